//! For how long a response answers, and what callers have to say about it (RFC 9111, sections 4.2 and 5.2).

use std::time::Duration;

use collapser_loadgen::http_load::Answer;
use http::Method;
use serde_json::json;

use super::gateway::{Gateway, NOTHING, plain, queries, serial, status};

async fn seconds(seconds: f64) {
    tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
}

fn age(answer: &Answer) -> Option<u64> {
    answer.header("age").map(|age| age.parse().unwrap())
}

#[tokio::test]
async fn a_page_is_kept_for_its_time_and_tells_its_age() {
    let gateway = Gateway::start(plain(), 0).await;
    let path = "/page/a?header=cache-control:max-age=2";
    assert_eq!(age(&gateway.get(path, &[]).await), None, "it is new");
    assert_eq!(age(&gateway.get(path, &[]).await), Some(0));
    seconds(1.2).await;
    assert_eq!(age(&gateway.get(path, &[]).await), Some(1));
    assert_eq!(gateway.backend.calls(), 1);
    seconds(1.0).await;
    assert_eq!(serial(&gateway.get(path, &[]).await), 2);
}

#[tokio::test]
async fn the_age_that_a_page_comes_with_counts() {
    let gateway = Gateway::start(plain(), 0).await;
    let path = "/page/a?header=cache-control:max-age=62&header=age:60";
    assert_eq!(age(&gateway.get(path, &[]).await), Some(60));
    assert_eq!(age(&gateway.get(path, &[]).await), Some(60));
    seconds(2.1).await;
    assert_eq!(serial(&gateway.get(path, &[]).await), 2);
}

#[tokio::test]
async fn the_default_counts_where_a_page_says_nothing_and_the_cap_where_it_says_too_much() {
    let settings = json!({"http": {"default_ttl": "1m"}, "max_ttl": "1s"});
    let gateway = Gateway::start(settings, 0).await;
    for path in ["/page/silent", "/page/greedy?header=cache-control:max-age=1000"] {
        let first = serial(&gateway.get(path, &[]).await);
        assert_eq!(serial(&gateway.get(path, &[]).await), first, "{path}");
        seconds(1.1).await;
        let second = serial(&gateway.get(path, &[]).await);
        // The cap is on what backends ask for; the default is the operator's own.
        assert_eq!(second == first, path == "/page/silent", "{path}");
    }
    let quiet = Gateway::start(plain(), 0).await;
    quiet.get("/page/silent", &[]).await;
    assert_eq!(serial(&quiet.get("/page/silent", &[]).await), 2, "no heuristics");
}

#[tokio::test]
async fn jitter_keeps_pages_from_expiring_together() {
    let gateway = Gateway::start(json!({"ttl_jitter": "100%"}), 0).await;
    let path = |n: u32| format!("/page/{n}?header=cache-control:max-age=2");
    for n in 0..40 {
        gateway.get(&path(n), &[]).await;
    }
    seconds(0.9).await;
    for n in 0..40 {
        gateway.get(&path(n), &[]).await;
    }
    let calls = gateway.backend.calls() - 40;
    assert!((5..36).contains(&calls), "{calls} of 40 had expired by half of their time");
}

#[tokio::test]
async fn who_wants_it_anew_starts_a_flight_or_joins_one() {
    let gateway = Gateway::start(plain(), 150).await;
    let path = "/page/a?header=cache-control:max-age=60";
    for words in [[("cache-control", "no-cache")], [("cache-control", "max-age=0")], [("pragma", "no-cache")]]
    {
        gateway.get(path, &[]).await;
        let before = gateway.backend.calls();
        let anew: &'static [_] = Box::leak(Box::new(words));
        let answers = gateway.together(path, &[anew, anew, NOTHING]).await;
        assert_eq!(gateway.backend.calls() - before, 1, "{words:?}");
        assert_eq!(queries(&answers[..2]), 1);
        assert!(status(&answers[0]).contains("fwd=request"), "{}", status(&answers[0]));
        assert_eq!(serial(&answers[2]) + 1, serial(&answers[0]), "what is there is fresh all the same");
        assert_eq!(serial(&gateway.get(path, &[]).await), serial(&answers[0]), "and replaced");
    }
}

