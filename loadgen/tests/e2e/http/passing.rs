//! What is not collapsed: it passes untouched, and is told why.

use http::Method;
use serde_json::json;

use crate::rig::eventually;

use super::gateway::{Gateway, NOTHING, plain, queries, status};

const KEPT: &str = "/page/kept?header=cache-control:max-age=60";

#[tokio::test]
async fn what_passes_is_not_collapsed_whoever_asks() {
    let gateway = Gateway::start(plain(), 100).await;
    let cases: [(&[_], &str); 6] = [
        (&[("range", "bytes=0-3")], "range"),
        (&[("if-match", "\"a\"")], "precondition"),
        (&[("if-unmodified-since", "Tue, 15 Nov 2022 12:45:26 GMT")], "precondition"),
        (&[("accept", "text/event-stream")], "event_stream"),
        (&[("cache-control", "no-store")], "asked"),
        (&[("cache-control", "max-age=5, No-Store")], "asked"),
    ];
    gateway.get(KEPT, &[]).await;
    for (request, reason) in cases {
        let before = gateway.backend.calls();
        let answers = gateway.together(KEPT, &[request; 2]).await;
        assert_eq!((queries(&answers), gateway.backend.calls() - before), (2, 2), "{request:?}");
        assert!(status(&answers[1]).ends_with(&format!("; detail={reason}")), "{}", status(&answers[1]));
        let seen = gateway.backend.recent_requests().pop().unwrap();
        assert!(seen.headers.contains_key(request[0].0), "{request:?}");
        assert!(!seen.headers.contains_key("x-collapser-pass"));
    }
    let before = gateway.backend.calls();
    gateway.get(KEPT, &[]).await;
    assert_eq!(gateway.backend.calls(), before, "the page itself is still there");
}

#[tokio::test]
async fn other_methods_pass_with_their_bodies() {
    let gateway = Gateway::start(plain(), 0).await;
    for method in [Method::POST, Method::PUT, Method::DELETE, Method::OPTIONS] {
        let client = gateway.client().await;
        let body = bytes::Bytes::from_static(b"a body");
        client.send(method.clone(), "/page/other", &Default::default(), body).await.unwrap();
        let seen = gateway.backend.recent_requests().pop().unwrap();
        assert_eq!((seen.method, &seen.body[..]), (method, &b"a body"[..]));
    }
    eventually("the count", async || {
        let metrics = gateway.sidecar.metrics().await.unwrap();
        metrics.get("collapser_bypassed_requests_total{reason=\"http_method\"}") == 4.0
    })
    .await;
}

#[tokio::test]
async fn methods_that_are_named_collapse_by_their_bodies_too() {
    let gateway = Gateway::start(json!({"http": {"methods": ["POST"], "default_ttl": "1m"}}), 100).await;
    let client = gateway.client().await;
    let ask = |body: &'static str| {
        let client = client.clone();
        async move {
            let body = bytes::Bytes::from_static(body.as_bytes());
            client.send(Method::POST, "/page/query", &Default::default(), body).await.unwrap()
        }
    };
    let (a, b, c) = tokio::join!(ask("one"), ask("one"), ask("two"));
    assert_eq!((queries(&[a, b, c]), gateway.backend.calls()), (2, 2));
    ask("two").await;
    assert_eq!(gateway.backend.calls(), 2);
    let mut bodies: Vec<_> = gateway.backend.recent_requests().iter().map(|seen| seen.body.clone()).collect();
    bodies.sort();
    assert_eq!(bodies, ["one", "two"]);
    gateway.get("/page/query", &[]).await;
    assert_eq!(gateway.backend.calls(), 3, "GET is not named");
}

#[tokio::test]
async fn without_the_section_nothing_of_http_collapses() {
    let gateway = Gateway::start(json!({"http": false}), 50).await;
    let answers = gateway.together(KEPT, &[NOTHING; 3]).await;
    assert_eq!(queries(&answers), 3);
    assert!(status(&answers[0]).ends_with("fwd=method; detail=not_grpc"), "{}", status(&answers[0]));
}

#[tokio::test]
async fn rules_turn_paths_off_and_give_them_times_and_key_headers() {
    let rules = json!([
        {"match": "/page/off/*", "collapse": false},
        {"match": "/page/timed", "cache_duration": "1m"},
        {"match": ["/page/keyed"], "cache_duration": "1m", "key_headers": ["x-tenant"]},
        {"match": "/page/*", "cache_duration": "0"},
    ]);
    let gateway = Gateway::start(json!({"http": {"default_ttl": "1m"}, "rules": rules}), 50).await;
    let off = gateway.together("/page/off/1?header=cache-control:max-age=60", &[NOTHING; 2]).await;
    assert_eq!(queries(&off), 2);
    assert!(status(&off[0]).ends_with("detail=rule"), "{}", status(&off[0]));
    let calls = async |path: &str, requests: &[&[(&'static str, &str)]]| {
        let before = gateway.backend.calls();
        for request in requests {
            gateway.get(path, request).await;
        }
        gateway.backend.calls() - before
    };
    assert_eq!(calls("/page/timed?x", &[&[], &[]]).await, 1);
    assert_eq!(calls("/page/untimed", &[&[], &[]]).await, 2);
    assert_eq!(calls("/page/untimed?header=cache-control:max-age=9", &[&[], &[]]).await, 1);
    let (a, b): (&[_], &[_]) = (&[("x-tenant", "a")], &[("x-tenant", "b")]);
    assert_eq!(calls("/page/keyed", &[a, b, a, b]).await, 2);
    let cookies: [&[_]; 2] = [&[("cookie", "a")], &[("cookie", "b")]];
    assert_eq!(calls("/page/keyed", &cookies).await, 1, "the rule's list replaces the other one");
}
