//! The header with the key: only the filter sets it, only where there is a key, and no backend sees it.

use std::time::Duration;

use collapser_loadgen::fleet::{self, Replica};
use http::{HeaderMap, Method, Request};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::front::{RawFront, send_headers, without_checks, without_early_removal};
use crate::raw::{COMPUTE, RawClient, headers};
use crate::rig::{ask, root};

const KEY: &str = "x-collapser-key";

/// What clients try.
fn forged() -> HeaderMap {
    headers(&[(KEY, "forged"), ("x-other", "1"), (KEY, "forged as well"), (KEY, "")])
}

/// The values of the header that the upstream saw last.
fn seen(rig: &RawFront) -> Vec<String> {
    let seen = rig.upstreams[0].last_headers();
    assert!(seen.contains_key("x-other"), "another request's: {seen:?}");
    seen.get_all(KEY).iter().map(|value| value.to_str().unwrap().to_owned()).collect()
}

fn with(name: &str, value: &str) -> HeaderMap {
    let mut more = forged();
    more.extend(headers(&[(name, value)]));
    more
}

/// Requests of every kind, each with forged keys.
async fn assert_forged_keys_go(edit: fn(&mut Value)) {
    let settings = json!({"methods": ["!/collapser.demo.v1.Demo/Other"], "max_request_bytes": "1KiB"});
    let rig = RawFront::start(1, settings, edit).await;
    let client = RawClient::connect(rig.addr()).await;

    client.compute(&ask("k"), headers(&[("x-other", "1")])).await.unwrap();
    let [key] = <[String; 1]>::try_from(seen(&rig)).unwrap();
    assert!(key.len() == 64 && key.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')), "{key}");
    client.compute(&ask("k"), forged()).await.unwrap();
    assert_eq!(seen(&rig), [key], "the key is the filter's");

    client.compute(&ask("k"), with("cache-control", "no-store")).await.unwrap();
    assert!(seen(&rig).is_empty(), "asked to pass: {:?}", seen(&rig));
    client.call("/collapser.demo.v1.Demo/Other", &ask("k"), forged()).await.unwrap();
    assert!(seen(&rig).is_empty(), "an excluded method: {:?}", seen(&rig));
    client.compute(&ask("k"), with("content-type", "application/json")).await.unwrap();
    assert!(seen(&rig).is_empty(), "no gRPC: {:?}", seen(&rig));
    client.compute(&ask(&"k".repeat(2_000)), forged()).await.unwrap();
    assert!(seen(&rig).is_empty(), "too large: {:?}", seen(&rig));
    let mut get =
        Request::builder().method(Method::GET).uri(format!("http://{}/x", rig.addr())).body(()).unwrap();
    *get.headers_mut() = forged();
    send_headers(rig.addr(), get).await;
    assert!(seen(&rig).is_empty(), "a GET: {:?}", seen(&rig));

    http1(&rig, "X-Collapser-Key: forged\r\nx-collapser-KEY: again\r\n").await;
    assert!(seen(&rig).is_empty(), "mixed case: {:?}", seen(&rig));
    assert_eq!(rig.upstreams[0].calls(), 8);
    let metrics = rig.front.metrics().await.unwrap();
    assert!(metrics.get("envoy_cluster_upstream_rq_total{envoy_cluster_name=\"replicas\"}") >= 8.0);
}

/// A POST over HTTP/1.1, where names of headers may have capitals.
async fn http1(rig: &RawFront, lines: &str) {
    let mut socket = TcpStream::connect(rig.addr()).await.unwrap();
    let request = format!(
        "POST {COMPUTE} HTTP/1.1\r\nHost: a\r\nX-Other: 1\r\nContent-Type: text/plain\r\n{lines}Content-Length: 1\r\nConnection: close\r\n\r\nx"
    );
    socket.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    socket.read_to_end(&mut answer).await.unwrap();
    assert!(answer.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&answer));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_a_client_sends_is_ignored() {
    assert_forged_keys_go(without_checks).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_filter_alone_sees_to_that() {
    assert_forged_keys_go(without_early_removal).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_backend_sees_the_key_and_no_sidecar_believes_it() {
    let ttl = json!({"cache_duration": "30s"});
    let replicas = [Replica::start(root(), Duration::ZERO, ttl).await.unwrap()];
    let backend = &replicas[0].backend;
    let front = fleet::front(root(), &replicas, |_| ()).await.unwrap();
    let sidecar = replicas[0].sidecar.as_ref().unwrap();
    for (asked, addr) in [("through the front", front.addr()), ("at the sidecar itself", sidecar.addr())] {
        backend.reset();
        let client = RawClient::connect(addr).await;
        for more in [headers(&[(KEY, "1")]), headers(&[(KEY, "2")])] {
            client.compute(&ask(asked), more).await.unwrap();
        }
        assert_eq!(backend.calls(), 1, "{asked}: another key in the header is no other request");
        assert!(!backend.last_request_headers().unwrap().contains_key(KEY), "{asked}: of a flight");
        let bypass = headers(&[(KEY, "1"), ("cache-control", "no-store")]);
        client.compute(&ask(asked), bypass).await.unwrap();
        let seen = backend.last_request_headers().unwrap();
        assert!(seen.contains_key("cache-control") && !seen.contains_key(KEY), "{asked}: {seen:?}");
    }
}
