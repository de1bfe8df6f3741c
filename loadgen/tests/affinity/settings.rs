//! Settings that make no sense together stop Envoy, with words that help.

use std::net::{Ipv4Addr, SocketAddr};

use collapser_loadgen::sidecar::{Sidecar, SidecarOptions};
use serde_json::{Value, json};

use crate::rig::root;

/// What Envoy says when it refuses to start.
async fn refusal(mut options: SidecarOptions) -> String {
    options.wait_for_backend = false;
    match Sidecar::start(options).await {
        Ok(_) => panic!("Envoy started"),
        Err(error) => format!("{error:#}"),
    }
}

async fn assert_refused(settings: Value, words: &[&str]) {
    let mut options = SidecarOptions::front(root(), Vec::new());
    options.config.settings = settings.clone();
    let said = refusal(options).await;
    assert!(said.contains("did not start"), "{said}");
    words.iter().for_each(|word| assert!(said.contains(word), "{settings}: {word:?} is missing in:\n{said}"));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_only_a_flight_or_a_cache_needs_is_refused() {
    let settings = json!({"cluster": "replicas", "cache_duration": "1s"});
    assert_refused(settings, &["cluster is set, but mode is \"affinity\"", "cache_duration is set"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rule_may_change_keys_but_not_the_cache() {
    let rule = json!({"match": "/*", "key_headers": ["x-tenant"], "cache_duration": "1s"});
    assert_refused(json!({"rules": [rule]}), &["rules[0].cache_duration is set, but mode is \"affinity\""])
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_cannot_hold_headers_is_refused() {
    assert_refused(json!({"hold": "filter"}), &["hold is \"filter\", but mode is \"affinity\""]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_mode_is_refused() {
    assert_refused(json!({"mode": "hash"}), &["mode is \"hash\"; allowed: collapse or affinity"]).await;
}

/// The variable reaches the sidecar, too, where it cannot be meant.
#[tokio::test(flavor = "multi_thread")]
async fn a_sidecar_is_no_front() {
    let nowhere = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
    let mut options = SidecarOptions::shipped(root(), nowhere);
    options.env.push(("COLLAPSER_MODE".to_string(), "affinity".to_string()));
    let said = refusal(options).await;
    assert!(said.contains("cluster is set, but mode is \"affinity\""), "{said}");
}
