//! One flight with many waiters, and others who want something else meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde_json::json;
use tokio::task::JoinSet;

use crate::callers::{assert_right, call, clients, crowd, sized};
use crate::gate::{GateRig, held};
use crate::health::{assert_unharmed, mib, quantile, rss, scaled};
use crate::slow::slow_readers;

const OTHERS: usize = 20;

/// For a worker that pauses after every 256 answers (some 10 ms) this is a hundred slices: far above what the
/// pacing lets anybody wait on a busy machine, and far below what all of the fan-out takes without it.
const OTHERS_P99: Duration = Duration::from_secs(1);

/// Callers each of whom makes one call after the other, every one for a key of its own. They have a thread of
/// their own, so that what they measure is Envoy's delay and not that of the crowd's threads.
struct Others {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<(Instant, Duration)>>,
}

impl Others {
    fn start(uri: String) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let thread = thread::spawn(move || runtime.block_on(call_until(stopped, uri)));
        Self { stop, thread }
    }

    /// When each call began and how long it took.
    fn finish(self) -> Vec<(Instant, Duration)> {
        self.stop.store(true, Relaxed);
        self.thread.join().unwrap()
    }
}

async fn call_until(stopped: Arc<AtomicBool>, uri: String) -> Vec<(Instant, Duration)> {
    let clients = clients(&uri, 4).await;
    let numbers = Arc::new(AtomicU64::new(0));
    let mut callers = JoinSet::new();
    for client in clients.iter().cycle().take(OTHERS) {
        let (client, stopped, numbers) = (client.clone(), Arc::clone(&stopped), Arc::clone(&numbers));
        callers.spawn(async move {
            let mut took = Vec::new();
            while !stopped.load(Relaxed) {
                let (key, start) = (format!("other-{}", numbers.fetch_add(1, Relaxed)), Instant::now());
                call(client.clone(), &key, 100).await.unwrap();
                took.push((start, start.elapsed()));
                // Enough to be always there, not so much as to be the load themselves.
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            took
        });
    }
    callers.join_all().await.into_iter().flatten().collect()
}

/// A fan-out to `waiters` over `connections`, and to a slow reader's `stalled` calls.
async fn fan_out(waiters: usize, connections: usize, payload_bytes: u32, stalled: usize) {
    let mut rig = GateRig::start(json!({"max_waiters": 1_000_000})).await;
    let message = sized(&held(1), payload_bytes);
    let mut slow = slow_readers(rig.sidecar.addr(), 1, stalled, 0, &message).await;
    let clients = clients(&rig.sidecar.uri(), connections).await;
    let mut crowds = Vec::new();
    let mut waiting = stalled;
    // In portions: a client that sends tens of thousands of requests at once sends their messages seconds after
    // their headers, and some would be taken for streams.
    for client in &clients {
        let portion = (waiters + stalled - waiting).min(waiters.div_ceil(connections));
        crowds.push(crowd(std::slice::from_ref(client), portion, &message.key, payload_bytes));
        waiting += portion;
        rig.waiting(waiting).await;
    }

    let others = Others::start(rig.sidecar.uri());
    tokio::time::sleep(Duration::from_secs(1)).await;
    let start = Instant::now();
    rig.gate.release(1);
    for crowd in crowds {
        assert_right(crowd).await;
    }
    let (took, end) = (start.elapsed(), Instant::now());
    let calls = others.finish();
    let of = |during: bool| {
        let overlaps = |(began, took): &&(Instant, Duration)| *began < end && *began + *took > start;
        let calls = calls.iter().filter(|call| overlaps(call) == during);
        calls.map(|(_, took)| *took).collect::<Vec<_>>()
    };
    let (mut before, mut during) = (of(false), of(true));
    let p99 = quantile(&mut during, 0.99);
    println!(
        "fan-out: {waiters} x {payload_bytes} B in {:.2} s with {stalled} stalled; others: p50 {:.1?}, p99 {p99:.1?}, max {:.1?} of {} calls (without: p99 {:.1?}); RSS {:.0} MiB",
        took.as_secs_f64(),
        quantile(&mut during, 0.5),
        quantile(&mut during, 1.0),
        during.len(),
        quantile(&mut before, 0.99),
        mib(rss(&rig.sidecar)),
    );
    assert!(p99 < OTHERS_P99, "the others waited {p99:?}");
    // Were anybody held up by the slow reader, this would take until Envoy resets its calls, after `HOLD`.
    assert!(took < Duration::from_secs(60), "the fan-out took {took:?}");
    assert_eq!(slow[0].ended(), 0, "the slow reader was to stall until all others had their answer");
    drop(slow);
    assert_unharmed(&mut rig.sidecar, (waiters + stalled + calls.len()) as u64).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_thousand_waiters_do_not_hold_up_others() {
    let waiters = scaled(50_000) as usize;
    // Well below the 16384 streams that a connection may have.
    fan_out(waiters, waiters.div_ceil(5_000), 16, 100).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn large_replies_do_not_hold_up_others() {
    fan_out(scaled(1_000) as usize, 4, 256 * 1024, 100).await;
}
