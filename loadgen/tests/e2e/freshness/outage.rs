//! The backend is stopped, and comes back.

use std::net::SocketAddr;

use collapser_loadgen::backend::{Backend, BackendOptions};
use collapser_loadgen::load::{self, LoadOptions};
use collapser_loadgen::report::Report;
use collapser_loadgen::sidecar::Sidecar;
use serde_json::json;

use super::scene::{Scene, THRONG, WORKERS, pass_ms};
use crate::rig::{Rig, eventually};

const ANSWERS: &str = "collapser_stale_answers_total{reason=\"error\"}";

/// So many calls at once, all for one key.
async fn burst(sidecar: &Sidecar, calls: u64) -> Report {
    let options = LoadOptions { connections: THRONG, ..LoadOptions::burst(sidecar.uri(), calls) };
    load::run(options, |_| ()).await.unwrap()
}

/// Starts the backend again where it was.
async fn start_again(addr: SocketAddr) -> collapser_loadgen::backend::BackendHandle {
    Backend::start(BackendOptions { grpc_addr: addr, ..BackendOptions::default() }).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_callers_do_not_notice_that_the_backend_is_gone() {
    const CALLERS: u64 = 10_000;
    for workers in WORKERS {
        let settings = json!({"cache_duration": "1s", "stale_if_error": "8s"});
        let Scene(Rig { backend, sidecar }) = Scene::start(settings, 20, workers).await;
        let addr = backend.grpc_addr();
        assert!(burst(&sidecar, THRONG as u64).await.is_clean());
        pass_ms(1_200).await;
        backend.shutdown().await;

        let report = burst(&sidecar, CALLERS).await;
        assert!(report.is_clean(), "{workers} workers: {report:?}");
        eventually("all were given what is stale", async || {
            sidecar.metrics().await.unwrap().get(ANSWERS) == CALLERS as f64
        })
        .await;

        pass_ms(8_000).await;
        let report = burst(&sidecar, 100).await;
        assert_eq!((report.failed, report.errors["UNAVAILABLE"].count), (100, 100), "{report:?}");

        let backend = start_again(addr).await;
        // Envoy looks for it from time to time only.
        eventually("the backend is found", async || burst(&sidecar, 1).await.is_clean()).await;
        pass_ms(1_200).await;
        let before = backend.calls();
        assert!(burst(&sidecar, 100).await.is_clean());
        assert!(backend.calls() > before);
        let metrics = sidecar.metrics().await.unwrap();
        assert_eq!(metrics.get(ANSWERS), CALLERS as f64, "these were fresh");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_short_outage_costs_nobody_anything() {
    let settings = json!({"cache_duration": "100ms", "stale_if_error": "1m"});
    let Scene(Rig { backend, sidecar }) = Scene::start(settings, 0, 1).await;
    let addr = backend.grpc_addr();
    assert!(burst(&sidecar, 1).await.is_clean());
    backend.shutdown().await;
    pass_ms(200).await;
    for _ in 0..20 {
        let report = burst(&sidecar, 20).await;
        assert!(report.is_clean(), "{report:?}");
    }
    let backend = start_again(addr).await;
    eventually("the backend is asked again", async || {
        let report = burst(&sidecar, 20).await;
        assert!(report.is_clean(), "{report:?}");
        backend.calls() > 0
    })
    .await;
}
