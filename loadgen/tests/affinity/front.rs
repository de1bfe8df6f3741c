//! The front before upstreams of the test's own, and the loads that are sent through it.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use collapser_loadgen::fleet::{self, Replica};
use collapser_loadgen::load::{self, LoadOptions};
use collapser_loadgen::report::Report;
use collapser_loadgen::sidecar::{ReplicaAddr, Sidecar, SidecarOptions};
use http::{Request, StatusCode};
use serde_json::{Value, json};
use tokio::net::TcpStream;

use crate::raw::{Act, Answer, Upstream};
use crate::rig::root;

const CLUSTER: &str = "/static_resources/clusters/0";
const MANAGER: &str = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config";

/// Leaves replicas unchecked, which then count as healthy.
pub fn without_checks(config: &mut Value) {
    config.pointer_mut(CLUSTER).unwrap().as_object_mut().unwrap().remove("health_checks").unwrap();
}

/// The same, and leaves it to the filter to remove what clients send.
pub fn without_early_removal(config: &mut Value) {
    without_checks(config);
    let manager = config.pointer_mut(MANAGER).unwrap().as_object_mut().unwrap();
    manager.remove("early_header_mutation_extensions").unwrap();
}

/// Bounds the calls in flight at 1.2 times the mean.
pub fn with_tight_bound(config: &mut Value) {
    without_checks(config);
    let factor = format!("{CLUSTER}/common_lb_config/consistent_hashing_lb_config/hash_balance_factor");
    *config.pointer_mut(&factor).unwrap() = json!(120);
}

/// Upstreams that answer each request for "k" at once, and the front before them.
pub struct RawFront {
    pub upstreams: Vec<Upstream>,
    pub front: Sidecar,
}

impl RawFront {
    /// With these settings of the filter.
    pub async fn start(count: usize, settings: Value, edit: fn(&mut Value)) -> Self {
        Self::start_with(count, |options| {
            options.config.settings = settings;
            options.config.edit = edit;
        })
        .await
    }

    /// With other changes to how the front starts.
    pub async fn start_with(count: usize, change: impl FnOnce(&mut SidecarOptions)) -> Self {
        let mut upstreams = Vec::new();
        for _ in 0..count {
            let upstream = Upstream::start(Act::Answer(Answer::compute("k"))).await;
            upstream.release();
            upstreams.push(upstream);
        }
        let addr = |upstream: &Upstream| ReplicaAddr { grpc: upstream.addr(), health_port: None };
        let mut options = SidecarOptions::front(root(), upstreams.iter().map(addr).collect());
        options.config.edit = without_checks;
        change(&mut options);
        Self { upstreams, front: Sidecar::start(options).await.unwrap() }
    }

    pub fn addr(&self) -> SocketAddr {
        self.front.addr()
    }

    /// Requests that have come, by upstream.
    pub fn calls(&self) -> Vec<usize> {
        self.upstreams.iter().map(Upstream::calls).collect()
    }
}

/// Sends a request that has headers only, on a connection of its own. Returns the status.
pub async fn send_headers(addr: SocketAddr, request: Request<()>) -> StatusCode {
    let socket = TcpStream::connect(addr).await.unwrap();
    let (requests, connection) = h2::client::handshake(socket).await.unwrap();
    // What goes wrong with it shows in the request.
    tokio::spawn(async { drop(connection.await) });
    let (response, _) = requests.ready().await.unwrap().send_request(request, true).unwrap();
    response.await.unwrap().status()
}

/// Backends without sidecars.
pub async fn plain(count: usize, latency: Duration) -> Vec<Replica> {
    let mut replicas = Vec::new();
    for _ in 0..count {
        replicas.push(Replica::plain(latency).await.unwrap());
    }
    replicas
}

/// A burst of `calls` over `keys` through the front; every call must be answered rightly.
pub async fn send(front: &Sidecar, calls: u64, keys: u64) -> Report {
    let report = load::run(burst(front, calls, keys), |_| ()).await.unwrap();
    assert!(report.is_clean(), "{report}");
    report
}

/// The options of such a burst.
pub fn burst(front: &Sidecar, calls: u64, keys: u64) -> LoadOptions {
    LoadOptions { keys, connections: 10, ..LoadOptions::burst(front.uri(), calls) }
}

/// The one replica that was called for each key.
pub fn homes(replicas: &[Replica]) -> BTreeMap<String, usize> {
    let one = |(key, owners): (String, Vec<(usize, u64)>)| {
        assert_eq!(owners.len(), 1, "{key} was computed by several replicas: {owners:?}");
        (key, owners[0].0)
    };
    fleet::owners(replicas).into_iter().map(one).collect()
}
