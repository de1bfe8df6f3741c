//! Several replicas, each a demo backend with its own sidecar, and the Envoy of `envoy/affinity.yaml` in front of them:
//! what the demo and the tests of key affinity have in common.

mod loss;

use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::ensure;
use serde_json::{Value, json};

pub use loss::{Loss, lose_one};

use crate::backend::{Backend, BackendHandle, BackendOptions};
use crate::sidecar::{ReplicaAddr, Sidecar, SidecarOptions};

/// How long health checks may take to agree.
const PATIENCE: Duration = Duration::from_secs(15);

/// Changes are told to Envoy's workers together, every so often: `update_merge_window`, and a little more.
const MERGE_WINDOW: Duration = Duration::from_millis(150);

/// How often what is awaited is looked for.
const POLL: Duration = Duration::from_millis(20);

/// A demo backend, with or without a sidecar in front of it.
pub struct Replica {
    /// The backend.
    pub backend: BackendHandle,
    /// The sidecar; `None` if it was killed, or never was.
    pub sidecar: Option<Sidecar>,
}

impl Replica {
    /// A backend with the shipped sidecar, with these settings of the filter.
    pub async fn start(root: &Path, latency: Duration, settings: Value) -> anyhow::Result<Self> {
        let mut replica = Self::plain(latency).await?;
        let mut options = SidecarOptions::shipped(root, replica.backend.grpc_addr());
        options.config.settings = settings;
        replica.sidecar = Some(Sidecar::start(options).await?);
        Ok(replica)
    }

    /// A backend without a sidecar, for what is about the front alone.
    pub async fn plain(latency: Duration) -> anyhow::Result<Self> {
        let backend = Backend::start(BackendOptions { latency, ..BackendOptions::default() }).await?;
        Ok(Self { backend, sidecar: None })
    }

    /// Where the front finds it.
    pub fn addr(&self) -> ReplicaAddr {
        let plain = ReplicaAddr { grpc: self.backend.grpc_addr(), health_port: None };
        self.sidecar.as_ref().map_or(plain, Sidecar::replica_addr)
    }

    /// Kills the sidecar, as a node that loses power does: without a word, all calls in flight with it. The backend stays, to
    /// be asked what it was called for.
    pub fn kill(&mut self) {
        self.sidecar = None;
    }

    /// Callers that wait in its sidecar now, as its metrics tell it, at most 100 ms late.
    pub async fn waiting(&self) -> anyhow::Result<u64> {
        match &self.sidecar {
            Some(sidecar) => Ok(sidecar.metrics().await?.get("collapser_waiting_requests") as u64),
            None => Ok(0),
        }
    }
}

/// `count` replicas with sidecars.
pub async fn replicas(
    root: &Path,
    count: usize,
    latency: Duration,
    settings: &Value,
) -> anyhow::Result<Vec<Replica>> {
    let mut replicas = Vec::with_capacity(count);
    for _ in 0..count {
        replicas.push(Replica::start(root, latency, settings.clone()).await?);
    }
    Ok(replicas)
}

/// A front before these replicas, once all of them are healthy. `edit` changes its configuration.
pub async fn front(root: &Path, replicas: &[Replica], edit: fn(&mut Value)) -> anyhow::Result<Sidecar> {
    let mut options = SidecarOptions::front(root, replicas.iter().map(Replica::addr).collect());
    options.config.edit = edit;
    let front = Sidecar::start(options).await?;
    wait_for_healthy(&front, replicas.len()).await?;
    Ok(front)
}

/// Waits until the front takes just so many replicas for healthy.
pub async fn wait_for_healthy(front: &Sidecar, count: usize) -> anyhow::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let healthy = cluster_metric(front, "membership_healthy").await?;
        if healthy == count as f64 {
            tokio::time::sleep(MERGE_WINDOW).await;
            return Ok(());
        }
        ensure!(
            Instant::now() < deadline,
            "{healthy} replicas are healthy, not {count}, after {PATIENCE:?}; Envoy: {}",
            front.log()
        );
        tokio::time::sleep(POLL).await;
    }
}

/// One of Envoy's own metrics of the cluster of replicas, such as `upstream_rq_retry`.
pub async fn cluster_metric(front: &Sidecar, name: &str) -> anyhow::Result<f64> {
    let metrics = front.metrics().await?;
    Ok(metrics.get(&format!("envoy_cluster_{name}{{envoy_cluster_name=\"replicas\"}}")))
}

/// Has the front retry what a dead replica had begun, too. The comment at `retry_policy` says for whom.
pub fn retry_resets(config: &mut Value) {
    const POLICY: &str = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/route_config/virtual_hosts/0/routes/0/route/retry_policy/retry_on";
    if let Some(retry_on) = config.pointer_mut(POLICY) {
        *retry_on = json!("connect-failure,refused-stream,reset-before-request,reset");
    }
}

/// Forgets what the backends were called for.
pub fn reset(replicas: &[Replica]) {
    replicas.iter().for_each(|replica| replica.backend.reset());
}

/// Calls that reached the backends, in all.
pub fn calls(replicas: &[Replica]) -> u64 {
    replicas.iter().map(|replica| replica.backend.calls()).sum()
}

/// Which replica was called for each key, by number, and how often. A key that several were called for has several entries.
pub fn owners(replicas: &[Replica]) -> HashMap<String, Vec<(usize, u64)>> {
    let mut owners: HashMap<String, Vec<(usize, u64)>> = HashMap::new();
    for (number, replica) in replicas.iter().enumerate() {
        for (key, calls) in replica.backend.calls_by_key() {
            owners.entry(key).or_default().push((number, calls));
        }
    }
    owners
}
