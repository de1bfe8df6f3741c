//! One flight for a key in the whole process, whichever of Envoy's workers a caller comes to.

use std::time::{Duration, Instant};

use collapser_loadgen::proto::ComputeRequest;
use http::HeaderMap;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tonic::Code;

use crate::raw::{RawClient, headers};
use crate::rig::{Rig, ask, channel, eventually, root};
use collapser_loadgen::proto::demo_client::DemoClient;
use tonic::transport::Channel;

const WORKERS: u32 = 4;

/// Connections, each of which is some worker's.
const CONNECTIONS: usize = 16;

const TTL: Duration = Duration::from_millis(100);

async fn start(settings: Value, latency_ms: u64) -> Rig {
    Rig::start_with(settings, latency_ms, |options| options.concurrency = WORKERS).await
}

/// Clients on connections of their own, over several workers.
async fn clients(rig: &Rig, count: usize) -> Vec<DemoClient<Channel>> {
    let mut clients = Vec::new();
    for _ in 0..count {
        clients.push(DemoClient::new(channel(&rig.sidecar.uri()).await));
    }
    let metrics = rig.sidecar.metrics().await.unwrap();
    let listener = rig.sidecar.addr().to_string().replace(':', "_");
    let busy = (0..WORKERS).filter(|worker| {
        let labels = format!("envoy_worker_id=\"{worker}\",envoy_listener_address=\"{listener}\"");
        metrics.get(&format!("envoy_listener_worker_downstream_cx_total{{{labels}}}")) > 0.0
    });
    assert!(busy.count() > 1, "all connections are with one worker: {metrics:#?}");
    clients
}

/// Every client makes so many calls of this at once. The serial numbers of all replies.
async fn all_ask(
    clients: &[DemoClient<Channel>],
    each: usize,
    request: ComputeRequest,
) -> Vec<Result<u64, tonic::Status>> {
    let mut calls = JoinSet::new();
    for client in clients.iter().cycle().take(clients.len() * each) {
        let (mut client, request) = (client.clone(), request.clone());
        calls.spawn(async move {
            let reply = client.compute(request.clone()).await?.into_inner();
            assert_eq!(reply.key, request.key);
            assert!(reply.payload.len() >= request.payload_bytes as usize);
            Ok(reply.serial)
        });
    }
    timeout(Duration::from_secs(30), calls.join_all()).await.expect("somebody is never answered")
}

