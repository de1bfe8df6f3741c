//! What cannot or must not collapse passes untouched, is counted with its reason, and what can collapse in spite of an odd
//! form still does.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use collapser_loadgen::http_ask;
use collapser_loadgen::payload::{payload_for, payload_matches};
use collapser_loadgen::proto::demo_client::DemoClient;
use collapser_loadgen::proto::{
    ComputeReply, ComputeRequest, CountReply, CountRequest, EchoMessage, SumReply, SumRequest,
};
use h2::SendStream;
use h2::client::ResponseFuture;
use http::{HeaderMap, Method, Request};
use prost::Message;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Response, Streaming};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;

use crate::raw::{Answer, COMPUTE, RawClient, frame, headers};
use crate::rig::{Rig, ask, channel, eventually};

const SUM: &str = "/collapser.demo.v1.Demo/Sum";
const ECHO: &str = "/collapser.demo.v1.Demo/Echo";
const COUNT: &str = "/collapser.demo.v1.Demo/Count";

/// How long anything may take that would otherwise take for ever.
const PATIENCE: Duration = Duration::from_secs(20);

/// A cache that outlives any test, so that a call that passes is told from one that collapses even afterwards.
fn lasting(mut settings: Value) -> Value {
    settings["cache_duration"] = json!("10m");
    settings
}

/// Waits until `requests` are counted, `passed` of them as bypassed, and those for this reason alone.
async fn assert_passed(rig: &Rig, requests: u64, passed: u64, reason: &str) {
    let metrics = rig.accounts(requests).await;
    let label = format!("collapser_bypassed_requests_total{{reason=\"{reason}\"}}");
    assert_eq!(metrics.get(&label), passed as f64, "{reason}: {metrics:#?}");
    assert_eq!(metrics.sum("collapser_bypassed_requests_total"), passed as f64, "{metrics:#?}");
}

fn message<T: Message + Default>(data: &[u8]) -> T {
    T::decode(&data[5..]).unwrap()
}

/// So many calls of one key at the same time.
async fn compute(rig: &Rig, count: usize, request: &ComputeRequest, more: HeaderMap) -> Vec<ComputeReply> {
    let client = RawClient::connect(rig.sidecar.addr()).await;
    let calls: JoinSet<_> = (0..count).map(|_| client.compute(request, more.clone())).collect();
    let replies = calls.join_all().await.into_iter().map(|answer| message(&answer.unwrap().data));
    let replies: Vec<ComputeReply> = replies.collect();
    assert!(replies.iter().all(|r| r.key == request.key && payload_matches(&r.key, &r.payload)));
    replies
}

// --- A request frame by frame ---

/// A request of which the test sends each frame.
struct OpenCall {
    response: ResponseFuture,
    body: SendStream<Bytes>,
}

