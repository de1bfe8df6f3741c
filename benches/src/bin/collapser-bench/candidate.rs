//! What is compared: Envoy in several configurations, and whatever else is given.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use collapser_loadgen::sidecar::{Sidecar, SidecarOptions, free_port};
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Value, json};
use tempfile::{NamedTempFile, TempDir};

use crate::wire;

/// How long something other than Envoy may take to start.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// One of those compared.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// Its name in tables.
    pub name: String,
    /// What it is.
    pub kind: Kind,
}

/// What a candidate is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The shipped configuration without the filter and what is there for it: a route to the backend.
    Plain,
    /// The same with an answer of Envoy's own in place of the route: nothing in Envoy that answers costs less.
    Direct,
    /// Plain, but a filter of Envoy's own holds every request: what waiting costs Envoy itself.
    Held,
    /// The same with the body slot, which is Envoy's own too.
    HeldWithSlot,
    /// The shipped configuration with this module.
    Filter(PathBuf),
    /// The same, but each of Envoy's workers by itself.
    FilterOfWorker(PathBuf),
    /// A command that serves `LISTEN_PORT` and forwards to `BACKEND_ADDRESS`.
    Peer(String),
}

/// What a candidate is to do.
pub struct Setup<'a> {
    /// The repository.
    pub root: &'a Path,
    /// The backend.
    pub backend: SocketAddr,
    /// The filter's settings.
    pub settings: &'a Value,
    /// Envoy's workers.
    pub concurrency: u32,
    /// Size of a reply's message.
    pub reply_bytes: usize,
}

/// A candidate that runs, until it is dropped.
pub enum Running {
    /// Envoy.
    Envoy(Box<Sidecar>, #[expect(dead_code, reason = "Envoy reads files there")] TempDir),
    /// Something else.
    Peer(Peer),
}

impl Candidate {
    /// The filter under the name `name`.
    pub fn filter(name: &str, module: PathBuf) -> Self {
        Self { name: name.to_owned(), kind: Kind::Filter(module) }
    }

    /// Whether it keeps replies.
    pub fn caches(&self) -> bool {
        matches!(self.kind, Kind::Filter(_) | Kind::FilterOfWorker(_) | Kind::Peer(_))
    }

    /// Content type of requests to it.
    pub fn content_type(&self) -> &'static str {
        if self.kind == Kind::Direct { wire::NOT_GRPC } else { wire::GRPC }
    }

    /// Starts it and waits until it serves.
    pub async fn start(&self, setup: &Setup<'_>) -> anyhow::Result<Running> {
        let started = match &self.kind {
            Kind::Peer(command) => Peer::start(command, setup).await.map(Running::Peer),
            _ => self.envoy(setup).await,
        };
        started.with_context(|| format!("candidate {}", self.name))
    }

    async fn envoy(&self, setup: &Setup<'_>) -> anyhow::Result<Running> {
        let mut options = SidecarOptions::shipped(setup.root, setup.backend);
        let dir = tempfile::Builder::new().prefix("collapser-bench-").tempdir()?;
        options.concurrency = setup.concurrency;
        // Held requests of some loads wait for longer than callers would.
        options.config.hold_timeout = Some(Duration::from_secs(120));
        match &self.kind {
            Kind::Filter(module) | Kind::FilterOfWorker(module) => {
                options.config.module.clone_from(module);
                options.config.settings = setup.settings.clone();
                if let Kind::FilterOfWorker(_) = self.kind {
                    options.config.settings["scope"] = json!("worker");
                }
                options.config.edit = patient;
            }
            Kind::Held => options.config.edit = holding,
            Kind::HeldWithSlot => options.config.edit = holding_with_slot,
            _ => options.config.edit = without_filters,
        }
        if self.kind == Kind::Direct {
            let template = answering_itself(&options.config.template, setup.reply_bytes, dir.path())?;
            options.config.template = template;
        }
        Ok(Running::Envoy(Box::new(Sidecar::start(options).await?), dir))
    }
}

impl Running {
    /// Where callers connect.
    pub fn addr(&self) -> SocketAddr {
        match self {
            Self::Envoy(sidecar, _) => sidecar.addr(),
            Self::Peer(peer) => SocketAddr::from((Ipv4Addr::LOCALHOST, peer.port)),
        }
    }

    /// Its process; there may be children.
    pub fn pid(&self) -> u32 {
        match self {
            Self::Envoy(sidecar, _) => sidecar.pid(),
            Self::Peer(peer) => peer.child.id(),
        }
    }

    /// What it complained about, if that is known.
    pub fn complaints(&self) -> String {
        match self {
            Self::Envoy(sidecar, _) => collapser_loadgen::sidecar::complaints(&sidecar.log()),
            Self::Peer(peer) => peer.said(),
        }
    }
}

const MANAGER: &str = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config";

/// A backend that shares its core with tens of thousands of callers may take longer than the shipped second to accept a
/// connection, and so many calls at once may come near the shipped limit of the heap.
fn patient(config: &mut Value) {
    for (pointer, value) in [
        ("/static_resources/clusters/0/connect_timeout", json!("30s")),
        ("/overload_manager/resource_monitors/0/typed_config/max_heap_size_bytes", json!(8_u64 << 30)),
    ] {
        if let Some(place) = config.pointer_mut(pointer) {
            *place = value;
        }
    }
}

