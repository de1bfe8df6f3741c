//! A flight belongs to none of its waiters: whoever hangs up, the others are answered.

use std::time::Duration;

use collapser_loadgen::payload::payload_for;
use collapser_loadgen::proto::ComputeRequest;
use collapser_loadgen::proto::demo_client::DemoClient;
use http::HeaderMap;
use serde_json::json;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tonic::transport::Channel;

use crate::raw::{Outcome, RawRig, send_many};
use crate::rig::{Rig, ask};

const ABANDONED: &str = "collapser_abandoned_requests_total";

/// All have the upstream's answer.
async fn assert_answered(calls: JoinSet<Outcome>) {
    for outcome in calls.join_all().await {
        assert_eq!(outcome.unwrap().key, "k");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn followers_are_answered_when_the_leader_hangs_up() {
    let rig = RawRig::start(json!({})).await;
    let mut leader = rig.crowd(1).await;
    rig.waiting(1).await;
    let followers = rig.crowd(20).await;
    rig.waiting(21).await;
    leader.shutdown().await;
    rig.waiting(20).await;
    rig.upstream.release();
    assert_answered(followers).await;
    assert_eq!(rig.upstream.calls(), 1);
    rig.metric(ABANDONED, 1).await;
    rig.quiet().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn followers_are_answered_when_the_leaders_connection_drops() {
    let rig = RawRig::start(json!({})).await;
    let connection = rig.raw_client().await;
    let leader = tokio::spawn(connection.compute(&ask("k"), HeaderMap::new()));
    rig.waiting(1).await;
    let followers = rig.crowd(20).await;
    rig.waiting(21).await;
    connection.disconnect();
    assert!(leader.await.unwrap().is_err(), "the leader is answered without a connection");
    rig.waiting(20).await;
    rig.upstream.release();
    assert_answered(followers).await;
    assert_eq!(rig.upstream.calls(), 1);
    rig.metric(ABANDONED, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flight_that_all_have_left_still_fills_the_cache() {
    let rig = RawRig::start(json!({"cache_duration": "10m"})).await;
    let mut calls = rig.crowd(20).await;
    rig.waiting(20).await;
    calls.shutdown().await;
    rig.waiting(0).await;
    rig.metric(ABANDONED, 20).await;
    rig.metric("collapser_inflight_requests", 1).await;
    rig.upstream.release();
    rig.quiet().await;
    assert_eq!(rig.one().await.unwrap().key, "k");
    assert_eq!(rig.upstream.calls(), 1);
    rig.metric("collapser_cache_hits_total", 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_notices_when_a_follower_hangs_up() {
    let rig = RawRig::start(json!({})).await;
    let leader = rig.crowd(1).await;
    rig.waiting(1).await;
    let mut leaving = rig.crowd(1).await;
    rig.waiting(2).await;
    let staying = rig.crowd(20).await;
    rig.waiting(22).await;
    leaving.shutdown().await;
    rig.waiting(21).await;
    rig.upstream.release();
    assert_answered(leader).await;
    assert_answered(staying).await;
    assert_eq!(rig.upstream.calls(), 1);
    rig.metric(ABANDONED, 1).await;
    rig.quiet().await;
}

/// Envoy takes many early hang-ups on one connection for an attack and closes it, unless told otherwise.
#[tokio::test(flavor = "multi_thread")]
async fn most_callers_of_a_connection_may_hang_up() {
    let rig = RawRig::start(json!({})).await;
    let client = rig.client().await;
    let staying = send_many(&client, 100);
    rig.waiting(100).await;
    let mut leaving = send_many(&client, 600);
    rig.waiting(700).await;
    leaving.shutdown().await;
    rig.waiting(100).await;
    rig.upstream.release();
    assert_answered(staying).await;
    assert_eq!(rig.upstream.calls(), 1);
    rig.metric(ABANDONED, 600).await;
    // Also over the same connection.
    client.clone().compute(ask("k")).await.unwrap();
    rig.quiet().await;
}

/// How long a flight takes here.
const LATENCY: Duration = Duration::from_millis(150);

/// A call that is given up at a random moment around its flight's end, on every other caller's part.
async fn call(mut client: DemoClient<Channel>, key: String, leaves: bool) -> bool {
    let request = ComputeRequest { key: key.clone(), payload_bytes: 1000, ..ComputeRequest::default() };
    let patience = if leaves {
        LATENCY.mul_f64(0.6 + rand::random::<f64>())
    } else {
        // Only to end a test that hangs.
        Duration::from_secs(60)
    };
    let Ok(outcome) = timeout(patience, client.compute(request)).await else {
        assert!(leaves, "no answer for {key}");
        return false;
    };
    let reply = outcome.unwrap().into_inner();
    assert_eq!((reply.key.as_str(), reply.payload), (key.as_str(), payload_for(&key, 1000)));
    true
}

/// 400 callers of a key, of whom 200 hang up unless they are answered before.
async fn round(clients: &[DemoClient<Channel>], key: &str) -> usize {
    let calls: JoinSet<bool> = (0..400)
        .map(|n| {
            call(clients[n % clients.len()].clone(), key.to_string(), (n / clients.len()).is_multiple_of(2))
        })
        .collect();
    // A wrong answer panics there, and `join_all` passes the panic on.
    calls.join_all().await.into_iter().filter(|answered| !answered).count()
}

/// Fewer hang-ups in all than the 1000 at once that nghttp2, Envoy's HTTP/2 library, puts up with on a connection.
const ROUNDS: usize = 4;

async fn many_hang_up_at_the_end(connections: usize) {
    let mut rig = Rig::start(json!({}), LATENCY.as_millis() as u64).await;
    let mut clients = Vec::new();
    for _ in 0..connections {
        clients.push(rig.client().await);
    }
    let mut left = 0;
    for number in 0..ROUNDS {
        left += round(&clients, &format!("key-{number}")).await;
    }
    let most = ROUNDS * 200;
    assert!((most / 16..most).contains(&left), "{left} of {most} hung up: not around the end");
    let metrics = rig
        .metrics_when(|m| {
            m.get("collapser_waiting_requests") == 0.0 && m.get("collapser_inflight_requests") == 0.0
        })
        .await;
    assert!(metrics.get(ABANDONED) > 0.0, "nobody left while waiting: {metrics:#?}");
    assert!(metrics.has("envoy_wasm_collapser_vm_reload"), "{metrics:#?}");
    for reload in ["", "_backoff", "_failure", "_success"] {
        assert_eq!(metrics.get(&format!("envoy_wasm_collapser_vm_reload{reload}")), 0.0);
    }
    assert!(rig.sidecar.is_running());
}

#[tokio::test(flavor = "multi_thread")]
async fn callers_of_one_connection_may_hang_up_while_the_answers_go_out() {
    many_hang_up_at_the_end(1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn callers_of_many_connections_may_hang_up_while_the_answers_go_out() {
    many_hang_up_at_the_end(10).await;
}
