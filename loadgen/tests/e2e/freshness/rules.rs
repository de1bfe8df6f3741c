//! Rules give methods times and keys of their own; the first one that matches counts.

use serde_json::{Value, json};

use super::scene::{Pairs, Told, pass_ms, telling};
use crate::raw::{Act, Answer, RawRig, headers};
use crate::rig::ask;

/// An upstream that knows every method, with these rules.
async fn start(rules: Value) -> RawRig {
    let rig = RawRig::start(telling(json!({"cache_duration": "1m", "rules": rules}))).await;
    rig.upstream.release();
    rig
}

async fn call(rig: &RawRig, path: &str, key: &str, metadata: Pairs<'_>) -> Told {
    Told(rig.raw_client().await.call(path, &ask(key), headers(metadata)).await.unwrap())
}

/// How many calls it takes to answer these, one after another.
async fn calls(rig: &RawRig, path: &str, all: &[Pairs<'_>]) -> usize {
    let before = rig.upstream.calls();
    for metadata in all {
        assert_eq!(call(rig, path, "k", metadata).await.code(), "0");
    }
    rig.upstream.calls() - before
}

const PLAIN: Pairs<'static> = &[];

#[tokio::test(flavor = "multi_thread")]
async fn the_first_rule_that_matches_counts() {
    let rig = start(json!([
        {"match": "/shop.Shop/Order", "collapse": false},
        {"match": "/shop.Shop/Get*", "cache_duration": "1h"},
        {"match": "/shop.Shop/*", "cache_duration": "0"},
    ]))
    .await;
    let order = call(&rig, "/shop.Shop/Order", "k", PLAIN).await;
    assert_eq!(order.status(), "collapser; fwd=bypass; detail=rule");
    for (path, expected) in [
        ("/shop.Shop/Order", 2),
        ("/shop.Shop/GetItem", 1),
        ("/shop.Shop/List", 2),
        ("/shop.Other/Order", 1),
        ("/other.Shop/List", 1),
    ] {
        assert_eq!(calls(&rig, path, &[PLAIN; 2]).await, expected, "{path}");
    }
    let ttl = |told: &Told| told.status().rsplit('=').next().unwrap().parse::<u64>().unwrap();
    let (ruled, flat) = (
        call(&rig, "/shop.Shop/GetItem", "k", PLAIN).await,
        call(&rig, "/other.Shop/List", "k", PLAIN).await,
    );
    assert!(ttl(&ruled) > 3_000 && (1..60).contains(&ttl(&flat)), "{ruled:?} {flat:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn key_headers_of_a_rule_replace_those_of_the_settings() {
    let rig = start(json!([{"match": "/a.A/Tenant", "key_headers": ["x-tenant"]}])).await;
    let tenants: [Pairs<'_>; 4] =
        [&[("x-tenant", "a")], &[("x-tenant", "b")], &[("x-tenant", "a")], &[("x-tenant", "b")]];
    let cookies: [Pairs<'_>; 2] = [&[("cookie", "a")], &[("cookie", "b")]];
    assert_eq!(calls(&rig, "/a.A/Tenant", &tenants).await, 2);
    assert_eq!(calls(&rig, "/a.A/Tenant", &cookies).await, 1);
    assert_eq!(calls(&rig, "/a.A/Plain", &tenants).await, 1);
    assert_eq!(calls(&rig, "/a.A/Plain", &cookies).await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rule_caps_what_backends_ask_for() {
    let rig = start(json!([{"match": "/a.A/Short", "max_ttl": "300ms"}])).await;
    let long = headers(&[("content-type", "application/grpc"), ("cache-control", "max-age=60")]);
    rig.upstream.set(Act::Answer(Answer { headers: long, ..Answer::compute("k") }));
    for (path, expected) in [("/a.A/Short", 1), ("/a.A/Long", 0)] {
        call(&rig, path, "k", PLAIN).await;
        pass_ms(400).await;
        assert_eq!(calls(&rig, path, &[PLAIN]).await, expected, "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_stale_answers_where_a_rule_says_so() {
    let rig = start(json!([
        {"match": "/a.A/Error", "cache_duration": "300ms", "stale_if_error": "1m"},
        {"match": "/a.A/While", "cache_duration": "300ms", "stale_while_revalidate": "1m"},
        {"match": "/a.A/*", "cache_duration": "300ms"},
    ]))
    .await;
    let methods = ["/a.A/Error", "/a.A/While", "/a.A/Neither"];
    for path in methods {
        call(&rig, path, "k", PLAIN).await;
    }
    pass_ms(400).await;
    rig.upstream.set(Act::Answer(Answer::http(503, "text/plain", "in trouble")));
    let [error, during, neither] = methods.map(|path| {
        let rig = &rig;
        async move { call(rig, path, "k", PLAIN).await }
    });
    let (error, during, neither) = (error.await, during.await, neither.await);
    assert!(error.is_stale("stale-if-error"), "{error:?}");
    assert!(during.is_stale("stale-while-revalidate"), "{during:?}");
    assert_eq!((neither.code(), neither.age()), ("14", None));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rule_has_its_own_eagerness_and_jitter() {
    let rig = start(json!([
        {"match": "/a.A/Early", "early_refresh": 10, "cache_duration": "4s"},
        {"match": "/a.A/Late", "cache_duration": "4s"},
        {"match": "/a.A/Scattered", "cache_duration": "4s", "ttl_jitter": 1},
    ]))
    .await;
    for (path, refreshes) in [("/a.A/Early", true), ("/a.A/Late", false)] {
        // A call that took long is repeated early.
        rig.upstream.hold();
        let client = rig.raw_client().await;
        let slow = tokio::spawn(client.call(path, &ask("k"), headers(&[])));
        rig.waiting(1).await;
        pass_ms(500).await;
        rig.upstream.release();
        slow.await.unwrap().unwrap();
        assert_eq!(calls(&rig, path, &[PLAIN; 20]).await > 0, refreshes, "{path}");
    }
    let mut counts = Vec::new();
    for path in ["/a.A/Scattered", "/a.A/Together"] {
        let keys: Vec<_> = (0..20).map(|n| n.to_string()).collect();
        for key in &keys {
            call(&rig, path, key, PLAIN).await;
        }
        pass_ms(1_500).await;
        let before = rig.upstream.calls();
        for key in &keys {
            call(&rig, path, key, PLAIN).await;
        }
        counts.push(rig.upstream.calls() - before);
    }
    assert!(counts[0] > 0 && counts[1] == 0, "{counts:?}");
}
