//! An answer through the sidecar is the backend's, byte for byte, whichever way it came about.

use std::time::Duration;

use bytes::Bytes;
use collapser_loadgen::proto::{ComputeRequest, Metadata};
use http::HeaderMap;
use serde_json::{Value, json};
use tonic::{Code, Status};

use crate::raw::{Act, Answer, RawClient, RawRig, headers};
use crate::rig::{Rig, ask, eventually};

/// Long enough for a follower to join, also on a busy machine.
const LATENCY_MS: u64 = 800;

/// Headers that differ between any two answers, that plain proxying sets, or that frame one hop's message
/// (hyper announces the length of an empty body).
fn is_from_the_way(name: &str) -> bool {
    ["date", "server", "content-length"].contains(&name) || name.starts_with("x-envoy-")
}

/// What the backend is responsible for.
fn essence(mut answer: Answer) -> Answer {
    let kept = answer.headers.iter().filter(|(name, _)| !is_from_the_way(name.as_str()));
    answer.headers = kept.map(|(name, value)| (name.clone(), value.clone())).collect();
    answer
}

/// One call, in its essence.
async fn call(client: &RawClient, request: &ComputeRequest) -> Answer {
    essence(client.compute(request, HeaderMap::new()).await.unwrap())
}

/// A backend with a sidecar, and a client of each.
struct Pair {
    rig: Rig,
    direct: RawClient,
    through: RawClient,
}

impl Pair {
    async fn start(settings: Value) -> Self {
        let rig = Rig::start(settings, LATENCY_MS).await;
        let direct = RawClient::connect(rig.backend.grpc_addr()).await;
        let through = RawClient::connect(rig.sidecar.addr()).await;
        Self { rig, direct, through }
    }

    /// The backend's own answer. It numbers its calls, anew before and after, for the next answer to be the same.
    async fn direct(&self, request: &ComputeRequest) -> Answer {
        self.rig.backend.reset();
        let answer = call(&self.direct, request).await;
        self.rig.backend.reset();
        answer
    }

    /// What a leader is told and what a follower is told.
    async fn flight(&self, request: &ComputeRequest) -> [Answer; 2] {
        let leader = self.through.compute(request, HeaderMap::new());
        let leader = tokio::spawn(leader);
        eventually("the flight is at the backend", async || self.rig.backend.in_flight() == 1).await;
        let follower = call(&self.through, request).await;
        [essence(leader.await.unwrap().unwrap()), follower]
    }

    /// Leader, follower and hit are told what the backend says.
    async fn assert_faithful(&self, request: &ComputeRequest) -> Answer {
        let direct = self.direct(request).await;
        for told in self.flight(request).await {
            assert_same(&told, &direct);
        }
        assert_same(&call(&self.through, request).await, &direct);
        assert_eq!(self.rig.backend.calls(), 1);
        direct
    }

    /// The same for an answer that is not cached: the third is a flight of its own.
    async fn assert_faithful_and_forgotten(&self, request: &ComputeRequest) -> Answer {
        let direct = self.direct(request).await;
        for told in self.flight(request).await {
            assert_same(&told, &direct);
        }
        assert_eq!(self.rig.backend.calls(), 1);
        assert_same(&call(&self.through, request).await, &direct);
        assert_eq!(self.rig.backend.calls(), 2);
        direct
    }
}

/// Equal, without megabytes of bytes in the message.
fn assert_same(told: &Answer, direct: &Answer) {
    let short = |answer: &Answer| Answer { data: Bytes::new(), ..answer.clone() };
    assert_eq!(short(told), short(direct));
    assert_eq!(told.data.len(), direct.data.len());
    assert!(told.data == direct.data, "the messages differ");
}

/// Replies stay for as long as a test may take.
fn long() -> Value {
    json!({"cache_duration": "10m"})
}

/// Names with and without repetition, bytes, and values of nothing.
fn metadata(prefix: &str) -> Vec<Metadata> {
    let text = |name: &str, value: &str| Metadata {
        name: format!("{prefix}-{name}"),
        value: value.to_string(),
        ..Metadata::default()
    };
    let binary = |name: &str, value: &'static [u8]| Metadata {
        name: format!("{prefix}-{name}-bin"),
        binary_value: Bytes::from_static(value),
        ..Metadata::default()
    };
    vec![
        text("once", "a value, with punctuation; = \"quoted\""),
        text("twice", "first"),
        text("other", "between"),
        text("twice", "second"),
        text("twice", "first"),
        text("empty", ""),
        binary("once", b"\x00\xff\x80 bytes"),
        binary("twice", b"\x01"),
        binary("twice", b"\x02\x03"),
        binary("empty", b""),
    ]
}

