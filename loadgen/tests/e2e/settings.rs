//! Settings: wrong ones stop Envoy with a message that helps, right ones arrive from both sources. Metrics are all there
//! from the start.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use collapser_engine::settings::Settings;
use collapser_loadgen::sidecar::{FILTER, Metrics, Sidecar, SidecarOptions};
use serde_json::{Value, json};
use tonic::Code;

use crate::rig::{Rig, ask, root};

/// Envoy merges histograms every five seconds.
const HISTOGRAM_PATIENCE: Duration = Duration::from_secs(15);

/// What Envoy says when it refuses to start.
async fn refusal(change: impl FnOnce(&mut SidecarOptions)) -> String {
    let nowhere = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
    let mut options = SidecarOptions { wait_for_backend: false, ..SidecarOptions::shipped(root(), nowhere) };
    change(&mut options);
    match Sidecar::start(options).await {
        Ok(_) => panic!("Envoy started"),
        Err(error) => format!("{error:#}"),
    }
}

/// These settings stop Envoy, and what it says holds all of `words`.
async fn assert_refused(settings: Value, words: &[&str]) {
    let said = refusal(|options| options.config.settings = settings).await;
    assert_says(&said, words);
}

fn assert_says(said: &str, words: &[&str]) {
    assert!(said.contains("did not start"), "{said}");
    for word in words {
        assert!(said.contains(word), "{word:?} is missing in:\n{said}");
    }
}

fn set(options: &mut SidecarOptions, name: &str, value: &str) {
    options.env.push((name.to_string(), value.to_string()));
}

