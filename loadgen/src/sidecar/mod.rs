//! Starts the sidecar that `envoy/envoy.yaml` describes, on other ports or with other settings.
//!
//! The shipped file is read, changed in the few places that differ and handed to a real Envoy, so
//! that the demo and every end-to-end test run what users run.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use http::{Method, StatusCode, Uri};
use tempfile::TempDir;
use tokio::net::TcpStream;

use crate::http_ask::ask;

mod config;
mod metrics;

pub use config::{BackendTls, ConfigOptions, FILTER, Identity, ListenerTls, ReplicaAddr, check_settings};
pub use metrics::Metrics;

/// How long Envoy may take to start.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// Where free ports are drawn from, and how often.
const PORTS: std::ops::Range<u16> = 10_000..32_000;
const DRAWS: usize = 100;

/// Starts that may fail because somebody else took a drawn port first.
const ATTEMPTS: usize = 3;

/// How long Envoy may take to stop when asked to, before it is killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// What to start, and how.
pub struct SidecarOptions {
    /// The Envoy binary.
    pub envoy: PathBuf,
    /// What is changed in the shipped configuration. Port 0 takes a free one.
    pub config: ConfigOptions,
    /// Environment variables for Envoy. It gets none of this process's `COLLAPSER_*`.
    pub env: Vec<(String, String)>,
    /// Envoy's worker threads.
    pub concurrency: u32,
    /// Whether readiness is awaited: needs the backend to be there.
    pub wait_for_backend: bool,
}

impl SidecarOptions {
    /// The shipped sidecar in front of `backend`, on free loopback ports, with one worker. Paths are those of
    /// the repository at `root`; `ENVOY`, `COLLAPSER_MODULE` and `COLLAPSER_CONFIG` name another Envoy, module and
    /// configuration.
    pub fn shipped(root: &Path, backend: SocketAddr) -> Self {
        let from_env = |name: &str, default: PathBuf| std::env::var_os(name).map_or(default, PathBuf::from);
        let mut config = ConfigOptions::new(&backend.ip().to_string(), backend.port());
        config.template = from_env("COLLAPSER_CONFIG", root.join("envoy/envoy.yaml"));
        config.module = from_env("COLLAPSER_MODULE", root.join("target/collapser.wasm"));
        for addr in [&mut config.listen, &mut config.metrics, &mut config.admin] {
            *addr = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        }
        Self {
            envoy: from_env("ENVOY", root.join(".tools/envoy")),
            config,
            env: Vec::new(),
            concurrency: 1,
            wait_for_backend: true,
        }
    }

    /// The HTTP gateway of `envoy/gateway.yaml` in front of `backend`, on free loopback ports, with one worker.
    pub fn gateway(root: &Path, backend: SocketAddr) -> Self {
        let mut options = Self::shipped(root, backend);
        options.config.template = root.join("envoy/gateway.yaml");
        options
    }

    /// The front of `envoy/affinity.yaml` before these replicas, on free loopback ports, with one worker.
    pub fn front(root: &Path, replicas: Vec<ReplicaAddr>) -> Self {
        let nowhere = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
        let mut options = Self::shipped(root, nowhere);
        options.config.template = root.join("envoy/affinity.yaml");
        options.config.replicas = replicas;
        options
    }
}

/// A running sidecar. Dropping it kills Envoy.
pub struct Sidecar {
    child: Child,
    dir: TempDir,
    listen: SocketAddr,
    metrics: Uri,
    admin: Uri,
}

impl Sidecar {
    /// Starts Envoy and waits until it serves.
    ///
    /// # Errors
    /// A missing file with its remedy; Envoy's own last words if it stops at once.
    pub async fn start(options: SidecarOptions) -> anyhow::Result<Self> {
        require(&options.envoy, "Envoy", "make envoy (or set ENVOY=/path/to/envoy)")?;
        require(&options.config.module, "the Wasm module", "make wasm")?;
        for _ in 1..ATTEMPTS {
            match Self::attempt(&options).await {
                Err(error) if error.to_string().contains("Address already in use") => (),
                outcome => return outcome,
            }
        }
        Self::attempt(&options).await
    }

    async fn attempt(options: &SidecarOptions) -> anyhow::Result<Self> {
        let mut config = options.config.clone();
        for addr in [&mut config.listen, &mut config.metrics, &mut config.admin] {
            *addr = reserve(*addr)?;
        }
        let dir = tempfile::Builder::new().prefix("collapser-").tempdir()?;
        let file = dir.path().join("envoy.json");
        fs::write(&file, config.render()?)?;
        let child = spawn(options, &file, &dir.path().join("envoy.log"))?;
        let uri = |addr: SocketAddr| format!("http://{addr}").parse::<Uri>();
        let ConfigOptions { listen, metrics, admin, .. } = config;
        let mut sidecar = Self { child, dir, listen, metrics: uri(metrics)?, admin: uri(admin)? };
        sidecar.wait_until_serving(options.wait_for_backend).await?;
        Ok(sidecar)
    }

    /// Where callers connect.
    pub fn addr(&self) -> SocketAddr {
        self.listen
    }

    /// Where it is as a replica: its health is its readiness.
    pub fn replica_addr(&self) -> ReplicaAddr {
        ReplicaAddr { grpc: self.listen, health_port: self.metrics.port_u16() }
    }