/// Takes out the filter and whatever is there for its sake alone, so that what remains is plain proxying.
fn without_filters(config: &mut Value) {
    leave_filters(config, &["router"]);
}

/// The same, but for these filters.
fn leave_filters(config: &mut Value, kept: &[&str]) {
    patient(config);
    let manager = config.pointer_mut(MANAGER).and_then(Value::as_object_mut);
    let Some(manager) = manager else { return };
    manager.remove("early_header_mutation_extensions");
    if let Some(filters) = manager.get_mut("http_filters").and_then(Value::as_array_mut) {
        filters.retain(|filter| kept.iter().any(|kept| filter["name"] == *kept));
    }
    if let Some(routes) = manager.get_mut("route_config").and_then(Value::as_object_mut) {
        routes.remove("response_headers_to_remove");
        let list = routes.get_mut("virtual_hosts").and_then(|hosts| hosts.pointer_mut("/0/routes"));
        if let Some(list) = list.and_then(Value::as_array_mut) {
            list.retain(|route| route["match"].get("headers").is_none());
        }
    }
}

/// Holds every request for longer than anybody looks.
fn holding(config: &mut Value) {
    without_filters(config);
    hold(config);
}

fn holding_with_slot(config: &mut Value) {
    leave_filters(config, &["body_slot", "router"]);
    hold(config);
}

fn hold(config: &mut Value) {
    let filters = config.pointer_mut(&format!("{MANAGER}/http_filters")).and_then(Value::as_array_mut);
    let Some(filters) = filters else { return };
    filters.insert(
        0,
        json!({"name": "fault", "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.fault.v3.HTTPFault",
            "delay": {"fixed_delay": "300s", "percentage": {"numerator": 100}},
        }}),
    );
}

/// A template like the one given, whose every route answers the reply's bytes itself.
fn answering_itself(template: &Path, reply_bytes: usize, dir: &Path) -> anyhow::Result<PathBuf> {
    let text = fs::read_to_string(template)?;
    let mut config: Value = serde_saphyr::from_str(&text)?;
    let body = dir.join("body");
    fs::write(&body, wire::reply(&wire::request(0), reply_bytes))?;
    let routes = config.pointer_mut(&format!("{MANAGER}/route_config")).and_then(Value::as_object_mut);
    let routes = routes.with_context(|| format!("{} has no routes", template.display()))?;
    routes.insert("max_direct_response_body_size_bytes".to_owned(), json!(wire::framed(reply_bytes)));
    let content_type = json!({"key": "content-type", "value": wire::GRPC});
    routes["virtual_hosts"][0]["routes"] = json!([{
        "match": {"prefix": "/"},
        "direct_response": {"status": 200, "body": {"filename": body}},
        "response_headers_to_add": [{"header": content_type, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}],
    }]);
    let path = dir.join("direct.json");
    fs::write(&path, config.to_string())?;
    Ok(path)
}

/// Something else than Envoy, with all that it starts.
pub struct Peer {
    child: Child,
    port: u16,
    log: NamedTempFile,
}

impl Peer {
    async fn start(command: &str, setup: &Setup<'_>) -> anyhow::Result<Self> {
        use std::os::unix::process::CommandExt as _;
        let loopback = Ipv4Addr::LOCALHOST.into();
        let (port, metrics) = (free_port(loopback)?, free_port(loopback)?);
        let mut shell = Command::new("sh");
        shell.args(["-c", command]).process_group(0).stdin(Stdio::null());
        let log = NamedTempFile::new()?;
        shell.stdout(log.as_file().try_clone()?).stderr(log.as_file().try_clone()?);
        shell.env("LISTEN_PORT", port.to_string());
        shell.env("METRICS_PORT", metrics.to_string());
        shell.env("BACKEND_ADDRESS", setup.backend.to_string());
        // The same settings as the filter's, should it know them.
        for (name, value) in setup.settings.as_object().into_iter().flatten() {
            if let Some(value) = value.as_str() {
                let prefix = if name == "backend_timeout" { "" } else { "COLLAPSER_" };
                shell.env(format!("{prefix}{}", name.to_uppercase()), value);
            }
        }
        let mut peer = Self { child: shell.spawn().context("cannot run sh")?, port, log };
        let deadline = Instant::now() + START_TIMEOUT;
        while tokio::net::TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.is_err() {
            if let Some(status) = peer.child.try_wait()? {
                bail!("`{command}` ended ({status}) without listening on its LISTEN_PORT:\n{}", peer.said());
            }
            ensure!(
                Instant::now() < deadline,
                "`{command}` does not listen on its LISTEN_PORT, {port}:\n{}",
                peer.said()
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(peer)
    }

    /// The last of what it wrote.
    fn said(&self) -> String {
        let text = fs::read(self.log.path()).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<_> = text.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Fails only if it has ended already.
        if let Some(group) = Pid::from_raw(self.child.id() as i32) {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.child.wait();
    }
}
