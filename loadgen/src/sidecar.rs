//! Starts the sidecar that `envoy/envoy.yaml` describes, on other ports or with other settings.
//!
//! The shipped file is read, changed in the few places that differ and handed to a real Envoy, so
//! that the demo and every end-to-end test run what users run.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use http::{Method, StatusCode, Uri};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::http_ask::ask;

/// How long Envoy may take to start.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// How long Envoy may take to stop when asked to, before it is killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// What to start, and how.
pub struct SidecarOptions {
    /// The Envoy binary.
    pub envoy: PathBuf,
    /// The Wasm module.
    pub module: PathBuf,
    /// The configuration to start from.
    pub config: PathBuf,
    /// Where callers connect; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Where `/metrics`, `/health` and `/ready` are served; port 0 takes a free one.
    pub metrics: SocketAddr,
    /// Where the backend listens.
    pub backend: SocketAddr,
    /// The filter's settings, besides `cluster`.
    pub settings: Value,
    /// Environment variables for Envoy. It gets none of this process's `COLLAPSER_*`.
    pub env: Vec<(String, String)>,
    /// Envoy's worker threads.
    pub concurrency: u32,
    /// Any other change to the configuration.
    pub edit: fn(&mut Value),
    /// Whether readiness is awaited: needs the backend to be there.
    pub wait_for_backend: bool,
}

impl SidecarOptions {
    /// The shipped sidecar in front of `backend`, on free loopback ports, with one worker. Paths are those of
    /// the repository at `root`; `ENVOY` and `COLLAPSER_MODULE` name another Envoy and module.
    pub fn shipped(root: &Path, backend: SocketAddr) -> Self {
        let from_env = |name: &str, default: PathBuf| std::env::var_os(name).map_or(default, PathBuf::from);
        let loopback = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        Self {
            envoy: from_env("ENVOY", root.join(".tools/envoy")),
            module: from_env("COLLAPSER_MODULE", root.join("target/collapser.wasm")),
            config: root.join("envoy/envoy.yaml"),
            listen: loopback,
            metrics: loopback,
            backend,
            settings: json!({}),
            env: Vec::new(),
            concurrency: 1,
            edit: |_| (),
            wait_for_backend: true,
        }
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
    pub async fn start(mut options: SidecarOptions) -> anyhow::Result<Self> {
        require(&options.envoy, "Envoy", "make envoy (or set ENVOY=/path/to/envoy)")?;
        require(&options.module, "the Wasm module", "make wasm")?;
        for addr in [&mut options.listen, &mut options.metrics] {
            *addr = reserve(*addr)?;
        }
        let admin = reserve(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
        let dir = tempfile::Builder::new().prefix("collapser-").tempdir()?;
        let config = dir.path().join("envoy.json");
        fs::write(&config, render(&options, admin)?)?;
        let child = spawn(&options, &config, &dir.path().join("envoy.log"))?;
        let uri = |addr: SocketAddr| format!("http://{addr}").parse::<Uri>();
        let mut sidecar =
            Self { child, dir, listen: options.listen, metrics: uri(options.metrics)?, admin: uri(admin)? };
        sidecar.wait_until_serving(options.wait_for_backend).await?;
        Ok(sidecar)
    }

    /// Where callers connect.
    pub fn addr(&self) -> SocketAddr {
        self.listen
    }

    /// The same as a URI.
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
        self.terminate()
    }

    fn terminate(&mut self) -> anyhow::Result<ExitStatus> {
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
            if self.status(path).await.is_ok_and(|status| status.is_success()) {
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

/// Metrics by their name with labels, as in `collapser_errors_total{code="14"}`; a metric without labels is
/// found by its bare name.
#[derive(Clone, Debug, Default)]
pub struct Metrics(BTreeMap<String, f64>);

impl Metrics {
    /// Reads the Prometheus text format.
    pub fn parse(text: &str) -> Self {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let pair = |line: &str| {
            let (name, value) = line.rsplit_once(' ')?;
            Some((name.trim_end_matches("{}").to_string(), value.parse().ok()?))
        };
        Self(lines.filter_map(pair).collect())
    }

    /// The value of a metric; 0 if there is none of that name.
    pub fn get(&self, name: &str) -> f64 {
        self.0.get(name).copied().unwrap_or_default()
    }

    /// The sum over all labels.
    pub fn sum(&self, name: &str) -> f64 {
        let of_name =
            |key: &str| key.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('{'));
        self.0.iter().filter(|(key, _)| of_name(key)).map(|(_, value)| value).sum()
    }

    /// Whether there is a metric of that name.
    pub fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
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

/// Takes a free port where port 0 is asked for.
fn reserve(addr: SocketAddr) -> anyhow::Result<SocketAddr> {
    let listener = TcpListener::bind(addr).with_context(|| format!("cannot listen on {addr}"))?;
    Ok(listener.local_addr()?)
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

/// The configuration that differs from the shipped one as the options say.
fn render(options: &SidecarOptions, admin: SocketAddr) -> anyhow::Result<String> {
    let path = options.config.display();
    let text = fs::read_to_string(&options.config).with_context(|| format!("cannot read {path}"))?;
    let mut config: Value = serde_saphyr::from_str(&text).with_context(|| format!("{path} is no YAML"))?;
    let mut settings = json!({"cluster": "backend"});
    merge(&mut settings, &options.settings);
    let module = fs::canonicalize(&options.module)?;
    for (pointer, value) in [
        ("/admin/address", address(admin)),
        ("/static_resources/listeners/0/address", address(options.listen)),
        ("/static_resources/listeners/1/address", address(options.metrics)),
        (BACKEND, address(options.backend)),
        (ADMIN_CLUSTER, address(admin)),
        (&format!("{FILTER}/configuration/value"), json!(settings.to_string())),
        (&format!("{FILTER}/vm_config/code/local/filename"), json!(module)),
    ] {
        *config.pointer_mut(pointer).with_context(|| format!("{path} has no {pointer}"))? = value;
    }
    (options.edit)(&mut config);
    Ok(config.to_string())
}

/// Where the filter's configuration stands in `envoy.yaml`, as a JSON pointer.
pub const FILTER: &str =
    "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/http_filters/0/typed_config/config";

const BACKEND: &str =
    "/static_resources/clusters/0/load_assignment/endpoints/0/lb_endpoints/0/endpoint/address";

const ADMIN_CLUSTER: &str =
    "/static_resources/clusters/1/load_assignment/endpoints/0/lb_endpoints/0/endpoint/address";

fn address(addr: SocketAddr) -> Value {
    json!({"socket_address": {"address": addr.ip().to_string(), "port_value": addr.port()}})
}

fn merge(into: &mut Value, from: &Value) {
    if let (Some(into), Some(from)) = (into.as_object_mut(), from.as_object()) {
        into.extend(from.iter().map(|(name, value)| (name.clone(), value.clone())));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_read_with_and_without_labels() {
        let metrics =
            Metrics::parse("# TYPE a counter\na{} 3\nb{code=\"1\"} 4\nb{code=\"2\"} 5\nbc{} 1\n\nodd\n");
        assert_eq!(metrics.get("a"), 3.0);
        assert_eq!(metrics.get("b{code=\"2\"}"), 5.0);
        assert_eq!(metrics.sum("b"), 9.0);
        assert!(metrics.has("bc") && !metrics.has("odd"));
    }

    #[test]
    fn complaints_are_picked_from_the_log() {
        assert_eq!(complaints("[1][info] a\n[2][critical] b\n[3][info] c"), "[2][critical] b");
        assert_eq!(complaints("x\ny"), "x\ny");
    }
}
