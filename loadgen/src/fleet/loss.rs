//! A replica that dies in the middle of a burst: what it takes with it, and what that costs.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use super::{Replica, calls, owners, reset};
use crate::load::{self, LoadMode, LoadOptions};
use crate::report::Report;
use crate::sidecar::Sidecar;

/// How long a burst may take to reach the replicas.
const PATIENCE: Duration = Duration::from_secs(10);

/// How often the replicas are asked how many callers they have. Their metrics lag by 100 ms.
const POLL: Duration = Duration::from_millis(50);

/// What came of it.
#[derive(Clone, Debug)]
pub struct Loss {
    /// The number of the replica that was killed.
    pub victim: usize,
    /// Callers that waited there at that moment; their requests had been sent whole.
    pub waiting: u64,
    /// The burst that was in flight then.
    pub during: Report,
    /// The burst of the same keys that was sent right after.
    pub after: Report,
    /// Different keys asked for.
    pub keys: u64,
    /// Keys that the dead replica had.
    pub lost: u64,
    /// Keys that more than one replica was called for.
    pub moved: u64,
    /// Backend calls in all, those of the dead replica included.
    pub backend_calls: u64,
}

impl Loss {
    /// Whether nothing failed that could be retried, only the dead replica's keys moved, and each cost one call more, or
    /// two: what is retried before the replica is out goes elsewhere than what comes later.
    ///
    /// # Errors
    /// What is not so.
    pub fn check(&self) -> anyhow::Result<()> {
        let Self { waiting, during, after, keys, lost, moved, backend_calls, .. } = self;
        ensure!(during.wrong == 0, "{} answers were wrong", during.wrong);
        ensure!(
            during.failed <= *waiting,
            "{} calls failed, but only {waiting} were at the dead replica: {:?}",
            during.failed,
            during.errors
        );
        ensure!(
            after.is_clean(),
            "{} calls failed although they could be retried: {:?}",
            after.failed,
            after.errors
        );
        ensure!(moved == lost, "{moved} keys moved, but the dead replica had {lost}");
        ensure!(
            (keys + lost..=keys + 2 * lost).contains(backend_calls),
            "{backend_calls} backend calls for {keys} keys of which {lost} were lost"
        );
        Ok(())
    }
}

/// Sends a burst, kills a replica that computes some of it as soon as all callers wait, and sends the same burst again at
/// once. The backends must take longer than that: some seconds.
///
/// # Errors
/// If a load cannot be run, or the burst does not arrive.
pub async fn lose_one(
    front: &Sidecar,
    replicas: &mut [Replica],
    burst: &LoadOptions,
) -> anyhow::Result<Loss> {
    let LoadMode::Burst { calls: callers } = burst.mode else { anyhow::bail!("a burst is needed") };
    let burst = LoadOptions { target: front.uri(), ..burst.clone() };
    reset(replicas);
    let during = tokio::spawn(load::run(burst.clone(), |_| ()));
    let waiting = wait_for_callers(replicas, callers).await?;
    let owned = |victim: usize| {
        let at = |owners: &&Vec<(usize, u64)>| owners.iter().any(|(replica, _)| *replica == victim);
        owners(replicas).values().filter(at).count() as u64
    };
    let victims = (0..replicas.len()).filter(|number| owned(*number) > 0);
    let victim = victims.min_by_key(|number| waiting[*number]).context("no replica has a key")?;
    let lost = owned(victim);
    replicas[victim].kill();
    let after = load::run(burst.clone(), |_| ()).await?;
    let during = during.await??;
    let moved = owners(replicas).values().filter(|owners| owners.len() > 1).count() as u64;
    Ok(Loss {
        victim,
        waiting: waiting[victim],
        during,
        after,
        keys: burst.keys,
        lost,
        moved,
        backend_calls: calls(replicas),
    })
}

/// Waits until so many callers wait in the sidecars; how many in each.
async fn wait_for_callers(replicas: &[Replica], callers: u64) -> anyhow::Result<Vec<u64>> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let mut waiting = Vec::with_capacity(replicas.len());
        for replica in replicas {
            waiting.push(replica.waiting().await?);
        }
        let there: u64 = waiting.iter().sum();
        if there == callers {
            return Ok(waiting);
        }
        ensure!(Instant::now() < deadline, "{there} callers wait, not {callers}, after {PATIENCE:?}");
        tokio::time::sleep(POLL).await;
    }
}
