//! The sidecar as a pod runs it: told to stop, it fails readiness first, takes calls for a while, lets calls end, and goes.
//! Told something wrong, it says what.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use collapser_loadgen::backend::{Backend, BackendHandle, BackendOptions};
use collapser_loadgen::http_ask::ask as ask_http;
use collapser_loadgen::proto::demo_client::DemoClient;
use collapser_loadgen::proto::{ComputeReply, ComputeRequest};
use collapser_loadgen::sidecar;
use http::{Method, StatusCode, Uri};
use serde_json::Value;
use tokio::process::{Child, Command};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tonic::Status;

use crate::rig::{ask, channel, eventually, root};

/// What a busy machine may add to any time.
const SLACK: Duration = Duration::from_secs(3);

/// A port that is free on all addresses.
pub fn free_port() -> u16 {
    sidecar::free_port(Ipv4Addr::UNSPECIFIED.into()).unwrap()
}

/// The program with nothing of this process's environment that it would read.
fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_collapser-sidecar"));
    let envoy = std::env::var_os("ENVOY").unwrap_or(root().join(".tools/envoy").into());
    let module = std::env::var_os("COLLAPSER_MODULE").unwrap_or(root().join("target/collapser.wasm").into());
    command
        .env_clear()
        .env("ENVOY", envoy)
        .env("COLLAPSER_MODULE", module)
        .env("COLLAPSER_CONFIG", root().join("envoy/envoy.yaml"))
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .kill_on_drop(true);
    command
}

/// A backend and the program in front of it.
struct Pod {
    backend: BackendHandle,
    child: Child,
    grpc: SocketAddr,
    metrics: Uri,
}

impl Pod {
    async fn start(more: &[(&str, &str)]) -> Self {
        let backend = Backend::start(BackendOptions::default()).await.unwrap();
        let ports = [free_port(), free_port(), free_port()];
        let mut command = program();
        for (name, port) in ["GRPC_PORT", "METRICS_PORT", "ADMIN_PORT"].iter().zip(ports) {
            command.env(name, port.to_string());
        }
        command.env("BACKEND_ADDRESS", backend.grpc_addr().to_string()).env("LOG_LEVEL", "error");
        let child = command.envs(more.iter().copied()).spawn().unwrap();
        let [grpc, metrics, _] = ports.map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
        let metrics = format!("http://{metrics}").parse().unwrap();
        let pod = Self { backend, child, grpc, metrics };
        eventually("the sidecar is ready", async || pod.is("/ready").await).await;
        pod
    }

    /// Whether the path answers 200.
    async fn is(&self, path: &str) -> bool {
        ask_http(Method::GET, &self.metrics, path).await.is_ok_and(|(status, _)| status == StatusCode::OK)
    }

    fn uri(&self) -> String {
        format!("http://{}", self.grpc)
    }

    /// New calls on one connection that take so long, two to a key.
    async fn calls(&self, count: usize, latency_ms: u32) -> JoinSet<Result<ComputeReply, Status>> {
        let client = DemoClient::new(channel(&self.uri()).await);
        let salt = rand::random::<u32>();
        let call = |n: usize| {
            let request = ComputeRequest { latency_ms, ..ask(&format!("{salt} {}", n / 2)) };
            let mut client = client.clone();
            async move { Ok(client.compute(request).await?.into_inner()) }
        };
        let known = self.backend.calls();
        let calls = (0..count).map(call).collect();
        eventually("the calls are in flight", async || self.backend.calls() - known >= count as u64 / 2)
            .await;
        calls
    }

    /// Tells the program to stop, as a kubelet would.
    fn terminate(&self) {
        signal("-TERM", &self.child.id().unwrap().to_string());
    }

    /// Waits until the program is gone; how it went and what it said.
    async fn gone(self, within: Duration) -> Output {
        timeout(within, self.child.wait_with_output()).await.expect("it goes on and on").unwrap()
    }
}

fn signal(signal: &str, pid: &str) {
    let sent = std::process::Command::new("kill").args([signal, pid]).status().unwrap();
    assert!(sent.success());
}

fn assert_clean(output: &Output) {
    assert!(output.status.success(), "{output:?}");
}

