//! A demo HTTP backend: pages that take as long as a slow database, answered as their URL asks and
//! counted, startable in-process, so that a test can compare requests sent with queries made.
//!
//! `/page/<anything>` is a page; [`Ask`] says what its query string may hold. Beside the pages, on
//! the same port, there are `GET /calls`, `POST /reset`, `GET /health` and `POST /latency?ms=N`.

mod ask;
mod page;
mod serve;
mod state;

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;

pub use ask::Ask;
pub use page::Page;
pub use state::{PageCounts, SeenPage};

use crate::backend::listen::Server;
use state::State;

/// How a demo HTTP backend behaves until it is told otherwise.
#[derive(Clone, Copy, Debug)]
pub struct HttpBackendOptions {
    /// Where HTTP/1.1 and HTTP/2 without TLS are served; port 0 takes a free one.
    pub addr: SocketAddr,
    /// How long a query takes that does not say so itself.
    pub latency: Duration,
}

impl Default for HttpBackendOptions {
    /// A free port on loopback, no latency.
    fn default() -> Self {
        Self { addr: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), latency: Duration::ZERO }
    }
}

/// The way to start a demo HTTP backend.
pub struct HttpBackend;

impl HttpBackend {
    /// Binds the address and serves until the handle is stopped or dropped.
    ///
    /// # Errors
    /// If the address is in use.
    pub fn start(options: HttpBackendOptions) -> anyhow::Result<HttpBackendHandle> {
        let state = Arc::new(State::new(options.latency));
        let server = serve::start(options.addr, Arc::clone(&state))?;
        Ok(HttpBackendHandle { addr: server.addr(), server: Some(server), state })
    }
}

/// A demo HTTP backend. Dropping it stops it too, a moment later; [`stop`](Self::stop) waits for it.
pub struct HttpBackendHandle {
    addr: SocketAddr,
    /// `None` while stopped.
    server: Option<Server>,
    state: Arc<State>,
}

impl HttpBackendHandle {
    /// Where it serves, also while stopped.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// [`Self::addr`] as a URI.
    pub fn uri(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// Requests for pages that arrived since the start or the last [`reset`](Self::reset).
    pub fn calls(&self) -> u64 {
        self.state.calls()
    }

    /// The same by path and query. Only the first 100,000 of these are told apart.
    pub fn calls_by_page(&self) -> HashMap<String, u64> {
        self.state.calls_by_page()
    }

    /// Requests for pages that have arrived and not been answered.
    pub fn in_flight(&self) -> u64 {
        self.state.in_flight()
    }

    /// What the last requests for pages looked like on arrival, oldest first, at most 64.
    pub fn recent_requests(&self) -> Vec<SeenPage> {
        self.state.recent()
    }

    /// Zeroes every counter but `in_flight`, and forgets the recent requests.
    pub fn reset(&self) {
        self.state.reset();
    }

    /// Changes the latency of queries that arrive from now on.
    pub fn set_latency(&self, latency: Duration) {
        self.state.set_latency(latency);
    }

    /// Has every page answer as this query string asks, and not as its own does, from now on; `None`
    /// ends that. So a page can fail whose URL, and with it the filter's key, stays the same.
    ///
    /// # Errors
    /// If the query string asks for what there is not.
    pub fn set_answer(&self, query: Option<&str>) -> anyhow::Result<()> {
        let ask = query.map(Ask::parse).transpose().map_err(anyhow::Error::msg)?;
        self.state.set_answer(ask);
        Ok(())
    }

    /// Closes the listener and every connection at once, requests in flight included. Afterwards
    /// the port refuses. Counters stay.
    pub async fn stop(&mut self) {
        if let Some(server) = self.server.take() {
            server.stop().await;
        }
    }

    /// Serves again, on the same port, after [`stop`](Self::stop).
    ///
    /// # Errors
    /// If somebody else has taken the port meanwhile.
    pub fn start_again(&mut self) -> anyhow::Result<()> {
        if self.server.is_none() {
            let server = serve::start(self.addr, Arc::clone(&self.state)).context("starting again")?;
            self.server = Some(server);
        }
        Ok(())
    }
}
