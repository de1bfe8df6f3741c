//! What a waiting call takes of the proxy's memory.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde::Serialize;
use serde_json::json;

use crate::backend::Backend;
use crate::bench::Bench;
use crate::candidate::{Candidate, Kind, Setup};
use crate::client::{Client, Shape};
use crate::process::rss_kib;
use crate::stats::Spread;

/// Calls that wait.
const WAITERS: u64 = 10_000;

/// Connections that they come over.
const CONNECTIONS: usize = 10;

/// How long all calls may take to arrive and to be answered.
const PATIENCE: Duration = Duration::from_secs(60);

/// Of one candidate.
#[derive(Clone, Debug, Serialize)]
pub struct Memory {
    /// Its name.
    pub candidate: String,
    /// Bytes for each waiting call, for each fresh process.
    pub bytes_per_waiter: Vec<f64>,
    /// The same, summed up.
    pub spread: Option<Spread>,
}

/// The candidate that shows what a waiting call takes of Envoy itself.
pub const HELD: &str = "held";

/// The same where Envoy's Lua filter is in the chain, of which each stream has an instance.
pub const HELD_WITH_SLOT: &str = "held+slot";

/// How much more one candidate takes for a waiting call than another, in bytes.
pub fn extra(memory: &[Memory], of: &str, than: &str) -> Option<f64> {
    let median = |name: &str| Some(memory.iter().find(|memory| memory.candidate == name)?.spread?.median);
    Some(median(of)? - median(than)?)
}

/// Lets calls wait for a backend that hangs, in processes that have never had so many, in turn.
pub async fn measure(
    bench: &Bench<'_>,
    candidates: &[Candidate],
    mut on_round: impl FnMut(),
) -> anyhow::Result<Vec<Memory>> {
    let held = [(HELD, Kind::Held), (HELD_WITH_SLOT, Kind::HeldWithSlot)]
        .map(|(name, kind)| Candidate { name: name.to_owned(), kind });
    let candidates: Vec<_> =
        candidates.iter().filter(|candidate| candidate.kind != Kind::Direct).chain(&held).collect();
    let mut bytes = vec![Vec::new(); candidates.len()];
    for _ in 0..bench.rounds {
        for (candidate, bytes) in candidates.iter().zip(&mut bytes) {
            let of_one =
                one(bench, candidate).await.with_context(|| format!("memory of {}", candidate.name))?;
            bytes.push(of_one);
            on_round();
        }
    }
    let memory = |(candidate, bytes): (&Candidate, Vec<f64>)| Memory {
        candidate: candidate.name.clone(),
        spread: Spread::of(bytes.iter().copied()),
        bytes_per_waiter: bytes,
    };
    Ok(candidates.into_iter().zip(bytes).map(memory).collect())
}

async fn one(bench: &Bench<'_>, candidate: &Candidate) -> anyhow::Result<f64> {
    let reply_bytes = crate::wire::SMALLEST;
    let backend = Backend::start(reply_bytes)?;
    let settings = json!({"backend_timeout": "100s"});
    let setup =
        Setup { root: bench.root, backend: backend.addr(), settings: &settings, concurrency: 1, reply_bytes };
    let running = bench.cores.as_proxy(candidate.start(&setup)).await?;
    let shape = Shape {
        content_type: candidate.content_type(),
        grpc: true,
        reply_bytes,
        headers: http::HeaderMap::new(),
    };
    let client = Client::connect(running.addr(), CONNECTIONS, shape).await?;
    let is_held = matches!(candidate.kind, Kind::Held | Kind::HeldWithSlot);
    if !is_held {
        // What the first calls alone take is not theirs.
        client.wave(CONNECTIONS as u64, 1).await?;
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    let idle = rss_kib(running.pid())?;
    backend.hold();
    let calls = backend.calls();
    let mut wave = std::pin::pin!(client.wave(WAITERS, 1));
    let arrived = arrived(running.pid());
    tokio::select! {
        early = &mut wave => anyhow::bail!("answers came though the backend hangs: {:?}", early.err()),
        arrived = arrived => arrived?,
    }
    let waiting = rss_kib(running.pid())?;
    let calls = backend.calls() - calls;
    let bytes = waiting.saturating_sub(idle) as f64 * 1024.0 / WAITERS as f64;
    let expected = match candidate.kind {
        Kind::Plain => WAITERS,
        Kind::Held | Kind::HeldWithSlot => 0,
        _ => 1,
    };
    ensure!(
        calls == expected || matches!(candidate.kind, Kind::Peer(_)),
        "{calls} of {WAITERS} waiting calls reached the backend instead of {expected}"
    );
    if is_held {
        return Ok(bytes);
    }
    backend.release();
    let load = tokio::time::timeout(PATIENCE, wave).await.context("some calls had no answer")??;
    ensure!(load.latencies.len() as u64 == WAITERS, "{} answers", load.latencies.len());
    Ok(bytes)
}

/// Waits until the proxy has nothing more to do: it has taken in all that was sent.
async fn arrived(pid: u32) -> anyhow::Result<()> {
    let start = Instant::now();
    let mut quiet = 0;
    let mut before = crate::process::cpu_time(pid)?;
    while quiet < 5 {
        ensure!(start.elapsed() < PATIENCE, "the proxy is still busy");
        tokio::time::sleep(Duration::from_millis(100)).await;
        let now = crate::process::cpu_time(pid)?;
        // Timers of an idle Envoy take less than 5 % of a core.
        quiet = if now - before < Duration::from_millis(5) { quiet + 1 } else { 0 };
        before = now;
    }
    Ok(())
}
