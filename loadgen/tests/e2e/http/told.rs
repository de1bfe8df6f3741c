//! What users are told: `cache-status` (RFC 9211), access logs and metrics.

use serde_json::{Value, json};

use super::gateway::{Gateway, NOTHING, status};
use crate::rig::eventually;

const PATH: &str = "/page/told?header=cache-control:max-age=60";

#[tokio::test]
async fn cache_status_says_how_an_answer_came_about() {
    let gateway = Gateway::start(json!({}), 100).await;
    let answers = gateway.together(PATH, &[NOTHING; 2]).await;
    assert_eq!(status(&answers[0]), "collapser; fwd=miss; stored");
    assert_eq!(status(&answers[1]), "collapser; fwd=miss; stored; collapsed");
    let hit = status(&gateway.get(PATH, &[]).await);
    assert!(hit == "collapser; hit; ttl=59" || hit == "collapser; hit; ttl=58", "{hit}");
    assert_eq!(status(&gateway.get("/page/silent", &[]).await), "collapser; fwd=miss");
    let range = gateway.get(PATH, &[("range", "bytes=0-1")]).await;
    assert_eq!(status(&range), "collapser; fwd=bypass; detail=range");
    let private = gateway.together("/page/p?header=cache-control:private", &[NOTHING; 2]).await;
    assert_eq!(status(&private[0]), "collapser; fwd=miss");
    assert_eq!(status(&private[1]), "collapser; fwd=bypass; detail=unshareable");
}

#[tokio::test]
async fn the_backends_own_cache_status_stays_before_the_filters() {
    let gateway = Gateway::start(json!({}), 0).await;
    let path = "/page/x?header=cache-control:max-age=60&header=cache-status:origin%3B%20hit";
    for _ in 0..2 {
        let answer = gateway.get(path, &[]).await;
        let all: Vec<_> =
            answer.headers.get_all("cache-status").iter().map(|value| value.to_str().unwrap()).collect();
        assert!(all[0].starts_with("origin; hit"), "{all:?}");
        assert!(status(&answer).contains("collapser; "), "{all:?}");
    }
}

#[tokio::test]
async fn it_is_off_unless_asked_for() {
    let gateway = Gateway::start(json!({"cache_status": false}), 0).await;
    for (path, request) in [(PATH, NOTHING), (PATH, NOTHING), (PATH, &[("range", "bytes=0-1")])] {
        assert_eq!(gateway.get(path, request).await.header("cache-status"), None);
    }
}

/// The shipped access log, line by line as JSON.
fn logged(gateway: &Gateway) -> Vec<Value> {
    let log = gateway.sidecar.log();
    let lines = log.lines().filter_map(|line| serde_json::from_str(line).ok());
    lines.filter(|line: &Value| line["path"].is_string()).collect()
}

#[tokio::test]
async fn the_access_log_shows_outcome_and_key() {
    let gateway = Gateway::start(json!({"stale_while_revalidate": "1m"}), 100).await;
    let path = "/page/logged?header=cache-control:max-age=1";
    gateway.together(path, &[NOTHING; 2]).await;
    gateway.get(path, &[]).await;
    gateway.get(path, &[("range", "bytes=0-1")]).await;
    gateway.together("/page/p?header=cache-control:private", &[NOTHING; 2]).await;
    tokio::time::sleep(std::time::Duration::from_millis(1_100)).await;
    gateway.get(path, &[]).await;
    gateway.get("/page/none", &[("cache-control", "only-if-cached")]).await;
    let mut outcomes = Vec::new();
    eventually("all lines", async || {
        let lines = logged(&gateway);
        outcomes = lines.iter().map(|line| line["outcome"].as_str().unwrap_or("-").to_string()).collect();
        outcomes.len() >= 8
    })
    .await;
    outcomes.sort();
    assert_eq!(
        outcomes,
        ["bypass:range", "follower", "hit", "leader", "leader", "refused", "released", "stale"]
    );
    let lines = logged(&gateway);
    let keys: Vec<_> = lines
        .iter()
        .filter(|line| line["path"] == path && line["outcome"] != "bypass:range")
        .map(|line| line["key"].as_str().unwrap_or_default().to_string())
        .collect();
    assert!(keys.len() == 4 && keys.iter().all(|key| key == &keys[0] && key.len() == 16), "{keys:?}");
}

#[tokio::test]
async fn each_outcome_is_counted() {
    let gateway = Gateway::start(json!({}), 100).await;
    gateway.together(PATH, &[NOTHING; 3]).await;
    gateway.get(PATH, &[]).await;
    gateway.together("/page/p?header=cache-control:private", &[NOTHING; 3]).await;
    gateway.get("/page/none", &[("cache-control", "only-if-cached")]).await;
    gateway.get(PATH, &[("range", "bytes=0-1")]).await;
    let expected = [
        ("collapser_requests_total", 9.0),
        ("collapser_backend_calls_total", 2.0),
        ("collapser_collapsed_requests_total", 4.0),
        ("collapser_cache_hits_total", 1.0),
        ("collapser_released_requests_total", 2.0),
        ("collapser_refused_requests_total", 1.0),
        ("collapser_bypassed_requests_total{reason=\"range\"}", 1.0),
        ("collapser_refreshes_total", 0.0),
    ];
    eventually("the counts", async || {
        let metrics = gateway.sidecar.metrics().await.unwrap();
        expected.iter().all(|(name, value)| metrics.get(name) == *value)
    })
    .await;
}
