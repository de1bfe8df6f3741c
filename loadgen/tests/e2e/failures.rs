//! Whatever the upstream does wrong, every waiter gets a proper status in time, nothing of it is kept, and the next
//! call finds the upstream as it is then.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use collapser_loadgen::backend::{Backend, BackendHandle, BackendOptions};
use collapser_loadgen::proto::demo_client::DemoClient;
use collapser_loadgen::sidecar::{Sidecar, SidecarOptions};
use http::{HeaderMap, StatusCode};
use serde_json::json;
use tokio::net::TcpSocket;
use tokio::task::JoinSet;
use tonic::Code;

use crate::raw::{Act, Answer, RawRig, frame, framed, headers};
use crate::rig::{ask, channel, eventually, root};

/// Leader and followers of each failing flight.
const WAITERS: usize = 20;

/// Has a flight fail that `WAITERS` wait for: each is told this code and words, well before the deadline, and the
/// next call succeeds.
async fn assert_fails(act: Act, code: Code, words: &str) {
    const LIMIT: Duration = Duration::from_secs(30);
    let rig = RawRig::start(json!({"backend_timeout": "30s", "cache_duration": "10m"})).await;
    rig.upstream.set(act);
    let begun = Instant::now();
    let calls = rig.crowd(WAITERS).await;
    rig.waiting(WAITERS).await;
    rig.upstream.release();
    for outcome in calls.join_all().await {
        let failure = outcome.unwrap_err();
        assert_eq!(failure.code(), code, "{failure:?}");
        assert!(failure.message().contains(words), "{failure:?}");
    }
    assert!(begun.elapsed() < LIMIT);
    assert_eq!(rig.upstream.calls(), 1);
    assert_recovers(&rig).await;
}

