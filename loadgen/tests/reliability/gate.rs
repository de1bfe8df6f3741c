//! A backend that holds chosen calls until it is told to answer, so that a test knows who waits when.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use collapser_loadgen::payload::payload_for;
use collapser_loadgen::proto::demo_server::{Demo, DemoServer};
use collapser_loadgen::proto::{
    ComputeReply, ComputeRequest, CountReply, CountRequest, EchoMessage, SumReply, SumRequest,
};
use collapser_loadgen::sidecar::{Metrics, Sidecar, SidecarOptions};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status, Streaming};

use crate::health::metrics_within;
use crate::rig::root;

/// How long calls take that are not held.
const LATENCY: Duration = Duration::from_millis(1);

/// How long held calls may gather before anything gives up on them: Envoy, the filter, or the test.
pub const HOLD: Duration = Duration::from_secs(120);

/// The key of the calls that are held until [`Gate::release`] is told this number.
pub fn held(number: u64) -> String {
    format!("held-{number}")
}

struct Service {
    calls: Arc<AtomicU64>,
    released: watch::Receiver<u64>,
}

#[tonic::async_trait]
impl Demo for Service {
    async fn compute(&self, request: Request<ComputeRequest>) -> Result<Response<ComputeReply>, Status> {
        let ComputeRequest { key, payload_bytes, .. } = request.into_inner();
        let serial = 1 + self.calls.fetch_add(1, Relaxed);
        match key.strip_prefix("held-").and_then(|number| number.parse().ok()) {
            Some(number) => {
                // The gate is gone only when the test is over.
                let _ = self.released.clone().wait_for(|released| *released >= number).await;
            }
            None => tokio::time::sleep(LATENCY).await,
        }
        let payload = payload_for(&key, payload_bytes as usize);
        Ok(Response::new(ComputeReply { key, serial, payload }))
    }

    type CountStream = tokio_stream::Empty<Result<CountReply, Status>>;
    async fn count(&self, _: Request<CountRequest>) -> Result<Response<Self::CountStream>, Status> {
        Err(Status::unimplemented("only Compute is served here"))
    }

    async fn sum(&self, _: Request<Streaming<SumRequest>>) -> Result<Response<SumReply>, Status> {
        Err(Status::unimplemented("only Compute is served here"))
    }

    type EchoStream = Streaming<EchoMessage>;
    async fn echo(&self, _: Request<Streaming<EchoMessage>>) -> Result<Response<Self::EchoStream>, Status> {
        Err(Status::unimplemented("only Compute is served here"))
    }
}

/// The backend.
pub struct Gate {
    addr: SocketAddr,
    calls: Arc<AtomicU64>,
    released: watch::Sender<u64>,
    task: JoinHandle<()>,
}

impl Gate {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let (calls, released) = (Arc::new(AtomicU64::new(0)), watch::Sender::new(0));
        let service = Service { calls: Arc::clone(&calls), released: released.subscribe() };
        let server =
            Server::builder().max_concurrent_streams(1_000_000).add_service(DemoServer::new(service));
        let serving = server.serve_with_incoming(TcpListenerStream::new(listener));
        let task = tokio::spawn(async { serving.await.unwrap() });
        Self { addr, calls, released, task }
    }

    /// Answers all calls that are held under this number or a lower one.
    pub fn release(&self, number: u64) {
        self.released.send_replace(number);
    }

    /// Calls that have arrived.
    pub fn calls(&self) -> u64 {
        self.calls.load(Relaxed)
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A waiting request takes some 20 KiB, so the shipped heap limit of 1 GiB turns requests away when 50,000 wait.
fn allow_more_heap(config: &mut Value) {
    let heap = "/overload_manager/resource_monitors/0/typed_config/max_heap_size_bytes";
    *config.pointer_mut(heap).unwrap() = json!(8_u64 << 30);
}

/// That backend with a sidecar in front of it.
pub struct GateRig {
    pub gate: Gate,
    pub sidecar: Sidecar,
}

impl GateRig {
    /// Both, with these settings of the filter, and room for very many calls that are held for long.
    pub async fn start(settings: Value) -> Self {
        Self::start_with(settings, |options| {
            options.config.hold_timeout = Some(HOLD);
            options.config.edit = allow_more_heap;
        })
        .await
    }

    /// Both, with these settings besides `backend_timeout` and no change but this in how the sidecar starts.
    pub async fn start_with(mut settings: Value, change: impl FnOnce(&mut SidecarOptions)) -> Self {
        let gate = Gate::start().await;
        settings["backend_timeout"] = format!("{}s", HOLD.as_secs()).into();
        let mut options = SidecarOptions::shipped(root(), gate.addr);
        options.config.settings = settings;
        change(&mut options);
        let sidecar = Sidecar::start(options).await.unwrap();
        Self { gate, sidecar }
    }

    /// Waits until exactly so many requests wait in the filter.
    pub async fn waiting(&self, count: usize) -> Metrics {
        let what = format!("{count} wait");
        metrics_within(&self.sidecar, HOLD, &what, |m| m.get("collapser_waiting_requests") == count as f64)
            .await
    }
}
