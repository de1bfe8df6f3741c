//! Where the host cannot pause on headers: a filter behind this one holds requests (`hold: filter`), as in Istio.

use std::time::Duration;

use collapser_loadgen::payload::payload_for;
use collapser_loadgen::proto::{ComputeRequest, EchoMessage};
use collapser_loadgen::sidecar::SidecarOptions;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;

use crate::bypass::ping_pong;
use crate::rig::{Rig, ask, root};

/// How long anything may take that would otherwise take for ever.
const PATIENCE: Duration = Duration::from_secs(20);

const LUA: &str = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/http_filters/4/typed_config/default_source_code/inline_string";

async fn inbound(settings: Value, latency_ms: u64, edit: fn(&mut Value)) -> Rig {
    let configure = |options: &mut SidecarOptions| {
        options.config.template = root().join("envoy/istio-inbound.yaml");
        options.config.edit = edit;
    };
    Rig::start_with(settings, latency_ms, configure).await
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_another_filter_holds_are_collapsed() {
    let rig = inbound(json!({"cache_duration": "0"}), 300, |_| ()).await;
    let report = rig.burst(1_000, 1, 10).await;
    assert!(report.is_clean(), "{report:?}");
    // Nothing of those that waited went upstream, not even headers.
    assert_eq!(rig.backend.calls(), 1);
    let metrics = rig.accounts(1_000).await;
    assert_eq!(metrics.get("envoy_cluster_upstream_rq_total{envoy_cluster_name=\"inbound|50051||\"}"), 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_that_are_excluded_by_name_pass() {
    let rig = inbound(json!({}), 0, |_| ()).await;
    let mut client = rig.client().await;
    timeout(PATIENCE, ping_pong(&mut client, 100)).await.expect("the conversation stalls");
    assert_eq!(rig.accounts(1).await.get("collapser_bypassed_requests_total{reason=\"method\"}"), 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn where_no_filter_holds_calls_pass_and_the_log_says_so() {
    let rig = inbound(json!({}), 0, |config| {
        *config.pointer_mut(LUA).expect("a Lua filter") = json!(
            "function envoy_on_response(handle) if handle:headers():get('x-collapser-slot') then handle:body(true) end end"
        );
    })
    .await;
    let client = rig.client().await;
    for _ in 0..3 {
        let reply = client.clone().compute(ask("k")).await.unwrap();
        assert_eq!(reply.into_inner().key, "k");
    }
    assert_eq!(rig.backend.calls(), 3);
    assert_eq!(rig.accounts(3).await.get("collapser_bypassed_requests_total{reason=\"not_held\"}"), 3.0);
    assert_eq!(rig.sidecar.log().matches("no filter after this one holds requests").count(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_asks_for_the_hold_itself_changes_nothing() {
    let rig = inbound(json!({"methods": ["!/collapser.demo.v1.Demo/*"]}), 0, |_| ()).await;
    let (send, messages) = mpsc::channel(1);
    let first = EchoMessage { index: 7, payload: payload_for("7", 100) };
    send.send(first.clone()).await.unwrap();
    let mut request = tonic::Request::new(ReceiverStream::new(messages));
    let mut unary = tonic::Request::new(ask("k"));
    for metadata in [request.metadata_mut(), unary.metadata_mut()] {
        metadata.insert("x-collapser-hold", "1".parse().unwrap());
    }
    // Were it believed, this stream would be held until its end, which comes only after the answer.
    let mut client = rig.client().await;
    let answer = timeout(PATIENCE, client.echo(request)).await.expect("the stream is held").unwrap();
    assert_eq!(answer.into_inner().message().await.unwrap(), Some(first));
    client.compute(unary).await.unwrap();
    assert!(!rig.backend.last_request_headers().unwrap().contains_key("x-collapser-hold"));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_passes_late_may_take_its_time() {
    let rig = inbound(json!({"max_request_bytes": "1KiB"}), 3_000, |config| {
        let manager =
            config.pointer_mut("/static_resources/listeners/0/filter_chains/0/filters/0/typed_config");
        manager.expect("a connection manager")["stream_idle_timeout"] = json!("1s");
    })
    .await;
    let large = ComputeRequest { padding: vec![7; 2_000].into(), ..ask("k") };
    rig.client().await.compute(large).await.unwrap();
    assert_eq!(rig.accounts(1).await.get("collapser_bypassed_requests_total{reason=\"too_large\"}"), 1.0);
}
