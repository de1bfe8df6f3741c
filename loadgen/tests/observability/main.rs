//! Prometheus and Grafana as `kind/observability` ships them: a real Prometheus scrapes real sidecars with the shipped
//! configuration, and every query of the dashboard and of the alerts is run against it and compared with what the load
//! generator reports.
//!
//! `make test-observability` runs them, and gets Prometheus where it is missing.

// Shared with the end-to-end tests, which use all of it.
#[allow(dead_code)]
#[path = "../e2e/rig.rs"]
mod rig;

mod dashboard;
mod load;
mod prometheus;
mod rules;

use std::collections::BTreeSet;
use std::path::PathBuf;

use collapser_loadgen::args::parse_duration;
use dashboard::{Dashboard, Substitution, metric_names};
use load::{Steady, Troubled};
use prometheus::{Pod, Prometheus, Series, now};
use rules::Rules;

/// What rates are taken over to get totals, and the time range of the dashboard: longer than the test.
const RANGE: &str = "300s";
const RANGE_SECONDS: f64 = 300.0;

/// All pods together cannot be asked for at the moment of each one's last scrape. Prometheus extrapolates the others by up to
/// one interval, which is much for series as young as these.
const EXTRAPOLATION: f64 = 1.5;

fn shipped(path: &str) -> PathBuf {
    rig::root().join("kind/observability").join(path)
}

#[test]
fn every_panel_says_what_it_shows() {
    let dashboard = Dashboard::read();
    dashboard.assert_complete();
}