fn with_metadata(request: ComputeRequest) -> ComputeRequest {
    ComputeRequest {
        initial_metadata: metadata("initial"),
        trailing_metadata: metadata("trailing"),
        ..request
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn metadata_and_trailers_arrive_as_sent() {
    let pair = Pair::start(long()).await;
    let answer = pair.assert_faithful(&with_metadata(ask("k"))).await;
    let trailers = answer.trailers.unwrap();
    let values = |map: &HeaderMap, name| map.get_all(name).iter().cloned().collect::<Vec<_>>();
    assert_eq!(values(&answer.headers, "initial-twice"), ["first", "second", "first"]);
    assert_eq!(values(&trailers, "trailing-twice"), ["first", "second", "first"]);
    assert_eq!(values(&trailers, "trailing-empty"), [""]);
    assert_eq!(values(&trailers, "trailing-twice-bin").len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_of_any_size_arrive_as_sent() {
    let pair = Pair::start(long()).await;
    for payload_bytes in [1, 100 * 1024, 3 * 1024 * 1024] {
        let request = ComputeRequest { payload_bytes, ..ask(&format!("of {payload_bytes}")) };
        let answer = pair.assert_faithful(&request).await;
        assert!(answer.data.len() > payload_bytes as usize);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_empty_message_is_not_the_same_as_none() {
    let pair = Pair::start(long()).await;
    let answer = pair.assert_faithful(&ComputeRequest { empty_reply: true, ..ask("k") }).await;
    assert_eq!(answer.data, [0; 5][..]);
    assert_eq!(answer.code(), Some("0"));
}

/// A failure whose message is in several scripts.
fn failing() -> ComputeRequest {
    ComputeRequest { fail_code: 9, fail_message: MESSAGE.to_string(), ..ask("k") }
}

const MESSAGE: &str = "100% späť, 失敗\nand a second line";

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_with_metadata_and_trailers_arrives_as_sent_and_is_not_cached() {
    let pair = Pair::start(long()).await;
    let answer = pair.assert_faithful_and_forgotten(&with_metadata(failing())).await;
    assert!(answer.headers.contains_key("initial-once"));
    let trailers = answer.trailers.unwrap();
    assert_eq!(trailers["grpc-status"], "9");
    assert_eq!(Status::from_header_map(&trailers).unwrap().message(), MESSAGE);
    assert!(trailers.contains_key("trailing-once"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_in_one_frame_arrives_as_sent_and_is_not_cached() {
    let pair = Pair::start(long()).await;
    let request = ComputeRequest { trailing_metadata: metadata("trailing"), ..failing() };
    let answer = pair.assert_faithful_and_forgotten(&request).await;
    assert_eq!((answer.code(), answer.trailers.is_none()), (Some("9"), true));
    let mut client = pair.rig.client().await;
    let status = client.compute(request).await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::FailedPrecondition, MESSAGE));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_is_cached_if_asked_for() {
    let pair = Pair::start(json!({"cache_duration": "10m", "cache_errors": true})).await;
    pair.assert_faithful(&failing()).await;
    let full = ComputeRequest { key: "full".to_string(), ..with_metadata(failing()) };
    pair.assert_faithful(&full).await;
    pair.rig.accounts(6).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cached_failure_expires_like_any_reply() {
    const TTL: Duration = Duration::from_secs(3);
    let pair = Pair::start(json!({"cache_duration": "3s", "cache_errors": true})).await;
    let first = call(&pair.through, &failing()).await;
    assert_same(&call(&pair.through, &failing()).await, &first);
    assert_eq!(pair.rig.backend.calls(), 1);
    tokio::time::sleep(TTL).await;
    assert_same(&call(&pair.through, &failing()).await, &first);
    assert_eq!(pair.rig.backend.calls(), 2);
}

/// Bytes that claim to be compressed. Nobody on the way may look into them.
fn compressed() -> Answer {
    let mut answer = Answer::grpc(Bytes::from_static(b"\x01\0\0\0\x04\x1f\x8b\0\xff"));
    answer.headers.insert("grpc-encoding", "gzip".parse().unwrap());
    answer
}

#[tokio::test(flavor = "multi_thread")]
async fn a_compressed_message_stays_compressed_and_among_those_who_accept_it() {
    let rig = RawRig::start(long()).await;
    rig.upstream.set(Act::Answer(compressed()));
    rig.upstream.release();
    let client = rig.raw_client().await;
    let accepting = || headers(&[("grpc-accept-encoding", "gzip")]);
    for _ in 0..2 {
        let answer = client.compute(&ask("k"), accepting()).await.unwrap();
        assert_same(&essence(answer), &compressed());
    }
    assert_eq!(rig.upstream.calls(), 1);
    rig.upstream.set(Act::Answer(Answer::compute("k")));
    let plain = client.compute(&ask("k"), HeaderMap::new()).await.unwrap();
    assert_same(&essence(plain), &Answer::compute("k"));
    assert_eq!(rig.upstream.calls(), 2);
}
