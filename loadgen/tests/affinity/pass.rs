//! What has no key passes the front as it passes the sidecar, and goes to any replica.

use std::time::Duration;

use collapser_loadgen::fleet::{self, Replica};
use collapser_loadgen::payload::payload_for;
use collapser_loadgen::proto::demo_client::DemoClient;
use collapser_loadgen::proto::{CountRequest, EchoMessage, SumRequest};
use collapser_loadgen::sidecar::{Metrics, Sidecar, SidecarOptions};
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;

use crate::front::{RawFront, plain, send, without_checks};
use crate::raw::{RawClient, headers};
use crate::rig::{ask, channel, eventually, root};

/// How long anything may take that would otherwise take for ever.
const PATIENCE: Duration = Duration::from_secs(20);

/// Waits until so many requests are counted; they add up.
async fn accounts(front: &Sidecar, requests: u64) -> Metrics {
    eventually("all are counted", async || {
        front.metrics().await.unwrap().get("collapser_requests_total") >= requests as f64
    })
    .await;
    let metrics = front.metrics().await.unwrap();
    assert_eq!(metrics.get("collapser_requests_total"), requests as f64, "{metrics:#?}");
    let parts =
        metrics.get("collapser_keyed_requests_total") + metrics.sum("collapser_bypassed_requests_total");
    assert_eq!(parts, requests as f64, "{metrics:#?}");
    metrics
}

async fn client(front: &Sidecar) -> DemoClient<Channel> {
    DemoClient::new(channel(&front.uri()).await)
}

async fn fleet_of(count: usize) -> (Vec<Replica>, Sidecar) {
    let replicas = fleet::replicas(root(), count, Duration::ZERO, &json!({})).await.unwrap();
    let front = fleet::front(root(), &replicas, |_| ()).await.unwrap();
    (replicas, front)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_passes() {
    let (replicas, front) = fleet_of(2).await;
    let (says, messages) = mpsc::channel(1);
    let mut client = client(&front).await;
    let conversation = async {
        let message = |index: u64| EchoMessage { index, payload: payload_for("echo", 100) };
        // Each is sent when the one before has come back. The headers of the response come with the first.
        says.send(message(0)).await.unwrap();
        let mut echoes = client.echo(ReceiverStream::new(messages)).await.unwrap().into_inner();
        for index in 0..20 {
            assert_eq!(echoes.message().await.unwrap().unwrap(), message(index));
            says.send(message(index + 1)).await.unwrap();
        }
    };
    timeout(PATIENCE, conversation).await.expect("the conversation hangs");
    assert_eq!(replicas.iter().map(|replica| replica.backend.streams().echo).sum::<u64>(), 1);
    let metrics = accounts(&front, 1).await;
    assert_eq!(metrics.get("collapser_bypassed_requests_total{reason=\"streaming\"}"), 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_in_one_direction_pass() {
    let (_replicas, front) = fleet_of(2).await;
    let mut client = client(&front).await;
    let numbers = tokio_stream::iter((1..=100).map(|value| SumRequest { value }));
    assert_eq!(client.sum(numbers).await.unwrap().get_ref().sum, 5_050);
    // A server's stream begins like a unary call: it has a key.
    let request = CountRequest { count: 50, payload_bytes: 1_000, interval_ms: 0 };
    let mut messages = client.count(request).await.unwrap().into_inner();
    let mut count = 0;
    while let Some(reply) = messages.message().await.unwrap() {
        assert_eq!(reply.index, count);
        count += 1;
    }
    assert_eq!(count, 50);
    let metrics = accounts(&front, 2).await;
    assert_eq!(metrics.get("collapser_keyed_requests_total"), 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_passes_goes_to_any_replica_and_what_has_a_key_to_one() {
    let rig = RawFront::start(4, json!({}), without_checks).await;
    let client = RawClient::connect(rig.addr()).await;
    for _ in 0..20 {
        client.compute(&ask("k"), headers(&[])).await.unwrap();
    }
    assert_eq!(rig.calls().iter().filter(|calls| **calls > 0).count(), 1, "{:?}", rig.calls());
    for _ in 0..40 {
        client.compute(&ask("k"), headers(&[("content-type", "application/json")])).await.unwrap();
    }
    assert!(rig.calls().iter().all(|calls| *calls > 0), "{:?}", rig.calls());
    let metrics = accounts(&rig.front, 60).await;
    assert_eq!(metrics.get("collapser_bypassed_requests_total{reason=\"not_grpc\"}"), 40.0);
    assert!(rig.upstreams.iter().all(|upstream| !upstream.last_headers().contains_key("x-collapser-pass")));
}

/// Holding is limited; computing is not.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_may_take_longer_than_it_may_be_held() {
    let replicas = plain(1, Duration::from_secs(3)).await;
    let mut options = SidecarOptions::front(root(), vec![replicas[0].addr()]);
    options.config.edit = without_checks;
    options.config.hold_timeout = Some(Duration::from_secs(1));
    let front = Sidecar::start(options).await.unwrap();
    send(&front, 1, 1).await;
}

/// Each worker of the front has the same ring.
#[tokio::test(flavor = "multi_thread")]
async fn several_workers_agree() {
    let rig = RawFront::start_with(4, |options| options.concurrency = 2).await;
    for _ in 0..20 {
        let client = RawClient::connect(rig.addr()).await;
        client.compute(&ask("k"), headers(&[])).await.unwrap();
    }
    assert_eq!(rig.calls().iter().filter(|calls| **calls > 0).count(), 1, "{:?}", rig.calls());
}
