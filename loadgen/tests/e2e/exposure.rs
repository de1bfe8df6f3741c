//! What callers and backends can reach and what they cannot: no header, frame or path gives anybody power over Envoy,
//! the router, or somebody else's answer.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use collapser_loadgen::http_ask::ask as ask_http;
use collapser_loadgen::proto::{ComputeReply, ComputeRequest};
use http::{HeaderMap, Method, Uri};
use prost::Message as _;
use serde_json::json;
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::drain::free_port;
use crate::frames::{
    CONTINUATION, END_HEADERS, END_STREAM, End, Frames, HEADERS, Header, PING, PRIORITY, RST_STREAM, good,
    good_and, good_but, grpc_over_http1, header, hpack, http1, message,
};
use crate::raw::{COMPUTE, RawClient, RawRig, frame, headers};
use crate::rig::{Rig, ask, eventually};

/// The key of the caller who must not be harmed, and whose answer nobody else may have.
const VICTIM: &str = "the victim's";

/// A rig with a caller who knows what it may expect.
struct Scene {
    rig: Rig,
    victim: RawClient,
}

impl Scene {
    async fn start() -> Self {
        let rig = Rig::start(json!({"cache_duration": "10m", "backend_timeout": "5s"}), 0).await;
        let victim = RawClient::connect(rig.sidecar.addr()).await;
        let scene = Self { rig, victim };
        scene.assert_unharmed("at the start").await;
        scene
    }

    fn addr(&self) -> SocketAddr {
        self.rig.sidecar.addr()
    }

    async fn frames(&self) -> Frames {
        Frames::connect(self.addr()).await
    }

    /// The victim gets its own answer, on its old connection, from cache and from the backend.
    async fn assert_unharmed(&self, after: &str) {
        for key in [VICTIM.to_string(), format!("{VICTIM} {}", rand::random::<u32>())] {
            let answer = self.victim.compute(&ask(&key), HeaderMap::new()).await;
            let answer = answer.unwrap_or_else(|error| panic!("{after}: {error}"));
            assert_eq!(answer.code(), Some("0"), "{after}: {answer:?}");
            assert_eq!(reply(&answer.data).key, key, "{after}");
        }
    }

    /// Sends a request of its own key that is wrong in some way. It may be refused or answered, never by something else.
    async fn attempt(&self, what: &str, headers: &[Header]) -> End {
        let mut frames = self.frames().await;
        let key = format!("attempt {what}");
        frames.request(1, headers, &key).await;
        let end = frames.end(1).await;
        assert_own(what, &end, &key);
        self.assert_unharmed(what).await;
        end
    }
}

fn reply(data: &[u8]) -> ComputeReply {
    ComputeReply::decode(&data[5..]).unwrap()
}

/// A stream ended, with its own answer or none.
fn assert_own(what: &str, end: &End, key: &str) {
    assert_ne!(*end, End::Hung, "{what}");
    if let End::Whole(data) = end
        && data.len() > 5
        && let Ok(reply) = ComputeReply::decode(&data[5..])
    {
        assert_eq!(reply.key, key, "{what}");
    }
}

fn answered(end: &End, key: &str) -> bool {
    matches!(end, End::Whole(data) if data.len() > 5 && reply(data).key == key)
}

/// What a caller might send to gain something.
const STEERING: [(&str, &str); 12] = [
    ("x-collapser-slot", "1"),
    ("x-collapser-pass", "1"),
    ("x-envoy-upstream-rq-timeout-ms", "1"),
    ("x-envoy-upstream-rq-per-try-timeout-ms", "1"),
    ("x-envoy-upstream-alt-stat-name", "x"),
    ("x-envoy-retry-on", "5xx"),
    ("x-envoy-max-retries", "50"),
    ("x-envoy-hedge-on-per-try-timeout", "true"),
    ("x-envoy-force-trace", "1"),
    ("x-envoy-decorator-operation", "x"),
    ("x-envoy-original-path", "/x"),
    ("x-envoy-internal", "true"),
];