fn slow(key: &str, latency_ms: u32) -> ComputeRequest {
    ComputeRequest { latency_ms, ..ask(key) }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_burst_over_all_workers_costs_what_it_costs_with_one() {
    let rig = start(json!({}), 50).await;
    let begun = Instant::now();
    let report = rig.burst(10_000, 1, 64).await;
    let took = begun.elapsed();
    assert!(report.is_clean(), "{report:?}");
    let most = 2 + (took.as_micros() / TTL.as_micros()) as u64;
    assert!(rig.backend.calls() <= most, "{} calls in {took:?}", rig.backend.calls());
    let metrics = rig.accounts(10_000).await;
    assert_eq!(metrics.get("collapser_backend_calls_total"), rig.backend.calls() as f64);
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_during_one_flight_are_that_flight() {
    for settings in [json!({}), json!({"cache_duration": "0"})] {
        let rig = start(settings, 0).await;
        let clients = clients(&rig, CONNECTIONS).await;
        let answers = all_ask(&clients, 100 / CONNECTIONS + 1, slow("k", 300)).await;
        assert!(answers.iter().all(|serial| serial.as_ref().is_ok_and(|serial| *serial == 1)), "{answers:?}");
        assert_eq!(rig.backend.calls(), 1);
        let metrics = rig.accounts(answers.len() as u64).await;
        assert_eq!(metrics.get("collapser_backend_calls_total"), 1.0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn with_the_scope_of_a_worker_each_has_its_own() {
    let rig = start(json!({"scope": "worker"}), 0).await;
    let clients = clients(&rig, CONNECTIONS).await;
    all_ask(&clients, 2, slow("k", 300)).await;
    assert!((2..=u64::from(WORKERS)).contains(&rig.backend.calls()), "{}", rig.backend.calls());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_that_one_worker_fetched_is_a_hit_for_all_until_it_expires() {
    let rig = start(json!({"cache_duration": "2s"}), 0).await;
    let clients = clients(&rig, CONNECTIONS).await;
    let begun = Instant::now();
    for client in &clients {
        assert_eq!(client.clone().compute(ask("k")).await.unwrap().into_inner().serial, 1);
    }
    assert!(begun.elapsed() < Duration::from_secs(2), "the machine is too slow for this test");
    let metrics = rig.accounts(CONNECTIONS as u64).await;
    assert_eq!(metrics.get("collapser_cache_hits_total"), CONNECTIONS as f64 - 1.0);
    // Nobody's TTL began anew when the reply came to another worker.
    tokio::time::sleep(Duration::from_secs(2).saturating_sub(begun.elapsed())).await;
    let serials = all_ask(&clients, 1, slow("k", 100)).await;
    assert!(serials.iter().all(|serial| serial.as_ref().is_ok_and(|serial| *serial == 2)), "{serials:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn replies_too_large_to_be_kept_for_all_still_answer_all_who_wait() {
    let rig = start(json!({"cache_duration": "0"}), 0).await;
    let clients = clients(&rig, CONNECTIONS).await;
    let request = ComputeRequest { payload_bytes: 1 << 20, ..slow("large", 500) };
    let answers = all_ask(&clients, 2, request).await;
    assert!(answers.iter().all(|serial| serial.as_ref().is_ok_and(|serial| *serial == 1)), "{answers:?}");
    assert_eq!(rig.backend.calls(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_is_everybodys_and_nobodys_later() {
    let rig = start(json!({}), 0).await;
    let clients = clients(&rig, CONNECTIONS).await;
    let request = ComputeRequest { fail_code: 9, fail_message: "no way".into(), ..slow("k", 300) };
    for calls in 1..=2 {
        for answer in all_ask(&clients, 3, request.clone()).await {
            let status = answer.unwrap_err();
            assert_eq!((status.code(), status.message()), (Code::FailedPrecondition, "no way"));
        }
        assert_eq!(rig.backend.calls(), calls);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_started_the_call_may_hang_up() {
    let rig = start(json!({}), 0).await;
    let clients = clients(&rig, CONNECTIONS).await;
    let mut leader = clients[0].clone();
    let leader = tokio::spawn(async move { leader.compute(slow("k", 700)).await });
    eventually("the call is at the backend", async || rig.backend.calls() == 1).await;
    let others = tokio::spawn({
        let clients = clients.clone();
        async move { all_ask(&clients, 2, slow("k", 700)).await }
    });
    rig.metrics_when(|m| m.get("collapser_waiting_requests") == 2.0 * CONNECTIONS as f64 + 1.0).await;
    leader.abort();
    let answers = others.await.unwrap();
    assert!(answers.iter().all(|serial| serial.as_ref().is_ok_and(|serial| *serial == 1)), "{answers:?}");
    assert_eq!(rig.backend.calls(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn different_keys_and_callers_stay_apart() {
    let rig = start(json!({}), 20).await;
    let report = rig.burst(5_000, 500, 32).await;
    assert!(report.is_clean(), "{report:?}");
    let calls = rig.backend.calls();
    assert!((500..=1_500).contains(&calls), "{calls} calls for 500 keys");
    rig.accounts(5_000).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn when_the_owners_vm_dies_all_others_are_answered_in_time() {
    const TIMEOUT: Duration = Duration::from_secs(6);
    let rig = Rig::start_with(json!({"backend_timeout": "6s"}), 0, |options| {
        options.concurrency = WORKERS;
        options.config.module = root().join("target/collapser-trap.wasm");
        options.config.hold_timeout = Some(Duration::from_secs(3));
    })
    .await;
    let owner = RawClient::connect(rig.sidecar.addr()).await;
    let led = tokio::spawn(owner.compute(&slow("k", 1_500), HeaderMap::new()));
    eventually("the call is at the backend", async || rig.backend.calls() == 1).await;
    let clients = clients(&rig, CONNECTIONS).await;
    let begun = Instant::now();
    let mut waiting = JoinSet::new();
    for mut client in clients {
        waiting.spawn(async move { (client.compute(slow("k", 1_500)).await, begun.elapsed()) });
    }
    rig.metrics_when(|m| m.get("collapser_waiting_requests") == CONNECTIONS as f64 + 1.0).await;
    // Its worker holds the flight.
    let told = owner.compute(&ask("trap"), headers(&[("x-collapser-trap", "1")])).await;
    assert!(told.is_err() || told.is_ok_and(|answer| answer.code() != Some("0")));
    let mut right = 0;
    for (answer, took) in waiting.join_all().await {
        assert!(took < TIMEOUT, "{took:?}");
        match answer {
            Ok(reply) => {
                assert_eq!(reply.into_inner().serial, 2, "one of those who waited has asked anew, for all");
                right += 1;
            }
            // It waited at the worker whose VM died.
            Err(status) => assert!(took >= Duration::from_millis(2_500), "{status:?} after {took:?}"),
        }
    }
    assert!(right > 0, "all were at one worker");
    assert_eq!(rig.backend.calls(), 2);
    drop(led);
}