    /// [`Self::addr`] as a URI.
    pub fn uri(&self) -> String {
        format!("http://{}", self.listen)
    }

    /// Where `/metrics` is.
    pub fn metrics_url(&self) -> String {
        format!("{}metrics", self.metrics)
    }

    /// Envoy's process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// All that Envoy has logged.
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("envoy.log")).unwrap_or_default()
    }

    /// Whether Envoy still runs.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// The status of a path of the metrics listener, such as `/ready`.
    pub async fn status(&self, path: &str) -> anyhow::Result<StatusCode> {
        Ok(ask(Method::GET, &self.metrics, path).await?.0)
    }

    /// Posts to Envoy's admin interface.
    pub async fn admin(&self, path: &str) -> anyhow::Result<String> {
        let (status, body) = ask(Method::POST, &self.admin, path).await?;
        ensure!(status.is_success(), "{path} on the admin interface: {status}");
        Ok(String::from_utf8_lossy(&body).into_owned())
    }

    /// The metrics now, as Prometheus would scrape them.
    pub async fn metrics(&self) -> anyhow::Result<Metrics> {
        let (status, body) = ask(Method::GET, &self.metrics, "/metrics").await?;
        ensure!(status.is_success(), "/metrics: {status}");
        Ok(Metrics::parse(&String::from_utf8_lossy(&body)))
    }

    /// Stops Envoy as a pod is stopped, with SIGTERM, and waits for it.
    pub fn stop(mut self) -> anyhow::Result<ExitStatus> {
        let pid = self.child.id().to_string();
        Command::new("kill").args(["-TERM", &pid]).status().context("cannot run `kill`")?;
        let deadline = Instant::now() + STOP_TIMEOUT;
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        self.child.kill()?;
        bail!("Envoy did not stop within {STOP_TIMEOUT:?} of SIGTERM and was killed")
    }

    async fn wait_until_serving(&mut self, wait_for_backend: bool) -> anyhow::Result<()> {
        let path = if wait_for_backend { "/ready" } else { "/health" };
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            if let Some(status) = self.child.try_wait()? {
                bail!("Envoy did not start ({status}):\n{}", complaints(&self.log()));
            }
            let answers = self.status(path).await.is_ok_and(|status| status.is_success());
            if answers && TcpStream::connect(self.listen).await.is_ok() {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("Envoy was not ready within {START_TIMEOUT:?}:\n{}", complaints(&self.log()));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Drop for Sidecar {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What Envoy said at level warning or above, or its last lines if nothing.
pub fn complaints(log: &str) -> String {
    let worse = |line: &&str| ["[warning]", "[error]", "[critical]"].iter().any(|level| line.contains(level));
    let complaints: Vec<_> = log.lines().filter(worse).collect();
    if !complaints.is_empty() {
        return complaints.join("\n");
    }
    let lines: Vec<_> = log.lines().collect();
    lines[lines.len().saturating_sub(10)..].join("\n")
}

fn require(path: &Path, what: &str, remedy: &str) -> anyhow::Result<()> {
    ensure!(path.is_file(), "{what} is missing at {}; run: {remedy}", path.display());
    Ok(())
}

/// Ports that this process has drawn. Two Envoys may bind the same one without an error, since Envoy shares ports
/// (SO_REUSEPORT), and each would get some of the other's calls; so no port is drawn twice.
static DRAWN: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());

/// Takes a free port where port 0 is asked for.
fn reserve(addr: SocketAddr) -> anyhow::Result<SocketAddr> {
    match addr.port() {
        0 => Ok(SocketAddr::new(addr.ip(), free_port(addr.ip())?)),
        port => Some(addr)
            .filter(|addr| TcpListener::bind(addr).is_ok())
            .with_context(|| format!("port {port} is in use; stop what listens there, or choose another")),
    }
}

/// A port that is free at `ip` and that this process was not given before. It is drawn at random from below the range
/// from which the system gives ports to clients, or one of those might have it by the time Envoy takes it.
///
/// # Errors
/// If none was found in a hundred draws.
pub fn free_port(ip: IpAddr) -> anyhow::Result<u16> {
    let is_new = |port: &u16| DRAWN.lock().unwrap_or_else(PoisonError::into_inner).insert(*port);
    let is_free = |port: &u16| TcpListener::bind((ip, *port)).is_ok();
    let mut ports = (0..DRAWS).map(|_| rand::random_range(PORTS));
    ports.find(|port| is_new(port) && is_free(port)).with_context(|| format!("no free port on {ip}"))
}

fn spawn(options: &SidecarOptions, config: &Path, log: &Path) -> anyhow::Result<Child> {
    let log = File::create(log)?;
    let mut command = Command::new(&options.envoy);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("COLLAPSER_") || name == "BACKEND_TIMEOUT" {
            command.env_remove(name);
        }
    }
    command
        .arg("-c")
        .arg(config)
        // No shared memory between several on one machine; fast to stop.
        .args(["--use-dynamic-base-id", "--drain-time-s", "1", "--log-level", "info"])
        .args(["--concurrency", &options.concurrency.to_string()])
        .envs(options.env.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .with_context(|| format!("cannot run {}", options.envoy.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complaints_are_picked_from_the_log() {
        assert_eq!(complaints("[1][info] a\n[2][critical] b\n[3][info] c"), "[2][critical] b");
        assert_eq!(complaints("x\ny"), "x\ny");
    }
}
