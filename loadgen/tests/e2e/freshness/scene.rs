//! Callers who see how their answers came about.

use std::collections::BTreeSet;
use std::time::Duration;

use collapser_loadgen::backend::Failure;
use collapser_loadgen::proto::{ComputeReply, ComputeRequest, Metadata};
use prost::Message as _;
use serde_json::{Value, json};
use tokio::time::sleep;
use tonic::Code;

use crate::raw::{Answer, RawClient, headers};
use crate::rig::{Rig, ask, eventually};

/// One worker, and several, all of which share.
pub const WORKERS: [u32; 2] = [1, 4];

/// So many callers with connections of their own are not all one worker's.
pub const CROWD: usize = 10;

/// With so many connections, none of the workers is without one.
pub const THRONG: usize = 64;

/// Request metadata.
pub type Pairs<'a> = &'a [(&'a str, &'a str)];

/// What a caller was told.
#[derive(Clone, Debug)]
pub struct Told(pub Answer);

impl Told {
    /// From which of the backend's calls the reply came.
    pub fn serial(&self) -> u64 {
        assert_eq!(self.code(), "0", "{self:?}");
        ComputeReply::decode(&self.0.data[5..]).unwrap().serial
    }

    /// The gRPC status.
    pub fn code(&self) -> &str {
        self.0.code().unwrap_or_default()
    }

    /// How the filter says that the answer came about; nothing if it does not say.
    pub fn status(&self) -> &str {
        let last = self.0.headers.get_all("cache-status").iter().next_back();
        last.map_or("", |value| value.to_str().unwrap())
    }

    /// The age of a reply that is older than it should be.
    pub fn age(&self) -> Option<u64> {
        self.0.headers.get("age").map(|age| age.to_str().unwrap().parse().unwrap())
    }

    /// Whether it was cached, and good.
    pub fn is_hit(&self) -> bool {
        self.status().starts_with("collapser; hit; ttl=") && !self.is_stale("") && self.age().is_none()
    }

    /// Whether it was cached, and given out after its time for this reason.
    pub fn is_stale(&self, reason: &str) -> bool {
        self.status().starts_with("collapser; hit; ttl=-")
            && self.status().contains(&format!("; detail={reason}"))
            && self.age().is_some()
    }
}

/// From how many of the backend's calls these came.
pub fn calls_of(told: &[Told]) -> usize {
    told.iter().map(Told::serial).collect::<BTreeSet<_>>().len()
}

/// A request whose reply comes with this `cache-control`.
pub fn saying(key: &str, cache_control: &str) -> ComputeRequest {
    let (name, value) = ("cache-control".to_string(), cache_control.to_string());
    ComputeRequest { initial_metadata: vec![Metadata { name, value, ..Metadata::default() }], ..ask(key) }
}

/// Every call fails as that of a backend in trouble.
pub fn trouble() -> Option<Failure> {
    Some(Failure::always(Code::Unavailable, "in trouble"))
}

/// Settings that have answers tell how they came about.
pub fn telling(mut settings: Value) -> Value {
    settings["cache_status"] = json!(true);
    settings
}

/// Waits for so many milliseconds.
pub async fn pass_ms(millis: u64) {
    sleep(Duration::from_millis(millis)).await;
}

/// Demo backend and sidecar, whose answers tell how they came about.
pub struct Scene(pub Rig);

impl Scene {
    /// Both, with these settings, this latency of the backend, and so many workers.
    pub async fn start(settings: Value, latency_ms: u64, workers: u32) -> Self {
        let settings = telling(settings);
        Self(Rig::start_with(settings, latency_ms, |options| options.concurrency = workers).await)
    }

    /// Calls that have reached the backend.
    pub fn calls(&self) -> u64 {
        self.0.backend.calls()
    }

    /// A connection of its own.
    pub async fn client(&self) -> RawClient {
        RawClient::connect(self.0.sidecar.addr()).await
    }

    /// One call on a connection of its own.
    pub async fn one(&self, request: &ComputeRequest, metadata: Pairs<'_>) -> Told {
        let client = self.client().await;
        Told(client.compute(request, headers(metadata)).await.unwrap())
    }

    /// One call for a key without anything special.
    pub async fn get(&self, key: &str) -> Told {
        self.one(&ask(key), &[]).await
    }

    /// Has each worker have the first reply for a key: what is stale answers only where it was had.
    pub async fn spread(&self, key: &str) {
        let mut clients = Vec::new();
        for _ in 0..THRONG {
            clients.push(self.client().await);
        }
        let calls: Vec<_> = clients.iter().map(|client| client.compute(&ask(key), headers(&[]))).collect();
        for call in calls.into_iter().map(tokio::spawn).collect::<Vec<_>>() {
            let told = Told(call.await.unwrap().unwrap());
            assert_eq!(told.serial(), 1, "the machine is too slow for this test");
        }
    }

    /// The same call by several, each on a connection of its own: the first one leads a flight, and the others come
    /// while it is in the air. The leader's answer comes first.
    pub async fn together(&self, request: &ComputeRequest, metadata: Pairs<'_>, count: usize) -> Vec<Told> {
        let before = self.calls();
        let mut clients = Vec::new();
        for _ in 0..count {
            clients.push(self.client().await);
        }
        let call = |client: &RawClient| tokio::spawn(client.compute(request, headers(metadata)));
        let mut asked = vec![call(&clients[0])];
        eventually("the leader's call", async || self.calls() > before).await;
        asked.extend(clients[1..].iter().map(call));
        let mut told = Vec::new();
        for one in asked {
            told.push(Told(one.await.unwrap().unwrap()));
        }
        told
    }

    /// Waits until a metric has this value.
    pub async fn metric(&self, name: &str, value: usize) {
        self.0.metrics_when(|metrics| metrics.get(name) == value as f64).await;
    }
}
