//! Upstreams that are no gRPC server at all, or stop being one, and replies at the edges of what can be recorded.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use collapser_loadgen::backend::{Backend, BackendOptions};
use collapser_loadgen::proto::ComputeRequest;
use collapser_loadgen::proto::demo_client::DemoClient;
use collapser_loadgen::sidecar::{Sidecar, SidecarOptions};
use http::HeaderMap;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};
use tonic::{Code, Status};

use crate::raw::{Act, Answer, RawRig, framed, headers, send_many};
use crate::rig::{Rig, ask, channel};

/// Callers of each failing flight.
const WAITERS: usize = 20;

/// A TCP server that says these bytes to whoever connects and then reads, and reads, until told to make way.
struct Talker {
    addr: SocketAddr,
    task: JoinHandle<()>,
}

impl Talker {
    async fn start(says: &'static [u8], hangs_up: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let task = tokio::spawn(async move {
            let mut talks = JoinSet::new();
            while let Ok((socket, _)) = listener.accept().await {
                talks.spawn(talk(socket, says, hangs_up));
            }
        });
        Self { addr, task }
    }

    /// Makes way for a backend at the same address.
    async fn backend(self) -> collapser_loadgen::backend::BackendHandle {
        self.task.abort();
        let _ = self.task.await;
        let options = BackendOptions { grpc_addr: self.addr, ..BackendOptions::default() };
        Backend::start(options).await.unwrap()
    }
}

/// Answers what it is sent, if it has anything to say. Health checks connect and say nothing.
async fn talk(mut socket: TcpStream, says: &[u8], hangs_up: bool) {
    let mut heard = [0; 4096];
    while matches!(socket.read(&mut heard).await, Ok(1..)) {
        // An error is the other side's.
        let _ = socket.write_all(says).await;
        if hangs_up {
            return;
        }
    }
}

async fn sidecar(addr: SocketAddr, settings: Value) -> Sidecar {
    let mut options = SidecarOptions::shipped(crate::rig::root(), addr);
    options.config.settings = settings;
    Sidecar::start(options).await.unwrap()
}

/// All callers of a key are told this code within the time; then a backend takes the upstream's place and is found.
async fn assert_fails(talker: Talker, code: Code, within: Duration) {
    let settings = json!({"backend_timeout": "2s", "cache_duration": "10m"});
    let sidecar = sidecar(talker.addr, settings).await;
    let client = DemoClient::new(channel(&sidecar.uri()).await);
    let begun = Instant::now();
    for outcome in send_many(&client, WAITERS).join_all().await {
        let failure = outcome.unwrap_err();
        assert_eq!(failure.code(), code, "{failure:?}");
        assert!(!failure.message().is_empty(), "{failure:?}");
    }
    assert!(begun.elapsed() < within, "{:?}", begun.elapsed());
    let _backend = talker.backend().await;
    assert_recovers(&client).await;
}

