//! A flood of distinct keys: what is kept stays within its bounds, and so does memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use collapser_loadgen::load::{self, LoadOptions};
use collapser_loadgen::sidecar::Metrics;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::callers::{Client, call, clients, sized};
use crate::health::{Peak, assert_unharmed, mib, rss, scale, scaled};
use crate::rig::Rig;

const CONNECTIONS: usize = 8;
const WORKERS: usize = 200;

/// What Envoy may take beyond what is cached, for each worker: buffers of calls under way, what allocators keep, and its
/// part of what all workers share.
const OVERHEAD: u64 = 64 << 20;

/// Has `count` keys asked for, each once, beginning with `first`.
async fn ask_all(clients: &[Client], first: u64, count: u64, payload_bytes: u32) {
    let numbers = Arc::new(AtomicU64::new(first));
    let mut workers = JoinSet::new();
    for client in clients.iter().cycle().take(WORKERS) {
        let (client, numbers) = (client.clone(), Arc::clone(&numbers));
        workers.spawn(async move {
            loop {
                let number = numbers.fetch_add(1, Relaxed);
                if number >= first + count {
                    return;
                }
                call(client.clone(), &format!("key-{number}"), payload_bytes).await.unwrap();
            }
        });
    }
    workers.join_all().await;
}

/// The most that was ever cached.
#[derive(Debug, Default)]
struct Most {
    entries: f64,
    bytes: f64,
}

impl Most {
    fn see(&mut self, metrics: &Metrics) {
        self.entries = self.entries.max(metrics.get("collapser_cached_results"));
        self.bytes = self.bytes.max(metrics.get("collapser_cached_bytes"));
    }
}

/// Floods and looks at the metrics every now and then.
async fn flood_and_look(rig: &Rig, clients: &[Client], keys: u64, payload_bytes: u32) -> Most {
    let mut most = Most::default();
    let mut flood = std::pin::pin!(ask_all(clients, 0, keys, payload_bytes));
    loop {
        tokio::select! {
            () = &mut flood => return most,
            () = tokio::time::sleep(Duration::from_millis(100)) => {
                most.see(&rig.sidecar.metrics().await.unwrap());
            }
        }
    }
}

/// A key that is asked for again is answered from the cache.
async fn assert_hot_key_hits(client: &Client) {
    let mut client = client.clone();
    let mut serials = Vec::new();
    // A machine that stalls for as long as the TTL makes a new call; not ten times in a row.
    for _ in 0..20 {
        serials.push(client.compute(sized("hot", 16)).await.unwrap().into_inner().serial);
    }
    assert!(serials.windows(2).any(|pair| pair[0] == pair[1]), "nothing was a hit: {serials:?}");
}

struct Flood {
    name: &'static str,
    /// Envoy's.
    workers: u32,
    settings: Value,
    keys: u64,
    payload_bytes: u32,
    most_entries: u64,
    most_bytes: u64,
}

impl Flood {
    async fn run(self) {
        let mut rig = Rig::start_with(self.settings, 0, |options| options.concurrency = self.workers).await;
        let clients = clients(&rig.sidecar.uri(), CONNECTIONS).await;
        let (before, peak, start) = (rss(&rig.sidecar), Peak::watch(&rig.sidecar), Instant::now());
        let most = flood_and_look(&rig, &clients, self.keys, self.payload_bytes).await;
        let took = start.elapsed().as_secs_f64();
        let after = rss(&rig.sidecar);
        assert_hot_key_hits(&clients[0]).await;
        println!(
            "flood, {}: {} keys in {took:.1} s ({:.0}/s), at most {} entries and {} bytes cached, RSS {:.0} -> {:.0} MiB, peak {:.0} MiB",
            self.name,
            self.keys,
            self.keys as f64 / took,
            most.entries,
            most.bytes,
            mib(before),
            mib(after),
            mib(peak.bytes()),
        );
        assert!(most.entries > 0.0 && most.entries <= self.most_entries as f64, "{most:?}");
        assert!(most.bytes <= self.most_bytes as f64, "{most:?}");
        // What is cached is counted twice: the Wasm VM's memory never shrinks, and the cache's index doubles.
        let bound = before + 2 * self.most_bytes.min(most.bytes as u64) + OVERHEAD * u64::from(self.workers);
        assert!(peak.bytes() < bound, "RSS rose to {:.0} MiB, bound {:.0}", mib(peak.bytes()), mib(bound));
        assert_unharmed(&mut rig.sidecar, self.keys + 20).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_keys_with_the_defaults() {
    // A million from a scale of 5 on.
    let keys = if scale() >= 5.0 { 1_000_000.0 * scale() / 5.0 } else { 200_000.0 * scale() };
    // All of them are kept, although none repeats.
    let (name, settings) = ("defaults", json!({"pass_after": 0}));
    Flood {
        name,
        workers: 1,
        settings,
        keys: keys as u64,
        payload_bytes: 16,
        most_entries: 10_000,
        most_bytes: 64 << 20,
    }
    .run()
    .await;
}

/// All flights go through what the workers share, of which nothing can be deleted.
#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_keys_over_four_workers() {
    let keys = if scale() >= 5.0 { 1_000_000.0 * scale() / 5.0 } else { 100_000.0 * scale() };
    let (name, settings) = ("four workers", json!({"pass_after": 0}));
    Flood {
        name,
        workers: 4,
        settings,
        keys: keys as u64,
        payload_bytes: 1_000,
        most_entries: 4 * 10_000,
        most_bytes: 4 * (64 << 20),
    }
    .run()
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_keys_that_are_kept_for_long() {
    let (name, settings) = ("long TTL", json!({"cache_duration": "1h", "pass_after": 0}));
    let keys = scaled(50_000);
    Flood {
        name,
        workers: 1,
        settings,
        keys,
        payload_bytes: 256,
        most_entries: 10_000,
        most_bytes: 64 << 20,
    }
    .run()
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_keys_over_a_small_cache() {
    let settings = json!({"cache_duration": "1h", "max_cache_bytes": "1MiB", "pass_after": 0});
    let (name, keys) = ("long TTL, 1 MiB of cache", scaled(50_000));
    Flood {
        name,
        workers: 1,
        settings,
        keys,
        payload_bytes: 1_000,
        most_entries: 10_000,
        most_bytes: 1 << 20,
    }
    .run()
    .await;
}

/// Flights are written whole. Envoy must not take so many frames at once for a flood of the backend.
#[tokio::test(flavor = "multi_thread")]
async fn a_burst_of_large_requests_is_no_flood() {
    let rig = Rig::start(json!({}), 0).await;
    let options = LoadOptions {
        backend_url: rig.backend.http_uri(),
        keys: 2_000,
        connections: 10,
        padding_bytes: 250_000,
        ..LoadOptions::burst(rig.sidecar.uri(), 2_000)
    };
    let report = load::run(options, |_| ()).await.unwrap();
    assert!(report.is_clean(), "{report}");
    let metrics = rig.sidecar.metrics().await.unwrap();
    assert_eq!(metrics.sum("envoy_cluster_http2_outbound_flood"), 0.0, "{metrics:#?}");
}
