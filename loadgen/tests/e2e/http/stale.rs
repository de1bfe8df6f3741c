//! When the backend fails, or is slow: stale answers (RFC 5861).

use std::sync::Arc;
use std::time::{Duration, Instant};

use collapser_loadgen::http_load::{Answer, HttpClients, HttpLoadOptions, Protocol};
use http::Method;
use serde_json::json;

use super::gateway::{Gateway, NOTHING, plain, queries, serial, status};
use crate::rig::eventually;

const PATH: &str = "/page/news?header=cache-control:max-age=1";

async fn seconds(seconds: f64) {
    tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
}

fn age(answer: &Answer) -> u64 {
    answer
        .header("age")
        .unwrap_or_default()
        .parse()
        .unwrap_or_else(|_| panic!("no age: {:?}", answer.headers))
}

/// Every one of ten thousand gets the last good page while that may stand in, then the failure, then a new page.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_get_the_last_good_page_of_a_dead_backend() {
    const STALE: u64 = 30;
    let mut gateway = Gateway::start(json!({"stale_if_error": format!("{STALE}s")}), 40).await;
    let clients = HttpClients::connect(&gateway.sidecar.uri(), Protocol::Http2, 100).await.unwrap();
    gateway.get(PATH, &[]).await;
    let filled = Instant::now();
    seconds(1.2).await;
    gateway.backend.stop().await;
    let judge = Arc::new(|answer: &Answer| {
        let told = status(answer);
        let is_stale = told.starts_with("collapser; hit; ttl=-") && told.ends_with("; detail=stale-if-error");
        match is_stale && age(answer) >= 1 && serial(answer) == 1 {
            true => Ok(()),
            false => Err(format!("{:?}", answer.headers)),
        }
    });
    let options = HttpLoadOptions { judge, ..HttpLoadOptions::burst(PATH, 10_000) };
    let report = clients.load(options, |_| ()).await.unwrap().report;
    assert!(report.is_clean() && report.ok == 10_000, "{report:#?}");

    tokio::time::sleep(Duration::from_secs(STALE).saturating_sub(filled.elapsed())).await;
    assert_eq!(gateway.get(PATH, &[]).await.status, 200, "still within its time");
    seconds(2.5).await;
    let answer = gateway.get(PATH, &[]).await;
    assert_eq!(answer.status, 503, "{answer:?}");

    gateway.backend.start_again().unwrap();
    eventually("a fresh page", async || gateway.get(PATH, &[]).await.status == 200).await;
    let fresh = gateway.get(PATH, &[]).await;
    assert_eq!((serial(&fresh), status(&fresh).starts_with("collapser; hit; ttl=0")), (2, true));
}

/// With several workers, all but one have never had the page.
#[tokio::test]
async fn workers_that_have_never_had_a_page_serve_it_stale_too() {
    let settings = json!({"stale_if_error": "20s"});
    let mut gateway = Gateway::start_with(settings, 0, |options| options.concurrency = 4).await;
    gateway.get(PATH, &[]).await;
    seconds(1.2).await;
    gateway.backend.stop().await;
    for round in 0..3 {
        let mut asked = Vec::new();
        for _ in 0..40 {
            let client = gateway.client().await;
            asked.push(tokio::spawn(async move { client.get(PATH, &Default::default()).await.unwrap() }));
        }
        for one in asked {
            let answer = one.await.unwrap();
            assert_eq!(answer.status, 200, "round {round}: {:?}", answer.headers);
            assert!(status(&answer).ends_with("detail=stale-if-error"), "{}", status(&answer));
        }
        seconds(0.8).await;
    }
    gateway.backend.start_again().unwrap();
    for _ in 0..40 {
        eventually("a fresh page", async || serial(&gateway.get(PATH, &[]).await) > 1).await;
    }
}

#[tokio::test]
async fn the_leader_a_follower_and_a_later_one_get_the_stale_page() {
    let gateway = Gateway::start(json!({"stale_if_error": "10s"}), 100).await;
    gateway.backend.set_answer(Some("header=cache-control:max-age=1")).unwrap();
    gateway.get("/page/x", &[]).await;
    seconds(1.1).await;
    gateway.backend.set_answer(Some("status=500")).unwrap();
    let answers = gateway.together("/page/x", &[NOTHING; 3]).await;
    assert_eq!((queries(&answers), serial(&answers[0]), gateway.backend.calls()), (1, 1, 2));
    let later = gateway.get("/page/x", &[]).await;
    assert_eq!((serial(&later), gateway.backend.calls()), (1, 2), "the backend is left alone for a second");
    for answer in answers.iter().chain([&later]) {
        assert!(status(answer).ends_with("detail=stale-if-error"), "{}", status(answer));
        assert!(age(answer) >= 1);
    }
    seconds(1.1).await;
    gateway.backend.set_answer(Some("header=cache-control:max-age=1")).unwrap();
    assert_eq!(serial(&gateway.get("/page/x", &[]).await), 3);
    let metrics = gateway.sidecar.metrics().await.unwrap();
    assert_eq!(metrics.sum("collapser_stale_answers_total"), 4.0, "{metrics:#?}");
}

