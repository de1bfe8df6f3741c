//! Who is given a reply, as its backend says: its leader, those who wait, and those who come later.

use collapser_loadgen::proto::ComputeRequest;
use serde_json::json;
use tonic::Code;

use super::scene::{CROWD, Scene, Told, WORKERS, calls_of, pass_ms, saying};
use crate::raw::headers;
use crate::rig::ask;

const UNSHAREABLE: &str = "collapser; fwd=bypass; detail=unshareable";

/// Who may be given a reply.
#[derive(Clone, Copy, Debug, PartialEq)]
enum For {
    /// Those who wait and those who come later.
    All,
    /// Those who wait.
    Waiters,
    /// The one whose call it was.
    Leader,
}
use For::{All, Leader, Waiters};

/// Asks for one thing many at a time and then once more.
async fn check(scene: &Scene, request: &ComputeRequest, whom: For, workers: u32) {
    let what = format!("{request:?} for {whom:?}, {workers} workers");
    let before = scene.calls();
    let told = scene.together(request, &[], CROWD).await;
    let during = scene.calls() - before;
    assert_eq!(calls_of(&told) as u64, during, "each call has its answer: {what}");
    let later = scene.one(request, &[]).await;
    let after = scene.calls() - before - during;
    let expected = match whom {
        All => (1, 0),
        Waiters => (1, 1),
        Leader => (CROWD as u64, 1),
    };
    assert_eq!((during, after), expected, "calls for many at a time and one later: {what}");
    let (leads, follows) = match whom {
        All => ("collapser; fwd=miss; stored", "collapser; fwd=miss; stored; collapsed"),
        Waiters => ("collapser; fwd=miss", "collapser; fwd=miss; collapsed"),
        Leader => ("collapser; fwd=miss", UNSHAREABLE),
    };
    assert_eq!(told[0].status(), leads, "{what}");
    assert!(told[1..].iter().all(|told| told.status() == follows), "{what}: {told:?}");
    match whom {
        All => assert!(later.is_hit() && later.serial() == told[0].serial(), "{what}: {later:?}"),
        Waiters => assert_eq!(later.status(), "collapser; fwd=miss", "{what}"),
        // Another worker may not have heard of it.
        Leader => assert!(later.status() == UNSHAREABLE || workers > 1, "{what}: {later:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn backends_decide_who_is_given_a_reply() {
    let cases = [
        ("public", All),
        ("max-age=60", All),
        ("s-maxage=60, max-age=0", All),
        ("no-store", Waiters),
        ("no-cache", Waiters),
        ("max-age=60, No-Store", Waiters),
        ("max-age=0", Waiters),
        ("s-maxage=0, max-age=60", Waiters),
        ("private", Leader),
        ("private, max-age=60", Leader),
    ];
    for workers in WORKERS {
        let scene = Scene::start(json!({"cache_duration": "1m"}), 500, workers).await;
        check(&scene, &ask("silent"), All, workers).await;
        for (said, whom) in cases {
            check(&scene, &saying("k", said), whom, workers).await;
        }
        let released = (CROWD - 1) * cases.iter().filter(|(_, whom)| *whom == Leader).count();
        scene.metric("collapser_released_requests_total", released).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_nobody_caches_is_cached_where_its_backend_wants_it() {
    for workers in WORKERS {
        let scene = Scene::start(json!({"cache_duration": "0"}), 500, workers).await;
        check(&scene, &ask("silent"), Waiters, workers).await;
        for (said, whom) in [("max-age=60", All), ("s-maxage=60", All), ("public", Waiters)] {
            check(&scene, &saying("k", said), whom, workers).await;
        }
    }
}

/// For how long a reply that says `max-age=N` is good.
async fn assert_is_gone_after_a_second(settings: serde_json::Value, said: &str) {
    let scene = Scene::start(settings, 0, 1).await;
    let request = saying("k", said);
    assert_eq!(scene.one(&request, &[]).await.serial(), 1);
    let hit = scene.one(&request, &[]).await;
    assert_eq!((hit.serial(), hit.status()), (1, "collapser; hit; ttl=0"));
    pass_ms(1_100).await;
    assert_eq!(scene.one(&request, &[]).await.serial(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backends_ttl_goes_before_that_of_the_settings() {
    assert_is_gone_after_a_second(json!({"cache_duration": "1m"}), "max-age=1").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backends_ttl_is_capped() {
    assert_is_gone_after_a_second(json!({"max_ttl": "1s"}), "max-age=60").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_comes_after_a_private_reply_does_not_wait_for_anybody() {
    let settings = json!({"http": {"unshareable_for": "3s"}});
    let scene = Scene::start(settings, 500, 1).await;
    let request = saying("k", "private");
    assert_eq!(scene.one(&request, &[]).await.status(), "collapser; fwd=miss");
    let told = scene.together(&request, &[], CROWD).await;
    assert!(told.iter().all(|told| told.status() == UNSHAREABLE), "{told:?}");
    assert_eq!(calls_of(&told), CROWD);
    scene.metric("collapser_bypassed_requests_total{reason=\"unshareable\"}", CROWD).await;
    pass_ms(3_000).await;
    assert_eq!(scene.one(&request, &[]).await.status(), "collapser; fwd=miss", "it is forgotten");
}

/// Many at once, some of whom hang up.
#[tokio::test(flavor = "multi_thread")]
async fn a_private_reply_never_reaches_a_second_caller() {
    for workers in WORKERS {
        // Forgotten as soon as can be, so that there are leaders and followers again and again.
        let settings = json!({"http": {"unshareable_for": "0"}});
        let scene = Scene::start(settings, 40, workers).await;
        let request = saying("mine", "private, max-age=60");
        let mut clients = Vec::new();
        for _ in 0..CROWD {
            clients.push(scene.client().await);
        }
        let mut serials = Vec::new();
        for round in 0..12 {
            let asked = (0..60).map(|n| {
                let one = tokio::spawn(clients[n % CROWD].compute(&request, headers(&[])));
                if n % 7 == round % 7 {
                    one.abort();
                }
                one
            });
            for one in asked.collect::<Vec<_>>() {
                if let Ok(told) = one.await {
                    serials.push(Told(told.unwrap()).serial());
                }
            }
        }
        let asked = serials.len();
        serials.sort_unstable();
        serials.dedup();
        assert_eq!(serials.len(), asked, "somebody got another's, {workers} workers");
        let metrics = scene.0.sidecar.metrics().await.unwrap();
        assert!(metrics.get("collapser_released_requests_total") > 0.0, "nobody followed: {metrics:#?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_private_failure_is_its_leaders_and_the_next_reply_may_be_for_all() {
    let scene = Scene::start(json!({}), 500, 1).await;
    let request = ComputeRequest { fail_code: Code::Unavailable as u32, ..saying("k", "private") };
    for _ in 0..2 {
        let before = scene.calls();
        let told = scene.together(&request, &[], CROWD).await;
        assert!(told.iter().all(|told| told.code() == "14"), "{told:?}");
        assert_eq!(scene.calls() - before, CROWD as u64);
        assert_eq!(told[0].status(), "collapser; fwd=miss", "the key is not remembered");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn failures_are_kept_only_if_their_backend_says_so() {
    let scene = Scene::start(json!({"cache_duration": "1m"}), 0, 1).await;
    let failing = |request| ComputeRequest { fail_code: Code::NotFound as u32, ..request };
    for (request, calls) in [(failing(ask("k")), 2), (failing(saying("k", "max-age=60")), 1)] {
        let before = scene.calls();
        for _ in 0..2 {
            assert_eq!(scene.one(&request, &[]).await.code(), "5");
        }
        assert_eq!(scene.calls() - before, calls, "{request:?}");
    }
}