/// A call reaches the upstream, which behaves again, and succeeds.
async fn assert_recovers(rig: &RawRig) {
    let calls = rig.upstream.calls();
    rig.upstream.set(Act::Answer(Answer::compute("k")));
    assert_eq!(rig.one().await.unwrap().key, "k");
    assert_eq!(rig.upstream.calls(), calls + 1);
    rig.quiet().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_http_503_is_unavailable() {
    let answer = Answer::http(503, "text/plain", "no healthy upstream");
    assert_fails(Act::Answer(answer), Code::Unavailable, "HTTP 503").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_http_404_is_unimplemented() {
    let answer = Answer::http(404, "text/plain", "not here");
    assert_fails(Act::Answer(answer), Code::Unimplemented, "HTTP 404").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_web_page_is_an_unknown_error() {
    let answer = Answer::http(200, "text/html", "<h1>Log in</h1>");
    assert_fails(Act::Answer(answer), Code::Unknown, "text/html").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_cut_within_a_message_is_an_internal_error() {
    let whole = Answer::compute("k");
    let cut = Answer { data: whole.data.slice(..whole.data.len() - 1), ..whole };
    assert_fails(Act::Answer(cut), Code::Internal, "within a message").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_cut_before_its_trailers_is_an_internal_error() {
    let whole = Answer::compute("k");
    let cut = Answer { data: whole.data.slice(..3), trailers: None, ..whole };
    assert_fails(Act::Answer(cut), Code::Internal, "within a message").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_without_a_status_is_an_unknown_error() {
    let without = Answer { trailers: Some(headers(&[("other", "1")])), ..Answer::compute("k") };
    assert_fails(Act::Answer(without), Code::Unknown, "without a grpc-status").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_without_trailers_is_an_unknown_error() {
    let without = Answer { trailers: None, ..Answer::compute("k") };
    assert_fails(Act::Answer(without), Code::Unknown, "without a grpc-status").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_reset_after_its_headers_is_unavailable() {
    assert_fails(Act::ResetAfterHeaders, Code::Unavailable, "aborted").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_connection_is_unavailable() {
    assert_fails(Act::Disconnect, Code::Unavailable, "").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_given_up_is_unavailable() {
    assert_fails(Act::GoAway, Code::Unavailable, "").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_larger_than_envoy_holds_fails_and_harms_nobody() {
    let huge = Answer::grpc(framed(&vec![b'x'; 40 * 1024 * 1024]));
    assert_fails(Act::Answer(huge), Code::Unavailable, "").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upstream_that_leaves_in_good_order_is_not_noticed() {
    let rig = RawRig::start(json!({"cache_duration": "0"})).await;
    rig.upstream.set(Act::AnswerAndLeave(Answer::compute("k")));
    let calls = rig.crowd(WAITERS).await;
    rig.waiting(WAITERS).await;
    rig.upstream.release();
    for outcome in calls.join_all().await {
        assert_eq!(outcome.unwrap().key, "k");
    }
    assert_eq!(rig.upstream.calls(), 1);
    assert_recovers(&rig).await;
}

/// The header by which the filter asks for a body slot.
const MARKER: &str = "x-collapser-slot";

fn marked(mut answer: Answer) -> Act {
    answer.headers.insert(MARKER, "1".parse().unwrap());
    Act::Answer(answer)
}

/// The upstream's message is there, and nothing of its marker.
fn assert_unmarked(told: &Answer, sent: &Answer) {
    assert_eq!((&told.data, &told.trailers), (&sent.data, &sent.trailers));
    assert_eq!(told.code(), sent.code());
    assert!(!told.headers.contains_key(MARKER), "{told:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upstream_that_sends_the_marker_corrupts_no_collapsed_reply() {
    let rig = RawRig::start(json!({"cache_duration": "10m"})).await;
    let sent = Answer::compute("k");
    rig.upstream.set(marked(sent.clone()));
    rig.upstream.release();
    let client = rig.raw_client().await;
    for _ in 0..2 {
        assert_unmarked(&client.compute(&ask("k"), HeaderMap::new()).await.unwrap(), &sent);
    }
    rig.metric("collapser_cache_hits_total", 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upstream_that_sends_the_marker_corrupts_no_failure() {
    let rig = RawRig::start(json!({})).await;
    let status = headers(&[("content-type", "application/grpc"), ("grpc-status", "5")]);
    let sent = Answer { headers: status, data: Bytes::new(), trailers: None, status: 200 };
    rig.upstream.set(marked(sent.clone()));
    rig.upstream.release();
    let client = rig.raw_client().await;
    for more in [HeaderMap::new(), headers(&[("cache-control", "no-store")])] {
        assert_unmarked(&client.compute(&ask("k"), more).await.unwrap(), &sent);
    }
    rig.metric("collapser_bypassed_requests_total{reason=\"asked\"}", 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upstream_that_sends_the_marker_corrupts_no_untouched_reply() {
    let rig = RawRig::start(json!({})).await;
    let sent = Answer::compute("k");
    rig.upstream.set(marked(sent.clone()));
    rig.upstream.release();
    let client = rig.raw_client().await;
    let no_store = headers(&[("cache-control", "no-store")]);
    assert_unmarked(&client.compute(&ask("k"), no_store).await.unwrap(), &sent);
    rig.metric("collapser_bypassed_requests_total{reason=\"asked\"}", 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upstream_that_sends_the_marker_corrupts_no_streaming_reply() {
    let rig = RawRig::start(json!({"cache_duration": "0"})).await;
    let message = frame(&ask("a message"));
    let sent = Answer::grpc([&message[..], &message, &message].concat().into());
    rig.upstream.set(marked(sent.clone()));
    rig.upstream.release();
    let client = rig.raw_client().await;
    // The first call looks unary until its answer comes; then the method is known to stream.
    for _ in 0..3 {
        let told = client.call("/some.Service/Streams", &ask("k"), HeaderMap::new()).await.unwrap();
        assert_unmarked(&told, &sent);
    }
    rig.metric("collapser_bypassed_requests_total{reason=\"streaming\"}", 2).await;
}

/// A port that nobody else takes while it refuses connections.
struct Port {
    addr: SocketAddr,
    _held: TcpSocket,
}

impl Port {
    fn take() -> Self {
        let held = TcpSocket::new_v4().unwrap();
        // Bound, but not listening: with this on both sides, a listener may take it, and no ephemeral port is it.
        held.set_reuseaddr(true).unwrap();
        held.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        Self { addr: held.local_addr().unwrap(), _held: held }
    }

    async fn backend(&self) -> BackendHandle {
        let options = BackendOptions { grpc_addr: self.addr, ..BackendOptions::default() };
        Backend::start(options).await.unwrap()
    }

    /// A sidecar in front of it. Nobody need be there.
    async fn sidecar(&self) -> Sidecar {
        let mut options = SidecarOptions::shipped(root(), self.addr);
        options.wait_for_backend = false;
        Sidecar::start(options).await.unwrap()
    }
}

/// 100 callers, half of one key and half of as many keys, are all told that nobody is there.
async fn assert_down(sidecar: &Sidecar) {
    let client = DemoClient::new(channel(&sidecar.uri()).await);
    let mut calls = JoinSet::new();
    for n in 0..100 {
        let mut client = client.clone();
        let key = if n % 2 == 0 { "k".to_string() } else { format!("k{n}") };
        calls.spawn(async move { client.compute(ask(&key)).await });
    }
    for outcome in calls.join_all().await {
        let failure = outcome.unwrap_err();
        assert_eq!(failure.code(), Code::Unavailable, "{failure:?}");
        assert!(!failure.message().is_empty());
    }
}

/// Calls succeed before long.
async fn succeeds(sidecar: &Sidecar) {
    let client = DemoClient::new(channel(&sidecar.uri()).await);
    eventually("a call succeeds", async || client.clone().compute(ask("another")).await.is_ok()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_fail_at_once_while_the_backend_is_down_and_succeed_when_it_is_up() {
    let port = Port::take();
    let sidecar = port.sidecar().await;
    let begun = Instant::now();
    assert_down(&sidecar).await;
    // A connection is refused at once; a flight would wait for ten seconds.
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    let backend = port.backend().await;
    succeeds(&sidecar).await;
    backend.shutdown().await;
    assert_down(&sidecar).await;
    let _backend = port.backend().await;
    succeeds(&sidecar).await;
}

/// Waits until `/ready` says so. Envoy looks after the backend every two seconds.
async fn ready(sidecar: &Sidecar, ready: bool) {
    eventually(&format!("ready: {ready}"), async || {
        assert_eq!(sidecar.status("/health").await.unwrap(), StatusCode::OK);
        sidecar.status("/ready").await.unwrap().is_success() == ready
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn readiness_follows_the_backend_and_health_does_not() {
    let port = Port::take();
    let sidecar = port.sidecar().await;
    ready(&sidecar, false).await;
    let backend = port.backend().await;
    ready(&sidecar, true).await;
    backend.shutdown().await;
    ready(&sidecar, false).await;
    let _backend = port.backend().await;
    ready(&sidecar, true).await;
}