/// What fails says nothing of `vary`, and the stale page is found all the same, again and again.
#[tokio::test]
async fn a_page_with_variants_stands_in_for_failures_that_name_none() {
    let gateway = Gateway::start(json!({"stale_if_error": "10s", "max_ttl": "1s"}), 0).await;
    let (one, two): (&[_], &[_]) = (&[("x-a", "1")], &[("x-a", "2")]);
    gateway.backend.set_answer(Some("header=cache-control:max-age=1&header=vary:x-a")).unwrap();
    gateway.get("/page/x", one).await;
    seconds(1.1).await;
    gateway.backend.set_answer(Some("status=500")).unwrap();
    for _ in 0..2 {
        let answer = gateway.get("/page/x", one).await;
        assert_eq!((answer.status.as_u16(), serial(&answer)), (200, 1));
        assert_eq!(gateway.get("/page/x", two).await.status, 500, "another variant, of which there is none");
        seconds(1.1).await;
    }
}

/// What has been changed by a request is not brought back.
#[tokio::test]
async fn a_page_from_before_a_change_does_not_stand_in() {
    let gateway = Gateway::start(json!({"stale_if_error": "10s"}), 0).await;
    for max_age in ["1", "60"] {
        let path = format!("/page/{max_age}");
        gateway.backend.set_answer(Some(&format!("header=cache-control:max-age={max_age}"))).unwrap();
        gateway.get(&path, &[]).await;
        seconds(1.1).await;
        gateway.send(Method::POST, &path, &[]).await;
        gateway.backend.set_answer(Some("status=500")).unwrap();
        assert_eq!(gateway.get(&path, &[]).await.status, 500, "{max_age}");
    }
}

/// A page that is gone, or has become somebody's own, is not given out any more once that is known.
#[tokio::test]
async fn what_a_refresh_brings_takes_the_place_of_the_stale_page() {
    let settings = json!({"stale_if_error": "20s", "stale_while_revalidate": "20s"});
    let gateway = Gateway::start(settings, 0).await;
    for answer in ["status=404", "status=403", "header=cache-control:private", "status=429"] {
        let path = format!("/page/{answer}");
        gateway.backend.set_answer(Some("header=cache-control:max-age=1")).unwrap();
        let first = serial(&gateway.get(&path, &[]).await);
        seconds(1.1).await;
        gateway.backend.set_answer(Some(answer)).unwrap();
        let calls = gateway.backend.calls();
        assert_eq!(serial(&gateway.get(&path, &[]).await), first, "{answer}");
        eventually("the refresh", async || gateway.backend.calls() > calls).await;
        seconds(0.2).await;
        let later = gateway.get(&path, &[]).await;
        // What one client is told for asking too often is not about the page.
        let is_about_the_page = answer != "status=429";
        assert_eq!(status(&later).contains("hit"), !is_about_the_page, "{answer}: {}", status(&later));
    }
}

#[tokio::test]
async fn what_counts_as_a_failure_can_be_set() {
    let gateway = Gateway::start(json!({"stale_if_error": "10s", "stale_statuses": ["404"]}), 0).await;
    for (failure, expected) in [("status=404", 200), ("status=500", 500)] {
        let path = format!("/page/{failure}");
        gateway.backend.set_answer(Some("header=cache-control:max-age=1")).unwrap();
        gateway.get(&path, &[]).await;
        seconds(1.1).await;
        gateway.backend.set_answer(Some(failure)).unwrap();
        assert_eq!(gateway.get(&path, &[]).await.status, expected, "{failure}");
    }
}

#[tokio::test]
async fn a_page_that_must_be_revalidated_is_never_stale() {
    let settings = json!({"stale_if_error": "10s", "stale_while_revalidate": "10s"});
    let gateway = Gateway::start(settings, 0).await;
    for word in ["must-revalidate", "proxy-revalidate"] {
        let path = format!("/page/{word}");
        let answer = format!("header=cache-control:max-age=1,{word}");
        gateway.backend.set_answer(Some(&answer)).unwrap();
        gateway.get(&path, &[]).await;
        seconds(1.1).await;
        gateway.backend.set_answer(Some("status=503")).unwrap();
        assert_eq!(gateway.get(&path, &[]).await.status, 503, "{word}");
    }
}

