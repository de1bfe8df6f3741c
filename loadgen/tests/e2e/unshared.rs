//! A method of which nobody asks the same twice is left alone, until somebody does.

use std::time::{Duration, Instant};

use collapser_loadgen::proto::{ComputeRequest, CountRequest};
use serde_json::json;
use tokio::task::JoinSet;
use tonic::Code;

use crate::raw::{Act, Answer, RawRig};
use crate::rig::{Rig, ask, eventually};

const PASSED: &str = "collapser_bypassed_requests_total{reason=\"unshared\"}";

/// Asks for each of these keys in turn.
async fn ask_for(rig: &Rig, keys: impl IntoIterator<Item = String>) {
    let client = rig.client().await;
    for key in keys {
        let reply = client.clone().compute(ask(&key)).await.unwrap().into_inner();
        assert_eq!(reply.key, key);
    }
}

fn keys(name: &str, count: usize) -> impl Iterator<Item = String> {
    (0..count).map(move |n| format!("{name}{n}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn what_never_repeats_passes_after_a_while() {
    let rig = Rig::start(json!({"pass_after": 10}), 0).await;
    ask_for(&rig, keys("k", 30)).await;
    let metrics = rig.accounts(30).await;
    assert_eq!(metrics.get("collapser_backend_calls_total"), 10.0);
    assert_eq!(metrics.get(PASSED), 20.0);
    assert_eq!(rig.backend.calls(), 30);
}

#[tokio::test(flavor = "multi_thread")]
async fn by_default_that_is_after_256_flights_and_never_with_0() {
    for (settings, passed) in [(json!({}), 44.0), (json!({"pass_after": 0}), 0.0)] {
        let rig = Rig::start(settings, 0).await;
        ask_for(&rig, keys("k", 300)).await;
        assert_eq!(rig.accounts(300).await.get(PASSED), passed);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_herd_costs_one_call_more_than_it_would() {
    let rig = Rig::start(json!({"pass_after": 10}), 100).await;
    ask_for(&rig, keys("k", 10)).await;
    let report = rig.burst(1_000, 1, 10).await;
    assert!(report.is_clean(), "{report:?}");
    // One that passes and the flight of all others; the reply of the latter is good for as long as stragglers come.
    assert_eq!(rig.backend.calls(), 10 + 2);
    assert_eq!(rig.accounts(1_010).await.get(PASSED), 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn once_something_repeats_all_is_shared_again() {
    let rig = Rig::start(json!({"pass_after": 10, "cache_duration": "1m"}), 0).await;
    ask_for(&rig, keys("k", 10)).await;
    // Passes; would have been cached, so the method is worth it; is cached.
    ask_for(&rig, ["again".to_string(), "again".to_string(), "again".to_string()]).await;
    let metrics = rig.accounts(13).await;
    assert_eq!((metrics.get(PASSED), metrics.get("collapser_cache_hits_total")), (1.0, 1.0));
    ask_for(&rig, keys("new", 9)).await;
    assert_eq!(rig.accounts(22).await.get(PASSED), 1.0, "the count begins anew");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_cached_and_what_is_in_flight_is_shared_all_the_same() {
    let rig = Rig::start(json!({"pass_after": 10, "cache_duration": "1m"}), 0).await;
    ask_for(&rig, keys("k", 10)).await;
    ask_for(&rig, keys("k", 10)).await;
    assert_eq!(rig.accounts(20).await.get("collapser_cache_hits_total"), 10.0);
    assert_eq!(rig.backend.calls(), 10);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_comes_after_the_ttl_has_not_been_shared() {
    let rig = Rig::start(json!({"pass_after": 10, "cache_duration": "10ms"}), 0).await;
    ask_for(&rig, keys("k", 10)).await;
    for _ in 0..5 {
        ask_for(&rig, ["rare".to_string()]).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(rig.accounts(15).await.get(PASSED), 5.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_passes_has_the_deadline_of_a_flight() {
    let rig = RawRig::start(json!({"pass_after": 1, "backend_timeout": "1s"})).await;
    rig.upstream.release();
    assert_eq!(rig.one().await.unwrap().key, "k");
    rig.upstream.hold();
    let begun = Instant::now();
    let late = rig.client().await.compute(ask("other")).await.unwrap_err();
    let took = begun.elapsed();
    assert!((Duration::from_millis(980)..Duration::from_secs(8)).contains(&took), "{took:?}");
    assert_eq!(late.code(), Code::DeadlineExceeded, "{late:?}");
    assert!(late.message().contains("1s (backend_timeout)"), "{late:?}");
    assert_eq!(rig.upstream.calls(), 2);
    rig.metric("collapser_bypassed_requests_total{reason=\"unshared\"}", 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_passes_may_hang_up() {
    let rig = RawRig::start(json!({"pass_after": 1, "cache_duration": "0"})).await;
    rig.upstream.release();
    assert_eq!(rig.one().await.unwrap().key, "k");
    rig.upstream.hold();
    let mut client = rig.client().await;
    let passes = tokio::spawn(async move { client.compute(ask("other")).await });
    eventually("it is at the upstream", async || rig.upstream.calls() == 2).await;
    passes.abort();
    eventually("it is gone", async || passes.is_finished()).await;
    rig.upstream.set(Act::Answer(Answer::compute("other")));
    rig.upstream.release();
    let reply = rig.client().await.compute(ask("other")).await.unwrap();
    assert_eq!(reply.into_inner().key, "other");
    rig.quiet().await;
}

/// Replies recurse in the VM; all at once would overflow its stack.
#[tokio::test(flavor = "multi_thread")]
async fn thousands_that_pass_may_be_late_at_once() {
    let rig = RawRig::start(json!({"pass_after": 1, "backend_timeout": "2s"})).await;
    rig.upstream.release();
    assert_eq!(rig.one().await.unwrap().key, "k");
    rig.upstream.hold();
    let client = rig.client().await;
    let mut calls = JoinSet::new();
    for number in 0..3_000 {
        let mut client = client.clone();
        calls.spawn(async move { client.compute(ask(&format!("late {number}"))).await });
    }
    for outcome in calls.join_all().await {
        let late = outcome.unwrap_err();
        assert_eq!(late.code(), Code::DeadlineExceeded, "{late:?}");
    }
    rig.metric("collapser_bypassed_requests_total{reason=\"unshared\"}", 3_000).await;
    rig.metric("collapser_errors_total{code=\"4\"}", 3_000).await;
    rig.metric("envoy_wasm_collapser_vm_reload_success", 0).await;
    rig.upstream.release();
    assert_eq!(rig.one().await.unwrap().key, "k");
    rig.quiet().await;
}

/// Streams whose replies had one message so far look like calls that never repeat. None is cut, and the method is known
/// for what it is after a few.
#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_passes_is_not_cut_and_becomes_known() {
    let rig = Rig::start(json!({"pass_after": 2, "backend_timeout": "1s"}), 0).await;
    let mut client = rig.client().await;
    let mut count = async |count, payload_bytes| {
        let request = CountRequest { count, interval_ms: 100, payload_bytes };
        let mut replies = client.count(request).await.unwrap().into_inner();
        let mut seen = 0;
        while replies.message().await.unwrap().is_some() {
            seen += 1;
        }
        assert_eq!(seen, count);
    };
    for payload_bytes in 0..2 {
        count(1, payload_bytes).await;
    }
    for payload_bytes in 0..3 {
        count(20, payload_bytes).await;
    }
    let metrics = rig.accounts(5).await;
    assert!(metrics.get(PASSED) >= 1.0, "{metrics:#?}");
    assert_eq!(metrics.get("collapser_streaming_methods_total"), 1.0, "{metrics:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn failures_do_not_tell_that_nothing_repeats() {
    let rig = Rig::start(json!({"pass_after": 10}), 0).await;
    let mut client = rig.client().await;
    for number in 0..20 {
        let request = ComputeRequest { fail_code: 14, ..ask(&format!("k{number}")) };
        client.compute(request).await.unwrap_err();
    }
    assert_eq!(rig.accounts(20).await.get(PASSED), 0.0);
}
