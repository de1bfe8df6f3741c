//! The promise itself: N callers, one upstream call.

use std::time::Duration;

use serde_json::json;
use tokio::task::JoinSet;

use crate::rig::{Rig, ask};

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_calls_during_one_flight_are_one_backend_call() {
    let rig = Rig::start(json!({}), 300).await;
    let client = rig.client().await;
    let mut calls = JoinSet::new();
    for _ in 0..100 {
        let mut client = client.clone();
        calls.spawn(async move { client.compute(ask("k")).await.unwrap().into_inner() });
    }
    let replies = calls.join_all().await;
    assert_eq!(replies.len(), 100);
    assert!(replies.iter().all(|reply| *reply == replies[0]), "all have the same answer");
    assert_eq!(rig.backend.calls(), 1);
    let metrics = rig.accounts(100).await;
    assert_eq!(metrics.get("collapser_backend_calls_total"), 1.0);
    assert_eq!(metrics.get("collapser_collapsed_requests_total"), 99.0);
}

/// No error, no wrong payload, and no more calls than the TTL explains.
async fn burst(connections: usize) {
    let rig = Rig::start(json!({}), 50).await;
    let report = rig.burst(10_000, 1, connections).await;
    assert!(report.is_clean(), "{report}");
    let most = 2.0 + report.elapsed_seconds / Duration::from_millis(100).as_secs_f64();
    assert!(rig.backend.calls() as f64 <= most, "{report}");
    rig.accounts(10_000).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_calls_over_one_connection_collapse() {
    burst(1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_calls_over_a_hundred_connections_collapse() {
    burst(100).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_key_has_its_own_answer_and_its_own_flight() {
    let rig = Rig::start(json!({}), 50).await;
    let report = rig.burst(5_000, 50, 10).await;
    assert!(report.is_clean(), "{report}");
    let most = 2.0 + report.elapsed_seconds / 0.1;
    for (key, calls) in rig.backend.calls_by_key() {
        assert!(calls as f64 <= most, "{key}: {calls} calls; {report}");
    }
    assert_eq!(rig.backend.calls_by_key().len(), 50);
}
