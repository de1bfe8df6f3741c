//! Podman, and the pod that it plays.

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use collapser_loadgen::http_ask::ask;
use collapser_loadgen::load::{self, LoadOptions};
use collapser_loadgen::proto::ComputeRequest;
use collapser_loadgen::proto::demo_client::DemoClient;
use collapser_loadgen::report::Report;
use collapser_loadgen::sidecar::Metrics;
use http::{Method, StatusCode, Uri};
use tonic::transport::{Channel, Endpoint};

use crate::manifests::Manifests;

/// How long anything in a test may take to come true.
const PATIENCE: Duration = Duration::from_secs(20);

/// What containers that tests start are marked with, so that they are found and removed even if a test is killed.
const LABEL: &str = "collapser-test";

/// Where `make test-pod` has put the rendered manifests.
pub fn work() -> PathBuf {
    let work = std::env::var_os("COLLAPSER_POD_MANIFESTS");
    work.expect("the pod's tests need what `make test-pod` prepares; run that").into()
}

/// Runs podman with these arguments.
pub fn podman(arguments: &[&str]) -> Output {
    Command::new("podman").args(arguments).stdin(Stdio::null()).output().expect("podman runs")
}

/// What podman prints, for commands that have to succeed.
pub fn podman_says(arguments: &[&str]) -> String {
    let output = podman(arguments);
    assert!(output.status.success(), "podman {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// Runs an image as the pod does, with no right that it does not need, and waits for its end.
pub fn run_locked_down(image: &str, options: &[&str], arguments: &[&str]) -> Output {
    let locked = ["run", "--rm", "--pull=never", "--read-only", "--read-only-tmpfs=false", "--cap-drop=all"];
    let marked = ["--security-opt=no-new-privileges", "--label", LABEL];
    podman(&[&locked[..], &marked, options, &[image], arguments].concat())
}

/// A pod that runs until it is dropped.
pub struct Pod {
    pub manifests: Manifests,
    /// Its name.
    name: String,
    /// Its address, which the host can reach.
    pub address: String,
}

impl Pod {
    /// Plays the demo and waits until the sidecar is ready.
    pub async fn start() -> Self {
        let file = work().join("podman.yaml");
        // Before anything can fail, so that whatever was started is removed.
        let mut pod = Self { manifests: Manifests::read(), name: String::new(), address: String::new() };
        podman_says(&["kube", "play", file.to_str().unwrap()]);
        let selector = "label=app.kubernetes.io/name=collapser-demo";
        let names = podman_says(&["pod", "ps", "--filter", selector, "--format", "{{.Name}}"]);
        assert_eq!(names.lines().count(), 1, "{names}");
        pod.name = names;
        let infra = podman_says(&["pod", "inspect", &pod.name, "--format", "{{.InfraContainerID}}"]);
        let networks = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}";
        pod.address = podman_says(&["inspect", &infra, "--format", networks]);
        pod.wait_for("readiness", StatusCode::OK).await;
        pod
    }

    /// Podman's name of a container of the pod.
    pub fn container(&self, name: &str) -> String {
        format!("{}-{name}", self.name)
    }

    /// A field of a container, as podman inspects it.
    pub fn inspect(&self, container: &str, field: &str) -> String {
        podman_says(&["inspect", &self.container(container), "--format", &format!("{{{{{field}}}}}")])
    }

    /// `http://` with the pod's address and this port.
    pub fn uri(&self, port: u16) -> String {
        format!("http://{}:{port}", self.address)
    }

    /// Where callers connect: what the Service's port leads to.
    pub fn grpc(&self) -> String {
        self.uri(self.manifests.service_target("collapser-demo", "grpc"))
    }

    /// The backend's counters.
    pub fn control(&self) -> String {
        self.uri(self.manifests.service_target("collapser-demo-control", "control"))
    }

    /// What the kubelet would be told by a probe of the sidecar; `None` if there is no answer.
    pub async fn probe(&self, kind: &str) -> Option<StatusCode> {
        let (port, path) = self.manifests.probe("collapser", kind);
        let server: Uri = self.uri(port).parse().unwrap();
        ask(Method::GET, &server, &path).await.ok().map(|(status, _)| status)
    }

    /// Waits until a probe of the sidecar gives this status.
    pub async fn wait_for(&self, kind: &str, status: StatusCode) {
        eventually(&format!("{kind} is {status}"), async || self.probe(kind).await == Some(status)).await;
    }

    /// What Prometheus would scrape, where the pod's annotations say so.
    pub async fn metrics(&self) -> Metrics {
        let (port, path) = self.manifests.scrape();
        let (status, body) = ask(Method::GET, &self.uri(port).parse().unwrap(), &path).await.unwrap();
        assert_eq!(status, StatusCode::OK);
        Metrics::parse(std::str::from_utf8(&body).unwrap())
    }

    /// A client on a connection of its own, through the sidecar.
    pub async fn client(&self) -> DemoClient<Channel> {
        let endpoint = Endpoint::from_shared(self.grpc()).unwrap();
        DemoClient::new(endpoint.connect().await.unwrap())
    }

    /// A burst of identical calls, and how many of them reached the backend.
    pub async fn burst(&self, calls: u64) -> Report {
        let options = LoadOptions {
            backend_url: Some(self.control()),
            reset_backend: true,
            connections: 20,
            ..LoadOptions::burst(self.grpc(), calls)
        };
        load::run(options, |_| ()).await.unwrap()
    }

    /// All that a container has written.
    pub fn logs(&self, container: &str) -> String {
        let output = podman(&["logs", &self.container(container)]);
        [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap()).concat()
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        if std::thread::panicking() && !self.name.is_empty() {
            let logs = self.logs("collapser");
            let from = logs.lines().count().saturating_sub(15);
            let tail: Vec<_> = logs.lines().skip(from).collect();
            eprintln!("the sidecar's last lines:\n{}", tail.join("\n"));
        }
        let file = work().join("podman.yaml");
        podman(&["kube", "down", file.to_str().unwrap()]);
        podman(&["pod", "rm", "--force", "--time", "0", &self.name]);
    }
}

/// A request for `key` that takes so long.
pub fn request(key: &str, latency: Duration) -> ComputeRequest {
    let latency_ms = u32::try_from(latency.as_millis()).unwrap();
    ComputeRequest { key: key.to_owned(), latency_ms, ..ComputeRequest::default() }
}

/// Waits until `done`.
pub async fn eventually(what: &str, mut done: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done().await {
        assert!(Instant::now() < deadline, "never came true: {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
