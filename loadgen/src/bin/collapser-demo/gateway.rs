//! The demonstration of the HTTP gateway: one page of a slow database, many clients, and a database that dies.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use clap::{Args, ValueEnum};
use collapser_loadgen::args::parse_duration;
use collapser_loadgen::http_backend::{HttpBackend, HttpBackendHandle, HttpBackendOptions};
use collapser_loadgen::http_load::{Answer, HttpClients, HttpLoadOptions, Judge, Protocol, is_page};
use collapser_loadgen::load::Progress;
use collapser_loadgen::progress::Display;
use collapser_loadgen::report::{Report, grouped};
use collapser_loadgen::sidecar::{Sidecar, SidecarOptions};
use serde_json::json;

use crate::{METRICS_LAG, show_metrics};

/// What is shown, and how large.
#[derive(Args)]
pub struct Gateway {
    /// Clients, each of which asks for the page once in every round.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..=14_000))]
    clients: u64,
    /// What clients speak: http1, with a connection for each, or http2, with 100 for all.
    #[arg(long, value_enum, default_value_t = Version::Http1)]
    protocol: Version,
    /// How long a query takes.
    #[arg(long, default_value = "40ms", value_parser = parse_duration)]
    latency: Duration,
    /// For how long the backend allows to keep the page, in seconds.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=60))]
    max_age: u64,
    /// The repository.
    #[arg(long, default_value = ".")]
    root: PathBuf,
}

/// What clients speak.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Version {
    Http1,
    Http2,
}

/// For how long the gateway serves the page after the database has died, beyond what the demonstration takes.
const STALE_IF_ERROR: &str = "10m";

/// Connections of HTTP/2 clients.
const HTTP2_CONNECTIONS: u64 = 100;

/// What runs, and what has been asked of it.
struct Stage {
    clients: HttpClients,
    path: String,
    calls: u64,
    backend: HttpBackendHandle,
    sidecar: Sidecar,
}

impl Gateway {
    /// Shows all of it.
    ///
    /// # Errors
    /// If a promise is broken, too.
    pub async fn show(&self) -> anyhow::Result<()> {
        let mut stage = self.start().await?;
        let start = Instant::now();
        println!(
            "\n{:<36}{:>8}{:>9}{:>10}{:>11}{:>10}{:>9}",
            "", "200", "failed", "time", "p99", "queries", "age"
        );

        stage.round("cold: nothing is cached", is_page(stage.path.clone())).await?;
        stage.round("warm: the same again", is_page(stage.path.clone())).await?;
        let queries = stage.backend.calls();
        let allowed = 2 + start.elapsed().as_secs() / self.max_age;
        ensure!(queries <= allowed, "{queries} queries, where {allowed} were enough");

        // What is allowed to be kept is kept from when it was made, so this is past its time.
        wait("waiting until the page is too old", Duration::from_secs(self.max_age + 1)).await;
        stage.backend.stop().await;
        let before = stage.backend.calls();
        stage.round("stale: the database has died", is_stale(stage.path.clone(), self.max_age)).await?;
        ensure!(stage.backend.calls() == before, "the database is not dead");

        tokio::time::sleep(METRICS_LAG).await;
        show_metrics(&stage.sidecar.metrics().await?);
        stage.sidecar.stop()?;
        println!("\n{} answers, {queries} queries.", grouped(3 * self.clients));
        Ok(())
    }

    async fn start(&self) -> anyhow::Result<Stage> {
        let options = HttpBackendOptions { latency: self.latency, ..HttpBackendOptions::default() };
        let backend = HttpBackend::start(options).context("the demo HTTP backend")?;
        let mut options = SidecarOptions::gateway(&self.root, backend.addr());
        options.config.settings = json!({"stale_if_error": STALE_IF_ERROR});
        let sidecar = Sidecar::start(options).await.context("the gateway")?;
        println!("gateway    {}  ({})", sidecar.addr(), sidecar.metrics_url());
        println!("database   {}  ({}/calls), {:?} a query", backend.addr(), backend.uri(), self.latency);

        let (protocol, connections, name) = match self.protocol {
            Version::Http1 => (Protocol::Http1, self.clients, "HTTP/1.1"),
            Version::Http2 => (Protocol::Http2, HTTP2_CONNECTIONS.min(self.clients), "HTTP/2"),
        };
        println!("clients    {} over {} connections, {name}", grouped(self.clients), grouped(connections));
        let clients = HttpClients::connect(&sidecar.uri(), protocol, connections as usize).await?;
        let path = format!("/page/front?header=cache-control:max-age={}", self.max_age);
        println!("page       {path}");
        Ok(Stage { clients, path, calls: self.clients, backend, sidecar })
    }
}

impl Stage {
    /// All clients ask once. An answer that is not right is an error.
    async fn round(&self, name: &str, judge: Judge) -> anyhow::Result<()> {
        let ages = Arc::new(AtomicU64::new(0));
        let seen = Arc::new(Mutex::new(None));
        let options = HttpLoadOptions {
            judge: noting(judge, &ages, &seen),
            ..HttpLoadOptions::burst(self.path.clone(), self.calls)
        };
        let before = self.backend.calls();
        let mut display = Display::new(false);
        let done = self.clients.load(options, |progress: Progress| display.show(progress)).await;
        display.clear();
        let report = done?.report.with_backend_calls(self.backend.calls() - before);
        line(name, &report, ages.load(Relaxed));
        if let Some(status) = seen.lock().unwrap_or_else(PoisonError::into_inner).take() {
            println!("{:<36}  cache-status: {status}", "");
        }
        let sample = report.wrong_sample.as_deref().unwrap_or_default();
        ensure!(report.wrong == 0, "{} answers were wrong, such as: {sample}", report.wrong);
        ensure!(report.failed == 0, "{} requests failed: {:?}", report.failed, report.errors);
        Ok(())
    }
}

/// Judges, and keeps the largest age and the last `cache-status`.
fn noting(judge: Judge, ages: &Arc<AtomicU64>, seen: &Arc<Mutex<Option<String>>>) -> Judge {
    let (ages, seen) = (Arc::clone(ages), Arc::clone(seen));
    Arc::new(move |answer| {
        ages.fetch_max(age(answer).unwrap_or_default(), Relaxed);
        *seen.lock().unwrap_or_else(PoisonError::into_inner) =
            answer.header("cache-status").map(str::to_owned);
        judge(answer)
    })
}

/// The page, older than allowed, and said to be so.
fn is_stale(path: String, max_age: u64) -> Judge {
    let is_page = is_page(path);
    Arc::new(move |answer| {
        is_page(answer)?;
        match (age(answer), answer.header("cache-status")) {
            (Some(age), _) if age < max_age => Err(format!("the age is {age} s")),
            (None, _) => Err("there is no age".to_owned()),
            (_, Some(status)) if status.starts_with("collapser;") => Ok(()),
            (_, status) => Err(format!("cache-status is {status:?}")),
        }
    })
}

fn age(answer: &Answer) -> Option<u64> {
    answer.header("age")?.parse().ok()
}

fn line(name: &str, report: &Report, age: u64) {
    println!(
        "{name:<36}{:>8}{:>9}{:>8.3} s{:>8.1} ms{:>10}{age:>7} s",
        grouped(report.ok),
        grouped(report.failed),
        report.elapsed_seconds,
        report.latency_ms.p99,
        grouped(report.backend_calls.unwrap_or_default())
    );
}

async fn wait(what: &str, time: Duration) {
    println!("{what} ({time:?})");
    tokio::time::sleep(time).await;
}