async fn assert_all_answered(calls: JoinSet<Result<ComputeReply, Status>>) {
    for answer in calls.join_all().await {
        answer.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn told_to_stop_it_fails_readiness_takes_calls_lets_them_end_and_goes() {
    let pod = Pod::start(&[("DRAIN_DELAY", "4s"), ("DRAIN_TIMEOUT", "6s")]).await;
    let (early, told) = (pod.calls(40, 1_500).await, Instant::now());
    pod.terminate();
    while pod.is("/ready").await {
        assert!(told.elapsed() < Duration::from_secs(2), "still ready after two seconds");
        sleep(Duration::from_millis(20)).await;
    }
    assert!(pod.is("/health").await);
    // Callers that have not noticed yet: old and new connections, until shortly before the delay is over.
    let mut late = Vec::new();
    while told.elapsed() < Duration::from_millis(2_500) {
        late.push(pod.calls(10, 1_200).await);
        assert!(pod.is("/health").await);
    }
    assert!(late.len() > 1);
    assert_all_answered(early).await;
    for calls in late {
        assert_all_answered(calls).await;
    }
    let output = pod.gone(Duration::from_secs(10) + SLACK).await;
    assert_clean(&output);
    // It does not wait for the timeout when nothing is left to wait for.
    assert!(told.elapsed() < Duration::from_secs(7) + SLACK, "{:?}", told.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn under_load_no_caller_that_leaves_when_told_to_fails() {
    let pod = Pod::start(&[("DRAIN_DELAY", "2s"), ("DRAIN_TIMEOUT", "5s")]).await;
    let calling = (0..4).map(|n| {
        let uri = pod.uri();
        async move { call_while_taken(&uri, n).await }
    });
    let calling: JoinSet<u32> = calling.collect();
    sleep(Duration::from_secs(1)).await;
    pod.terminate();
    let output = pod.gone(Duration::from_secs(7) + SLACK).await;
    assert_clean(&output);
    for calls in calling.join_all().await {
        assert!(calls > 10, "{calls} calls");
    }
}

/// Calls on a new connection each, as balancers do, until connections are refused; none that has connected fails.
async fn call_while_taken(uri: &str, caller: u32) -> u32 {
    let mut calls = 0;
    loop {
        let endpoint = tonic::transport::Endpoint::from_shared(uri.to_string()).unwrap();
        let Ok(channel) = endpoint.connect().await else { return calls };
        let request = ComputeRequest { latency_ms: 60, ..ask(&format!("{caller} {calls}")) };
        match DemoClient::new(channel).compute(request).await {
            Ok(_) => calls += 1,
            // The connection was in the listener's queue when the listener went.
            Err(status) if is_refused(&status) => return calls,
            Err(status) => panic!("{status:?}"),
        }
    }
}

/// Whether the connection was closed before it said anything: there is no gRPC message from the other side.
fn is_refused(status: &Status) -> bool {
    std::error::Error::source(status).is_some()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_hangs_does_not_keep_it() {
    let settings = [("DRAIN_DELAY", "500ms"), ("DRAIN_TIMEOUT", "1s"), ("BACKEND_TIMEOUT", "60s")];
    let pod = Pod::start(&settings).await;
    let hanging = pod.calls(4, 60_000).await;
    let told = Instant::now();
    pod.terminate();
    let output = pod.gone(Duration::from_millis(1_500) + SLACK).await;
    assert_clean(&output);
    assert!(told.elapsed() >= Duration::from_millis(1_500), "{:?}: it did not wait", told.elapsed());
    for answer in hanging.join_all().await {
        answer.unwrap_err();
    }
    assert!(String::from_utf8_lossy(&output.stderr).contains("still in flight"), "{output:?}");
}

/// What the admin interface is asked for takes at most five seconds; an Envoy that is stopped for longer lets that fail.
#[tokio::test(flavor = "multi_thread")]
async fn an_envoy_too_busy_to_answer_drains_all_the_same() {
    let pod = Pod::start(&[("DRAIN_DELAY", "1s"), ("DRAIN_TIMEOUT", "20s")]).await;
    let calls = pod.calls(40, 9_500).await;
    let envoy = envoy_of(pod.child.id().unwrap());
    pod.terminate();
    sleep(Duration::from_millis(1_300)).await;
    signal("-STOP", &envoy);
    sleep(Duration::from_secs(6)).await;
    signal("-CONT", &envoy);
    assert_all_answered(calls).await;
    assert_clean(&pod.gone(SLACK * 3).await);
}

/// The process id of the launcher's only child.
fn envoy_of(launcher: u32) -> String {
    let path = format!("/proc/{launcher}/task/{launcher}/children");
    std::fs::read_to_string(path).unwrap().trim().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn callers_and_probes_may_come_over_ipv6() {
    if TcpListener::bind("[::1]:0").is_err() {
        return eprintln!("note: this machine has no IPv6; nothing was tested");
    }
    let pod = Pod::start(&[("LISTEN_ADDRESS", "::")]).await;
    let metrics: Uri = format!("http://[::1]:{}", pod.metrics.port_u16().unwrap()).parse().unwrap();
    assert_eq!(ask_http(Method::GET, &metrics, "/ready").await.unwrap().0, StatusCode::OK);
    for host in ["[::1]", "127.0.0.1"] {
        let channel = channel(&format!("http://{host}:{}", pod.grpc.port())).await;
        DemoClient::new(channel).compute(ask("k")).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn told_twice_it_goes_at_once() {
    let pod = Pod::start(&[("DRAIN_DELAY", "60s"), ("DRAIN_TIMEOUT", "60s")]).await;
    let hanging = pod.calls(2, 60_000).await;
    pod.terminate();
    eventually("readiness fails", async || !pod.is("/ready").await).await;
    pod.terminate();
    assert_clean(&pod.gone(SLACK).await);
    drop(hanging);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_envoy_that_dies_takes_it_along() {
    let pod = Pod::start(&[]).await;
    let pid = pod.child.id().unwrap();
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    signal("-KILL", children.trim());
    let output = pod.gone(SLACK).await;
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("Envoy ended"), "{output:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn all_that_is_logged_is_json_where_that_is_asked_for() {
    let pod = Pod::start(&[("LOG_FORMAT", "json"), ("LOG_LEVEL", "info"), ("DRAIN_DELAY", "100ms")]).await;
    pod.terminate();
    let output = pod.gone(SLACK * 3).await;
    let log = String::from_utf8_lossy(&output.stderr);
    for line in log.lines() {
        let entry: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        for field in ["time", "level", "logger", "message"] {
            assert!(entry[field].is_string(), "{field}: {line}");
        }
    }
    assert!(log.contains("drained: no call is in flight"), "{log}");
}

/// Environment variables; an empty one is left out.
type Variables<'a> = &'a [(&'a str, &'a str)];

/// The program refuses to start with these variables and says all these words.
async fn assert_refuses(variables: Variables<'_>, words: &[&str]) {
    let mut command = program();
    command.env("BACKEND_ADDRESS", "127.0.0.1:1").envs(variables.iter().copied());
    for (name, _) in variables.iter().filter(|(_, value)| value.is_empty()) {
        command.env_remove(name);
    }
    let output = timeout(SLACK * 3, command.output()).await.expect("it started").unwrap();
    assert!(!output.status.success(), "{variables:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    for word in words {
        assert!(said.contains(word), "{variables:?}: {word:?} is missing in:\n{said}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_environment_is_refused_and_named() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let cases: [(Variables, &[&str]); 13] = [
        (&[("BACKEND_ADDRESS", "")], &["--backend-address"]),
        (&[("BACKEND_ADDRESS", "backend")], &["--backend-address", "backend:50051"]),
        (&[("GRPC_PORT", "70000")], &["--grpc-port", "70000"]),
        (&[("GRPC_PORT", "0")], &["--grpc-port"]),
        (&[("GRPC_PORT", "31999"), ("METRICS_PORT", "31999")], &["METRICS_PORT", "31999"]),
        (&[("METRICS_PORT", "x")], &["--metrics-port"]),
        (&[("LOG_LEVEL", "loud")], &["--log-level", "loud", "trace"]),
        (&[("LOG_FORMAT", "xml")], &["--log-format", "json"]),
        (&[("DRAIN_DELAY", "soon")], &["--drain-delay", "soon"]),
        (&[("TLS_CERT_FILE", file)], &["--tls-key-file"]),
        (&[("BACKEND_USE_TLS", "true"), ("BACKEND_TLS_KEY_FILE", file)], &["--backend-tls-cert-file"]),
        (&[("COLLAPSER_MODULE", "nowhere.wasm")], &["--module", "nowhere.wasm", "no such file"]),
        (&[("BACKEND_USE_TLS", "perhaps")], &["--backend-use-tls", "perhaps"]),
    ];
    for (variables, words) in cases {
        assert_refuses(variables, words).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_files_without_tls_are_refused() {
    // Whoever names authorities means to speak TLS; plain text instead would be a surprise.
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    assert_refuses(&[("BACKEND_TLS_CA_FILE", file)], &["BACKEND_USE_TLS"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_envoy_that_is_not_there_is_named() {
    assert_refuses(&[("ENVOY", "no-such-envoy")], &["no-such-envoy"]).await;
}
