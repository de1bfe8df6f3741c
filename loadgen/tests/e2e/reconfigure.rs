//! Settings change while Envoy serves: the listener is replaced, no call fails, and what comes next follows the new
//! settings. A wrong setting is refused, and the old ones stay.
//!
//! A connection belongs to the settings under which it was made. After a change Envoy tells callers to leave (GOAWAY);
//! until they do, what is sent on an old connection is served by the old settings. A call that is in flight longer than
//! Envoy's `--drain-time-s` after a change is cut off.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use collapser_loadgen::proto::ComputeRequest;
use collapser_loadgen::proto::demo_client::DemoClient;
use collapser_loadgen::sidecar::{FILTER, Metrics};
use http::HeaderMap;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tonic::{Code, Status};

use crate::raw::{RawClient, headers};
use crate::rig::{Rig, ask, channel, eventually};

/// Callers that are there all the time.
const CALLERS: u64 = 4;

/// How long Envoy gives callers to leave a connection of replaced settings.
const DRAIN_SECONDS: u32 = 4;

/// Envoy counts listeners and what became of them.
const UPDATED: &str = "envoy_listener_manager_lds_update_success";
const REJECTED: &str = "envoy_listener_manager_lds_update_rejected";

/// The folder for the listener of the Envoy that serves on this port. The hook that moves it there is told nothing else.
fn folder(port: u64) -> PathBuf {
    std::env::temp_dir().join(format!("collapser-listener-{}-{port}", std::process::id()))
}

/// Moves the callers' listener into a file that Envoy watches.
fn watch_listener(config: &mut Value) {
    let mut listener = config["static_resources"]["listeners"].as_array_mut().unwrap().remove(0);
    let folder = folder(listener["address"]["socket_address"]["port_value"].as_u64().unwrap());
    fs::create_dir_all(&folder).unwrap();
    listener["@type"] = json!("type.googleapis.com/envoy.config.listener.v3.Listener");
    write(&folder, &json!({"resources": [listener]}));
    let source = json!({"path": folder.join("lds.json"), "watched_directory": {"path": folder}});
    config["dynamic_resources"] =
        json!({"lds_config": {"path_config_source": source, "resource_api_version": "V3"}});
}

/// Puts a file in place at once; Envoy never sees half of it.
fn write(folder: &Path, listeners: &Value) {
    let next = folder.join("next.json");
    fs::write(&next, listeners.to_string()).unwrap();
    fs::rename(next, folder.join("lds.json")).unwrap();
}

/// Envoy, but for how long it drains: the harness wants it to stop fast, and here callers need time to leave.
fn patient(envoy: &Path, wrapper: &Path) -> PathBuf {
    let script = format!(
        r#"#!/bin/sh
for arg; do
  shift
  [ "$last" != --drain-time-s ] || arg={DRAIN_SECONDS}
  set -- "$@" "$arg"
  last=$arg
done
exec '{}' "$@"
"#,
        envoy.display()
    );
    fs::write(wrapper, script).unwrap();
    fs::set_permissions(wrapper, fs::Permissions::from_mode(0o700)).unwrap();
    wrapper.to_owned()
}

/// A sidecar whose settings can be changed, and callers that it must not fail.
struct Changing {
    rig: Rig,
    folder: PathBuf,
    callers: JoinSet<u64>,
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicU64>,
}

