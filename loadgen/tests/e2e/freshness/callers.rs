//! What callers say to caches.

use serde_json::json;

use super::scene::{CROWD, Pairs, Scene, WORKERS, calls_of, pass_ms};
use crate::rig::ask;

const NO_CACHE: Pairs<'static> = &[("cache-control", "no-cache")];
const NO_STORE: Pairs<'static> = &[("cache-control", "no-store")];

async fn start(workers: u32, latency_ms: u64) -> Scene {
    Scene::start(json!({"cache_duration": "1m"}), latency_ms, workers).await
}

#[tokio::test(flavor = "multi_thread")]
async fn no_cache_gets_a_new_reply_for_all() {
    let scene = start(1, 0).await;
    for (serial, metadata) in [(1, &[][..]), (1, &[]), (2, NO_CACHE), (2, &[]), (3, NO_CACHE)] {
        assert_eq!(scene.one(&ask("k"), metadata).await.serial(), serial);
    }
    assert_eq!(scene.one(&ask("k"), NO_CACHE).await.status(), "collapser; fwd=request; stored");
    assert!(scene.get("k").await.is_hit());
}

#[tokio::test(flavor = "multi_thread")]
async fn no_cache_is_never_answered_from_what_another_worker_has() {
    let scene = start(4, 0).await;
    for _ in 0..CROWD {
        assert_eq!(scene.get("k").await.serial(), 1);
    }
    for serial in 2..2 + CROWD as u64 {
        let told = scene.one(&ask("k"), NO_CACHE).await;
        assert_eq!((told.serial(), told.status()), (serial, "collapser; fwd=request; stored"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_cache_joins_what_is_in_the_air() {
    for workers in WORKERS {
        let scene = start(workers, 500).await;
        scene.get("k").await;
        let told = scene.together(&ask("k"), NO_CACHE, CROWD).await;
        assert_eq!((calls_of(&told), scene.calls()), (1, 2));
        assert_eq!(told[0].status(), "collapser; fwd=request; stored");
        let follows = "collapser; fwd=request; stored; collapsed";
        assert!(told[1..].iter().all(|told| told.status() == follows), "{workers} workers: {told:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_store_is_left_alone() {
    for workers in WORKERS {
        let scene = start(workers, 500).await;
        assert_eq!(scene.get("k").await.serial(), 1);
        let told = scene.together(&ask("k"), NO_STORE, CROWD).await;
        assert_eq!(calls_of(&told), CROWD, "each has a call of its own");
        let status = "collapser; fwd=request; detail=asked";
        assert!(told.iter().all(|told| told.status() == status), "{told:?}");
        let later = scene.get("k").await;
        assert!(later.is_hit() && later.serial() == 1, "theirs are not kept: {later:?}");
        scene.metric("collapser_bypassed_requests_total{reason=\"asked\"}", CROWD).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn max_age_is_the_greatest_age_that_will_do() {
    for workers in WORKERS {
        let scene = start(workers, 0).await;
        for _ in 0..CROWD {
            assert_eq!(scene.get("k").await.serial(), 1);
        }
        pass_ms(1_500).await;
        assert_eq!(scene.one(&ask("k"), &[("cache-control", "max-age=60")]).await.serial(), 1);
        assert_eq!(scene.one(&ask("k"), &[("cache-control", "max-age=1")]).await.serial(), 2);
        assert_eq!(scene.one(&ask("k"), &[("cache-control", "max-age=0")]).await.serial(), 3);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_if_cached_means_nothing_to_grpc() {
    let scene = start(1, 0).await;
    let told = scene.one(&ask("k"), &[("cache-control", "only-if-cached")]).await;
    assert_eq!((told.serial(), told.status()), (1, "collapser; fwd=miss; stored"));
}

#[tokio::test(flavor = "multi_thread")]
async fn callers_have_no_say_where_they_are_given_none() {
    let scene = Scene::start(json!({"cache_duration": "1m", "caller_control": false}), 0, 1).await;
    assert_eq!(scene.get("k").await.serial(), 1);
    for said in ["no-cache", "no-store", "max-age=0"] {
        let told = scene.one(&ask("k"), &[("cache-control", said)]).await;
        assert!(told.is_hit() && told.serial() == 1, "{said}: {told:?}");
    }
    let told = scene.one(&ask("k"), &[("pragma", "no-cache")]).await;
    assert!(told.is_hit(), "{told:?}");
}
