//! Two pods: one that does what it is there for, and one that has every trouble there is. What was sent to them is kept as
//! the load generator reports it.

use std::time::Duration;

use collapser_loadgen::backend::{BackendHandle, Failure};
use collapser_loadgen::load::{self, LoadMode, LoadOptions};
use collapser_loadgen::proto::demo_client::DemoClient;
use collapser_loadgen::proto::{CountRequest, EchoMessage, Metadata, SumRequest};
use collapser_loadgen::report::Report;
use collapser_loadgen::sidecar::Sidecar;
use serde_json::json;
use tonic::transport::Channel;
use tonic::{Code, Request};

use crate::rig::{Rig, ask, channel, eventually, root};

async fn run(options: LoadOptions) -> Report {
    load::run(options, |_| ()).await.unwrap()
}

/// The shipped settings, and the shipped module.
pub struct Steady {
    pub rig: Rig,
    pub calls: u64,
    /// Of these, calls that asked to pass.
    pub asked: u64,
    /// What reached the backend of the others.
    pub backend_calls: u64,
    pub slowest_ms: f64,
}

impl Steady {
    pub async fn start() -> Self {
        Self { rig: Rig::start(json!({}), 50).await, calls: 0, asked: 0, backend_calls: 0, slowest_ms: 0.0 }
    }

    /// A burst of identical calls, a steady stream of them, some of which find the reply in the cache, and some that ask
    /// to pass.
    pub async fn load(&mut self) {
        let options = LoadOptions {
            backend_url: self.rig.backend.http_uri(),
            connections: 10,
            mode: LoadMode::Rate { per_second: 200.0, duration: Duration::from_secs(5) },
            ..LoadOptions::burst(self.rig.sidecar.uri(), 1)
        };
        for report in [self.rig.burst(10_000, 1, 100).await, run(options).await] {
            assert!(report.is_clean() && report.reaches_ratio(20.0), "{report}");
            self.calls += report.calls;
            self.backend_calls += report.backend_calls.unwrap();
            self.slowest_ms = self.slowest_ms.max(report.latency_ms.max);
        }
        let to_pass = LoadOptions::burst(self.rig.sidecar.uri(), 500);
        let report = run(LoadOptions { headers: vec![no_store()], ..to_pass }).await;
        assert!(report.is_clean(), "{report}");
        self.asked = report.calls;
        self.calls += report.calls;
    }
}

/// What a caller sends that wants an answer of its own.
fn no_store() -> Metadata {
    Metadata { name: "cache-control".to_owned(), value: "no-store".to_owned(), ..Metadata::default() }
}

/// Little room, a module that can be made to trap, and callers that ask for ever new things.
pub struct Troubled {
    sidecar: Sidecar,
    backend: Option<BackendHandle>,
    pub calls: u64,
    /// Calls that may or may not be counted.
    pub around_death: u64,
    pub failed: u64,
    pub refused: u64,
    pub left: u64,
    pub asked: u64,
    pub excluded: u64,
}

/// More than may wait by chance, on a busy machine.
const MAX_WAITERS: u64 = 500;

impl Troubled {
    pub async fn start() -> Self {
        let module = root().join("target/collapser-trap.wasm");
        assert!(module.is_file(), "{} is missing; run: make wasm-trap", module.display());
        // None of its keys repeats, and all are to be calls of the filter's.
        let settings = json!({
            "pass_after": 0,
            "cache_duration": "10m",
            "max_cache_entries": 100,
            "max_waiters": MAX_WAITERS,
            "methods": ["/collapser.demo.v1.Demo/*", "!/collapser.demo.v1.Demo/Sum"],
        });
        let rig = Rig::start_with(settings, 0, |options| options.config.module = module).await;
        Self {
            sidecar: rig.sidecar,
            backend: Some(rig.backend),
            calls: 0,
            around_death: 0,
            failed: 0,
            refused: 0,
            left: 0,
            asked: 0,
            excluded: 0,
        }
    }

    pub fn metrics_url(&self) -> String {
        self.sidecar.metrics_url()
    }

    /// Calls for that many keys, none of them asked for before.
    fn distinct(&self, prefix: &str, mode: LoadMode) -> LoadOptions {
        LoadOptions {
            keys: 1_000_000,
            key_prefix: format!("{prefix}-"),
            mode,
            ..LoadOptions::burst(self.sidecar.uri(), 1)
        }
    }