/// Leaves the plugin without any configuration.
fn drop_configuration(config: &mut Value) {
    let configuration = format!("{FILTER}/configuration/value");
    *config.pointer_mut(&configuration).unwrap() = json!("");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_setting_is_refused() {
    let words = ["cache_ttl", "1s", "no such setting", "cache_duration", "max_waiters"];
    assert_refused(json!({"cache_ttl": "1s"}), &words).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_word_for_a_duration_is_refused() {
    assert_refused(json!({"cache_duration": "soon"}), &["cache_duration", "soon", "100ms"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_duration_out_of_range_is_refused() {
    assert_refused(json!({"backend_timeout": "0"}), &["backend_timeout", "\"0\"", "from 1ms to 1h"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_negative_number_is_refused() {
    assert_refused(json!({"max_waiters": -1}), &["max_waiters", "-1", "a whole number from 1 to"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_type_is_refused() {
    assert_refused(json!({"cache_errors": "maybe"}), &["cache_errors", "maybe", "true or false"]).await;
    assert_refused(json!({"key_headers": 7}), &["key_headers", "7", "a list of header names"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pattern_that_names_no_method_is_refused() {
    assert_refused(json!({"methods": ["Compute"]}), &["methods", "Compute", "/pkg.Service/Method"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fault_within_a_setting_is_named_with_its_place() {
    let settings = json!({
        "http": {"methods": ["TRACE"]},
        "rules": [{"match": "/*", "cache_duration": "25h"}, {"match": "/a"}]
    });
    let words =
        ["http.methods", "TRACE", "rules[0].cache_duration", "25h", "from 0 to 24h", "rules[1]", "nothing"];
    assert_refused(settings, &words).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rule_that_can_never_match_is_refused() {
    let rule = |path: &str| json!({"match": path, "collapse": false});
    let settings = json!({"rules": [rule("/a.B/*"), rule("/a.B/C")]});
    assert_refused(settings, &["rules[1] can never match", "rules[0]", "the narrower rule first"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn several_faults_are_told_together() {
    let settings = json!({"cache_duration": "soon", "max_waiters": -1, "nonsense": true});
    assert_refused(settings, &["cache_duration", "soon", "max_waiters", "-1", "nonsense"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_cluster_envoy_does_not_start() {
    let said = refusal(|options| options.config.edit = drop_configuration).await;
    assert_says(&said, &["cluster (COLLAPSER_CLUSTER)", "the name of the Envoy cluster"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_variable_is_refused_under_its_own_name() {
    let said = refusal(|options| set(options, "BACKEND_TIMEOUT", "x")).await;
    assert_says(&said, &["BACKEND_TIMEOUT", "\"x\"", "10s"]);
}

/// All variables but that of the cluster, for which any word will do, and that of what the configuration sets itself.
fn variables() -> Vec<&'static str> {
    let other = ["COLLAPSER_CLUSTER", "COLLAPSER_MAX_REPLAY_BYTES"];
    Settings::environment().filter(|name| !other.contains(name)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_variable_reaches_the_filter() {
    let said = refusal(|options| variables().iter().for_each(|name| set(options, name, "no good"))).await;
    assert_says(&said, &variables());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_cluster_may_come_from_the_environment() {
    let rig = Rig::start_with(json!({}), 0, |options| {
        options.config.edit = drop_configuration;
        set(options, "COLLAPSER_CLUSTER", "backend");
    })
    .await;
    rig.client().await.compute(ask("k")).await.unwrap();
    assert_eq!(rig.accounts(1).await.get("collapser_backend_calls_total"), 1.0);
}

/// Backend calls for two requests of one key, one after the other, with no cache by the environment.
async fn calls_of_two(settings: Value) -> u64 {
    let rig = Rig::start_with(settings, 0, |options| set(options, "COLLAPSER_CACHE_DURATION", "0")).await;
    let mut client = rig.client().await;
    for _ in 0..2 {
        client.compute(ask("k")).await.unwrap();
    }
    rig.backend.calls()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_variable_counts_and_json_wins_over_it() {
    assert_eq!(calls_of_two(json!({})).await, 2, "the variable turns the cache off");
    assert_eq!(calls_of_two(json!({"cache_duration": "10m"})).await, 1, "JSON turns it on");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_cluster_fails_calls_and_is_named() {
    let rig = Rig::start(json!({"cluster": "nowhere"}), 0).await;
    let status = rig.client().await.compute(ask("k")).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert!(status.message().contains("\"nowhere\""), "{status}");
    assert_eq!(rig.backend.calls(), 0);
    let metrics = rig.metrics_when(|m| m.get("collapser_errors_total{code=\"14\"}") == 1.0).await;
    assert_eq!(metrics.get("collapser_inflight_requests"), 0.0);
}

const PLAIN_METRICS: [&str; 13] = [
    "collapser_requests_total",
    "collapser_collapsed_requests_total",
    "collapser_backend_calls_total",
    "collapser_cache_hits_total",
    "collapser_keyed_requests_total",
    "collapser_refused_requests_total",
    "collapser_abandoned_requests_total",
    "collapser_evictions_total",
    "collapser_streaming_methods_total",
    "collapser_cached_results",
    "collapser_cached_bytes",
    "collapser_inflight_requests",
    "collapser_waiting_requests",
];

const HISTOGRAMS: [&str; 2] =
    ["collapser_backend_latency_microseconds", "collapser_follower_wait_microseconds"];

/// Every metric there is, by the name under which Prometheus finds it.
fn all_metrics() -> Vec<String> {
    let reasons = ["not_grpc", "method", "asked", "streaming", "too_large", "malformed"];
    let codes = (1..=16).map(|code| code.to_string()).chain(["other".to_string()]);
    let plain = PLAIN_METRICS.map(str::to_string).into_iter();
    plain
        .chain(reasons.map(|reason| format!("collapser_bypassed_requests_total{{reason=\"{reason}\"}}")))
        .chain(codes.map(|code| format!("collapser_errors_total{{code=\"{code}\"}}")))
        .chain(HISTOGRAMS.map(|name| format!("{name}_count")))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_metric_is_there_from_the_start_at_zero() {
    let rig = Rig::start(json!({}), 0).await;
    let metrics = rig.sidecar.metrics().await.unwrap();
    for name in all_metrics() {
        assert!(metrics.has(&name), "{name} is missing: {metrics:#?}");
        assert_eq!(metrics.get(&name), 0.0, "{name}");
    }
}

async fn histogram_metrics(rig: &Rig, count: f64) -> Metrics {
    let deadline = Instant::now() + HISTOGRAM_PATIENCE;
    loop {
        let metrics = rig.sidecar.metrics().await.unwrap();
        if HISTOGRAMS.iter().all(|name| metrics.get(&format!("{name}_count")) == count) {
            return metrics;
        }
        assert!(Instant::now() < deadline, "histograms never came true: {metrics:#?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn histograms_have_buckets_from_a_tenth_of_a_millisecond_to_thirteen_seconds() {
    let rig = Rig::start(json!({}), 300).await;
    let client = rig.client().await;
    let call = || async { client.clone().compute(ask("k")).await.unwrap() };
    tokio::join!(call(), call());
    assert_eq!(rig.backend.calls(), 1);
    let metrics = histogram_metrics(&rig, 1.0).await;
    for name in HISTOGRAMS {
        let mut bound = 100;
        while bound <= 13_107_200 {
            let bucket = format!("{name}_bucket{{le=\"{bound}\"}}");
            assert!(metrics.has(&bucket), "{bucket} is missing: {metrics:#?}");
            bound *= 2;
        }
        assert_eq!(metrics.get(&format!("{name}_bucket{{le=\"100\"}}")), 0.0);
        assert_eq!(metrics.get(&format!("{name}_bucket{{le=\"13107200\"}}")), 1.0, "{metrics:#?}");
    }
    // The backend takes 300 ms; a unit mistaken would miss this by a thousand.
    let latency = metrics.get("collapser_backend_latency_microseconds_sum");
    assert!((250_000.0..10_000_000.0).contains(&latency), "{latency} µs");
}
