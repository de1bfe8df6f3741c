//! When calls are made: all at once, by workers, or at fixed times.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::JoinSet;

use super::options::LoadMode;
use super::tally::{Outcome, Tally};

/// Time for the servers' settings to arrive, and for the calls of a burst to line up.
const SETTLE: Duration = Duration::from_millis(50);

/// What a worker waits after a failure, so that a refusing target is not hammered
/// with as many calls as the machine can make.
const FAILURE_PAUSE: Duration = Duration::from_millis(10);

/// What can be called again and again, from many tasks at once.
pub(crate) trait Calls: Send + Sync + 'static {
    /// Makes the call with this number, from 0, and judges the answer.
    fn call(&self, number: u64) -> impl Future<Output = Outcome> + Send;
}

/// Makes all calls and waits for their ends. Returns how long that took.
pub(super) async fn drive<C: Calls>(
    mode: &LoadMode,
    caller: &Arc<C>,
    tally: &Arc<Tally>,
) -> anyhow::Result<Duration> {
    tokio::time::sleep(SETTLE).await;
    match *mode {
        LoadMode::Burst { calls } => burst(calls, caller, tally).await,
        LoadMode::Workers { workers, duration } => sustain(workers, duration, caller, tally).await,
        LoadMode::Rate { per_second, .. } => {
            let calls = mode.calls().unwrap_or(1);
            pace(calls, per_second, caller, tally).await
        }
    }
}

/// Lines all calls up behind a gate, then opens it. Latency counts from there, so
/// that it includes what a call waits for its turn on a connection.
async fn burst<C: Calls>(calls: u64, caller: &Arc<C>, tally: &Arc<Tally>) -> anyhow::Result<Duration> {
    let (gate, closed) = watch::channel(None::<Instant>);
    let mut tasks = JoinSet::new();
    for number in 0..calls {
        let (caller, tally, mut gate) = (caller.clone(), tally.clone(), closed.clone());
        tasks.spawn(async move {
            // The gate is dropped only when the load is given up.
            let Ok(opened) = gate.wait_for(Option::is_some).await.map(|opened| *opened) else {
                return;
            };
            let outcome = caller.call(number).await;
            tally.record(opened.map_or(Duration::ZERO, |opened| opened.elapsed()), outcome);
        });
    }
    tokio::time::sleep(SETTLE).await;
    tally.start();
    let start = Instant::now();
    gate.send_replace(Some(start));
    finish(tasks).await?;
    Ok(start.elapsed())
}

/// Keeps `workers` calls in the air until the time is up, then lets them end.
async fn sustain<C: Calls>(
    workers: usize,
    duration: Duration,
    caller: &Arc<C>,
    tally: &Arc<Tally>,
) -> anyhow::Result<Duration> {
    let numbers = Arc::new(AtomicU64::new(0));
    let mut tasks = JoinSet::new();
    tally.start();
    let start = Instant::now();
    for _ in 0..workers {
        let (caller, tally, numbers) = (caller.clone(), tally.clone(), numbers.clone());
        tasks.spawn(async move {
            while start.elapsed() < duration {
                let sent = Instant::now();
                let outcome = caller.call(numbers.fetch_add(1, Relaxed)).await;
                let failed = matches!(outcome, Outcome::Failed { .. });
                tally.record(sent.elapsed(), outcome);
                if failed {
                    tokio::time::sleep(FAILURE_PAUSE).await;
                }
            }
        });
    }
    finish(tasks).await?;
    Ok(start.elapsed())
}

/// Makes each call at its time, late or not, and counts its latency from the time
/// it was meant for: a stall then shows in every call that it held up.
async fn pace<C: Calls>(
    calls: u64,
    per_second: f64,
    caller: &Arc<C>,
    tally: &Arc<Tally>,
) -> anyhow::Result<Duration> {
    let mut tasks = JoinSet::new();
    tally.start();
    let start = Instant::now();
    for number in 0..calls {
        let due = start + Duration::from_secs_f64(number as f64 / per_second);
        if due > Instant::now() {
            tokio::time::sleep_until(due.into()).await;
        }
        let (caller, tally) = (caller.clone(), tally.clone());
        tasks.spawn(async move {
            let outcome = caller.call(number).await;
            tally.record(due.elapsed(), outcome);
        });
        // What has ended must not pile up for as long as the load lasts.
        while let Some(ended) = tasks.try_join_next() {
            ended?;
        }
    }
    finish(tasks).await?;
    Ok(start.elapsed())
}

async fn finish(mut tasks: JoinSet<()>) -> anyhow::Result<()> {
    while let Some(ended) = tasks.join_next().await {
        ended?;
    }
    Ok(())
}
