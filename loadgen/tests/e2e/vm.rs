//! When the VM dies, everybody whose request it held is told in time, the next VM serves at once, and the gauges
//! forget what the dead one had added to them.

use std::time::{Duration, Instant};

use collapser_loadgen::proto::ComputeRequest;
use http::HeaderMap;
use serde_json::json;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::raw::{Answer, RawClient, headers};
use crate::rig::{Rig, ask, eventually, root};

/// Requests that the VM holds when it dies, five to a flight.
const HELD: usize = 50;
const FLIGHTS: usize = 10;

/// What the route gives a held request, and what scheduling on a busy machine may add.
const HOLD: Duration = Duration::from_secs(3);
const SLACK: Duration = Duration::from_secs(2);

/// Envoy makes no new VM within a second of the last one, and longer after several deaths.
const BACKOFF: Duration = Duration::from_secs(10);

/// A lease ends after five seconds; it may take some more until somebody finds it.
const GAUGES: Duration = Duration::from_secs(15);

const RELOADS: &str = "envoy_wasm_collapser_vm_reload_success";

type Told = Result<Answer, h2::Error>;

/// A sidecar whose filter can be made to trap.
async fn start() -> Rig {
    let module = root().join("target/collapser-trap.wasm");
    assert!(module.is_file(), "{} is missing; run: make wasm-trap", module.display());
    let settings = json!({"backend_timeout": "2s", "cache_duration": "10m"});
    Rig::start_with(settings, 0, |options| {
        options.config.module = module;
        options.config.hold_timeout = Some(HOLD);
    })
    .await
}

async fn client(rig: &Rig) -> RawClient {
    RawClient::connect(rig.sidecar.addr()).await
}

/// Sends calls that the backend takes 1.5 seconds for, and waits until the gauges tell of them.
async fn hold(rig: &Rig, client: &RawClient) -> JoinSet<Told> {
    let calls = (0..HELD).map(|n| {
        let key = format!("held {}", n % FLIGHTS);
        client.compute(&ComputeRequest { latency_ms: 1_500, ..ask(&key) }, HeaderMap::new())
    });
    let calls = calls.collect();
    rig.metrics_when(|m| {
        m.get("collapser_waiting_requests") == HELD as f64
            && m.get("collapser_inflight_requests") == FLIGHTS as f64
    })
    .await;
    calls
}

/// Has the VM die; the call that brings it about is told so.
async fn trap(client: &RawClient) {
    let call = client.compute(&ask("trap"), headers(&[("x-collapser-trap", "1")]));
    let told = timeout(HOLD + SLACK, call).await.expect("the call that trapped is never answered");
    assert_failed(&told);
}

/// A gRPC failure, and nothing of anybody's answer.
fn assert_failed(told: &Told) {
    let answer = match told {
        Ok(answer) => answer,
        Err(error) if was_told_early(error) => return,
        Err(error) => panic!("{error}"),
    };
    assert!(answer.code().is_some_and(|code| code != "0"), "{answer:?}");
    assert!(answer.data.is_empty(), "{answer:?}");
}

/// Whether the answer came before the caller had sent its message, which this client takes for its own mistake.
fn was_told_early(error: &h2::Error) -> bool {
    error.reason().is_none() && !error.is_io()
}

async fn answers(client: &RawClient, key: &str) {
    let answer = client.compute(&ask(key), HeaderMap::new()).await.unwrap();
    assert_eq!(answer.code(), Some("0"), "{answer:?}");
}

