//! Ten thousand at once.

use collapser_loadgen::http_load::{HttpClients, HttpLoadOptions, Protocol};
use serde_json::json;

use super::gateway::Gateway;

/// For how long a page is kept, in seconds.
const TTL: f64 = 0.1;

async fn burst(protocol: Protocol, connections: usize, concurrency: u32) {
    let settings = json!({"http": {"default_ttl": "100ms"}});
    let gateway = Gateway::start_with(settings, 40, |options| options.concurrency = concurrency).await;
    let clients = HttpClients::connect(&gateway.sidecar.uri(), protocol, connections).await.unwrap();
    let report = clients.load(HttpLoadOptions::burst("/page/viral", 10_000), |_| ()).await.unwrap().report;
    assert!(report.is_clean(), "{report:#?}");
    assert_eq!(report.ok, 10_000);
    let (calls, allowed) = (gateway.backend.calls(), 2.0 + report.elapsed_seconds / TTL);
    println!(
        "{protocol:?}, {concurrency} workers: {calls} backend calls in {:.3} s; median wait {:.1} ms beyond the backend's 40",
        report.elapsed_seconds,
        report.latency_ms.p50 - 40.0
    );
    assert!(calls as f64 <= allowed, "{calls} backend calls, {allowed:.0} allowed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_over_http_1_are_few_calls() {
    burst(Protocol::Http1, 10_000, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_over_http_2_are_few_calls() {
    burst(Protocol::Http2, 100, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_over_four_workers_are_few_calls() {
    burst(Protocol::Http2, 100, 4).await;
}