    async fn client(&self) -> DemoClient<Channel> {
        DemoClient::new(channel(&self.sidecar.uri()).await)
    }

    pub async fn load(&mut self) {
        self.fill_the_cache().await;
        self.fail().await;
        self.ask_to_pass().await;
        self.refuse().await;
        self.leave().await;
        self.stream().await;
        self.die().await;
    }

    /// More keys than there is room for, while some calls take longer than two scrapes are apart.
    async fn fill_the_cache(&mut self) {
        let seconds = Duration::from_secs;
        let many = self.distinct("many", LoadMode::Rate { per_second: 200.0, duration: seconds(5) });
        let slow = LoadOptions { latency_ms: 7_000, ..self.distinct("slow", LoadMode::Burst { calls: 20 }) };
        let (many, slow) = tokio::join!(run(many), run(slow));
        assert!(many.is_clean() && slow.is_clean(), "{many}{slow}");
        self.calls += many.calls + slow.calls;
    }

    async fn fail(&mut self) {
        let backend = self.backend.as_ref().unwrap();
        backend.set_failure(Some(Failure::always(Code::Unavailable, "failing as told")));
        let report =
            run(self
                .distinct("failing", LoadMode::Rate { per_second: 200.0, duration: Duration::from_secs(1) }))
            .await;
        backend.set_failure(None);
        assert_eq!(report.errors["UNAVAILABLE"].count, report.calls, "{report}");
        self.calls += report.calls;
        self.failed = report.failed;
    }

    async fn ask_to_pass(&mut self) {
        let to_pass = self.distinct("asked", LoadMode::Burst { calls: 30 });
        let report = run(LoadOptions { headers: vec![no_store()], ..to_pass }).await;
        assert!(report.is_clean(), "{report}");
        self.calls += report.calls;
        self.asked = report.calls;
    }

    async fn refuse(&mut self) {
        let crowd = LoadMode::Burst { calls: 3 * MAX_WAITERS };
        let report = run(LoadOptions { latency_ms: 3_000, ..self.distinct("crowd", crowd) }).await;
        self.calls += report.calls;
        self.refused = report.errors["RESOURCE_EXHAUSTED"].count;
        assert_eq!((report.ok, self.refused), (MAX_WAITERS, 2 * MAX_WAITERS), "{report}");
    }

    async fn leave(&mut self) {
        let timeout = Some(Duration::from_millis(200));
        let impatient = self.distinct("impatient", LoadMode::Burst { calls: 10 });
        let report = run(LoadOptions { latency_ms: 2_000, timeout, ..impatient }).await;
        assert_eq!(report.failed, report.calls, "{report}");
        self.calls += report.calls;
        self.left = report.failed;
    }

    async fn stream(&mut self) {
        let mut client = self.client().await;
        for count in 3..6 {
            let mut replies =
                client.count(CountRequest { count, ..CountRequest::default() }).await.unwrap().into_inner();
            while replies.message().await.unwrap().is_some() {}
        }
        let messages = (0..3).map(|index| EchoMessage { index, ..EchoMessage::default() });
        let mut echo = client.echo(tokio_stream::iter(messages)).await.unwrap().into_inner();
        while echo.message().await.unwrap().is_some() {}
        client.sum(tokio_stream::iter([SumRequest { value: 1 }])).await.unwrap();
        self.calls += 5;
        self.excluded = 1;
    }

    /// The VM dies while it holds nothing, and another takes over.
    async fn die(&mut self) {
        // What a VM has counted since it last told Envoy dies with it.
        tokio::time::sleep(Duration::from_secs(2)).await;
        let mut client = self.client().await;
        let mut request = Request::new(ask("trap"));
        request.metadata_mut().insert("x-collapser-trap", "1".parse().unwrap());
        client.compute(request).await.unwrap_err();
        let mut attempts = 0;
        eventually("another VM answers", async || {
            attempts += 1;
            client.compute(ask(&format!("after-{attempts}"))).await.is_ok()
        })
        .await;
        self.around_death = attempts + 1;
    }

    pub async fn stop_backend(&mut self) {
        self.backend.take().unwrap().shutdown().await;
    }
}
