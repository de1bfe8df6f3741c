//! `stale_if_error`: a good reply, though too old, goes before an error.

use collapser_loadgen::backend::Failure;
use collapser_loadgen::proto::ComputeRequest;
use serde_json::{Value, json};
use tonic::Code;

use super::scene::{CROWD, Scene, WORKERS, pass_ms, saying, trouble};
use crate::rig::ask;

const WHY: &str = "stale-if-error";

const ANSWERS: &str = "collapser_stale_answers_total{reason=\"error\"}";

/// A reply's TTL, in milliseconds, and what is surely after it.
const TTL: &str = "1s";
const AFTER_TTL: u64 = 1_200;

/// Has a reply of the first call expire.
async fn expired(settings: Value, latency_ms: u64, workers: u32) -> Scene {
    let scene = Scene::start(settings, latency_ms, workers).await;
    scene.spread("k").await;
    pass_ms(AFTER_TTL).await;
    scene
}

#[tokio::test(flavor = "multi_thread")]
async fn all_who_wait_for_a_failing_call_get_the_last_good_reply() {
    for workers in WORKERS {
        let scene = expired(json!({"cache_duration": TTL, "stale_if_error": "1m"}), 500, workers).await;
        scene.0.backend.set_failure(trouble());
        let told = scene.together(&ask("k"), &[], CROWD).await;
        assert!(told.iter().all(|told| told.serial() == 1 && told.is_stale(WHY)), "{told:?}");
        assert_eq!(scene.calls(), 2, "{workers} workers");
        scene.metric(ANSWERS, CROWD).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn for_a_second_after_a_failure_nobody_waits_for_another_one() {
    let scene = expired(json!({"cache_duration": TTL, "stale_if_error": "1m"}), 0, 1).await;
    scene.0.backend.set_failure(trouble());
    assert!(scene.get("k").await.is_stale(WHY));
    // Whoever came now would wait for this long.
    scene.0.backend.set_latency(std::time::Duration::from_secs(3_600));
    for _ in 0..CROWD {
        assert!(scene.get("k").await.is_stale(WHY));
    }
    assert_eq!(scene.calls(), 2);
    scene.0.backend.set_latency(std::time::Duration::ZERO);
    pass_ms(1_000).await;
    assert!(scene.get("k").await.is_stale(WHY));
    assert_eq!(scene.calls(), 3, "then it is tried again");
    scene.metric(ANSWERS, CROWD + 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_its_time_there_is_the_error_and_then_a_fresh_reply() {
    for workers in WORKERS {
        let scene = expired(json!({"cache_duration": TTL, "stale_if_error": "4s"}), 0, workers).await;
        scene.0.backend.set_failure(trouble());
        let told = scene.get("k").await;
        assert!(told.is_stale(WHY) && told.age().is_some_and(|age| (1..=5).contains(&age)), "{told:?}");
        pass_ms(5_000).await;
        let told = scene.get("k").await;
        assert_eq!((told.code(), told.status(), told.age()), ("14", "collapser; fwd=miss", None));
        scene.0.backend.set_failure(None);
        let told = scene.get("k").await;
        assert_eq!(told.status(), "collapser; fwd=miss; stored");
        assert_eq!(told.serial(), scene.calls());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_it_an_error_is_an_error() {
    let scene = expired(json!({"cache_duration": TTL}), 0, 1).await;
    scene.0.backend.set_failure(trouble());
    assert_eq!(scene.get("k").await.code(), "14");
    scene.metric("collapser_errors_total{code=\"14\"}", 1).await;
    scene.metric(ANSWERS, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_that_was_not_to_be_kept_stands_in_for_none() {
    for said in ["no-store", "no-cache", "max-age=0", "private"] {
        let settings = json!({"cache_duration": "1m", "stale_if_error": "1m"});
        let scene = Scene::start(settings, 0, 1).await;
        assert_eq!(scene.one(&saying("k", said), &[]).await.serial(), 1);
        scene.0.backend.set_failure(trouble());
        assert_eq!(scene.one(&saying("k", said), &[]).await.code(), "14", "{said}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_whose_ttl_its_backend_gave_is_stale_after_that() {
    let scene = Scene::start(json!({"cache_duration": "0", "stale_if_error": "1m"}), 0, 1).await;
    let request = saying("k", "max-age=1");
    assert_eq!(scene.one(&request, &[]).await.serial(), 1);
    scene.0.backend.set_failure(trouble());
    pass_ms(1_100).await;
    let told = scene.one(&request, &[]).await;
    assert!(told.is_stale(WHY) && told.serial() == 1, "{told:?}");
}

/// Whether a failure with this code is hidden by a stale reply.
async fn is_hidden(scene: &Scene, code: Code) -> bool {
    let key = format!("{code:?}");
    scene.0.backend.set_failure(None);
    let good = scene.get(&key).await.serial();
    pass_ms(AFTER_TTL).await;
    scene.0.backend.set_failure(Some(Failure::always(code, "no")));
    let told = scene.get(&key).await;
    let hidden = told.is_stale(WHY) && told.serial() == good;
    assert!(hidden || told.code() == (code as i32).to_string(), "{told:?}");
    hidden
}

#[tokio::test(flavor = "multi_thread")]
async fn only_a_backend_in_trouble_counts_as_failed() {
    let scene = Scene::start(json!({"cache_duration": TTL, "stale_if_error": "1m"}), 0, 1).await;
    for code in [Code::Unknown, Code::DeadlineExceeded, Code::Internal, Code::Unavailable] {
        assert!(is_hidden(&scene, code).await, "{code:?}");
    }
    for code in [Code::NotFound, Code::PermissionDenied, Code::ResourceExhausted, Code::Unauthenticated] {
        assert!(!is_hidden(&scene, code).await, "{code:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_counts_as_failed_is_a_setting() {
    let statuses = json!(["RESOURCE_EXHAUSTED", 10]);
    let settings = json!({"cache_duration": TTL, "stale_if_error": "1m", "stale_statuses": statuses});
    let scene = Scene::start(settings, 0, 1).await;
    for code in [Code::ResourceExhausted, Code::Aborted] {
        assert!(is_hidden(&scene, code).await, "{code:?}");
    }
    assert!(!is_hidden(&scene, Code::Unavailable).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backend_that_is_too_slow_has_failed() {
    let settings = json!({"cache_duration": TTL, "stale_if_error": "1m", "backend_timeout": "500ms"});
    let scene = expired(settings, 0, 1).await;
    scene.0.backend.set_latency(std::time::Duration::from_secs(3_600));
    let told = scene.together(&ask("k"), &[], CROWD).await;
    assert!(told.iter().all(|told| told.serial() == 1 && told.is_stale(WHY)), "{told:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_says_nothing_of_other_keys() {
    let scene = expired(json!({"cache_duration": TTL, "stale_if_error": "1m"}), 0, 1).await;
    let fails = ComputeRequest { fail_code: Code::Unavailable as u32, ..ask("k") };
    assert_eq!(scene.one(&fails, &[]).await.code(), "14");
    assert_eq!(scene.get("other").await.status(), "collapser; fwd=miss; stored");
    assert_eq!(scene.get("k").await.status(), "collapser; fwd=miss; stored");
}
