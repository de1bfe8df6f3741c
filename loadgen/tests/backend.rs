//! The demo backend over a real connection: it must do to the letter what it is
//! told, for every test of the filter leans on it.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use collapser_loadgen::args::parse_metadata;
use collapser_loadgen::backend::{Backend, BackendHandle, BackendOptions, Failure, StreamCounts};
use collapser_loadgen::load::{self, BackendClient, LoadMode, LoadOptions};
use collapser_loadgen::payload::payload_for;
use collapser_loadgen::proto::demo_client::DemoClient;
use collapser_loadgen::proto::{ComputeRequest, CountRequest, EchoMessage, Metadata, SumReply, SumRequest};
use http::{HeaderMap, Request, StatusCode};
use http_body_util::{BodyExt as _, Empty, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message as _;
use tokio::net::TcpStream;
use tokio_stream::StreamExt as _;
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

async fn start() -> BackendHandle {
    Backend::start(BackendOptions::default()).await.unwrap()
}

async fn channel(backend: &BackendHandle) -> Channel {
    let endpoint = Endpoint::from_shared(backend.grpc_uri()).unwrap();
    endpoint.connect().await.unwrap()
}

async fn client(backend: &BackendHandle) -> DemoClient<Channel> {
    DemoClient::new(channel(backend).await)
}

fn ask(key: &str) -> ComputeRequest {
    ComputeRequest { key: key.to_owned(), ..ComputeRequest::default() }
}

fn metadata(entries: &[&str]) -> Vec<Metadata> {
    let entries = entries.iter();
    entries.map(|text| parse_metadata(text).unwrap()).collect()
}

/// An answer as it is on the wire.
struct Raw {
    headers: HeaderMap,
    body: Bytes,
    trailers: Option<HeaderMap>,
}

/// Calls Compute without a gRPC library, which would hide where metadata travels.
async fn raw_compute(backend: &BackendHandle, ask: &ComputeRequest) -> Raw {
    let stream = TcpStream::connect(backend.grpc_addr()).await.unwrap();
    let handshake = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream));
    let (mut sender, connection) = handshake.await.unwrap();
    tokio::spawn(connection);

    let message = ask.encode_to_vec();
    let mut frame = vec![0];
    frame.extend_from_slice(&(message.len() as u32).to_be_bytes());
    frame.extend_from_slice(&message);
    let request = Request::post(format!("{}/collapser.demo.v1.Demo/Compute", backend.grpc_uri()))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(Full::new(Bytes::from(frame)))
        .unwrap();
    let (parts, body) = sender.send_request(request).await.unwrap().into_parts();
    let body = body.collect().await.unwrap();
    Raw { headers: parts.headers, trailers: body.trailers().cloned(), body: body.to_bytes() }
}

fn values<'a>(headers: &'a HeaderMap, name: &str) -> Vec<&'a str> {
    let values = headers.get_all(name).iter();
    values.map(|value| value.to_str().unwrap()).collect()
}

async fn http(addr: SocketAddr, method: &str, path: &str) -> (StatusCode, String) {
    let stream = TcpStream::connect(addr).await.unwrap();
    let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream));
    let (mut sender, connection) = handshake.await.unwrap();
    tokio::spawn(connection);
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("host", "backend")
        .body(Empty::<Bytes>::new())
        .unwrap();
    let response = sender.send_request(request).await.unwrap();
    let status = response.status();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8(body.to_vec()).unwrap())
}

