//! What the filter holds is bounded: waiting requests, cached replies, their bytes and their age.

use std::collections::BTreeMap;
use std::time::Duration;

use collapser_loadgen::payload::payload_matches;
use collapser_loadgen::proto::demo_client::DemoClient;
use collapser_loadgen::proto::{ComputeReply, ComputeRequest};
use serde_json::json;
use tokio::task::JoinSet;
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::raw::RawClient;
use crate::rig::{Rig, ask};

const CACHED: &str = "collapser_cached_results";
const EVICTIONS: &str = "collapser_evictions_total";

/// Makes one call and checks that the answer is the one that was asked for, whole.
async fn compute(client: &DemoClient<Channel>, key: &str, payload_bytes: u32) -> ComputeReply {
    let request = ComputeRequest { payload_bytes, ..ask(key) };
    let reply = client.clone().compute(request).await.unwrap().into_inner();
    assert_eq!(reply.key, key);
    assert_eq!(reply.payload.len(), payload_bytes.max(16) as usize, "16 are the backend's own choice");
    assert!(payload_matches(key, &reply.payload));
    reply
}

/// So many calls at the same time, each of the key that `key` gives it.
async fn at_once(
    client: &DemoClient<Channel>,
    count: usize,
    key: impl Fn(usize) -> String,
) -> Vec<Result<ComputeReply, Status>> {
    let mut calls = JoinSet::new();
    for number in 0..count {
        let (mut client, request) = (client.clone(), ask(&key(number)));
        calls.spawn(async move { Ok(client.compute(request).await?.into_inner()) });
    }
    calls.join_all().await
}

fn calls_of(rig: &Rig, keys: &[&str]) -> BTreeMap<String, u64> {
    let calls = rig.backend.calls_by_key();
    keys.iter().map(|key| (key.to_string(), calls.get(*key).copied().unwrap_or_default())).collect()
}