#[tokio::test]
async fn the_backends_own_word_on_staleness_goes_first() {
    let gateway = Gateway::start(json!({"stale_if_error": "0"}), 0).await;
    gateway.backend.set_answer(Some("header=cache-control:max-age=1,stale-if-error=20")).unwrap();
    gateway.get("/page/own", &[]).await;
    seconds(1.1).await;
    gateway.backend.set_answer(Some("status=503")).unwrap();
    let answer = gateway.get("/page/own", &[]).await;
    assert_eq!((answer.status.as_u16(), serial(&answer)), (200, 1));
}

#[tokio::test]
async fn an_expired_page_is_given_at_once_while_one_call_refreshes_it() {
    let gateway = Gateway::start(json!({"stale_while_revalidate": "20s"}), 0).await;
    gateway.get(PATH, &[]).await;
    seconds(1.1).await;
    gateway.backend.set_latency(Duration::from_secs(3));
    let client = gateway.client().await;
    let start = Instant::now();
    for _ in 0..20 {
        let answer = client.get(PATH, &Default::default()).await.unwrap();
        assert_eq!(serial(&answer), 1);
        assert!(status(&answer).ends_with("detail=stale-while-revalidate"), "{}", status(&answer));
    }
    assert!(start.elapsed() < Duration::from_secs(3), "nobody waited for the refresh");
    assert_eq!(gateway.backend.calls(), 2);
    eventually("the new page", async || serial(&client.get(PATH, &Default::default()).await.unwrap()) == 2)
        .await;
    eventually("the count", async || {
        gateway.sidecar.metrics().await.unwrap().get("collapser_refreshes_total") >= 1.0
    })
    .await;
}

#[tokio::test]
async fn a_hot_page_has_no_cold_moment_if_it_is_refreshed_early() {
    for (early_refresh, waits) in [(0, true), (2, false)] {
        let settings = json!({"early_refresh": early_refresh});
        let gateway = Gateway::start(settings, 50).await;
        gateway.get(PATH, &[]).await;
        let client = gateway.client().await;
        let (start, mut waited) = (Instant::now(), 0);
        while start.elapsed() < Duration::from_millis(3_500) {
            let answer = client.get(PATH, &Default::default()).await.unwrap();
            waited += u32::from(!status(&answer).starts_with("collapser; hit"));
        }
        assert_eq!(waited > 0, waits, "early_refresh {early_refresh}: {waited} waited");
        assert!((3..=12).contains(&gateway.backend.calls()), "{}", gateway.backend.calls());
    }
}

#[tokio::test]
async fn without_settings_a_failure_is_told_to_all_who_wait_and_to_nobody_later() {
    let gateway = Gateway::start(plain(), 100).await;
    gateway.backend.set_answer(Some("status=503")).unwrap();
    let answers = gateway.together("/page/f", &[NOTHING; 4]).await;
    assert!(answers.iter().all(|answer| answer.status == 503));
    assert_eq!(gateway.backend.calls(), 1);
    gateway.backend.set_answer(None).unwrap();
    assert_eq!(gateway.get("/page/f", &[]).await.status, 200);
}

#[tokio::test]
async fn a_dead_backend_and_a_late_one_are_failures_of_the_gateway() {
    let mut gateway = Gateway::start(json!({"stale_if_error": "0", "backend_timeout": "300ms"}), 2_000).await;
    let answers = gateway.together("/page/late", &[NOTHING; 2]).await;
    for answer in &answers {
        assert_eq!(answer.status, 504);
        assert!(answer.text().contains("300ms (backend_timeout)"), "{}", answer.text());
    }
    gateway.backend.stop().await;
    assert_eq!(gateway.get("/page/dead", &[]).await.status, 503);
}

#[tokio::test]
async fn a_response_that_breaks_off_breaks_off_for_everybody_by_itself() {
    let gateway = Gateway::start(plain(), 100).await;
    let client = gateway.client().await;
    let ask = || async { client.get("/page/cut?cut&size=1000", &Default::default()).await };
    let (a, b) = tokio::join!(ask(), ask());
    assert!(a.is_err() && b.is_err(), "{a:?} {b:?}");
    assert_eq!(gateway.get("/page/whole", &[]).await.status, 200);
}