/// Waits until the condition holds.
async fn eventually(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(10), "{what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test]
async fn compute_answers_what_is_asked() {
    let backend = start().await;
    let mut client = client(&backend).await;
    for serial in 1..=3 {
        let reply = client.compute(ask("a")).await.unwrap().into_inner();
        assert_eq!((reply.key.as_str(), reply.serial), ("a", serial));
        assert_eq!(reply.payload, payload_for("a", 16));
    }
    let big = ComputeRequest { payload_bytes: 100_000, padding: vec![7; 1_000_000].into(), ..ask("b") };
    let reply = client.compute(big).await.unwrap().into_inner();
    assert_eq!(reply.payload, payload_for("b", 100_000));

    assert_eq!(backend.calls(), 4);
    assert_eq!(backend.calls_by_key()["a"], 3);
    assert_eq!(backend.calls_by_key()["b"], 1);
    assert_eq!(backend.in_flight(), 0);
    backend.reset();
    assert_eq!(backend.calls(), 0);
    assert!(backend.calls_by_key().is_empty());
    let reply = client.compute(ask("a")).await.unwrap();
    assert_eq!(reply.get_ref().serial, 1);
}

#[tokio::test]
async fn latency_is_the_callers_or_the_backends() {
    let backend = start().await;
    let mut client = client(&backend).await;
    let patient = ComputeRequest { latency_ms: 80, ..ask("a") };
    let start = Instant::now();
    client.compute(patient).await.unwrap();
    assert!(start.elapsed() >= Duration::from_millis(80));

    backend.set_latency(Duration::from_millis(60));
    let start = Instant::now();
    client.compute(ask("a")).await.unwrap();
    assert!(start.elapsed() >= Duration::from_millis(60));
}

#[tokio::test]
async fn a_success_carries_metadata_and_trailers() {
    let backend = Backend::start(BackendOptions {
        initial_metadata: metadata(&["from=backend"]),
        trailing_metadata: metadata(&["late=backend"]),
        ..BackendOptions::default()
    })
    .await
    .unwrap();
    let ask = ComputeRequest {
        initial_metadata: metadata(&["early=1", "early=2", "early-bin=\u{1}\u{2}"]),
        trailing_metadata: metadata(&["late=1", "late=2", "late-bin=\u{ff}"]),
        ..ask("a")
    };
    let raw = raw_compute(&backend, &ask).await;
    assert_eq!(values(&raw.headers, "from"), ["backend"]);
    assert_eq!(values(&raw.headers, "early"), ["1", "2"]);
    assert_eq!(values(&raw.headers, "early-bin"), ["AQI"]);
    assert!(values(&raw.headers, "grpc-status").is_empty());
    let trailers = raw.trailers.unwrap();
    assert_eq!(values(&trailers, "grpc-status"), ["0"]);
    assert_eq!(values(&trailers, "late"), ["backend", "1", "2"]);
    assert_eq!(values(&trailers, "late-bin"), ["w78"]);

    // A gRPC library sees the same, trailers included.
    let mut client = client(&backend).await;
    let response = client.compute(ask).await.unwrap();
    assert_eq!(response.get_ref().payload, payload_for("a", 16));
    let late = response.metadata().get_bin("late-bin").unwrap();
    assert_eq!(late.to_bytes().unwrap(), "\u{ff}");
}

#[tokio::test]
async fn a_failure_carries_metadata_and_trailers() {
    let backend = start().await;
    let mut ask = ComputeRequest {
        fail_code: Code::NotFound as u32,
        fail_message: "größer\nals 100 %".to_owned(),
        trailing_metadata: metadata(&["late=1", "late=2", "late-bin=x"]),
        ..ask("a")
    };
    // Without initial metadata, everything is in one frame.
    let raw = raw_compute(&backend, &ask).await;
    assert_eq!(values(&raw.headers, "grpc-status"), ["5"]);
    assert_eq!(values(&raw.headers, "late"), ["1", "2"]);
    assert!(raw.body.is_empty() && raw.trailers.is_none());

    ask.initial_metadata = metadata(&["early=1", "early-bin=y"]);
    let raw = raw_compute(&backend, &ask).await;
    assert_eq!(values(&raw.headers, "early"), ["1"]);
    assert!(values(&raw.headers, "grpc-status").is_empty());
    assert!(raw.body.is_empty());
    let trailers = raw.trailers.unwrap();
    assert_eq!(values(&trailers, "grpc-status"), ["5"]);
    assert_eq!(values(&trailers, "late"), ["1", "2"]);

    let status = client(&backend).await.compute(ask).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound);
    assert_eq!(status.message(), "größer\nals 100 %");
    let late = status.metadata().get_bin("late-bin").unwrap();
    assert_eq!(late.to_bytes().unwrap(), "x");
}

#[tokio::test]
async fn the_backend_fails_by_itself_when_told() {
    let backend = start().await;
    let mut client = client(&backend).await;
    backend.set_failure(Some(Failure::always(Code::ResourceExhausted, "zu viel, süß")));
    let status = client.compute(ask("a")).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert_eq!(status.message(), "zu viel, süß");
    backend.set_failure(None);
    client.compute(ask("a")).await.unwrap();
    assert_eq!(backend.calls(), 2);
}

#[tokio::test]
async fn nonsense_is_refused() {
    let backend = start().await;
    let mut client = client(&backend).await;
    for nonsense in [
        ComputeRequest { fail_code: 17, ..ask("a") },
        ComputeRequest { payload_bytes: u32::MAX, ..ask("a") },
        ComputeRequest {
            initial_metadata: vec![Metadata { name: "no name".to_owned(), ..Metadata::default() }],
            ..ask("a")
        },
    ] {
        let status = client.compute(nonsense).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    }
}