#[tokio::test]
async fn callers_ages_are_heeded_unless_the_user_forbids_it() {
    for heeded in [true, false] {
        let gateway = Gateway::start(json!({"caller_control": heeded}), 0).await;
        let path = "/page/a?header=cache-control:max-age=60&header=age:10";
        gateway.get(path, &[]).await;
        let words: [&[_]; 4] = [
            &[("cache-control", "max-age=5")],
            &[("cache-control", "min-fresh=55")],
            &[("cache-control", "no-cache")],
            &[("cache-control", "no-store")],
        ];
        for (nth, word) in words.into_iter().enumerate() {
            gateway.get(path, word).await;
            let expected = if heeded { nth as u64 + 2 } else { 1 };
            assert_eq!(gateway.backend.calls(), expected, "{word:?}");
        }
        let before = gateway.backend.calls();
        for word in [[("cache-control", "max-age=20")], [("cache-control", "min-fresh=20")]] {
            gateway.get(path, Box::leak(Box::new(word))).await;
        }
        assert_eq!(gateway.backend.calls(), before);
    }
}

#[tokio::test]
async fn who_wants_only_what_is_there_is_told_when_nothing_is() {
    let gateway = Gateway::start(plain(), 0).await;
    let path = "/page/a?header=cache-control:max-age=60";
    let only: &[_] = &[("cache-control", "only-if-cached")];
    assert_eq!(gateway.get(path, only).await.status, 504);
    assert_eq!(gateway.backend.calls(), 0);
    gateway.get(path, &[]).await;
    assert_eq!(gateway.get(path, only).await.status, 200);
}

#[tokio::test]
async fn a_change_makes_what_is_kept_of_it_no_answer() {
    let gateway = Gateway::start(plain(), 0).await;
    let path = "/page/a?header=cache-control:max-age=60";
    let other = "/page/b?header=cache-control:max-age=60";
    gateway.get(other, &[]).await;
    for (method, changes) in
        [(Method::POST, true), (Method::PUT, true), (Method::DELETE, true), (Method::OPTIONS, false)]
    {
        let before = serial(&gateway.get(path, &[]).await);
        assert_eq!(serial(&gateway.get(path, &[]).await), before);
        gateway.send(method.clone(), path, &[]).await;
        assert_eq!(serial(&gateway.get(path, &[]).await) != before, changes, "{method}");
    }
    let before = gateway.backend.calls();
    gateway.get(other, &[]).await;
    assert_eq!(gateway.backend.calls(), before, "another page");
    let kept = serial(&gateway.get(path, &[]).await);
    gateway.backend.set_answer(Some("status=500")).unwrap();
    gateway.send(Method::POST, path, &[]).await;
    assert_eq!(serial(&gateway.get(path, &[]).await), kept, "a change that fails is none");
}

#[tokio::test]
async fn so_it_does_for_what_its_response_names() {
    let gateway = Gateway::start(plain(), 0).await;
    let page = |name: &str| format!("/page/{name}?header=cache-control:max-age=60");
    let serials = async || {
        let mut serials = Vec::new();
        for name in ["a", "b", "c"] {
            serials.push(serial(&gateway.get(&page(name), &[]).await));
        }
        serials
    };
    let before = serials().await;
    assert_eq!(serials().await, before);
    let (a, b) = (page("a"), page("b").replace("/page/", ""));
    let names = format!("/page/x/?status=201&header=location:{a}&header=content-location:../{b}");
    gateway.send(Method::POST, &names, &[]).await;
    let after = serials().await;
    assert!(after[0] != before[0] && after[1] != before[1], "{before:?} {after:?}");
    assert_eq!(after[2], before[2]);
}

#[tokio::test]
async fn a_change_counts_at_all_workers() {
    let gateway = Gateway::start_with(plain(), 0, |options| options.concurrency = 4).await;
    let path = "/page/a?header=cache-control:max-age=60";
    let clients: Vec<_> = futures(&gateway, 12).await;
    for client in &clients {
        client.get(path, &Default::default()).await.unwrap();
    }
    let calls = gateway.backend.calls();
    clients[0].send(Method::PUT, path, &Default::default(), Default::default()).await.unwrap();
    seconds(0.3).await;
    for client in &clients {
        let answer = client.get(path, &Default::default()).await.unwrap();
        assert!(serial(&answer) > calls, "an answer from before the change");
    }
    // One call more, or few, if workers do not learn of each other's replies in time.
    assert!(gateway.backend.calls() <= calls + 1 + 4, "{}", gateway.backend.calls());
}

async fn futures(
    gateway: &Gateway,
    count: usize,
) -> Vec<std::sync::Arc<collapser_loadgen::http_load::HttpClient>> {
    let mut clients = Vec::new();
    for _ in 0..count {
        clients.push(gateway.client().await);
    }
    clients
}
