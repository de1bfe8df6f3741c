//! What a waiting request costs in memory, beside what it costs without the filter.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::callers::{assert_right, clients, crowd};
use crate::gate::{GateRig, HOLD, held};
use crate::health::{mib, rss};

const FEW: usize = 10_000;
const MANY: usize = 40_000;

/// The most that the filter may add, above what a request that hangs upstream costs anyway.
const EXTRA: f64 = 16.0 * 1024.0;

/// Waits until so many requests hang: in the filter, or at the backend.
async fn hanging(rig: &GateRig, in_filter: bool, count: usize) {
    if in_filter {
        rig.waiting(count).await;
        return;
    }
    let deadline = Instant::now() + HOLD;
    while rig.gate.calls() < count as u64 {
        assert!(Instant::now() < deadline, "only {} calls arrived", rig.gate.calls());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Bytes of Envoy's memory for each hanging request.
async fn bytes_per_request(name: &str, settings: Value, in_filter: bool) -> f64 {
    let rig = GateRig::start(settings).await;
    let clients = clients(&rig.sidecar.uri(), MANY / FEW).await;
    let idle = rss(&rig.sidecar);
    let mut calls = crowd(&clients[..1], FEW, &held(1), 16);
    hanging(&rig, in_filter, FEW).await;
    let few = rss(&rig.sidecar);
    let more = crowd(&clients[1..], MANY - FEW, &held(1), 16);
    hanging(&rig, in_filter, MANY).await;
    let many = rss(&rig.sidecar);
    let each = (many - idle) as f64 / MANY as f64;
    println!(
        "memory, {name}: idle {:.0} MiB, {FEW} waiting {:.0} MiB, {MANY} waiting {:.0} MiB: {:.0} and {each:.0} bytes each",
        mib(idle),
        mib(few),
        mib(many),
        (few - idle) as f64 / FEW as f64,
    );
    rig.gate.release(1);
    assert_right(more).await;
    while let Some(call) = calls.join_next().await {
        call.unwrap().unwrap();
    }
    each
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_costs_little_more_than_a_request_that_hangs() {
    let waiting = bytes_per_request("waiting in the filter", json!({}), true).await;
    let settings = json!({"methods": ["!/collapser.demo.v1.Demo/Compute"]});
    let passing = bytes_per_request("hanging at the backend", settings, false).await;
    println!("memory: the filter adds {:.0} bytes a waiter", waiting - passing);
    assert!(waiting - passing < EXTRA);
}
