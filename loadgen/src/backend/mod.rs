//! The demo backend: a gRPC service that does what it is told and counts what it
//! was asked, startable in-process, so that a test can compare calls sent with
//! calls that got through.

mod calls;
mod grpc;
mod http;
pub(crate) mod listen;
mod service;

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use ::http::HeaderMap;
use anyhow::{Context as _, ensure};
use tonic::Code;

pub use calls::{CallCounts, SeenRequest, StreamCounts};

use crate::args::metadata_map;
use crate::proto::Metadata;
use calls::State;
use listen::Server;

/// How a demo backend behaves until it is told otherwise.
#[derive(Clone, Debug)]
pub struct BackendOptions {
    /// Where gRPC is served; port 0 takes a free one.
    pub grpc_addr: SocketAddr,
    /// Where `/calls`, `/reset`, `/health` and `/latency` are served; `None` leaves them out.
    pub http_addr: Option<SocketAddr>,
    /// How long a Compute call takes that does not say so itself.
    pub latency: Duration,
    /// Which Compute calls fail that do not say so themselves.
    pub failure: Option<Failure>,
    /// Payload of a Compute reply when the request asks for 0 bytes; at most 63 MiB.
    pub payload_bytes: u32,
    /// Initial metadata of every Compute reply, ahead of what the request asks for.
    pub initial_metadata: Vec<Metadata>,
    /// Trailing metadata of every Compute reply, ahead of what the request asks for.
    pub trailing_metadata: Vec<Metadata>,
}

impl Default for BackendOptions {
    /// Free ports on loopback, no latency, no failures, 16 payload bytes.
    fn default() -> Self {
        let loopback = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        Self {
            grpc_addr: loopback,
            http_addr: Some(loopback),
            latency: Duration::ZERO,
            failure: None,
            payload_bytes: 16,
            initial_metadata: Vec::new(),
            trailing_metadata: Vec::new(),
        }
    }
}

/// A failure that the backend brings about by itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure {
    /// The status that failing calls end with.
    pub code: Code,
    /// Its message, in any script.
    pub message: String,
    /// Which share of the calls fails, from 0.0 to 1.0.
    pub ratio: f64,
}

impl Failure {
    /// Every call fails.
    pub fn always(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), ratio: 1.0 }
    }
}

/// The way to start a demo backend.
pub struct Backend;

impl Backend {
    /// Binds both addresses and serves until the handle is shut down or dropped.
    /// An address in use, or metadata that cannot be sent, is an error.
    pub async fn start(options: BackendOptions) -> anyhow::Result<BackendHandle> {
        if let Some(failure) = &options.failure {
            ensure!(
                (0.0..=1.0).contains(&failure.ratio),
                "the failure ratio is {}; it goes from 0 to 1",
                failure.ratio
            );
        }
        let initial = metadata_map(&options.initial_metadata)
            .map_err(anyhow::Error::msg)
            .context("initial metadata")?;
        let trailing = metadata_map(&options.trailing_metadata)
            .map_err(anyhow::Error::msg)
            .context("trailing metadata")?;

        let state = Arc::new(State::new(&options, initial, trailing));
        let grpc = grpc::start(options.grpc_addr, Arc::clone(&state)).await?;
        let http = match options.http_addr {
            Some(addr) => Some(http::start(addr, Arc::clone(&state))?),
            None => None,
        };
        Ok(BackendHandle { state, grpc, http })
    }
}

/// A running demo backend. Dropping it stops the backend too, a moment later;
/// [`shutdown`](Self::shutdown) waits for it.
pub struct BackendHandle {
    state: Arc<State>,
    grpc: Server,
    http: Option<Server>,
}

impl BackendHandle {
    /// Where gRPC is served.
    pub fn grpc_addr(&self) -> SocketAddr {
        self.grpc.addr()
    }

    /// Where the HTTP side is served, if it is.
    pub fn http_addr(&self) -> Option<SocketAddr> {
        self.http.as_ref().map(Server::addr)
    }

    /// The gRPC address as a URI that a client can connect to.
    pub fn grpc_uri(&self) -> String {
        format!("http://{}", self.grpc_addr())
    }

    /// The HTTP address as a URI, if there is one.
    pub fn http_uri(&self) -> Option<String> {
        self.http_addr().map(|addr| format!("http://{addr}"))
    }

    /// Compute calls that arrived since the start or the last [`reset`](Self::reset).
    pub fn calls(&self) -> u64 {
        self.state.calls()
    }

    /// The same by key. Only the first 100,000 keys are told apart.
    pub fn calls_by_key(&self) -> HashMap<String, u64> {
        self.state.calls_by_key()
    }

    /// Streaming calls that arrived.
    pub fn streams(&self) -> StreamCounts {
        self.state.streams()
    }

    /// Compute calls that have arrived and not ended.
    pub fn in_flight(&self) -> u64 {
        self.state.in_flight()
    }

    /// What the last Compute requests looked like on arrival, oldest first, at most 64.
    pub fn recent_requests(&self) -> Vec<SeenRequest> {
        self.state.recent_requests()
    }

    /// The headers of the last Compute request, without pseudo headers.
    pub fn last_request_headers(&self) -> Option<HeaderMap> {
        self.recent_requests().pop().map(|seen| seen.headers)
    }

    /// Zeroes every counter but `in_flight`, and forgets the recent requests.
    pub fn reset(&self) {
        self.state.reset();
    }

    /// Changes the latency of calls that arrive from now on.
    pub fn set_latency(&self, latency: Duration) {
        self.state.set_latency(latency);
    }

    /// Changes which calls fail from now on; `None` means none.
    pub fn set_failure(&self, failure: Option<Failure>) {
        self.state.set_failure(failure);
    }

    /// Closes the listeners and every connection at once, calls in flight
    /// included. Afterwards the ports refuse, and can be bound again.
    pub async fn shutdown(self) {
        self.grpc.stop().await;
        if let Some(http) = self.http {
            http.stop().await;
        }
    }
}
