//! Replicas that die, drain and come back: what fails, and what moves.

use std::collections::BTreeMap;
use std::time::Duration;

use collapser_loadgen::backend::{Backend, BackendOptions};
use collapser_loadgen::fleet::{self, Replica};
use collapser_loadgen::sidecar::Sidecar;
use serde_json::{Value, json};

use crate::front::{burst, homes, send, without_checks};
use crate::rig::root;

/// Long enough for all callers to arrive and for the kill, on a busy machine.
const COMPUTATION: Duration = Duration::from_secs(3);

async fn lose_one(edit: fn(&mut Value)) -> fleet::Loss {
    let ttl = json!({"cache_duration": "30s"});
    let mut replicas = fleet::replicas(root(), 4, COMPUTATION, &ttl).await.unwrap();
    let front = fleet::front(root(), &replicas, edit).await.unwrap();
    let loss = fleet::lose_one(&front, &mut replicas, &burst(&front, 1_000, 4)).await.unwrap();
    let retries = fleet::cluster_metric(&front, "upstream_rq_retry").await.unwrap();
    println!("{loss:#?}\n{retries} retries");
    loss.check().unwrap();
    loss
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_dies_fails_only_what_it_had_begun() {
    let loss = lose_one(|_| ()).await;
    assert_eq!(loss.during.failed, loss.waiting, "what may have had an effect is not repeated");
    assert_eq!(loss.during.errors.keys().collect::<Vec<_>>(), ["UNAVAILABLE"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn where_nothing_has_an_effect_nothing_fails() {
    let loss = lose_one(fleet::retry_resets).await;
    assert!(loss.waiting > 0 && loss.during.is_clean(), "{}", loss.during);
}

const KEYS: u64 = 200;

/// Where each key is computed now; nothing is cached.
async fn homes_now(front: &Sidecar, replicas: &[Replica]) -> BTreeMap<String, usize> {
    fleet::reset(replicas);
    send(front, KEYS, KEYS).await;
    homes(replicas)
}

/// Only what was at `gone` has another home. Maglev moves a few others, less than one in a hundred.
fn assert_only_moved(before: &BTreeMap<String, usize>, after: &BTreeMap<String, usize>, gone: usize) {
    let lost = before.values().filter(|home| **home == gone).count();
    let others = before.iter().filter(|(key, home)| **home != gone && after[*key] != **home).count();
    assert!(after.values().all(|home| *home != gone), "it still gets calls: {after:?}");
    assert!(lost > 0, "the replica had no key");
    assert!(others < KEYS as usize / 25, "{others} keys of other replicas moved, {lost} of its own");
}

#[tokio::test(flavor = "multi_thread")]
async fn health_checks_take_a_dead_replica_out_and_only_its_keys_move() {
    let uncached = json!({"cache_duration": "0"});
    let mut replicas = fleet::replicas(root(), 4, Duration::ZERO, &uncached).await.unwrap();
    let front = fleet::front(root(), &replicas, |_| ()).await.unwrap();
    let before = homes_now(&front, &replicas).await;
    replicas[1].kill();
    // No call fails meanwhile that would tell.
    fleet::wait_for_healthy(&front, 3).await.unwrap();
    let after = homes_now(&front, &replicas).await;
    assert_only_moved(&before, &after, 1);
    assert_eq!(fleet::cluster_metric(&front, "upstream_rq_retry").await.unwrap(), 0.0, "it was not asked");
    assert_eq!(fleet::cluster_metric(&front, "outlier_detection_ejections_active").await.unwrap(), 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_without_its_backend_is_not_ready_and_gets_its_keys_back_with_it() {
    let uncached = json!({"cache_duration": "0"});
    let mut replicas = fleet::replicas(root(), 3, Duration::ZERO, &uncached).await.unwrap();
    let front = fleet::front(root(), &replicas, |_| ()).await.unwrap();
    let before = homes_now(&front, &replicas).await;

    let Replica { backend, sidecar } = replicas.pop().unwrap();
    let grpc_addr = backend.grpc_addr();
    backend.shutdown().await;
    fleet::wait_for_healthy(&front, 2).await.unwrap();
    let after = homes_now(&front, &replicas).await;
    assert_only_moved(&before, &after, 2);

    let backend = Backend::start(BackendOptions { grpc_addr, ..BackendOptions::default() }).await.unwrap();
    replicas.push(Replica { backend, sidecar });
    fleet::wait_for_healthy(&front, 3).await.unwrap();
    assert_eq!(homes_now(&front, &replicas).await, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_connections_take_a_dead_replica_out_at_once() {
    let uncached = json!({"cache_duration": "0"});
    let mut replicas = fleet::replicas(root(), 3, Duration::ZERO, &uncached).await.unwrap();
    let front = fleet::front(root(), &replicas, without_checks).await.unwrap();
    let before = homes_now(&front, &replicas).await;
    replicas[1].kill();
    // All of these succeed, those of the dead replica at the second attempt.
    let after = homes_now(&front, &replicas).await;
    assert_only_moved(&before, &after, 1);
    assert!(fleet::cluster_metric(&front, "upstream_rq_retry").await.unwrap() > 0.0);
    assert_eq!(fleet::cluster_metric(&front, "outlier_detection_ejections_active").await.unwrap(), 1.0);
}
