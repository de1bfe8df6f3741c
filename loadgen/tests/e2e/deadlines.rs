//! Everybody has a deadline of their own, and a flight has one that is nobody's.

use std::time::{Duration, Instant};

use serde_json::json;
use tonic::{Code, Request};

use crate::raw::{RawRig, headers};
use crate::rig::{ask, eventually};

#[tokio::test(flavor = "multi_thread")]
async fn a_leaders_deadline_is_not_the_flights() {
    let rig = RawRig::start(json!({"backend_timeout": "70s"})).await;
    let mut leader = rig.client().await;
    let mut request = Request::new(ask("k"));
    request.set_timeout(Duration::from_millis(300));
    let leader = tokio::spawn(async move { leader.compute(request).await });
    eventually("the flight is at the upstream", async || rig.upstream.calls() > 0).await;
    let followers = rig.crowd(20).await;
    let refused = leader.await.unwrap().unwrap_err();
    // tonic calls it cancelled when its own timer is first.
    assert!(matches!(refused.code(), Code::DeadlineExceeded | Code::Cancelled), "{refused:?}");
    rig.waiting(20).await;
    rig.upstream.release();
    for outcome in followers.join_all().await {
        assert_eq!(outcome.unwrap().key, "k");
    }
    assert_eq!(rig.upstream.calls(), 1);
    assert_eq!(rig.upstream.last_headers()["grpc-timeout"], "70000000u");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_followers_deadline_is_its_own() {
    let rig = RawRig::start(json!({})).await;
    let leader = rig.crowd(1).await;
    rig.waiting(1).await;
    let others = rig.crowd(20).await;
    // Raw, so that nobody on this side watches the deadline.
    let client = rig.raw_client().await;
    let short = client.compute(&ask("k"), headers(&[("grpc-timeout", "200m")])).await.unwrap();
    assert_eq!(short.code(), Some("4"), "{short:?}");
    assert!(short.data.is_empty(), "{short:?}");
    rig.waiting(21).await;
    rig.upstream.release();
    for outcome in leader.join_all().await.into_iter().chain(others.join_all().await) {
        assert_eq!(outcome.unwrap().key, "k");
    }
    assert_eq!(rig.upstream.calls(), 1);
    rig.quiet().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_flight_ends_at_backend_timeout_for_everybody() {
    let rig = RawRig::start(json!({"backend_timeout": "1s"})).await;
    let begun = Instant::now();
    let outcomes = rig.crowd(20).await.join_all().await;
    let took = begun.elapsed();
    // Envoy's timers may be some milliseconds early. The upstream would never have answered.
    assert!((Duration::from_millis(980)..Duration::from_secs(8)).contains(&took), "{took:?}");
    for outcome in outcomes {
        let late = outcome.unwrap_err();
        assert_eq!(late.code(), Code::DeadlineExceeded, "{late:?}");
        assert!(late.message().contains("1s (backend_timeout)"), "{late:?}");
    }
    assert_eq!(rig.upstream.calls(), 1);
    rig.upstream.release();
    assert_eq!(rig.one().await.unwrap().key, "k");
    assert_eq!(rig.upstream.calls(), 2);
}
