//! How keys spread over replicas, and how few of them move.

use std::collections::BTreeMap;
use std::time::Duration;

use collapser_loadgen::fleet::{self, Replica};
use collapser_loadgen::load::{self, LoadOptions};
use http::{Method, Request};
use serde_json::{Value, json};

use crate::front::{RawFront, burst, homes, plain, send, send_headers, with_tight_bound, without_checks};
use crate::raw::{RawClient, headers};
use crate::rig::{ask, root};

const KEYS: u64 = 10_000;

/// Where each of 10,000 keys is computed with these replicas, and no others.
async fn homes_of(replicas: &[Replica]) -> BTreeMap<String, usize> {
    fleet::reset(replicas);
    let front = fleet::front(root(), replicas, without_checks).await.unwrap();
    send(&front, KEYS, KEYS).await;
    let homes = homes(replicas);
    assert_eq!(homes.len() as u64, KEYS);
    homes
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_spread_evenly_and_one_replica_of_ten_moves_its_own_keys_only() {
    let mut replicas = plain(10, Duration::ZERO).await;
    let before = homes_of(&replicas).await;
    let mut shares = [0_u64; 10];
    before.values().for_each(|home| shares[*home] += 1);
    let largest = *shares.iter().max().unwrap() as f64 / (KEYS as f64 / 10.0);
    println!("largest share of ten replicas: {largest:.3} of the mean");
    assert!(largest < 1.3, "{shares:?}");

    // The last one goes; seen the other way round, it is added.
    replicas.pop();
    let after = homes_of(&replicas).await;
    let moved = before.iter().filter(|(key, home)| after[*key] != **home).count();
    println!("{moved} of {KEYS} keys moved");
    assert!((moved as f64) < 0.15 * KEYS as f64, "{moved} keys moved");
    let others = moved as u64 - shares[9];
    assert!(others < KEYS / 50, "{others} keys of other replicas moved");
}

/// Calls of one key in flight at each of ten replicas.
async fn one_hot_key(edit: fn(&mut Value)) -> Vec<u64> {
    let replicas = plain(10, Duration::ZERO).await;
    let front = fleet::front(root(), &replicas, edit).await.unwrap();
    // Envoy does not count calls that wait for a connection, so all are opened first.
    send(&front, 1_000, 1_000).await;
    fleet::reset(&replicas);
    let hot = LoadOptions { latency_ms: 1_000, ..burst(&front, 1_000, 1) };
    assert!(load::run(hot, |_| ()).await.unwrap().is_clean());
    replicas.iter().map(|replica| replica.backend.calls()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_bound_is_out_of_the_way_of_a_hot_key() {
    let calls = one_hot_key(without_checks).await;
    assert_eq!(calls.iter().filter(|calls| **calls > 0).count(), 1, "{calls:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tight_bound_bounds_the_load() {
    let calls = one_hot_key(with_tight_bound).await;
    assert!(calls.iter().all(|calls| *calls <= 130), "{calls:?}");
    assert_eq!(calls.iter().sum::<u64>(), 1_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_header_of_the_clients_own_chooses_the_replica_for_grpc_and_http() {
    let rig = RawFront::start(4, json!({}), without_checks).await;
    let client = RawClient::connect(rig.addr()).await;
    let mut used = [false; 4];
    for channel in 0..20 {
        let before = rig.calls();
        let channel = channel.to_string();
        for key in ["a", "b", "c"] {
            let more = headers(&[("channel-id", &channel)]);
            client.compute(&ask(key), more.clone()).await.unwrap();
            let bypass = headers(&[("channel-id", &channel), ("cache-control", "no-store")]);
            client.compute(&ask(key), bypass).await.unwrap();
        }
        let get = Request::builder().method(Method::GET).uri(format!("http://{}/channel", rig.addr()));
        let status = send_headers(rig.addr(), get.header("channel-id", &channel).body(()).unwrap()).await;
        assert_eq!(status, 200);
        let after = rig.calls();
        let new: Vec<_> = after.iter().zip(before).map(|(after, before)| after - before).collect();
        let home = new.iter().position(|calls| *calls == 7);
        used[home.unwrap_or_else(|| panic!("channel {channel} went to several replicas: {new:?}"))] = true;
    }
    assert!(used.iter().filter(|used| **used).count() > 1, "all channels went to one replica");
}