fn counts(expected: &[(&str, u64)]) -> BTreeMap<String, u64> {
    expected.iter().map(|(key, count)| (key.to_string(), *count)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn beyond_max_waiters_requests_are_refused_and_the_cache_still_answers() {
    let rig = Rig::start(json!({"max_waiters": 10, "cache_duration": "10m"}), 0).await;
    let client = rig.client().await;
    compute(&client, "warm", 0).await;
    rig.backend.set_latency(Duration::from_secs(2));

    let crowd = {
        let client = client.clone();
        tokio::spawn(async move { at_once(&client, 50, |number| number.to_string()).await })
    };
    rig.metrics_when(|m| m.get("collapser_refused_requests_total") == 40.0).await;
    compute(&client, "warm", 0).await;
    assert_eq!(rig.backend.in_flight(), 10, "the hit came while all places were taken");

    let (served, refused): (Vec<_>, Vec<_>) = crowd.await.unwrap().into_iter().partition(Result::is_ok);
    assert_eq!((served.len(), refused.len()), (10, 40));
    for status in refused.into_iter().filter_map(Result::err) {
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert!(status.message().contains("max_waiters"), "{status}");
    }
    let metrics = rig.accounts(52).await;
    assert_eq!(metrics.get("collapser_cache_hits_total"), 1.0);
    assert_eq!(rig.backend.calls(), 11);

    // The places are free again.
    rig.backend.set_latency(Duration::ZERO);
    compute(&client, "afterwards", 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_follower_takes_a_place_too() {
    let rig = Rig::start(json!({"max_waiters": 3}), 1_000).await;
    let replies = at_once(&rig.client().await, 5, |_| "k".to_string()).await;
    let served: Vec<_> = replies.iter().flatten().collect();
    assert_eq!(served.len(), 3);
    assert!(served.iter().all(|reply| *reply == served[0]));
    assert_eq!(rig.backend.calls(), 1);
    rig.accounts(5).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_least_recently_used_reply_is_evicted_first() {
    // By itself: what a worker evicts may still be among what all share.
    let settings = json!({"max_cache_entries": 2, "cache_duration": "10m", "scope": "worker"});
    let rig = Rig::start(settings, 0).await;
    let client = rig.client().await;
    // "b" makes way for "c", since "a" was used after it; then "a" makes way for "b".
    for key in ["a", "b", "a", "c", "a", "c", "b", "c"] {
        compute(&client, key, 0).await;
        let metrics = rig.sidecar.metrics().await.unwrap();
        assert!(metrics.get(CACHED) <= 2.0, "{metrics:#?}");
    }
    assert_eq!(calls_of(&rig, &["a", "b", "c"]), counts(&[("a", 1), ("b", 2), ("c", 1)]));
    let metrics = rig.accounts(8).await;
    assert_eq!(metrics.get("collapser_cache_hits_total"), 4.0);
    assert_eq!((metrics.get(EVICTIONS), metrics.get(CACHED)), (2.0, 2.0));
}

/// Its headers came while the reply was fresh; but it is asked when the message has come.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_comes_late_is_answered_by_the_time_it_comes() {
    let settings = json!({"cache_duration": "300ms", "cleanup_interval": "1m", "stream_grace": "100ms"});
    let rig = Rig::start(settings, 0).await;
    let client = RawClient::connect(rig.sidecar.addr()).await;
    for pause in [Duration::ZERO, Duration::from_millis(600)] {
        let answer = client.compute_after(pause, &ask("k")).await.unwrap();
        assert_eq!(answer.code(), Some("0"), "{answer:?}");
    }
    assert_eq!(rig.backend.calls(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn max_cache_bytes_bounds_what_is_kept() {
    let rig = Rig::start(json!({"max_cache_bytes": 25_000, "cache_duration": "10m"}), 0).await;
    let client = rig.client().await;
    for key in ["a", "b", "a", "c", "a", "b"] {
        compute(&client, key, 10_000).await;
    }
    assert_eq!(calls_of(&rig, &["a", "b", "c"]), counts(&[("a", 1), ("b", 2), ("c", 1)]));
    let metrics = rig.metrics_when(|m| m.get(EVICTIONS) == 2.0 && m.get(CACHED) == 2.0).await;
    let bytes = metrics.get("collapser_cached_bytes");
    assert!((20_000.0..=25_000.0).contains(&bytes), "{bytes} bytes");

    // What is larger than the whole cache does not empty it.
    for _ in 0..2 {
        compute(&client, "large", 30_000).await;
    }
    compute(&client, "a", 10_000).await;
    assert_eq!(calls_of(&rig, &["a", "large"]), counts(&[("a", 1), ("large", 2)]));
    rig.accounts(9).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_over_max_response_bytes_is_delivered_but_not_kept() {
    let settings = json!({"max_response_bytes": "4KiB", "cache_duration": "10m"});
    let rig = Rig::start(settings, 0).await;
    let client = rig.client().await;
    for _ in 0..2 {
        compute(&client, "large", 10_000).await;
        compute(&client, "small", 100).await;
    }
    assert_eq!(calls_of(&rig, &["large", "small"]), counts(&[("large", 2), ("small", 1)]));
    let metrics = rig.accounts(4).await;
    assert_eq!((metrics.get(CACHED), metrics.get(EVICTIONS)), (1.0, 0.0), "only the small one is kept");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_is_reused_until_its_time_is_over() {
    // Long enough that a busy machine does not pass it between two calls.
    let ttl = Duration::from_secs(2);
    let rig = Rig::start(json!({"cache_duration": "2s", "cleanup_interval": "100ms"}), 0).await;
    let client = rig.client().await;
    let first = compute(&client, "k", 0).await;
    assert_eq!(compute(&client, "k", 0).await, first);
    tokio::time::sleep(ttl).await;
    let second = compute(&client, "k", 0).await;
    assert_ne!(second.serial, first.serial);
    assert_eq!(rig.backend.calls(), 2);
    // Nobody asks any more, and the reply goes nevertheless.
    rig.metrics_when(|m| m.get(CACHED) == 1.0).await;
    let metrics = rig.metrics_when(|m| m.get(CACHED) == 0.0).await;
    assert_eq!(metrics.get("collapser_cached_bytes"), 0.0);
    assert_eq!(metrics.get(EVICTIONS), 0.0, "to expire is not to be evicted");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_cache_calls_still_collapse() {
    let rig = Rig::start(json!({"cache_duration": "0"}), 500).await;
    let client = rig.client().await;
    let replies = at_once(&client, 20, |_| "k".to_string()).await;
    let first = replies[0].as_ref().unwrap();
    assert!(replies.iter().all(|reply| reply.as_ref().unwrap() == first));
    assert_eq!(rig.backend.calls(), 1);
    // The next one, although at once, is a new call.
    assert_ne!(compute(&client, "k", 0).await.serial, first.serial);
    assert_eq!(rig.backend.calls(), 2);
    let metrics = rig.accounts(21).await;
    assert_eq!((metrics.get(CACHED), metrics.get("collapser_cache_hits_total")), (0.0, 0.0));
}
