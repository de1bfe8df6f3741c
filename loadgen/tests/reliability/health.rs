//! How the sidecar fares: its memory, its metrics, and whether it is the process and VM that it was.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use collapser_loadgen::sidecar::{Metrics, Sidecar, complaints};
use tokio::task::JoinHandle;

/// How long metrics may take to come true once the load is over.
const PATIENCE: Duration = Duration::from_secs(30);

/// By how much loads are to be larger than they are by default.
pub fn scale() -> f64 {
    let Ok(text) = std::env::var("RELIABILITY_SCALE") else { return 1.0 };
    let scale = text.parse().ok().filter(|scale: &f64| scale.is_finite() && *scale > 0.0);
    scale.unwrap_or_else(|| panic!("RELIABILITY_SCALE is `{text}`; it is a number above 0, such as 5"))
}

/// `count` at the scale that was asked for.
pub fn scaled(count: u64) -> u64 {
    ((count as f64 * scale()).round() as u64).max(1)
}

/// Bytes of Envoy's memory that are resident.
pub fn rss(sidecar: &Sidecar) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", sidecar.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().unwrap();
    kib * 1024
}

/// In MiB, for people.
pub fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// The quantile `q` of durations, which are sorted for it.
pub fn quantile(durations: &mut [Duration], q: f64) -> Duration {
    durations.sort_unstable();
    let last = durations.len().checked_sub(1).expect("nothing was measured");
    durations[(last as f64 * q).ceil() as usize]
}

/// The metrics, once `done` says that they have come true.
pub async fn metrics_within(
    sidecar: &Sidecar,
    patience: Duration,
    what: &str,
    done: impl Fn(&Metrics) -> bool,
) -> Metrics {
    let deadline = Instant::now() + patience;
    loop {
        // A worker that is busy may answer late.
        let metrics = sidecar.metrics().await.unwrap_or_default();
        if done(&metrics) {
            return metrics;
        }
        assert!(Instant::now() < deadline, "never came true: {what}: {metrics:#?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Checks that nothing is left of a load of so many requests, that they add up, and that neither
/// Envoy nor the VM was replaced.
pub async fn assert_unharmed(sidecar: &mut Sidecar, requests: u64) -> Metrics {
    assert!(sidecar.is_running(), "Envoy died:\n{}", complaints(&sidecar.log()));
    let metrics = metrics_within(sidecar, PATIENCE, "all is over and counted", |m| {
        m.get("collapser_waiting_requests") == 0.0
            && m.get("collapser_inflight_requests") == 0.0
            && m.get("collapser_requests_total") >= requests as f64
    })
    .await;
    let parts = metrics.get("collapser_backend_calls_total")
        + metrics.get("collapser_collapsed_requests_total")
        + metrics.get("collapser_cache_hits_total")
        + metrics.sum("collapser_bypassed_requests_total")
        + metrics.get("collapser_refused_requests_total");
    assert_eq!(metrics.get("collapser_requests_total"), requests as f64, "{metrics:#?}");
    assert_eq!(parts, requests as f64, "{metrics:#?}");
    assert!(metrics.has("envoy_wasm_collapser_vm_reload"), "{metrics:#?}");
    for reload in ["", "_backoff", "_failure", "_success"] {
        assert_eq!(metrics.get(&format!("envoy_wasm_collapser_vm_reload{reload}")), 0.0, "{metrics:#?}");
    }
    metrics
}

/// Samples Envoy's memory until dropped, for its peak.
pub struct Peak {
    highest: Arc<AtomicU64>,
    task: JoinHandle<()>,
}

impl Peak {
    pub fn watch(sidecar: &Sidecar) -> Self {
        let path = format!("/proc/{}/statm", sidecar.pid());
        let highest = Arc::new(AtomicU64::new(rss(sidecar)));
        let seen = highest.clone();
        let task = tokio::spawn(async move {
            loop {
                // Its second number is resident pages; gone if Envoy is.
                let pages =
                    fs::read_to_string(&path).ok().and_then(|text| text.split(' ').nth(1)?.parse().ok());
                seen.fetch_max(pages.unwrap_or(0u64) * 4096, Relaxed);
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        Self { highest, task }
    }

    pub fn bytes(&self) -> u64 {
        self.highest.load(Relaxed)
    }
}

impl Drop for Peak {
    fn drop(&mut self) {
        self.task.abort();
    }
}