/// Calls until one succeeds. Until then each fails as it should, and in time.
async fn answers_before_long(client: &RawClient, key: &str) {
    let deadline = Instant::now() + BACKOFF;
    loop {
        let call = client.compute(&ask(key), HeaderMap::new());
        let told = timeout(HOLD + SLACK, call).await.expect("a call hangs while there is no VM");
        if told.as_ref().is_ok_and(|answer| answer.code() == Some("0")) {
            return;
        }
        assert_failed(&told);
        assert!(Instant::now() < deadline, "no new VM within {BACKOFF:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Waits until the gauges say that nobody waits and that so many replies are cached.
async fn gauges_settle(rig: &Rig, cached: f64) {
    let deadline = Instant::now() + GAUGES;
    loop {
        let metrics = rig.sidecar.metrics().await.unwrap();
        let gauges = ["waiting_requests", "inflight_requests", "cached_results"];
        let gauges = gauges.map(|name| metrics.get(&format!("collapser_{name}")));
        if gauges == [0.0, 0.0, cached] {
            return;
        }
        assert!(Instant::now() < deadline, "waiting, in flight, cached: {gauges:?}, not 0, 0, {cached}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// All that were held are told before the route's limit is over.
async fn assert_held_are_told(held: JoinSet<Told>, since: Instant) {
    let all = timeout(HOLD + SLACK, held.join_all()).await.expect("a held call is never answered");
    all.iter().for_each(assert_failed);
    assert!(since.elapsed() < HOLD + SLACK, "{:?}", since.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_dies_takes_nobody_with_it() {
    let mut rig = start().await;
    let (old, other) = (client(&rig).await, client(&rig).await);
    for key in ["a", "b", "c"] {
        answers(&old, key).await;
    }
    // A VM younger than this is replaced only when it is older (Envoy docs, `ReloadConfig`).
    tokio::time::sleep(Duration::from_secs(2)).await;
    let held = hold(&rig, &old).await;
    let died = Instant::now();
    trap(&other).await;
    // Long before those that were held are told, on the connections there are and on a new one.
    for connection in [&old, &other, &client(&rig).await] {
        answers(connection, "afterwards").await;
    }
    assert!(died.elapsed() < Duration::from_millis(2_500), "{:?}", died.elapsed());
    assert_held_are_told(held, died).await;
    assert!(rig.sidecar.is_running());
    assert_eq!(rig.sidecar.metrics().await.unwrap().get(RELOADS), 1.0);
    gauges_settle(&rig, 1.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_death_is_survived_too() {
    let mut rig = start().await;
    let client = client(&rig).await;
    let first = hold(&rig, &client).await;
    trap(&client).await;
    answers_before_long(&client, "between").await;
    let died = Instant::now();
    trap(&client).await;
    answers_before_long(&client, "afterwards").await;
    assert_held_are_told(first, died).await;
    eventually("both are counted", async || rig.sidecar.metrics().await.unwrap().get(RELOADS) == 2.0).await;
    assert!(rig.sidecar.is_running());
    gauges_settle(&rig, 1.0).await;
    // And it collapses as ever.
    assert_eq!(rig.burst(1_000, 1, 4).await.ok, 1_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_may_die_at_any_moment_of_a_fan_out() {
    const CROWD: usize = 600;
    let mut rig = start().await;
    let (crowd, other) = (client(&rig).await, client(&rig).await);
    for round in 0..6 {
        answers_before_long(&other, "ready").await;
        let request = ComputeRequest { latency_ms: 300, payload_bytes: 50_000, ..ask(&format!("{round}")) };
        let calls: JoinSet<_> = (0..CROWD).map(|_| crowd.compute(&request, HeaderMap::new())).collect();
        // From just before the answer to amid its fan-out.
        tokio::time::sleep(Duration::from_millis(290 + 15 * round)).await;
        trap(&other).await;
        for told in timeout(HOLD + SLACK, calls.join_all()).await.expect("a call is never answered") {
            match &told {
                Ok(answer) if answer.code() == Some("0") => assert!(answer.data.len() > 50_000),
                // What was on its way may end short, but never as a success.
                Ok(answer) => assert!(answer.code().is_some(), "{:?}", answer.headers),
                Err(error) => assert!(error.is_reset() || was_told_early(error), "{error}"),
            }
        }
        assert!(rig.sidecar.is_running());
    }
    answers_before_long(&other, "afterwards").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_claims_to_pass_is_told_of_a_death_too() {
    let rig = start().await;
    let (caller, other) = (client(&rig).await, client(&rig).await);
    // Were it believed, the request would be given no limit on how long it may be held.
    let request = ComputeRequest { latency_ms: 1_500, ..ask("held") };
    let held = tokio::spawn(caller.compute(&request, headers(&[("x-collapser-pass", "1")])));
    rig.metrics_when(|m| m.get("collapser_waiting_requests") == 1.0).await;
    trap(&other).await;
    let told = timeout(HOLD + SLACK, held).await.expect("a held call is never answered").unwrap();
    assert_failed(&told);
}