#[tokio::test]
async fn an_empty_reply_is_a_message_of_no_bytes() {
    let backend = start().await;
    let ask = ComputeRequest { empty_reply: true, trailing_metadata: metadata(&["late=1"]), ..ask("a") };
    let raw = raw_compute(&backend, &ask).await;
    assert_eq!(raw.body, [0; 5].as_slice());
    assert_eq!(values(&raw.trailers.unwrap(), "late"), ["1"]);
}

#[tokio::test]
async fn a_deadline_ends_a_call_in_the_backend() {
    let backend = start().await;
    backend.set_latency(Duration::from_secs(20));
    let mut request = tonic::Request::new(ask("a"));
    request.set_timeout(Duration::from_millis(50));
    let status = client(&backend).await.compute(request).await.unwrap_err();
    // Whoever is first: the client gives up at the same moment.
    assert!([Code::DeadlineExceeded, Code::Cancelled].contains(&status.code()), "{status}");
    eventually("the call ends", || backend.in_flight() == 0).await;
    assert_eq!(backend.calls(), 1);
}

#[tokio::test]
async fn requests_are_remembered_as_they_arrived() {
    let backend = start().await;
    assert!(backend.last_request_headers().is_none());
    let mut client = client(&backend).await;
    for number in 0..3 {
        let mut request = tonic::Request::new(ask("a"));
        let headers = request.metadata_mut();
        headers.append("x-number", number.into());
        headers.append("x-twice", "1".parse().unwrap());
        headers.append("x-twice", "2".parse().unwrap());
        client.compute(request).await.unwrap();
    }
    let last = backend.last_request_headers().unwrap();
    assert_eq!(values(&last, "x-number"), ["2"]);
    assert_eq!(values(&last, "x-twice"), ["1", "2"]);
    assert_eq!(values(&last, "te"), ["trailers"]);
    let recent = backend.recent_requests();
    assert_eq!(recent.len(), 3);
    assert_eq!(values(&recent[0].headers, "x-number"), ["0"]);
    let authority = recent[0].uri.authority().unwrap().to_string();
    assert_eq!(authority, backend.grpc_addr().to_string());
}

#[tokio::test]
async fn all_kinds_of_streams_work() {
    let backend = start().await;
    let mut client = client(&backend).await;

    let count = CountRequest { count: 3, interval_ms: 30, payload_bytes: 9 };
    let start = Instant::now();
    let replies = client.count(count).await.unwrap().into_inner();
    let replies: Vec<_> = replies.map(Result::unwrap).collect().await;
    assert!(start.elapsed() >= Duration::from_millis(60));
    let indices: Vec<_> = replies.iter().map(|reply| reply.index).collect();
    assert_eq!(indices, [0, 1, 2]);
    assert!(replies.iter().all(|reply| reply.payload.len() == 9));

    let numbers = (1..=100).map(|value| SumRequest { value });
    let sum = client.sum(tokio_stream::iter(numbers)).await.unwrap();
    let expected = SumReply { sum: 5050, messages: 100 };
    assert_eq!(sum.into_inner(), expected);

    // Ping-pong: each message is sent only when the one before has come back.
    let (send, receive) = tokio::sync::mpsc::channel(1);
    let outgoing = tokio_stream::wrappers::ReceiverStream::new(receive);
    let mut echoes = client.echo(outgoing).await.unwrap().into_inner();
    for index in 0..5 {
        let message = EchoMessage { index, payload: "ping".into() };
        send.send(message.clone()).await.unwrap();
        assert_eq!(echoes.message().await.unwrap(), Some(message));
    }
    drop(send);
    assert_eq!(echoes.message().await.unwrap(), None);

    let expected = StreamCounts { count: 1, sum: 1, echo: 1 };
    assert_eq!(backend.streams(), expected);
    assert_eq!(backend.calls(), 0);
}

#[tokio::test]
async fn health_is_checked_and_watched() {
    use tonic_health::pb::HealthCheckRequest;
    use tonic_health::pb::health_check_response::ServingStatus;
    use tonic_health::pb::health_client::HealthClient;

    let backend = start().await;
    let mut client = HealthClient::new(channel(&backend).await);
    for service in ["", "collapser.demo.v1.Demo"] {
        let request = HealthCheckRequest { service: service.to_owned() };
        let reply = client.check(request.clone()).await.unwrap().into_inner();
        assert_eq!(reply.status(), ServingStatus::Serving);
        let mut watch = client.watch(request).await.unwrap().into_inner();
        let first = watch.message().await.unwrap().unwrap();
        assert_eq!(first.status(), ServingStatus::Serving);
    }
    let unknown = HealthCheckRequest { service: "nobody".to_owned() };
    let status = client.check(unknown).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound);
}

