//! More flights than the circuit breaker of the cluster lets through.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::task::JoinSet;
use tonic::{Code, Status};

use crate::callers::{Client, assert_right, clients, crowd};
use crate::health::assert_unharmed;
use crate::rig::{Rig, ask};

const ALLOWED: usize = 4;
const CALLS: usize = 50;

fn few_requests(config: &mut Value) {
    let breaker = config.pointer_mut("/static_resources/clusters/0/circuit_breakers/thresholds/0").unwrap();
    breaker["max_requests"] = json!(ALLOWED);
}

/// Calls at the same time, each for a key of its own.
async fn distinct(client: &Client, round: usize) -> Vec<Result<(), Status>> {
    let mut calls = JoinSet::new();
    for number in 0..CALLS {
        let mut client = client.clone();
        calls.spawn(async move { client.compute(ask(&format!("{round}-{number}"))).await.map(drop) });
    }
    calls.join_all().await
}

#[tokio::test(flavor = "multi_thread")]
async fn beyond_the_circuit_breaker_calls_fail_at_once_and_say_why() {
    let mut rig = Rig::start_with(json!({}), 500, |options| options.config.edit = few_requests).await;
    let clients = clients(&rig.sidecar.uri(), 1).await;
    let rounds = 3;
    for round in 0..rounds {
        let outcomes = distinct(&clients[0], round).await;
        let refused: Vec<_> = outcomes.into_iter().filter_map(Result::err).collect();
        assert_eq!(refused.len(), CALLS - ALLOWED);
        for status in &refused {
            assert_eq!(status.code(), Code::Unavailable, "{status}");
            let message = status.message();
            assert!(message.contains("circuit breaker") || message.contains("overflow"), "{status}");
        }
        println!("overload: {} of {CALLS} refused: {:?}", refused.len(), refused[0].message());
    }
    // Many callers of one key are one call, which the breaker lets through, and all is well afterwards.
    assert_right(crowd(&clients, CALLS, "afterwards", 0)).await;
    rig.backend.set_latency(Duration::ZERO);
    for number in 0..20 {
        assert_right(crowd(&clients, 1, &format!("afterwards-{number}"), 0)).await;
    }
    let metrics = assert_unharmed(&mut rig.sidecar, (rounds * CALLS + CALLS + 20) as u64).await;
    assert_eq!(metrics.sum("collapser_errors_total"), (rounds * (CALLS - ALLOWED)) as f64);
}