#[test]
fn data_source_and_prometheus_agree_on_the_interval() {
    assert_eq!(dashboard::scrape_interval(), prometheus::scrape_interval());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_seen_in_prometheus_is_what_was_sent() {
    let (mut steady, mut troubled) = (Steady::start().await, Troubled::start().await);
    let pods = [
        Pod::running("steady", steady.rig.sidecar.metrics_url()),
        Pod::running("troubled", troubled.metrics_url()),
        // Nothing listens there, neither on its port nor on the machine's IPv6.
        Pod { ip: "::1".to_owned(), ..Pod::running("gone", "http://127.0.0.1:9/metrics".to_owned()) },
        Pod { phase: "Succeeded", ..Pod::running("ended", "http://127.0.0.1:9/metrics".to_owned()) },
        Pod { scrape: None, ..Pod::running("unannotated", "http://127.0.0.1:9/metrics".to_owned()) },
    ];
    let prometheus = Prometheus::start(&pods).await;
    prometheus
        .eventually("the first scrape", "count(up) == 3 and count(collapser_requests_total) == 2")
        .await;
    assert_targets(&prometheus, &troubled).await;
    let rules = Rules::read();
    let start = now();
    assert_nothing_alerts_before(&prometheus, &rules, start).await;

    tokio::join!(steady.load(), troubled.load());
    troubled.stop_backend().await;
    await_all(&prometheus, &steady, &troubled).await;

    let dashboard = Dashboard::read();
    assert_every_metric_exists(&prometheus, &dashboard, &rules).await;
    assert_every_panel_has_data(&prometheus, &dashboard, start).await;
    assert_variables_have_values(&prometheus, &dashboard).await;
    assert_steady(&prometheus, &dashboard, &steady).await;
    assert_troubled(&prometheus, &dashboard, &troubled).await;
    assert_all(&prometheus, &dashboard, &steady, &troubled).await;
    assert_alerts(&prometheus, &rules).await;
}

/// The shipped relabelling makes one target of a pod, whatever ports it declares, and none of those that do not ask.
async fn assert_targets(prometheus: &Prometheus, troubled: &Troubled) {
    let targets = prometheus.targets().await;
    let pods: Vec<_> = targets.iter().map(|target| target.labels["pod"].as_str()).collect();
    assert_eq!(pods, ["gone", "steady", "troubled"]);
    assert_eq!(targets[0].url, "http://[::1]:9/metrics");
    assert_eq!(targets[2].url, troubled.metrics_url());
    for target in &targets {
        assert_eq!(target.labels["namespace"], "collapser");
        assert_eq!(target.labels["job"], "collapser");
    }
}

async fn assert_nothing_alerts_before(prometheus: &Prometheus, rules: &Rules, at: f64) {
    for alert in &rules.alerts {
        let expected: &[&str] = if alert.name == "CollapserTargetDown" { &["gone"] } else { &[] };
        assert_eq!(
            pods(&prometheus.query(&alert.expr, at).await),
            BTreeSet::from_iter(expected.iter().copied()),
            "{}",
            alert.name
        );
    }
}

/// Waits until all that was sent has been scraped: counters lag by 100 ms and a scrape, histograms by 5 s and a scrape.
async fn await_all(prometheus: &Prometheus, steady: &Steady, troubled: &Troubled) {
    let (calls, flights) = (steady.calls, steady.backend_calls);
    let Troubled { calls: least, refused, left, .. } = troubled;
    for expr in [
        format!("collapser_requests_total{{pod='steady'}} == {calls}"),
        format!("collapser_backend_latency_microseconds_count{{pod='steady'}} == {flights}"),
        "collapser_follower_wait_microseconds_count{pod='steady'} == collapser_collapsed_requests_total"
            .to_owned(),
        format!("collapser_requests_total{{pod='troubled'}} >= {least}"),
        format!("collapser_refused_requests_total{{pod='troubled'}} == {refused}"),
        format!("collapser_abandoned_requests_total{{pod='troubled'}} == {left}"),
        "envoy_cluster_membership_healthy{pod='troubled', envoy_cluster_name='backend'} == 0".to_owned(),
        "envoy_wasm_collapser_vm_reload_success{pod='troubled'} >= 1".to_owned(),
    ] {
        prometheus.eventually("all that was sent is scraped", &expr).await;
    }
    // Panels are asked for in steps of this length, and the last step must come after that scrape.
    tokio::time::sleep(parse_duration(&prometheus::scrape_interval()).unwrap()).await;
}

async fn assert_every_metric_exists(prometheus: &Prometheus, dashboard: &Dashboard, rules: &Rules) {
    let exprs =
        dashboard.targets().map(|target| &target.expr).chain(rules.alerts.iter().map(|alert| &alert.expr));
    let names: BTreeSet<_> = exprs.flat_map(|expr| metric_names(expr)).collect();
    assert!(names.len() > 15, "{names:?}");
    for name in names {
        assert!(!prometheus.query(&name, now()).await.is_empty(), "no sidecar has {name}");
    }
}

/// Whatever a panel shows was provoked, so each of its queries must show more than zero at some time.
async fn assert_every_panel_has_data(prometheus: &Prometheus, dashboard: &Dashboard, start: f64) {
    let substitution = Substitution { range: RANGE, rate_interval: &dashboard::rate_interval(), pod: ".+" };
    for target in dashboard.targets() {
        let expr = substitution.apply(&target.expr);
        let series = match target.instant {
            true => prometheus.query(&expr, now()).await,
            false => prometheus.range(&expr, start, now()).await,
        };
        assert!(!series.is_empty(), "\"{}\" has no data: {expr}", target.title);
        let most =
            series.iter().flat_map(|series| &series.points).map(|(_, value)| *value).fold(f64::NAN, f64::max);
        // A VM that cannot be loaded again is the one thing that cannot be provoked.
        let may_be_zero = target.expr.contains("vm_reload_failure");
        assert!(most > 0.0 || may_be_zero, "\"{}\" shows at most {most}: {expr}", target.title);
        println!("{:<28} {:<24} {} series, at most {most:.4}", target.title, target.legend, series.len());
    }
}

async fn assert_variables_have_values(prometheus: &Prometheus, dashboard: &Dashboard) {
    for (variable, expected) in [("namespace", vec!["collapser"]), ("pod", vec!["steady", "troubled"])] {
        let (label, matcher) = dashboard.variable(variable);
        let values = prometheus.label_values(&label, &matcher.replace("$namespace", ".+")).await;
        assert_eq!(values, expected, "the variable {variable}");
    }
}

/// Asked at the very moment of a pod's last scrape, `increase` gives exact numbers: its counters began at zero.
async fn assert_steady(prometheus: &Prometheus, dashboard: &Dashboard, sent: &Steady) {
    let at = prometheus.last_scrape("steady").await;
    let substitution = Substitution { range: RANGE, rate_interval: RANGE, pod: "steady" };
    let stat = async |title: &str| {
        let series = prometheus.query(&substitution.apply(&dashboard.target(title).expr), at).await;
        let [series] = &series[..] else { panic!("\"{title}\" is {series:?}") };
        series.points[0].1
    };
    let requests = stat("Requests").await;
    assert_close("requests", requests, sent.calls as f64);
    assert_close("backend calls", stat("Backend calls").await, sent.backend_calls as f64);
    let (collapsed, hits) = (stat("Collapsed").await, stat("Cache hits").await);
    let collapsible = sent.calls - sent.asked;
    assert_close("collapsed and hits", collapsed + hits, (collapsible - sent.backend_calls) as f64);
    let removed = 1.0 - sent.backend_calls as f64 / collapsible as f64;
    assert_close("load removed", stat("Load removed").await, removed);
    // Buckets double: half of what the backend takes at least, twice what the slowest caller waited at most.
    let p95 = stat("Backend latency p95").await;
    assert!(
        (25_000.0..2_000.0 * sent.slowest_ms).contains(&p95),
        "{p95} µs, and {} ms for the slowest",
        sent.slowest_ms
    );

    let by_pod = Totals { prometheus, dashboard, substitution, at };
    assert_close("requests by pod", by_pod.get("Requests by pod", "pod", "steady").await, requests);
    assert_close("collapsed by pod", by_pod.get("Collapsed by pod", "pod", "steady").await, collapsed);
    assert_close("hits by pod", by_pod.get("Cache hits by pod", "pod", "steady").await, hits);
    let calls = by_pod.get("Backend calls by pod", "pod", "steady").await;
    assert_close("backend calls by pod", calls, sent.backend_calls as f64);
    let by_pod_removed = substitution.apply(&dashboard.target("Load removed by pod").expr);
    assert_close("load removed by pod", prometheus.value(&by_pod_removed, at).await, removed);
    println!(
        "steady: {requests} requests, {calls} backend calls, {collapsed} collapsed, {hits} hits, p95 {p95:.0} µs"
    );
}

async fn assert_troubled(prometheus: &Prometheus, dashboard: &Dashboard, sent: &Troubled) {
    let at = prometheus.last_scrape("troubled").await;
    let substitution = Substitution { range: RANGE, rate_interval: RANGE, pod: "troubled" };
    let totals = Totals { prometheus, dashboard, substitution, at };
    let requests = totals.get("Requests by pod", "pod", "troubled").await;
    // Those around the VM's death may be counted or not.
    let least = sent.calls as f64 - 0.5;
    assert!(
        (least..least + 1.0 + sent.around_death as f64).contains(&requests),
        "{requests}, not {}",
        sent.calls
    );
    let code = "Failed backend calls by code";
    assert_close("UNAVAILABLE", totals.get(code, "code", "14").await, sent.failed as f64);
    assert_close("NOT_FOUND", totals.get(code, "code", "5").await, 0.0);
    let reason = "Bypassed by reason";
    assert_close("asked", totals.get(reason, "reason", "asked").await, sent.asked as f64);
    assert_close("method", totals.get(reason, "reason", "method").await, sent.excluded as f64);
    assert!(totals.get(reason, "reason", "streaming").await > 0.5);
    assert_close("refused", totals.nth("Refused and left", 0).await, sent.refused as f64);
    assert_close("left", totals.nth("Refused and left", 1).await, sent.left as f64);
    let evictions = totals.get("Evictions", "pod", "troubled").await;
    assert!(evictions > 500.0, "{evictions} evictions");
    println!(
        "troubled: {requests} requests, {} failed, {} refused, {} left, {evictions:.0} evictions",
        sent.failed, sent.refused, sent.left
    );
}

async fn assert_all(prometheus: &Prometheus, dashboard: &Dashboard, steady: &Steady, troubled: &Troubled) {
    let substitution = Substitution { range: RANGE, rate_interval: RANGE, pod: ".+" };
    let requests = prometheus.value(&substitution.apply(&dashboard.target("Requests").expr), now()).await;
    let sent = (steady.calls + troubled.calls) as f64;
    assert!((sent - 0.5..sent * EXTRAPOLATION).contains(&requests), "{requests}, not {sent}");
}

async fn assert_alerts(prometheus: &Prometheus, rules: &Rules) {
    for alert in &rules.alerts {
        let expected: &[&str] = match alert.name.as_str() {
            // Cannot be provoked; `promtool test rules` tests it.
            "CollapserVmDead" => &[],
            "CollapserTargetDown" => &["gone"],
            _ => &["troubled"],
        };
        let series = prometheus.query(&alert.expr, now()).await;
        assert_eq!(pods(&series), BTreeSet::from_iter(expected.iter().copied()), "{}", alert.name);
        println!("{:<28} {expected:?}", alert.name);
    }
    let firing = "ALERTS{alertname=\"CollapserVmReloaded\", alertstate=\"firing\", severity=\"warning\", pod=\"troubled\"}";
    prometheus.eventually("Prometheus fires the alert that waits for nothing", firing).await;
    prometheus.assert_rules_are_evaluated(rules.alerts.len()).await;
}

fn pods(series: &[Series]) -> BTreeSet<&str> {
    series.iter().map(|series| series.labels["pod"].as_str()).collect()
}

fn assert_close(what: &str, seen: f64, sent: f64) {
    assert!(
        (seen - sent).abs() < 1e-6 * sent.max(1.0),
        "{what}: Prometheus says {seen}, the load generator {sent}"
    );
}

/// Totals from panels that show rates: a rate over the whole range, times the range.
struct Totals<'a> {
    prometheus: &'a Prometheus,
    dashboard: &'a Dashboard,
    substitution: Substitution<'a>,
    at: f64,
}

impl Totals<'_> {
    async fn get(&self, title: &str, label: &str, value: &str) -> f64 {
        let expr = self.substitution.apply(&self.dashboard.target(title).expr);
        let series = self.prometheus.query(&expr, self.at).await;
        let one = series.iter().find(|series| series.labels.get(label).is_some_and(|found| found == value));
        RANGE_SECONDS
            * one.unwrap_or_else(|| panic!("\"{title}\" has no {label} {value}: {series:?}")).points[0].1
    }

    async fn nth(&self, title: &str, nth: usize) -> f64 {
        let target = self.dashboard.targets().filter(|target| target.title == title).nth(nth).unwrap();
        RANGE_SECONDS * self.prometheus.value(&self.substitution.apply(&target.expr), self.at).await
    }
}