impl Changing {
    async fn start(settings: Value) -> Self {
        let wrapper = tempfile::NamedTempFile::new().unwrap().into_temp_path();
        let rig = Rig::start_with(settings, 0, |options| {
            options.config.edit = watch_listener;
            options.envoy = patient(&options.envoy, &wrapper);
        })
        .await;
        let addr = rig.sidecar.addr();
        eventually("the listener is there", async || tokio::net::TcpStream::connect(addr).await.is_ok())
            .await;
        let (stop, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let caller = |n| call_on(rig.sidecar.uri(), n, Arc::clone(&stop), Arc::clone(&answered));
        let callers = (0..CALLERS).map(caller).collect();
        let folder = folder(addr.port().into());
        Self { rig, folder, callers, stop, answered }
    }

    fn addr(&self) -> SocketAddr {
        self.rig.sidecar.addr()
    }

    async fn metric(&self, name: &str) -> f64 {
        self.rig.sidecar.metrics().await.unwrap().get(name)
    }

    /// Replaces the filter's settings and waits until Envoy has said what it thinks of them.
    async fn change(&self, settings: Value, verdict: &str) {
        let before = self.metric(verdict).await;
        let text = fs::read_to_string(self.folder.join("lds.json")).unwrap();
        let mut listeners: Value = serde_json::from_str(&text).unwrap();
        let filter = FILTER.replace("/static_resources/listeners", "/resources");
        let place = listeners.pointer_mut(&format!("{filter}/configuration/value")).unwrap();
        let mut all = json!({"cluster": "backend"});
        all.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
        *place = json!(all.to_string());
        write(&self.folder, &listeners);
        eventually(verdict, async || self.metric(verdict).await > before).await;
    }

    /// The callers go on for a while.
    async fn go_on(&self) {
        let before = self.answered.load(Ordering::Relaxed);
        eventually("the callers are answered", async || self.answered.load(Ordering::Relaxed) > before + 50)
            .await;
    }

    /// Calls of two requests that reach the backend, on a new connection: same key, these headers.
    async fn calls_of_two(&self, key: &str, more: [HeaderMap; 2]) -> u64 {
        let client = RawClient::connect(self.addr()).await;
        for more in more {
            let answer = client.compute(&ask(key), more).await.unwrap();
            assert_eq!(answer.code(), Some("0"), "{answer:?}");
        }
        self.rig.backend.calls_by_key()[key]
    }

    /// The callers stop, none of them having seen a failure, and nothing is left in the gauges.
    async fn end(mut self) -> Metrics {
        self.go_on().await;
        self.stop.store(true, Ordering::Relaxed);
        assert!(self.rig.sidecar.is_running());
        let calls: u64 = std::mem::take(&mut self.callers).join_all().await.into_iter().sum();
        assert!(calls > 100, "{calls} calls");
        self.rig
            .metrics_when(|m| {
                ["waiting_requests", "inflight_requests"]
                    .iter()
                    .all(|name| m.get(&format!("collapser_{name}")) == 0.0)
            })
            .await
    }
}

/// Calls one after the other, on one channel, until told to stop.
async fn call_on(uri: String, caller: u64, stop: Arc<AtomicBool>, answered: Arc<AtomicU64>) -> u64 {
    let mut client = DemoClient::new(channel(&uri).await);
    let mut calls = 0;
    while !stop.load(Ordering::Relaxed) {
        let key = format!("load {}", calls % 7);
        let latency_ms = 20 + (calls * 37 + caller * 61) as u32 % 180;
        let request = ComputeRequest { latency_ms, ..ask(&key) };
        let reply = match client.compute(request).await {
            Err(status) if was_not_sent(&status) => continue,
            told => told.unwrap_or_else(|status| panic!("call {calls}: {status:?}")),
        };
        assert_eq!(reply.into_inner().key, key);
        answered.fetch_add(1, Ordering::Relaxed);
        calls += 1;
    }
    calls
}

/// Whether the connection was told to go away between two calls and this one never left the caller: gRPC libraries
/// repeat such a call by themselves, tonic does not.
fn was_not_sent(status: &Status) -> bool {
    status.code() == Code::Cancelled && std::error::Error::source(status).is_some()
}

fn none() -> [HeaderMap; 2] {
    [HeaderMap::new(), HeaderMap::new()]
}

fn users() -> [HeaderMap; 2] {
    ["a", "b"].map(|user| headers(&[("x-user", user)]))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_cache_duration_holds_from_then_on() {
    let changing = Changing::start(json!({"cache_duration": "0"})).await;
    assert_eq!(changing.calls_of_two("before", none()).await, 2);
    changing.go_on().await;
    changing.change(json!({"cache_duration": "10m"}), UPDATED).await;
    eventually("new connections find the cache", async || {
        let key = format!("after {}", rand::random::<u32>());
        changing.calls_of_two(&key, none()).await == 1
    })
    .await;
    changing.change(json!({"cache_duration": "0"}), UPDATED).await;
    eventually("and find it gone", async || {
        let key = format!("again {}", rand::random::<u32>());
        changing.calls_of_two(&key, none()).await == 2
    })
    .await;
    // What the replaced settings had cached is gone from the gauge.
    eventually("nothing is cached", async || changing.metric("collapser_cached_results").await == 0.0).await;
    changing.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn new_key_headers_and_methods_hold_from_then_on() {
    let changing = Changing::start(json!({"cache_duration": "10m"})).await;
    assert_eq!(changing.calls_of_two("before", users()).await, 1, "nothing tells the users apart");
    changing.change(json!({"cache_duration": "10m", "key_headers": ["x-user"]}), UPDATED).await;
    eventually("users are told apart", async || {
        let key = format!("after {}", rand::random::<u32>());
        changing.calls_of_two(&key, users()).await == 2
    })
    .await;
    changing.go_on().await;
    changing
        .change(json!({"cache_duration": "10m", "methods": ["!/collapser.demo.v1.Demo/Compute"]}), UPDATED)
        .await;
    eventually("the method passes", async || {
        let key = format!("passes {}", rand::random::<u32>());
        changing.calls_of_two(&key, none()).await == 2
    })
    .await;
    eventually("nothing is cached", async || changing.metric("collapser_cached_results").await == 0.0).await;
    changing.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_backend_timeout_holds_from_then_on() {
    let changing = Changing::start(json!({"cache_duration": "300ms"})).await;
    changing.go_on().await;
    changing.change(json!({"cache_duration": "300ms", "backend_timeout": "500ms"}), UPDATED).await;
    eventually("a slow call is cut off", async || {
        let client = RawClient::connect(changing.addr()).await;
        let request = ComputeRequest { latency_ms: 1_000, ..ask("slow") };
        let answer = client.compute(&request, HeaderMap::new()).await.unwrap();
        answer.code() == Some("4")
    })
    .await;
    let metrics = changing.end().await;
    assert!(metrics.get("collapser_errors_total{code=\"4\"}") > 0.0, "{metrics:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_new_setting_is_refused_and_the_old_ones_stay() {
    let changing = Changing::start(json!({"cache_duration": "10m"})).await;
    for wrong in [json!({"cache_duration": "soon"}), json!({"cache_ttl": "1s"})] {
        changing.change(wrong, REJECTED).await;
        changing.go_on().await;
        let key = format!("old {}", rand::random::<u32>());
        assert_eq!(changing.calls_of_two(&key, none()).await, 1, "the cache is as before");
    }
    assert!(changing.rig.sidecar.log().contains("soon"), "the log does not name the wrong value");
    // A right one after it is taken.
    changing.change(json!({"cache_duration": "0"}), UPDATED).await;
    eventually("the cache is off", async || {
        let key = format!("new {}", rand::random::<u32>());
        changing.calls_of_two(&key, none()).await == 2
    })
    .await;
    changing.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_that_outlast_the_drain_are_cut_off_and_leave_nothing_behind() {
    let changing = Changing::start(json!({"cache_duration": "0", "backend_timeout": "30s"})).await;
    let client = RawClient::connect(changing.addr()).await;
    let calls: JoinSet<_> = (0..40)
        .map(|n| {
            let request = ComputeRequest { latency_ms: 7_000, ..ask(&format!("long {}", n % 4)) };
            client.compute(&request, HeaderMap::new())
        })
        .collect();
    eventually("they are in flight", async || changing.metric("collapser_waiting_requests").await >= 40.0)
        .await;
    changing.change(json!({"cache_duration": "10m", "backend_timeout": "30s"}), UPDATED).await;
    for told in calls.join_all().await {
        assert!(told.is_err() || told.is_ok_and(|answer| answer.code().is_some()));
    }
    // The backend answers flights whose filter has gone.
    eventually("the backend has answered all", async || changing.rig.backend.in_flight() < CALLERS).await;
    changing.end().await;
}

impl Drop for Changing {
    fn drop(&mut self) {
        // Left behind, it would only take place.
        let _ = fs::remove_dir_all(&self.folder);
    }
}