#[tokio::test(flavor = "multi_thread")]
async fn headers_that_mean_something_inside_mean_nothing_from_outside() {
    let scene = Scene::start().await;
    scene.rig.backend.set_latency(Duration::from_millis(100));
    let mut leaked = Vec::new();
    for (n, (name, value)) in STEERING.into_iter().enumerate() {
        for store in ["no-store", "no-cache"] {
            let more = headers(&[(name, value), ("cache-control", store)]);
            let key = format!("steer {n} {store}");
            let before = scene.rig.backend.calls();
            let answer = scene.victim.compute(&ask(&key), more).await.unwrap();
            assert_eq!(
                (answer.code(), reply(&answer.data).key.as_str()),
                (Some("0"), key.as_str()),
                "{name}"
            );
            assert!(
                !answer.headers.keys().any(|name| name.as_str().starts_with("x-collapser")),
                "{answer:?}"
            );
            assert_eq!(scene.rig.backend.calls(), before + 1, "{name}");
            let seen = scene.rig.backend.last_request_headers().unwrap();
            if name.starts_with("x-collapser") && seen.contains_key(name) {
                leaked.push((name, store));
            }
        }
    }
    scene.assert_unharmed("steering").await;
    assert!(leaked.is_empty(), "the backend sees {leaked:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_claims_to_pass_collapses_like_any_other() {
    let rig = RawRig::start(json!({})).await;
    let client = rig.raw_client().await;
    let claim = || headers(&[("x-collapser-pass", "1"), ("x-collapser-slot", "1")]);
    let calls: JoinSet<_> = (0..10).map(|_| client.compute(&ask("k"), claim())).collect();
    rig.waiting(10).await;
    rig.upstream.release();
    for answer in calls.join_all().await {
        assert_eq!(reply(&answer.unwrap().data).key, "k");
    }
    assert_eq!(rig.upstream.calls(), 1);
    let seen = rig.upstream.last_headers();
    assert!(!seen.keys().any(|name| name.as_str().starts_with("x-collapser")), "{seen:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_admin_interface_is_on_loopback_alone() {
    let port = free_port();
    let _rig = Rig::start_with(json!({}), 0, |options| options.config.admin.set_port(port)).await;
    TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    // Another address of this machine, which a listener on all addresses would have.
    TcpStream::connect(("127.0.0.2", port)).await.unwrap_err();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_metrics_port_leads_to_nothing_else() {
    let mut rig = Rig::start(json!({}), 0).await;
    let server: Uri = rig.sidecar.metrics_url().parse().unwrap();
    let paths = [
        "/",
        "/quitquitquit",
        "/config_dump",
        "/stats",
        "//stats",
        "/stats/prometheus",
        "/metrics/",
        "/metrics/../quitquitquit",
        "/metrics/%2e%2e/quitquitquit",
        "/metrics%2f..%2fquitquitquit",
        "/metrics;/quitquitquit",
        "/health/../quitquitquit",
        "/healthcheck/fail",
        "/drain_listeners",
        "/Metrics",
    ];
    for path in paths {
        for method in [Method::GET, Method::POST] {
            let (status, body) = ask_http(method.clone(), &server, path).await.unwrap();
            assert_eq!(status, 404, "{method} {path}: {body:?}");
        }
    }
    // A query is the admin interface's own business, but must not choose another page.
    let (status, body) = ask_http(Method::GET, &server, "/metrics?/../quitquitquit").await.unwrap();
    assert!(status.is_success() || status == 404, "{status} {body:?}");
    assert!(rig.sidecar.is_running());
    assert!(rig.sidecar.status("/ready").await.unwrap().is_success());
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_sent_twice_or_misspelt_give_nobody_anothers_answer() {
    let scene = Scene::start().await;
    let attempts = [
        ("two paths", good_and(&[header(":path", "/collapser.demo.v1.Demo/Count")])),
        ("two equal paths", good_and(&[header(":path", COMPUTE)])),
        ("two methods", good_and(&[header(":method", "GET")])),
        ("two content types", good_and(&[header("content-type", "application/grpc")])),
        ("two different content types", good_and(&[header("content-type", "text/html")])),
        ("two content lengths", good_and(&[header("content-length", "1"), header("content-length", "2")])),
        ("a content length too small", good_and(&[header("content-length", "1")])),
        ("a content length too large", good_and(&[header("content-length", "1000")])),
        ("grpc-web", good_but("content-type", "application/grpc-web")),
        ("a parameter", good_but("content-type", "application/grpc;x")),
        ("an upper-case content type", good_but("content-type", "Application/GRPC")),
        ("an upper-case name", good_and(&[header("X-Upper", "1")])),
        ("a name with a space", good_and(&[header("x y", "1")])),
        ("an empty name", good_and(&[header("", "1")])),
        ("a pseudo header nobody knows", good_and(&[header(":other", "1")])),
        ("a connection header", good_and(&[header("connection", "close")])),
        ("transfer-encoding", good_and(&[header("transfer-encoding", "chunked")])),
        ("no path", good_but(":path", "")),
        ("a path with a query", good_but(":path", &format!("{COMPUTE}?x=1"))),
        ("a path with a fragment", good_but(":path", &format!("{COMPUTE}#x"))),
        ("a path with dots", good_but(":path", "/x/../collapser.demo.v1.Demo/Compute")),
        ("no authority", good_but(":authority", "")),
        ("another scheme", good_but(":scheme", "ftp")),
        ("CONNECT", good_but(":method", "CONNECT")),
        ("HEAD", good_but(":method", "HEAD")),
        ("an odd timeout", good_and(&[header("grpc-timeout", "99999999999999999H")])),
        ("a timeout of nothing", good_and(&[header("grpc-timeout", "")])),
    ];
    for (what, headers) in attempts {
        scene.attempt(what, &headers).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn values_that_are_no_text_pass_or_are_refused() {
    let scene = Scene::start().await;
    for bytes in [&b"\x80"[..], b"\xff\xfe", b"caf\xe9", "ü".as_bytes(), b"\xf0\x28", b"a\tb"] {
        let named = |name: &str| good_and(&[(name.as_bytes().to_vec(), bytes.to_vec())]);
        for name in ["x-odd", "authorization", "grpc-encoding", "cache-control", "x-odd-bin"] {
            scene.attempt(&format!("{name}: {bytes:?}"), &named(name)).await;
        }
    }
    for bytes in [&b"a\0b"[..], b"a\r\nx-injected: 1", b"a\nb"] {
        let end =
            scene.attempt(&format!("{bytes:?}"), &good_and(&[(b"x-odd".to_vec(), bytes.to_vec())])).await;
        assert!(!answered(&end, &format!("attempt {bytes:?}")), "a line break in a value went through");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn large_and_many_headers_are_refused_or_answered() {
    let scene = Scene::start().await;
    for size in [8_000, 15_000, 50_000, 61_000] {
        let value = "v".repeat(size);
        let mut frames = scene.frames().await;
        let block = hpack(&good_and(&[header("x-large", &value)]));
        let (first, rest) = block.split_at(block.len().min(16_000));
        frames.send(HEADERS, if rest.is_empty() { END_HEADERS } else { 0 }, 1, first).await;
        let parts: Vec<_> = rest.chunks(1_000).collect();
        for (n, part) in parts.iter().enumerate() {
            let flags = if n + 1 == parts.len() { END_HEADERS } else { 0 };
            frames.send(CONTINUATION, flags, 1, part).await;
        }
        frames.last_data(1, &message("large")).await;
        let end = frames.end(1).await;
        assert_own(&format!("{size} bytes"), &end, "large");
        assert!(size > 60_000 || answered(&end, "large"), "{size} bytes: {end:?}");
        scene.assert_unharmed(&format!("{size} bytes")).await;
    }
    for count in [80, 99, 2_000] {
        let more: Vec<_> = (0..count).map(|n| header(&format!("x-{n}"), "")).collect();
        let end = scene.attempt(&format!("{count} headers"), &good_and(&more)).await;
        assert!(count > 90 || answered(&end, &format!("attempt {count} headers")), "{count}: {end:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn frames_in_odd_order_harm_nobody() {
    let scene = Scene::start().await;
    let whole = message("odd");

    // Empty frames before, between and after; and with the end in one of its own.
    let mut frames = scene.frames().await;
    frames.begin(1, &good()).await;
    for part in [&whole[..0], &whole[..3], &whole[..0], &whole[3..7], &whole[..0], &whole[7..], &whole[..0]] {
        frames.data(1, part).await;
    }
    frames.last_data(1, &[]).await;
    assert!(answered(&frames.end(1).await, "odd"));

    // One byte at a time.
    frames.begin(3, &good()).await;
    for byte in whole.iter() {
        frames.data(3, &[*byte]).await;
    }
    frames.last_data(3, &[]).await;
    assert!(answered(&frames.end(3).await, "odd"));

    // Reset right after the end, with others on the connection.
    for stream in (5..205).step_by(2) {
        frames.request(stream, &good(), &format!("reset {stream}")).await;
        frames.send(RST_STREAM, 0, stream, &8_u32.to_be_bytes()).await;
    }
    frames.request(205, &good(), "odd").await;
    assert!(answered(&frames.end(205).await, "odd"));

    // Priorities and pings amid a request.
    frames.begin(207, &good()).await;
    frames.send(PRIORITY, 0, 207, &[0, 0, 0, 1, 15]).await;
    frames.data(207, &whole[..4]).await;
    frames.send(PING, 0, 0, &[7; 8]).await;
    frames.last_data(207, &whole[4..]).await;
    assert!(answered(&frames.end(207).await, "odd"));

    // Trailers on the request: no unary caller sends them, and they may pass.
    frames.begin(209, &good()).await;
    frames.data(209, &whole).await;
    frames.send(HEADERS, END_HEADERS | END_STREAM, 209, &hpack(&[header("x-trailer", "1")])).await;
    assert!(answered(&frames.end(209).await, "odd"));

    // Nothing but headers.
    frames.send(HEADERS, END_HEADERS | END_STREAM, 211, &hpack(&good())).await;
    assert_own("no body", &frames.end(211).await, "odd");
    scene.assert_unharmed("odd frames").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_that_are_no_message_harm_nobody() {
    let scene = Scene::start().await;
    let bodies: [(&str, &[u8]); 6] = [
        ("empty", b""),
        ("a prefix cut off", b"\0\0"),
        ("a message cut off", b"\0\0\0\0\x09ab"),
        ("a length of 4 GiB", b"\0\xff\xff\xff\xffab"),
        ("an unknown flag", b"\x07\0\0\0\0"),
        ("text", b"GET / HTTP/1.1\r\n\r\n"),
    ];
    for (what, body) in bodies {
        let mut frames = scene.frames().await;
        frames.begin(1, &good()).await;
        frames.last_data(1, body).await;
        assert_own(what, &frames.end(1).await, "");
        scene.assert_unharmed(what).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn grpc_over_http1_is_answered_or_refused() {
    let scene = Scene::start().await;
    let trailers = "x-trailer: 1\r\n";
    for (n, (chunked, trailers)) in [(false, ""), (true, ""), (true, trailers)].into_iter().enumerate() {
        let key = format!("http1 {n}");
        for _ in 0..2 {
            let said = http1(scene.addr(), &grpc_over_http1(&message(&key), chunked, trailers)).await;
            assert!(said.starts_with(b"HTTP/1.1 "), "{:?}", Bytes::from(said));
            assert!(!contains(&said, VICTIM.as_bytes()));
        }
        scene.assert_unharmed(&key).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_in_a_row_on_http1_are_answered_in_that_order() {
    let scene = Scene::start().await;
    let keys = ["row-a", "row-b", "row-a", "row-c"];
    let calls = keys.map(|key| {
        let call = grpc_over_http1(&message(key), key == "row-b", "");
        String::from_utf8(call).unwrap().replace("connection: close\r\n", "")
    });
    let said = http1(scene.addr(), calls.concat().as_bytes()).await;
    let said = String::from_utf8_lossy(&said).into_owned();
    let told: Vec<_> = said.match_indices("row-").map(|(at, _)| &said[at..at + 5]).collect();
    assert_eq!(told, keys);
    scene.assert_unharmed("calls in a row").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_reply_reaches_an_http1_caller_whole() {
    let scene = Scene::start().await;
    for payload_bytes in [1 << 20, 5 << 20, 20 << 20, 31 << 20] {
        let request = ComputeRequest { payload_bytes, ..ask("large") };
        for _ in 0..2 {
            let said = http1(scene.addr(), &grpc_over_http1(&frame(&request), false, "")).await;
            assert!(said.starts_with(b"HTTP/1.1 200"), "{:?}", Bytes::from(said));
            assert!(said.len() > payload_bytes as usize, "{} of {payload_bytes} bytes", said.len());
        }
        scene.assert_unharmed("a large reply").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_within_requests_are_not_seen() {
    let scene = Scene::start().await;
    let inner = String::from_utf8_lossy(&grpc_over_http1(&message(VICTIM), false, "")).into_owned();
    let start = format!("POST {COMPUTE} HTTP/1.1\r\nhost: sidecar\r\ncontent-type: application/grpc\r\n");
    let heads = [
        "content-length: 5\r\ntransfer-encoding: chunked\r\n",
        "content-length: 0\r\ncontent-length: 5\r\n",
        "transfer-encoding: xchunked\r\n",
        "transfer-encoding: chunked, identity\r\n",
        "transfer-encoding : chunked\r\n",
        "content-length: +5\r\n",
    ];
    for head in heads {
        let said = http1(scene.addr(), format!("{start}{head}\r\n0\r\n\r\n{inner}").as_bytes()).await;
        assert!(!contains(&said, VICTIM.as_bytes()), "{head}: {:?}", Bytes::from(said));
        scene.assert_unharmed(head).await;
    }
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

#[tokio::test(flavor = "multi_thread")]
async fn many_undecided_streams_are_all_told_apart() {
    const STREAMS: u32 = 2_000;
    let scene = Scene::start().await;
    let mut frames = scene.frames().await;
    let ids = (0..STREAMS).map(|n| 2 * n + 1);
    let key = |stream: u32| format!("undecided {}", stream % 97);
    for stream in ids.clone() {
        frames.begin(stream, &good()).await;
        frames.data(stream, &message(&key(stream))).await;
    }
    scene.assert_unharmed("many open streams").await;
    for stream in ids.clone() {
        frames.last_data(stream, &[]).await;
    }
    for stream in ids {
        let end = frames.end(stream).await;
        assert!(answered(&end, &key(stream)), "{stream}: {end:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn callers_that_leave_half_way_leave_nothing_behind() {
    let scene = Scene::start().await;
    scene.rig.backend.set_latency(Duration::from_millis(300));
    for part in 0..4 {
        for n in 0..50 {
            let mut frames = scene.frames().await;
            let whole = message(&format!("half {n}"));
            frames.begin(1, &good()).await;
            match part {
                0 => (),
                1 => frames.data(1, &whole[..3]).await,
                2 => frames.data(1, &whole).await,
                _ => frames.last_data(1, &whole).await,
            }
        }
    }
    eventually("nobody waits", async || {
        let metrics = scene.rig.sidecar.metrics().await.unwrap();
        metrics.get("collapser_waiting_requests") == 0.0 && metrics.get("collapser_inflight_requests") == 0.0
    })
    .await;
    scene.assert_unharmed("hang-ups").await;
}
