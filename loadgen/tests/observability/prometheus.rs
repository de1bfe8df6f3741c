//! A real Prometheus with the shipped configuration, in which only discovery is swapped: files in place of Kubernetes, with
//! the labels that Kubernetes would have given, so that the shipped relabelling is what is tested.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use collapser_loadgen::http_ask::ask;
use http::{Method, Uri};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::shipped;

/// A scrape or two, and the rules' evaluation, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(40);

const META: &str = "__meta_kubernetes_pod";

/// A pod, as discovery sees it.
pub struct Pod {
    pub name: String,
    pub ip: String,
    pub port: String,
    pub phase: &'static str,
    pub scrape: Option<&'static str>,
}

impl Pod {
    /// One that asks for its metrics at this URL to be scraped.
    pub fn running(name: &str, metrics: String) -> Self {
        let uri: Uri = metrics.parse().unwrap();
        Self {
            name: name.to_owned(),
            ip: uri.host().unwrap().to_owned(),
            port: uri.port_u16().unwrap().to_string(),
            phase: "Running",
            scrape: Some("true"),
        }
    }

    /// Discovery finds it once for each port that it declares.
    fn targets(&self) -> Vec<Value> {
        let host = if self.ip.contains(':') { format!("[{}]", self.ip) } else { self.ip.clone() };
        [50052, 2112].map(|declared| self.target(&format!("{host}:{declared}"), declared)).to_vec()
    }

    /// Source: Prometheus docs, `kubernetes_sd_config`, role `pod`.
    fn target(&self, address: &str, declared: u16) -> Value {
        let mut labels = json!({
            "__meta_kubernetes_namespace": "collapser",
            format!("{META}_name"): self.name,
            format!("{META}_ip"): self.ip,
            format!("{META}_phase"): self.phase,
            format!("{META}_container_name"): "collapser",
            format!("{META}_container_port_number"): declared.to_string(),
            format!("{META}_annotation_prometheus_io_port"): self.port,
            format!("{META}_annotation_prometheus_io_path"): "/metrics",
        });
        if let Some(scrape) = self.scrape {
            labels[format!("{META}_annotation_prometheus_io_scrape")] = json!(scrape);
        }
        json!({"targets": [address], "labels": labels})
    }
}

/// A series, with its points as time and value.
#[derive(Debug)]
pub struct Series {
    pub labels: BTreeMap<String, String>,
    pub points: Vec<(f64, f64)>,
}

/// What is scraped.
pub struct Scraped {
    pub labels: BTreeMap<String, String>,
    pub url: String,
}

/// A running Prometheus. Dropping it kills it.
pub struct Prometheus {
    child: Child,
    dir: TempDir,
    uri: Uri,
}

impl Prometheus {
    pub async fn start(pods: &[Pod]) -> Self {
        let dir = tempfile::Builder::new().prefix("collapser-prometheus-").tempdir().unwrap();
        let config = configure(dir.path(), pods);
        run_promtool(&config);
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let log = File::create(dir.path().join("log")).unwrap();
        let child = Command::new(program("PROMETHEUS", "prometheus"))
            .arg(format!("--config.file={}", config.display()))
            .arg(format!("--storage.tsdb.path={}", dir.path().join("data").display()))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .expect("cannot run Prometheus; run: make test-observability");
        let uri = format!("http://127.0.0.1:{port}").parse().unwrap();
        let mut prometheus = Self { child, dir, uri };
        prometheus.wait_until_ready().await;
        prometheus
    }

