//! `stale_while_revalidate`: nobody waits for the successor of a reply that has just expired.

use collapser_loadgen::proto::ComputeReply;
use serde_json::{Value, json};

use super::scene::{CROWD, Told, pass_ms, telling};
use crate::raw::{Act, Answer, RawRig, frame, headers};
use crate::rig::{ask, eventually};

const WHY: &str = "stale-while-revalidate";

const ANSWERS: &str = "collapser_stale_answers_total{reason=\"revalidate\"}";

/// An answer with this serial number.
fn numbered(serial: u64) -> Act {
    Act::Answer(Answer::grpc(frame(&ComputeReply { serial, ..ComputeReply::default() })))
}

/// Has the reply with number 1 expire. From then on the upstream holds requests, and will answer with number 2.
async fn expired(settings: Value) -> RawRig {
    let rig = RawRig::start(telling(settings)).await;
    rig.upstream.set(numbered(1));
    rig.upstream.release();
    assert_eq!(get(&rig).await.serial(), 1);
    rig.upstream.hold();
    rig.upstream.set(numbered(2));
    pass_ms(400).await;
    rig
}

async fn get(rig: &RawRig) -> Told {
    Told(rig.raw_client().await.compute(&ask("k"), headers(&[])).await.unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn one_call_refreshes_and_nobody_waits_for_it() {
    let rig = expired(json!({"cache_duration": "300ms", "stale_while_revalidate": "1m"})).await;
    for _ in 0..CROWD {
        // The upstream answers nobody.
        let told = get(&rig).await;
        assert!(told.is_stale(WHY) && told.serial() == 1, "{told:?}");
    }
    assert_eq!(rig.upstream.calls(), 2);
    rig.metric(ANSWERS, CROWD).await;
    rig.metric("collapser_refreshes_total", 1).await;
    rig.metric("collapser_backend_calls_total", 2).await;
    rig.metric("collapser_cache_hits_total", CROWD).await;
    rig.upstream.release();
    // The reply is good for a moment only, and is then given on as stale, so that nobody is ever given the first one.
    eventually("the successor is given out", async || get(&rig).await.serial() == 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_its_successor_brings_is_fresh() {
    let rig = expired(json!({"cache_duration": "300ms", "stale_while_revalidate": "1m"})).await;
    let long = headers(&[("content-type", "application/grpc"), ("cache-control", "max-age=60")]);
    let Act::Answer(answer) = numbered(2) else { return };
    rig.upstream.set(Act::Answer(Answer { headers: long, ..answer }));
    assert!(get(&rig).await.is_stale(WHY));
    rig.upstream.release();
    eventually("the successor is given out", async || get(&rig).await.serial() == 2).await;
    // Longer than what has no word of its own is good.
    pass_ms(400).await;
    let told = get(&rig).await;
    assert!(told.is_hit() && told.serial() == 2, "{told:?}");
    assert_eq!(rig.upstream.calls(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn after_its_time_everybody_waits() {
    let rig = expired(json!({"cache_duration": "100ms", "stale_while_revalidate": "100ms"})).await;
    let calls = rig.crowd(CROWD).await;
    rig.waiting(CROWD).await;
    rig.upstream.release();
    for outcome in calls.join_all().await {
        assert_eq!(outcome.unwrap().serial, 2);
    }
    assert_eq!(rig.upstream.calls(), 2);
    rig.metric(ANSWERS, 0).await;
    rig.metric("collapser_refreshes_total", 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refresh_that_fails_is_tried_again_after_a_second() {
    let rig = expired(json!({"cache_duration": "300ms", "stale_while_revalidate": "1m"})).await;
    rig.upstream.set(Act::Answer(Answer::http(503, "text/plain", "in trouble")));
    rig.upstream.release();
    assert!(get(&rig).await.is_stale(WHY));
    rig.metric("collapser_errors_total{code=\"14\"}", 1).await;
    for _ in 0..3 {
        let told = get(&rig).await;
        assert!(told.is_stale(WHY) && told.serial() == 1, "{told:?}");
    }
    eventually("it is tried again", async || {
        assert!(get(&rig).await.is_stale(WHY));
        rig.upstream.calls() == 3
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_wants_no_cached_reply_joins_the_refresh() {
    let rig = expired(json!({"cache_duration": "300ms", "stale_while_revalidate": "1m"})).await;
    assert!(get(&rig).await.is_stale(WHY));
    eventually("the refresh is at the upstream", async || rig.upstream.calls() == 2).await;
    let client = rig.raw_client().await;
    let asked = tokio::spawn(client.compute(&ask("k"), headers(&[("cache-control", "no-cache")])));
    rig.waiting(1).await;
    rig.upstream.release();
    let told = Told(asked.await.unwrap().unwrap());
    assert_eq!((told.serial(), rig.upstream.calls()), (2, 2));
    assert_eq!(told.status(), "collapser; fwd=request; stored; collapsed");
}