#[tokio::test]
async fn reflection_lists_the_services() {
    use tonic_reflection::pb::v1::ServerReflectionRequest;
    use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
    use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
    use tonic_reflection::pb::v1alpha;

    let backend = start().await;
    let request = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let mut client = ServerReflectionClient::new(channel(&backend).await);
    let replies = client.server_reflection_info(tokio_stream::once(request));
    let reply = replies.await.unwrap().into_inner().message().await.unwrap();
    let Some(MessageResponse::ListServicesResponse(list)) = reply.unwrap().message_response else {
        panic!("no list");
    };
    let names: Vec<_> = list.service.iter().map(|one| one.name.as_str()).collect();
    assert!(names.contains(&"collapser.demo.v1.Demo"), "{names:?}");
    assert!(names.contains(&"grpc.health.v1.Health"), "{names:?}");

    // The older version of the protocol, which many tools still speak.
    let request = v1alpha::ServerReflectionRequest {
        host: String::new(),
        message_request: Some(v1alpha::server_reflection_request::MessageRequest::FileContainingSymbol(
            "collapser.demo.v1.Demo".to_owned(),
        )),
    };
    let mut client = v1alpha::server_reflection_client::ServerReflectionClient::new(channel(&backend).await);
    let replies = client.server_reflection_info(tokio_stream::once(request));
    let reply = replies.await.unwrap().into_inner().message().await.unwrap();
    assert!(matches!(
        reply.unwrap().message_response,
        Some(v1alpha::server_reflection_response::MessageResponse::FileDescriptorResponse(_))
    ));
}

#[tokio::test]
async fn the_http_side_tells_and_takes() {
    let backend = start().await;
    let addr = backend.http_addr().unwrap();
    let ok = |body: &str| (StatusCode::OK, body.to_owned());
    assert_eq!(http(addr, "GET", "/health").await, ok("ok\n"));

    let mut client = client(&backend).await;
    for key in ["a", "a", "b"] {
        client.compute(ask(key)).await.unwrap();
    }
    let counters = BackendClient::new(&backend.http_uri().unwrap()).unwrap();
    let counts = counters.counts().await.unwrap();
    assert_eq!((counts.compute, counts.keys, counts.in_flight), (3, 2, 0));
    assert_eq!(counts.per_key["a"], 2);

    for method in ["POST", "GET"] {
        client.compute(ask("a")).await.unwrap();
        assert_eq!(http(addr, method, "/reset").await, ok("ok\n"));
        assert_eq!(backend.calls(), 0);
    }
    assert_eq!(http(addr, "POST", "/latency?ms=30").await, ok("ok\n"));
    let start = Instant::now();
    client.compute(ask("a")).await.unwrap();
    assert!(start.elapsed() >= Duration::from_millis(30));

    for (method, path, status) in [
        ("GET", "/nothing", StatusCode::NOT_FOUND),
        ("DELETE", "/calls", StatusCode::METHOD_NOT_ALLOWED),
        ("POST", "/latency?ms=long", StatusCode::BAD_REQUEST),
        ("POST", "/latency", StatusCode::BAD_REQUEST),
    ] {
        assert_eq!(http(addr, method, path).await.0, status, "{method} {path}");
    }
}

#[tokio::test]
async fn shutdown_closes_at_once_and_frees_the_port() {
    let mut options = BackendOptions::default();
    for round in 0..3 {
        let backend = Backend::start(options.clone()).await.unwrap();
        options.grpc_addr = backend.grpc_addr();
        options.http_addr = backend.http_addr();
        backend.set_latency(Duration::from_secs(20));
        let mut client = client(&backend).await;
        let call = tokio::spawn(async move { client.compute(ask("a")).await });
        eventually("the call arrives", || backend.in_flight() == 1).await;

        let start = Instant::now();
        backend.shutdown().await;
        assert!(TcpStream::connect(options.grpc_addr).await.is_err());
        assert!(TcpStream::connect(options.http_addr.unwrap()).await.is_err());
        assert!(call.await.unwrap().is_err(), "round {round}");
        assert!(start.elapsed() < Duration::from_secs(2));
    }
}

