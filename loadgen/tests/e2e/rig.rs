//! A backend with a sidecar in front of it, and what tests ask of the two.

use std::path::Path;
use std::time::{Duration, Instant};

use collapser_loadgen::backend::{Backend, BackendHandle, BackendOptions};
use collapser_loadgen::load::{self, LoadOptions};
use collapser_loadgen::proto::ComputeRequest;
use collapser_loadgen::proto::demo_client::DemoClient;
use collapser_loadgen::report::Report;
use collapser_loadgen::sidecar::{Metrics, Sidecar, SidecarOptions};
use serde_json::Value;
use tonic::transport::{Channel, Endpoint};

/// How long anything in a test may take to come true.
const PATIENCE: Duration = Duration::from_secs(10);

/// The repository.
pub fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// Demo backend and sidecar.
pub struct Rig {
    pub backend: BackendHandle,
    pub sidecar: Sidecar,
}

impl Rig {
    /// Both, with these settings of the filter and this latency of the backend.
    pub async fn start(settings: Value, latency_ms: u64) -> Self {
        Self::start_with(settings, latency_ms, |_| ()).await
    }

    /// The same, with other changes to how the sidecar starts.
    pub async fn start_with(
        settings: Value,
        latency_ms: u64,
        change: impl FnOnce(&mut SidecarOptions),
    ) -> Self {
        let latency = Duration::from_millis(latency_ms);
        let backend = Backend::start(BackendOptions { latency, ..BackendOptions::default() }).await.unwrap();
        let mut options = SidecarOptions::shipped(root(), backend.grpc_addr());
        options.config.settings = settings;
        change(&mut options);
        let sidecar = Sidecar::start(options).await.unwrap();
        Self { backend, sidecar }
    }

    /// A client on a connection of its own, through the sidecar.
    pub async fn client(&self) -> DemoClient<Channel> {
        let channel = connect(&self.sidecar.uri()).await;
        DemoClient::new(channel.unwrap_or_else(|error| panic!("{error:?}; Envoy: {}", self.sidecar.log())))
    }

    /// A burst of `calls` over `keys` and `connections` through the sidecar.
    pub async fn burst(&self, calls: u64, keys: u64, connections: usize) -> Report {
        let options = LoadOptions {
            backend_url: self.backend.http_uri(),
            keys,
            connections,
            ..LoadOptions::burst(self.sidecar.uri(), calls)
        };
        load::run(options, |_| ()).await.unwrap()
    }

    /// The metrics, once `done` says that what was to be counted has been. Metrics lag a little.
    pub async fn metrics_when(&self, done: impl Fn(&Metrics) -> bool) -> Metrics {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let metrics = self.sidecar.metrics().await.unwrap();
            if done(&metrics) {
                return metrics;
            }
            assert!(Instant::now() < deadline, "metrics never came true: {metrics:#?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits until `requests` are counted and nobody waits, then checks that the metrics add up.
    pub async fn accounts(&self, requests: u64) -> Metrics {
        let metrics = self
            .metrics_when(|m| {
                m.get("collapser_requests_total") >= requests as f64
                    && m.get("collapser_waiting_requests") == 0.0
                    && m.get("collapser_inflight_requests") == 0.0
            })
            .await;
        assert_eq!(metrics.get("collapser_requests_total"), requests as f64, "{metrics:#?}");
        let parts = metrics.get("collapser_backend_calls_total")
            + metrics.get("collapser_collapsed_requests_total")
            + metrics.get("collapser_cache_hits_total")
            + metrics.sum("collapser_bypassed_requests_total")
            + metrics.get("collapser_refused_requests_total");
        assert_eq!(metrics.get("collapser_requests_total"), parts, "{metrics:#?}");
        metrics
    }
}

/// An HTTP/2 connection.
pub async fn channel(uri: &str) -> Channel {
    connect(uri).await.unwrap()
}

async fn connect(uri: &str) -> Result<Channel, tonic::transport::Error> {
    Endpoint::from_shared(uri.to_string()).unwrap().connect().await
}

/// A request for `key`.
pub fn ask(key: &str) -> ComputeRequest {
    ComputeRequest { key: key.to_string(), ..ComputeRequest::default() }
}

/// Waits until `done`.
pub async fn eventually(what: &str, mut done: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done().await {
        assert!(Instant::now() < deadline, "never came true: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