impl OpenCall {
    /// Sends the headers on a connection of its own.
    async fn start(addr: SocketAddr, path: &str) -> Self {
        let request = Request::post(format!("http://{addr}{path}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers");
        let (response, body) = send_headers(addr, request.body(()).unwrap(), false).await;
        Self { response, body }
    }

    fn send(&mut self, data: Bytes, end: bool) {
        self.body.send_data(data, end).unwrap();
    }

    async fn answer(self) -> Answer {
        answer(self.response).await
    }
}

async fn send_headers(
    addr: SocketAddr,
    request: Request<()>,
    end: bool,
) -> (ResponseFuture, SendStream<Bytes>) {
    let socket = TcpStream::connect(addr).await.unwrap();
    let (requests, connection) = h2::client::handshake(socket).await.unwrap();
    // It lives as long as its streams do; what goes wrong shows in them.
    tokio::spawn(async { drop(connection.await) });
    requests.ready().await.unwrap().send_request(request, end).unwrap()
}

async fn answer(response: ResponseFuture) -> Answer {
    timeout(PATIENCE, read(response)).await.expect("no whole answer came")
}

async fn read(response: ResponseFuture) -> Answer {
    let (head, mut body) = response.await.unwrap().into_parts();
    let mut data = BytesMut::new();
    while let Some(chunk) = body.data().await {
        let chunk = chunk.unwrap();
        body.flow_control().release_capacity(chunk.len()).unwrap();
        data.extend_from_slice(&chunk);
    }
    let trailers = body.trailers().await.unwrap();
    Answer { status: head.status.as_u16(), headers: head.headers, data: data.freeze(), trailers }
}

// --- Streams of requests ---

fn numbers() -> [SumRequest; 2] {
    [SumRequest { value: 40 }, SumRequest { value: 2 }]
}

#[tokio::test(flavor = "multi_thread")]
async fn two_messages_in_one_go_pass() {
    let rig = Rig::start(lasting(json!({})), 0).await;
    for _ in 0..2 {
        let mut call = OpenCall::start(rig.sidecar.addr(), SUM).await;
        call.send(numbers().iter().map(frame).collect::<Vec<_>>().concat().into(), true);
        let answer = call.answer().await;
        assert_eq!(answer.code(), Some("0"));
        assert_eq!(message::<SumReply>(&answer.data), SumReply { sum: 42, messages: 2 });
    }
    assert_eq!(rig.backend.streams().sum, 2, "one call each, since both had two messages");
    assert_passed(&rig, 2, 2, "streaming").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn client_streaming_passes() {
    let rig = Rig::start(lasting(json!({})), 0).await;
    let mut client = rig.client().await;
    let reply = client.sum(tokio_stream::iter(numbers())).await.unwrap().into_inner();
    assert_eq!(reply, SumReply { sum: 42, messages: 2 });
    assert_passed(&rig, 1, 1, "streaming").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_messages_of_a_caller_pass() {
    let rig = Rig::start(lasting(json!({})), 0).await;
    let mut client = rig.client().await;
    let messages = tokio_stream::iter((1..=10_000).map(|value| SumRequest { value }));
    let reply = client.sum(messages).await.unwrap().into_inner();
    assert_eq!(reply, SumReply { sum: 50_005_000, messages: 10_000 });
    assert_passed(&rig, 1, 1, "streaming").await;
}

/// A stream without an end looks like a slow unary call, until one call passes to find out.
#[tokio::test(flavor = "multi_thread")]
async fn a_stream_longer_than_the_deadline_is_found_out() {
    let rig = Rig::start(lasting(json!({"backend_timeout": "500ms"})), 0).await;
    let mut client = rig.client().await;
    let request = CountRequest { count: 20, interval_ms: 100, payload_bytes: 10 };
    let status = client.count(request).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::DeadlineExceeded);
    assert!(status.message().contains("methods"), "{status:?}");
    for _ in 0..2 {
        let mut replies = client.count(request).await.unwrap().into_inner();
        for index in 0..20 {
            assert_eq!(replies.message().await.unwrap().unwrap().index, index);
        }
        assert_eq!(replies.message().await.unwrap(), None);
    }
    let metrics = rig.accounts(3).await;
    assert_eq!(metrics.get("collapser_bypassed_requests_total{reason=\"probe\"}"), 1.0);
    assert_eq!(metrics.get("collapser_bypassed_requests_total{reason=\"streaming\"}"), 1.0);
}

/// Waits for each echo before it sends the next message.
pub async fn ping_pong(client: &mut DemoClient<Channel>, bytes: usize) {
    let (send, messages) = mpsc::channel(1);
    let echo = |index| EchoMessage { index, payload: payload_for(&index.to_string(), bytes) };
    send.send(echo(0)).await.unwrap();
    let mut echoes = client.echo(ReceiverStream::new(messages)).await.unwrap().into_inner();
    for index in 0..20 {
        assert_eq!(echoes.message().await.unwrap(), Some(echo(index)));
        send.send(echo(index + 1)).await.unwrap();
    }
    drop(send);
    assert_eq!(echoes.message().await.unwrap(), Some(echo(20)));
    assert_eq!(echoes.message().await.unwrap(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_passes() {
    let rig = Rig::start(lasting(json!({})), 0).await;
    let mut client = rig.client().await;
    for _ in 0..2 {
        timeout(PATIENCE, ping_pong(&mut client, 100)).await.expect("the conversation stalls");
    }
    assert_eq!(rig.backend.streams().echo, 2);
    assert_passed(&rig, 2, 2, "streaming").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn large_messages_of_a_conversation_pass() {
    let rig = Rig::start(json!({"max_request_bytes": "1KiB"}), 0).await;
    let mut client = rig.client().await;
    timeout(PATIENCE, ping_pong(&mut client, 200_000)).await.expect("the conversation stalls");
    assert_passed(&rig, 1, 1, "too_large").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_opens_without_a_message_reaches_the_backend() {
    let rig = Rig::start(lasting(json!({})), 0).await;
    let mut call = OpenCall::start(rig.sidecar.addr(), ECHO).await;
    eventually("the backend sees the stream", async || rig.backend.streams().echo == 1).await;
    let echo = frame(&EchoMessage { index: 7, payload: payload_for("7", 100) });
    call.send(echo.clone(), false);
    call.send(Bytes::new(), true);
    let answer = call.answer().await;
    assert_eq!((answer.code(), &answer.data), (Some("0"), &echo));
    assert_passed(&rig, 1, 1, "streaming").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_comes_right_after_the_release_is_not_lost() {
    let rig = Rig::start(lasting(json!({})), 0).await;
    let mut call = OpenCall::start(rig.sidecar.addr(), ECHO).await;
    let echo = |index: u64| frame(&EchoMessage { index, payload: payload_for(&index.to_string(), 100) });
    call.send(echo(1), false);
    eventually("the backend sees the stream", async || rig.backend.streams().echo == 1).await;
    // The message and the end in one frame.
    call.send(echo(2), true);
    let answer = call.answer().await;
    assert_eq!(answer.code(), Some("0"));
    let whole = [echo(1), echo(2)].concat();
    assert!(answer.data == whole, "{} bytes came of {}", answer.data.len(), whole.len());
    assert_passed(&rig, 1, 1, "streaming").await;
}

// --- Sizes ---

/// A request that has this size on the wire, gRPC's five bytes included.
fn sized(key: &str, size: usize) -> ComputeRequest {
    let mut request = ComputeRequest { padding: vec![7; size].into(), ..ask(key) };
    while frame(&request).len() > size {
        request.padding.truncate(request.padding.len() - 1);
    }
    assert_eq!(frame(&request).len(), size);
    request
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_at_the_limit_collapses_and_one_byte_more_passes() {
    let rig = Rig::start(lasting(json!({"max_request_bytes": "1KiB"})), 0).await;
    compute(&rig, 3, &sized("under", 1023), HeaderMap::new()).await;
    assert_eq!(rig.backend.calls_by_key()["under"], 1);
    compute(&rig, 3, &sized("at", 1024), HeaderMap::new()).await;
    assert_eq!(rig.backend.calls_by_key()["at"], 1);
    compute(&rig, 3, &sized("over", 1025), HeaderMap::new()).await;
    assert_eq!(rig.backend.calls_by_key()["over"], 3);
    assert_passed(&rig, 9, 3, "too_large").await;
}

/// Envoy's buffers hold 32 MiB.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_larger_than_envoys_buffers_passes() {
    let rig = Rig::start(lasting(json!({})), 0).await;
    compute(&rig, 1, &sized("over", 33 << 20), HeaderMap::new()).await;
    assert_passed(&rig, 1, 1, "too_large").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_over_the_limit_in_many_frames_passes() {
    let rig = Rig::start(lasting(json!({"max_request_bytes": "64KiB"})), 0).await;
    for _ in 0..2 {
        compute(&rig, 1, &sized("over", 1_000_000), HeaderMap::new()).await;
    }
    assert_eq!(rig.backend.calls_by_key()["over"], 2);
    assert_passed(&rig, 2, 2, "too_large").await;
}

// --- What is no gRPC ---

/// What two answers must have in common, the proxy's own headers aside.
fn essence(answer: &Answer) -> (u16, Option<&[u8]>, Option<&str>, &Bytes) {
    let content_type = answer.headers.get("content-type").map(|value| value.as_bytes());
    (answer.status, content_type, answer.code(), &answer.data)
}

/// Twice the same POST with this content type, through the sidecar and to the backend itself.
async fn assert_content_type_passes(content_type: &str) {
    let rig = Rig::start(lasting(json!({})), 0).await;
    let [proxied, direct] = [rig.sidecar.addr(), rig.backend.grpc_addr()];
    // An empty reply is the same each time.
    let request = ComputeRequest { empty_reply: true, ..ask("k") };
    let post = async |addr| {
        let more = headers(&[("content-type", content_type)]);
        RawClient::connect(addr).await.compute(&request, more).await.unwrap()
    };
    let expected = post(direct).await;
    let before = rig.backend.calls();
    for _ in 0..2 {
        let answer = post(proxied).await;
        assert_eq!(essence(&answer), essence(&expected));
    }
    assert_eq!(rig.backend.calls(), before * 3, "each is to the backend what the direct one is");
    assert_passed(&rig, 2, 2, "not_grpc").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_post_of_json_passes() {
    assert_content_type_passes("application/json").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn grpc_web_passes() {
    assert_content_type_passes("application/grpc-web").await;
    assert_content_type_passes("application/grpc-web+proto").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_get_passes_over_http2_and_http1() {
    let rig = Rig::start(lasting(json!({})), 0).await;
    let get = async |addr: SocketAddr| {
        let request = Request::get(format!("http://{addr}{COMPUTE}")).body(()).unwrap();
        answer(send_headers(addr, request, true).await.0).await
    };
    let expected = get(rig.backend.grpc_addr()).await;
    assert_eq!(essence(&get(rig.sidecar.addr()).await), essence(&expected));
    let uri = rig.sidecar.uri().parse().unwrap();
    let (status, body) = http_ask::ask(Method::GET, &uri, COMPUTE).await.unwrap();
    assert_eq!((status.as_u16(), body), (expected.status, expected.data));
    assert_passed(&rig, 2, 2, "not_grpc").await;
}

// --- What was asked not to collapse ---

#[tokio::test(flavor = "multi_thread")]
async fn an_excluded_method_passes() {
    let rig = Rig::start(lasting(json!({"methods": [format!("!{COMPUTE}")]})), 0).await;
    let replies = compute(&rig, 10, &ask("k"), HeaderMap::new()).await;
    assert_eq!((replies.len(), rig.backend.calls()), (10, 10));
    assert_passed(&rig, 10, 10, "method").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_method_that_is_not_included_passes() {
    let rig = Rig::start(lasting(json!({"methods": ["/grpc.health.v1.Health/*", COUNT]})), 0).await;
    compute(&rig, 10, &ask("k"), HeaderMap::new()).await;
    assert_eq!(rig.backend.calls(), 10);
    assert_passed(&rig, 10, 10, "method").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_included_method_collapses() {
    let methods = ["/collapser.demo.v1.Demo/*", "!/collapser.demo.v1.Demo/Count"];
    let rig = Rig::start(lasting(json!({"methods": methods})), 0).await;
    compute(&rig, 10, &ask("k"), HeaderMap::new()).await;
    assert_eq!(rig.backend.calls(), 1);
    assert_eq!(count(&mut rig.client().await, 3, 100).await.len(), 3);
    assert_passed(&rig, 11, 1, "method").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_may_ask_to_pass() {
    let rig = Rig::start(lasting(json!({})), 200).await;
    let asked = headers(&[("cache-control", "private, no-store")]);
    let plain = compute(&rig, 3, &ask("k"), HeaderMap::new()).await;
    let fresh = compute(&rig, 3, &ask("k"), asked).await;
    assert!(plain.iter().all(|reply| reply.serial == 1));
    let mut serials: Vec<_> = fresh.iter().map(|reply| reply.serial).collect();
    serials.sort_unstable();
    assert_eq!(serials, [2, 3, 4]);
    // Its answer is nobody else's.
    assert_eq!(compute(&rig, 1, &ask("k"), HeaderMap::new()).await[0].serial, 1);
    assert_passed(&rig, 7, 3, "asked").await;
}

// --- gRPC's own services ---

#[tokio::test(flavor = "multi_thread")]
async fn health_checks_collapse() {
    let rig = Rig::start(lasting(json!({})), 0).await;
    let client = HealthClient::new(channel(&rig.sidecar.uri()).await);
    let check = || {
        let mut client = client.clone();
        async move { client.check(HealthCheckRequest::default()).await.unwrap().into_inner().status() }
    };
    let statuses = (0..10).map(|_| check()).collect::<JoinSet<_>>().join_all().await;
    assert_eq!(statuses, [ServingStatus::Serving; 10]);
    let metrics = rig.accounts(10).await;
    assert_eq!(metrics.get("collapser_backend_calls_total"), 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn health_watch_passes() {
    let rig = Rig::start(lasting(json!({})), 0).await;
    let mut client = HealthClient::new(channel(&rig.sidecar.uri()).await);
    // Held back, it would never end.
    let watch = async {
        let mut updates = client.watch(HealthCheckRequest::default()).await.unwrap().into_inner();
        updates.message().await.unwrap().unwrap().status()
    };
    assert_eq!(timeout(PATIENCE, watch).await, Ok(ServingStatus::Serving));
    assert_passed(&rig, 1, 1, "method").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn server_reflection_passes() {
    let rig = Rig::start(lasting(json!({})), 0).await;
    let mut client = ServerReflectionClient::new(channel(&rig.sidecar.uri()).await);
    let request = ServerReflectionRequest {
        message_request: Some(MessageRequest::ListServices(String::new())),
        ..ServerReflectionRequest::default()
    };
    // The caller keeps its half open, as tools do that ask further questions.
    let (send, questions) = mpsc::channel(1);
    send.send(request).await.unwrap();
    let first = async {
        let answers = client.server_reflection_info(ReceiverStream::new(questions)).await.unwrap();
        answers.into_inner().message().await.unwrap().unwrap()
    };
    let answer = timeout(PATIENCE, first).await.expect("no answer came");
    let Some(MessageResponse::ListServicesResponse(list)) = answer.message_response else {
        panic!("{answer:?}");
    };
    assert!(list.service.iter().any(|service| service.name == "collapser.demo.v1.Demo"), "{list:?}");
    assert_passed(&rig, 1, 1, "method").await;
}

// --- Server streaming ---

async fn open_count(client: &mut DemoClient<Channel>, request: CountRequest) -> Streaming<CountReply> {
    client.count(request).await.map(Response::into_inner).unwrap()
}

/// All messages of a call, each of which must be the one due.
async fn count(client: &mut DemoClient<Channel>, count: u32, payload_bytes: u32) -> Vec<CountReply> {
    let request = CountRequest { count, payload_bytes, interval_ms: 0 };
    let mut messages = open_count(client, request).await;
    let mut replies = Vec::new();
    while let Some(reply) = messages.message().await.unwrap() {
        let payload = payload_for(&reply.index.to_string(), payload_bytes as usize);
        assert_eq!(reply, CountReply { index: replies.len() as u32, payload });
        replies.push(reply);
    }
    replies
}

#[tokio::test(flavor = "multi_thread")]
async fn server_streaming_delivers_everything_and_is_recognised_by_its_first_reply() {
    let rig = Rig::start(json!({}), 0).await;
    let mut client = rig.client().await;
    assert_eq!(count(&mut client, 50, 1_000).await.len(), 50);
    assert_passed(&rig, 1, 0, "streaming").await;
    rig.metrics_when(|m| m.get("collapser_streaming_methods_total") == 1.0).await;
    // From now on it passes: a first message arrives although the last one is an hour away.
    let request = CountRequest { count: 2, payload_bytes: 100, interval_ms: 3_600_000 };
    let mut messages = open_count(&mut client, request).await;
    let first = timeout(PATIENCE, messages.message()).await.expect("no message came").unwrap().unwrap();
    assert_eq!((first.index, first.payload), (0, payload_for("0", 100)));
    assert_passed(&rig, 2, 1, "streaming").await;
    assert_eq!(count(&mut client, 50, 1_000).await.len(), 50);
    assert_eq!(rig.backend.streams().count, 3);
    assert_passed(&rig, 3, 2, "streaming").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_streaming_method_that_is_excluded_streams_from_its_first_call() {
    let rig = Rig::start(json!({"methods": [format!("!{COUNT}")]}), 0).await;
    let request = CountRequest { count: 2, payload_bytes: 100, interval_ms: 3_600_000 };
    let mut messages = open_count(&mut rig.client().await, request).await;
    let first = timeout(PATIENCE, messages.message()).await.expect("no message came").unwrap().unwrap();
    assert_eq!(first.index, 0);
    assert_passed(&rig, 1, 1, "method").await;
}

// --- Odd forms of a unary request ---

#[tokio::test(flavor = "multi_thread")]
async fn a_message_in_pieces_collapses() {
    // Generous, since the empty frame at the end must come in time however busy the machine is.
    let rig = Rig::start(json!({"stream_grace": "5s"}), 1_000).await;
    let request = frame(&sized("k", 600));
    let mut calls = JoinSet::new();
    // Within the five bytes of the prefix, right after them, and within the message.
    for cut in [1, 5, 300] {
        let mut call = OpenCall::start(rig.sidecar.addr(), COMPUTE).await;
        let pieces = [request.slice(..cut), request.slice(cut..cut + 1), request.slice(cut + 1..)];
        calls.spawn(async move {
            for piece in pieces {
                call.send(piece, false);
                // Each leaves in a packet of its own.
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            call.send(Bytes::new(), true);
            call.answer().await
        });
    }
    let answers = calls.join_all().await;
    assert_eq!(message::<ComputeReply>(&answers[0].data).key, "k");
    assert!(answers.iter().all(|answer| essence(answer) == essence(&answers[0])), "{answers:?}");
    assert_eq!(rig.backend.calls(), 1);
    assert_passed(&rig, 3, 0, "streaming").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn request_trailers_pass() {
    let rig = Rig::start(lasting(json!({"stream_grace": "5s"})), 0).await;
    for serial in 1..=2 {
        let mut call = OpenCall::start(rig.sidecar.addr(), COMPUTE).await;
        call.send(frame(&ask("k")), false);
        call.body.send_trailers(headers(&[("x-trailer", "1")])).unwrap();
        let answer = call.answer().await;
        assert_eq!(answer.code(), Some("0"));
        assert_eq!(message::<ComputeReply>(&answer.data).serial, serial, "a call of its own");
    }
    assert_passed(&rig, 2, 2, "malformed").await;
}