    async fn wait_until_ready(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        while !ask(Method::GET, &self.uri, "/-/ready").await.is_ok_and(|(status, _)| status.is_success()) {
            let is_running = matches!(self.child.try_wait(), Ok(None));
            assert!(is_running && Instant::now() < deadline, "Prometheus did not start:\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    async fn get(&self, path: &str) -> Value {
        let (status, body) = ask(Method::GET, &self.uri, path).await.unwrap();
        let body = String::from_utf8_lossy(&body);
        assert!(status.is_success(), "{path}: {status}: {body}");
        let mut answer: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(answer["status"], "success", "{path}: {body}");
        assert!(answer["warnings"].is_null(), "{path}: {body}");
        answer["data"].take()
    }

    /// The value of an expression at a time.
    pub async fn query(&self, expr: &str, at: f64) -> Vec<Series> {
        let data = self.get(&format!("/api/v1/query?time={at:.3}&query={}", encode(expr))).await;
        series(&data)
    }

    /// The same for an expression that gives one number.
    pub async fn value(&self, expr: &str, at: f64) -> f64 {
        let series = self.query(expr, at).await;
        assert_eq!(series.len(), 1, "{expr}: {series:?}");
        series[0].points[0].1
    }

    /// The values of an expression from `start` to `end`, a scrape interval apart.
    pub async fn range(&self, expr: &str, start: f64, end: f64) -> Vec<Series> {
        let step = scrape_interval();
        let query = encode(expr);
        let data = self
            .get(&format!("/api/v1/query_range?start={start:.3}&end={end:.3}&step={step}&query={query}"))
            .await;
        series(&data)
    }

    /// Waits until an expression has a value.
    pub async fn eventually(&self, what: &str, expr: &str) {
        let deadline = Instant::now() + PATIENCE;
        while self.query(expr, now()).await.is_empty() {
            assert!(Instant::now() < deadline, "never came true: {what}: {expr}\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
    }

    /// When a pod was last scraped.
    pub async fn last_scrape(&self, pod: &str) -> f64 {
        self.value(&format!("timestamp(collapser_requests_total{{pod=\"{pod}\"}})"), now()).await
    }

    pub async fn label_values(&self, label: &str, matcher: &str) -> Vec<String> {
        let data = self.get(&format!("/api/v1/label/{label}/values?match[]={}", encode(matcher))).await;
        serde_json::from_value(data).unwrap()
    }

    /// What is scraped, by pod.
    pub async fn targets(&self) -> Vec<Scraped> {
        let data = self.get("/api/v1/targets?state=active").await;
        let target = |target: &Value| Scraped {
            labels: serde_json::from_value(target["labels"].clone()).unwrap(),
            url: target["scrapeUrl"].as_str().unwrap().to_owned(),
        };
        let mut targets: Vec<_> = data["activeTargets"].as_array().unwrap().iter().map(target).collect();
        targets.sort_by_key(|target| target.labels["pod"].clone());
        targets
    }

    /// Prometheus itself evaluates every rule without an error.
    pub async fn assert_rules_are_evaluated(&self, expected: usize) {
        let data = self.get("/api/v1/rules").await;
        let groups = data["groups"].as_array().unwrap();
        let rules: Vec<_> = groups.iter().flat_map(|group| group["rules"].as_array().unwrap()).collect();
        assert_eq!(rules.len(), expected);
        for rule in rules {
            assert_eq!(rule["health"], "ok", "{rule}");
        }
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The seconds since 1970.
pub fn now() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs_f64()
}

/// The interval of the shipped configuration.
pub fn scrape_interval() -> String {
    shipped_config()["global"]["scrape_interval"].as_str().unwrap().to_owned()
}

fn shipped_config() -> Value {
    let text = fs::read_to_string(shipped("prometheus/prometheus.yml")).unwrap();
    serde_saphyr::from_str(&text).unwrap()
}

/// Writes configuration, rules and targets into a folder. Debian's Prometheus has no discovery for Kubernetes, not even to
/// check its syntax, so what is taken out is compared with what is meant.
fn configure(dir: &Path, pods: &[Pod]) -> PathBuf {
    let mut config = shipped_config();
    let jobs = config["scrape_configs"].as_array_mut().unwrap();
    assert_eq!(jobs.len(), 1);
    let discovery = jobs[0].as_object_mut().unwrap().remove("kubernetes_sd_configs");
    assert_eq!(discovery, Some(json!([{"role": "pod", "namespaces": {"own_namespace": true}}])));
    jobs[0]["file_sd_configs"] = json!([{"files": ["targets.json"]}]);
    for rules in config["rule_files"].as_array().unwrap() {
        let name = rules.as_str().unwrap();
        fs::copy(shipped("prometheus").join(name), dir.join(name)).unwrap();
    }
    let targets: Vec<_> = pods.iter().flat_map(Pod::targets).collect();
    fs::write(dir.join("targets.json"), json!(targets).to_string()).unwrap();
    let file = dir.join("prometheus.yml");
    fs::write(&file, config.to_string()).unwrap();
    file
}

fn run_promtool(config: &Path) {
    let output = Command::new(program("PROMTOOL", "promtool")).args(["check", "config"]).arg(config).output();
    let output = output.expect("cannot run promtool; run: make test-observability");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn program(variable: &str, default: &str) -> PathBuf {
    std::env::var_os(variable).map_or(default.into(), PathBuf::from)
}

/// Source: Prometheus docs, "HTTP API", "Expression query result formats".
fn series(data: &Value) -> Vec<Series> {
    let point = |point: &Value| (point[0].as_f64().unwrap(), point[1].as_str().unwrap().parse().unwrap());
    let series = |result: &Value| Series {
        labels: serde_json::from_value(result["metric"].clone()).unwrap(),
        points: match result["values"].as_array() {
            Some(values) => values.iter().map(point).collect(),
            None => vec![point(&result["value"])],
        },
    };
    data["result"].as_array().unwrap().iter().map(series).collect()
}

fn encode(text: &str) -> String {
    let encode = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(encode).collect()
}