/// A call succeeds within the second that Envoy may take to connect anew.
async fn assert_recovers(client: &DemoClient<tonic::transport::Channel>) {
    crate::rig::eventually("a call succeeds", async || client.clone().compute(ask("k")).await.is_ok()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_speaks_only_http1_is_unavailable() {
    let says = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
    assert_fails(Talker::start(says, true).await, Code::Unavailable, Duration::from_secs(2)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_that_speaks_tls_is_unavailable() {
    // A fatal alert, unexpected_message, as a TLS server answers what is no ClientHello.
    let says = b"\x15\x03\x03\x00\x02\x02\x0a";
    assert_fails(Talker::start(says, true).await, Code::Unavailable, Duration::from_secs(2)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_that_never_answers_is_given_up_at_the_deadline() {
    let talker = Talker::start(b"", false).await;
    assert_fails(talker, Code::DeadlineExceeded, Duration::from_secs(4)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backend_killed_in_flight_fails_its_callers_at_once() {
    let Rig { backend, sidecar } = Rig::start(json!({"cache_duration": "0"}), 5_000).await;
    let client = DemoClient::new(channel(&sidecar.uri()).await);
    let calls = send_many(&client, WAITERS);
    crate::rig::eventually("the flight is at the backend", async || backend.in_flight() == 1).await;
    let (addr, begun) = (backend.grpc_addr(), Instant::now());
    backend.shutdown().await;
    for outcome in calls.join_all().await {
        assert_eq!(outcome.unwrap_err().code(), Code::Unavailable);
    }
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    let options = BackendOptions { grpc_addr: addr, ..BackendOptions::default() };
    let _backend = Backend::start(options).await.unwrap();
    assert_recovers(&client).await;
}

/// An upstream that answers at once, and what a raw client is told, twice: by the upstream, then from the cache if it
/// was kept.
async fn told_twice(settings: Value, answer: Answer) -> [Answer; 2] {
    let rig = RawRig::start(settings).await;
    rig.upstream.set(Act::Answer(answer));
    rig.upstream.release();
    let client = rig.raw_client().await;
    let first = client.compute(&ask("k"), HeaderMap::new()).await.unwrap();
    let second = client.compute(&ask("k"), HeaderMap::new()).await.unwrap();
    // Whatever it was, the sidecar goes on.
    rig.upstream.set(Act::Answer(Answer::compute("after")));
    let after = client.compute(&ask("after"), HeaderMap::new()).await.unwrap();
    assert_eq!(after.code(), Some("0"), "{after:?}");
    [first, second]
}

fn kept() -> Value {
    json!({"cache_duration": "24h"})
}

fn assert_same(told: &[Answer; 2], sent: &Answer) {
    for told in told {
        assert_eq!((told.code(), &told.data), (sent.code(), &sent.data), "{:?}", told.headers);
        assert_eq!(told.trailers, sent.trailers);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_of_no_bytes_is_replayed_with_its_trailers() {
    let none = Answer { data: Bytes::new(), ..Answer::compute("k") };
    assert_same(&told_twice(kept(), none.clone()).await, &none);
    let empty = Answer::grpc(framed(b""));
    assert_same(&told_twice(kept(), empty.clone()).await, &empty);
}

fn many(count: usize, size: usize) -> HeaderMap {
    let value = "v".repeat(size);
    let pairs: Vec<_> = (0..count).map(|n| (format!("x-{n}"), value.clone())).collect();
    headers(&pairs.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect::<Vec<_>>())
}

#[tokio::test(flavor = "multi_thread")]
async fn replies_with_many_headers_or_large_ones_arrive_or_fail_cleanly() {
    // Envoy takes 100 headers and 60 KiB of them from an upstream.
    for (count, size) in [(80, 10), (50, 1_000), (90, 600), (101, 1), (1_000, 1), (5_000, 20), (4, 20_000)] {
        let mut answer = Answer::compute("k");
        answer.headers.extend(many(count, size));
        assert_whole_or_failed(answer.clone(), count < 95 && count * size < 55_000).await;
        let mut answer = Answer::compute("k");
        answer.trailers.as_mut().unwrap().extend(many(count, size));
        assert_whole_or_failed(answer, count < 95 && count * size < 55_000).await;
    }
}

async fn assert_whole_or_failed(sent: Answer, must_arrive: bool) {
    for told in told_twice(kept(), sent.clone()).await {
        if told.code() == Some("0") {
            assert_eq!(told.data, sent.data);
            assert_eq!(told.trailers, sent.trailers);
            sent.headers.keys().for_each(|name| assert_eq!(told.headers.get(name), sent.headers.get(name)));
        } else {
            assert!(!must_arrive && told.code().is_some() && told.data.is_empty(), "{told:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_response_without_a_content_type_is_a_clean_failure() {
    let mut answer = Answer::compute("k");
    answer.headers.remove("content-type");
    for told in told_twice(kept(), answer).await {
        assert_eq!(told.code(), Some("2"), "{told:?}");
        assert!(told.data.is_empty());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn odd_statuses_are_clean_failures() {
    for status in [204, 302, 418, 599] {
        let answer = Answer { status, trailers: None, data: Bytes::new(), ..Answer::compute("k") };
        for told in told_twice(kept(), answer).await {
            assert_eq!(told.status, 200);
            assert!(told.code().is_some_and(|code| code != "0"), "{told:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_is_replayed_up_to_max_replay_bytes_and_no_further() {
    let most = 1_000_000;
    let settings = json!({"cache_duration": "10m", "max_replay_bytes": most});
    let body = |size: usize| Answer::grpc(framed(&vec![b'x'; size - 5]));
    for (size, arrives) in [(most - 1, true), (most, true), (most + 1, false)] {
        let sent = body(size);
        for told in told_twice(settings.clone(), sent.clone()).await {
            if arrives {
                assert_eq!((told.code(), told.data.len()), (Some("0"), size));
            } else {
                assert_eq!(told.code(), Some("8"), "RESOURCE_EXHAUSTED: {:?}", told.headers);
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_largest_reply_there_is_arrives_or_fails_but_kills_nobody() {
    // Envoy's own limit and the filter's are both 32 MiB; a little below, at it, and above.
    for size in [32 * 1024 * 1024 - 100_000, 32 * 1024 * 1024, 32 * 1024 * 1024 + 1] {
        for told in
            told_twice(json!({"cache_duration": "0"}), Answer::grpc(framed(&vec![b'x'; size - 5]))).await
        {
            assert!(told.code().is_some(), "{size}");
            assert!(told.data.is_empty() || told.data.len() == size, "{} of {size}", told.data.len());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_at_their_edges_work() {
    let edges = [
        json!({"stream_grace": "0", "cache_duration": "24h"}),
        json!({"key_headers": [":authority", ":path", ":method"], "cache_duration": "24h"}),
        json!({"max_waiters": 1, "max_cache_entries": 1, "max_cache_bytes": 1, "cache_duration": "24h"}),
        json!({"max_fanout_bytes": "64KiB", "cleanup_interval": "10ms"}),
    ];
    for settings in edges {
        let rig = Rig::start(settings.clone(), 0).await;
        let client = rig.client().await;
        for n in 0..20 {
            let reply =
                client.clone().compute(ask(&format!("{n}"))).await.unwrap_or_else(|status: Status| {
                    panic!("{settings}: {status:?}");
                });
            assert_eq!(reply.into_inner().key, n.to_string());
        }
        assert_eq!(rig.backend.calls_by_key().len(), 20, "{settings}");
        assert_eq!(rig.accounts(20).await.get("collapser_waiting_requests"), 0.0);
    }
}

/// A configuration of one's own may lack the large buffers. What does not fit fails, and nobody else notices: Envoy resets the
/// stream from within the very call that hands it the reply.
#[tokio::test(flavor = "multi_thread")]
async fn a_reply_larger_than_envoys_buffer_fails_alone() {
    let configure = |options: &mut SidecarOptions| {
        options.config.edit = |config| {
            let listener = config.pointer_mut("/static_resources/listeners/0").unwrap();
            listener["per_connection_buffer_limit_bytes"] = json!(65_536);
            let manager = listener.pointer_mut("/filter_chains/0/filters/0/typed_config").unwrap();
            manager["http2_protocol_options"]["initial_stream_window_size"] = json!(65_536);
        };
    };
    let mut rig = Rig::start_with(json!({"cache_duration": "10m"}), 0, configure).await;
    let client = rig.client().await;
    for round in 0..20 {
        let large = ComputeRequest { payload_bytes: 3_000_000, ..ask(&format!("{round}")) };
        // Leader, then hit.
        for _ in 0..2 {
            if let Ok(reply) = client.clone().compute(large.clone()).await {
                assert_eq!(reply.into_inner().payload.len(), 3_000_000);
            }
        }
        client.clone().compute(ask("small")).await.unwrap();
    }
    assert!(rig.sidecar.is_running());
    assert_eq!(rig.sidecar.metrics().await.unwrap().get("envoy_wasm_collapser_vm_reload_success"), 0.0);
}