#[tokio::test]
async fn a_taken_port_is_an_error_that_names_it() {
    let backend = start().await;
    let again = BackendOptions { grpc_addr: backend.grpc_addr(), ..BackendOptions::default() };
    let error = Backend::start(again).await.err().unwrap();
    let text = format!("{error:#}");
    assert!(text.contains(&backend.grpc_addr().to_string()), "{text}");
}

#[tokio::test]
async fn callers_that_hang_up_leave_no_call_behind() {
    let backend = start().await;
    backend.set_latency(Duration::from_secs(20));
    let mut options = LoadOptions::burst(backend.grpc_uri(), 3000);
    options.timeout = Some(Duration::from_millis(1500));
    let report = load::run(options, |_| {}).await.unwrap();
    assert_eq!(report.errors["DEADLINE_EXCEEDED"].count, 3000);
    assert_eq!(backend.calls(), 3000);
    eventually("the calls end", || backend.in_flight() == 0).await;
}

#[tokio::test]
async fn deadlines_travel_when_asked() {
    let backend = start().await;
    backend.set_latency(Duration::from_secs(20));
    let mut options = LoadOptions::burst(backend.grpc_uri(), 100);
    options.timeout = Some(Duration::from_millis(200));
    options.send_grpc_timeout = true;
    options.headers = metadata(&["x-twice=1", "x-twice=2"]);
    let report = load::run(options, |_| {}).await.unwrap();
    assert_eq!(report.errors["DEADLINE_EXCEEDED"].count, 100, "{report}");
    let last = backend.last_request_headers().unwrap();
    assert_eq!(values(&last, "grpc-timeout").len(), 1);
    assert_eq!(values(&last, "x-twice"), ["1", "2"]);
}

async fn burst(connections: usize) {
    const CALLS: u64 = 10_000;
    let backend = start().await;
    // Long enough for all calls to be in the backend at the same time.
    backend.set_latency(Duration::from_secs(3));
    let mut options = LoadOptions::burst(backend.grpc_uri(), CALLS);
    options.backend_url = backend.http_uri();
    options.connections = connections;
    options.keys = 7;
    options.payload_bytes = 100;
    let mut most = 0;
    let report = load::run(options, |_| most = most.max(backend.in_flight()));
    let report = report.await.unwrap();
    assert!(report.is_clean(), "{report}");
    assert_eq!((report.calls, report.ok), (CALLS, CALLS));
    assert_eq!(report.backend_calls, Some(CALLS));
    assert_eq!(most, CALLS);
    assert_eq!(backend.calls_by_key().len(), 7);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_calls_at_once_on_one_connection() {
    burst(1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_calls_at_once_on_a_hundred_connections() {
    burst(100).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sustained_loads_run_for_their_time() {
    let backend = start().await;
    backend.set_latency(Duration::from_millis(10));
    let duration = Duration::from_millis(500);
    let mut options = LoadOptions::burst(backend.grpc_uri(), 1);
    options.backend_url = backend.http_uri();
    options.reset_backend = true;
    options.mode = LoadMode::Workers { workers: 5, duration };
    let report = load::run(options.clone(), |_| {}).await.unwrap();
    assert!(report.is_clean(), "{report}");
    // At best 5 workers × 500 ms ÷ 10 ms, and a last call each.
    assert!((25..=255).contains(&report.calls), "{report}");
    assert_eq!(report.backend_calls, Some(report.calls));
    assert!(report.latency_ms.min >= 9.9, "{report}");

    options.mode = LoadMode::Rate { per_second: 200.0, duration };
    let report = load::run(options, |_| {}).await.unwrap();
    assert!(report.is_clean(), "{report}");
    assert_eq!(report.calls, 100);
    assert!(report.elapsed_seconds >= 0.49, "{report}");
}

#[tokio::test]
async fn a_load_that_cannot_run_says_why() {
    let backend = start().await;
    let gone = backend.grpc_addr();
    let http = backend.http_addr().unwrap();
    backend.shutdown().await;

    let options = LoadOptions::burst(format!("http://{gone}"), 1);
    let error = load::run(options, |_| {}).await.unwrap_err();
    let text = format!("{error:#}");
    assert!(text.contains("cannot connect to http://127.0.0.1"), "{text}");
    assert!(text.contains("refused"), "{text}");

    let backend = start().await;
    let mut options = LoadOptions::burst(backend.grpc_uri(), 1);
    options.backend_url = Some(format!("http://{http}"));
    let error = load::run(options, |_| {}).await.unwrap_err();
    assert!(format!("{error:#}").contains("/calls"), "{error:#}");
    assert_eq!(backend.calls(), 0);
}
