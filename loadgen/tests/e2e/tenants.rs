//! Nobody gets an answer that was meant for somebody else: whatever tells two callers apart keeps their answers apart,
//! in flights and in the cache.

use collapser_loadgen::proto::ComputeReply;
use http::{HeaderMap, Request};
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use prost::Message as _;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::raw::{COMPUTE, RawClient, frame, headers};
use crate::rig::{Rig, ask};

/// The headers of a caller, besides gRPC's own.
type Caller<'a> = &'a [(&'a str, &'a str)];

/// Calls that each caller makes at the same time.
const TOGETHER: usize = 5;

/// With a cache that outlives any test, so that a wrongly shared reply would be found.
async fn start(mut settings: Value) -> Rig {
    settings["cache_duration"] = json!("10m");
    Rig::start(settings, 200).await
}

async fn start_with_tenants() -> Rig {
    start(json!({"key_headers": ["authorization", "cookie", "x-tenant-id"]})).await
}

fn decode(data: &[u8]) -> ComputeReply {
    ComputeReply::decode(&data[5..]).unwrap()
}

/// The serial numbers of the backend calls that answered each caller: several calls at the same time,
/// and one afterwards.
async fn serials(rig: &Rig, key: &str, callers: [Caller<'_>; 2]) -> [Vec<u64>; 2] {
    let client = RawClient::connect(rig.sidecar.addr()).await;
    let call = |number: usize| {
        let answer = client.compute(&ask(key), headers(callers[number]));
        async move {
            let answer = answer.await.unwrap();
            assert_eq!(answer.code(), Some("0"), "{answer:?}");
            (number, decode(&answer.data))
        }
    };
    let mut calls: JoinSet<_> = (0..2 * TOGETHER).map(|n| call(n % 2)).collect();
    let mut replies = Vec::new();
    while let Some(reply) = calls.join_next().await {
        replies.push(reply.unwrap());
    }
    for number in 0..2 {
        replies.push(call(number).await);
    }
    let mut serials = [Vec::new(), Vec::new()];
    for (number, reply) in replies {
        assert_eq!(reply.key, key);
        serials[number].push(reply.serial);
    }
    serials
}

/// Each has its own backend call, and shares it with nobody but itself.
async fn assert_apart(rig: &Rig, key: &str, callers: [Caller<'_>; 2]) {
    let serials = serials(rig, key, callers).await;
    for own in &serials {
        assert!(own.iter().all(|serial| *serial == own[0]), "{callers:?}: {serials:?}");
    }
    assert_ne!(serials[0][0], serials[1][0], "{callers:?} share an answer");
    assert_eq!(rig.backend.calls_by_key()[key], 2, "{callers:?}");
}

/// All share one backend call.
async fn assert_shared(rig: &Rig, key: &str, callers: [Caller<'_>; 2]) {
    let serials = serials(rig, key, callers).await.concat();
    assert!(serials.iter().all(|serial| *serial == serials[0]), "{callers:?}: {serials:?}");
    assert_eq!(rig.backend.calls_by_key()[key], 1, "{callers:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn credentials_keep_callers_apart_by_default() {
    let rig = start(json!({})).await;
    for name in ["authorization", "cookie"] {
        assert_apart(&rig, name, [&[(name, "a=1")], &[(name, "a=2")]]).await;
        let anonymous = format!("{name} or none");
        assert_apart(&rig, &anonymous, [&[(name, "a=1")], &[]]).await;
    }
    assert_apart(&rig, "both", [&[("authorization", "x"), ("cookie", "y")], &[("authorization", "x")]]).await;
    assert!(!rig.sidecar.log().contains("key_headers"), "nothing to warn of:\n{}", rig.sidecar.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_header_of_choice_keeps_tenants_apart() {
    let rig = start_with_tenants().await;
    assert_apart(&rig, "k", [&[("x-tenant-id", "a")], &[("x-tenant-id", "b")]]).await;
    // Values are told apart to the letter.
    assert_apart(&rig, "case", [&[("x-tenant-id", "a")], &[("x-tenant-id", "A")]]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_value_of_a_repeated_header_counts() {
    let rig = start_with_tenants().await;
    let first: Caller = &[("x-tenant-id", "a"), ("x-tenant-id", "b")];
    let others: [Caller; 4] = [
        &[("x-tenant-id", "a"), ("x-tenant-id", "c")],
        &[("x-tenant-id", "a")],
        &[("x-tenant-id", "b"), ("x-tenant-id", "a")],
        &[("x-tenant-id", "a"), ("x-tenant-id", "b"), ("x-tenant-id", "b")],
    ];
    for (number, other) in others.into_iter().enumerate() {
        assert_apart(&rig, &number.to_string(), [first, other]).await;
    }
    // Credentials take another way through Envoy than headers that it does not know.
    let other: Caller = &[("authorization", "a"), ("authorization", "c")];
    assert_apart(&rig, "authorization", [&[("authorization", "a"), ("authorization", "b")], other]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_empty_header_differs_from_none() {
    let rig = start_with_tenants().await;
    for name in ["x-tenant-id", "authorization"] {
        assert_apart(&rig, name, [&[(name, "")], &[]]).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn encodings_are_never_shared() {
    // Whatever the list says.
    let rig = start(json!({"key_headers": []})).await;
    for name in ["grpc-encoding", "grpc-accept-encoding"] {
        assert_apart(&rig, name, [&[(name, "identity")], &[]]).await;
    }
    let both: Caller = &[("grpc-accept-encoding", "identity,gzip")];
    assert_apart(&rig, "more encodings", [&[("grpc-accept-encoding", "identity")], both]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_outside_the_key_are_no_reason_to_call_twice() {
    let rig = start(json!({})).await;
    for name in ["x-tenant-id", "user-agent", "traceparent", "x-request-id", "x-forwarded-for"] {
        assert_shared(&rig, name, [&[(name, "1")], &[(name, "2")]]).await;
    }
    assert_shared(&rig, "deadline", [&[("grpc-timeout", "20S")], &[("grpc-timeout", "30S")]]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_empty_list_lets_everybody_share_and_warns() {
    let rig = start(json!({"key_headers": []})).await;
    for name in ["authorization", "cookie", "x-tenant-id"] {
        assert_shared(&rig, name, [&[(name, "1")], &[(name, "2")]]).await;
    }
    let log = rig.sidecar.log();
    let warns = |line: &str| line.contains("[warning]") && line.contains("key_headers is empty");
    assert!(log.lines().any(warns), "no warning in\n{log}");
}

/// One call over HTTP/1.1, which keeps the names' case on the wire: `X-Tenant-Id`.
async fn call_in_title_case(rig: &Rig, key: &str, more: HeaderMap) -> u64 {
    let stream = TcpStream::connect(rig.sidecar.addr()).await.unwrap();
    let mut builder = http1::Builder::new();
    builder.title_case_headers(true);
    let (mut sender, connection) = builder.handshake(TokioIo::new(stream)).await.unwrap();
    let connection = tokio::spawn(connection);
    let mut request = Request::post(COMPUTE).body(Full::new(frame(&ask(key)))).unwrap();
    *request.headers_mut() = more;
    request.headers_mut().extend(headers(&[("content-type", "application/grpc"), ("host", "x")]));
    let response = sender.send_request(request).await.unwrap();
    let data = response.into_body().collect().await.unwrap().to_bytes();
    connection.abort();
    decode(&data).serial
}

#[tokio::test(flavor = "multi_thread")]
async fn the_case_of_a_headers_name_does_not_matter() {
    let rig = start(json!({"key_headers": ["X-Tenant-ID"]})).await;
    assert_apart(&rig, "configured", [&[("x-tenant-id", "a")], &[("x-tenant-id", "b")]]).await;
    let sent = async |tenant| call_in_title_case(&rig, "sent", headers(&[("x-tenant-id", tenant)])).await;
    let (a, b) = (sent("a").await, sent("b").await);
    assert_ne!(a, b, "tenants share an answer");
    assert_eq!([a, b], [sent("a").await, sent("b").await], "the same tenant has its own again");
    assert_eq!(rig.backend.calls_by_key()["sent"], 2);
}
