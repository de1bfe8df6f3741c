//! The demonstration: backend and sidecar started together, and a burst to show what it is for.

mod affinity;
mod gateway;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use affinity::Affinity;
use anyhow::{Context as _, bail};
use clap::{Args, Parser, Subcommand};
use collapser_loadgen::affinity_sim::{self, Plan};
use collapser_loadgen::args::parse_duration;
use collapser_loadgen::backend::{Backend, BackendHandle, BackendOptions};
use collapser_loadgen::load::{self, LoadOptions};
use collapser_loadgen::progress::Display;
use collapser_loadgen::report::grouped;
use collapser_loadgen::sidecar::{Metrics, Sidecar, SidecarOptions, check_settings};
use gateway::Gateway;
use tokio::signal::unix::{SignalKind, signal};

/// Metrics lag by at most 100 ms behind what happened.
const METRICS_LAG: Duration = Duration::from_millis(300);

/// Shows Collapser at work: a demo backend, a real Envoy with the filter in front of it.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Send a burst of identical calls, report, stop everything. Fails if a call fails, an answer is wrong or too many
    /// calls reach the backend.
    Quickstart {
        #[command(flatten)]
        ports: Ports,
        /// Identical calls, all at once.
        #[arg(long, default_value_t = 10_000)]
        calls: u64,
        /// HTTP/2 connections that they come by.
        #[arg(long, default_value_t = 100)]
        connections: usize,
        /// Fail if there are fewer calls than this to a backend call.
        #[arg(long, default_value_t = 500.0)]
        min_ratio: f64,
    },
    /// Show key affinity: several replicas, a burst, the burst again, and a replica that dies in the middle of one. Fails if
    /// a key is computed twice, or a call fails that could be retried.
    Affinity(Affinity),
    /// Show the HTTP gateway: clients that all want one page from a slow database, the same again while it is cached, and once
    /// more when the database has died. Fails if a client gets no page or too many queries are made.
    Gateway(Gateway),
    /// Simulate 10, 100 and 1,000 replicas. Prints tables of Markdown.
    AffinitySim {
        /// Callers of a burst.
        #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
        callers: u64,
        /// Different keys on offer to them.
        #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
        keys: u64,
        /// What chance starts from; the same gives the same.
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Start both and leave them running until Ctrl-C.
    Run {
        #[command(flatten)]
        ports: Ports,
    },
}

/// Where everything listens, on loopback; 0 takes a free port.
#[derive(Args)]
struct Ports {
    /// The sidecar, where callers connect.
    #[arg(long, env = "GRPC_PORT", default_value_t = 0)]
    grpc_port: u16,
    /// The sidecar's /metrics, /health and /ready.
    #[arg(long, env = "METRICS_PORT", default_value_t = 0)]
    metrics_port: u16,
    /// The backend itself.
    #[arg(long, env = "BACKEND_PORT", default_value_t = 0)]
    backend_port: u16,
    /// The backend's counters: /calls, /reset.
    #[arg(long, env = "BACKEND_HTTP_PORT", default_value_t = 0)]
    backend_http_port: u16,
    /// How long a backend call takes.
    #[arg(long, env = "BACKEND_LATENCY", default_value = "50ms", value_parser = parse_duration)]
    latency: Duration,
    /// The repository.
    #[arg(long, default_value = ".")]
    root: PathBuf,
}

/// What runs.
struct Pair {
    backend: BackendHandle,
    sidecar: Sidecar,
}

impl Ports {
    async fn start(&self) -> anyhow::Result<Pair> {
        check_settings(&self.root.join("envoy/envoy.yaml"))?;
        let loopback = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let options = BackendOptions {
            grpc_addr: loopback(self.backend_port),
            http_addr: Some(loopback(self.backend_http_port)),
            latency: self.latency,
            ..BackendOptions::default()
        };
        let backend = Backend::start(options)
            .await
            .context("the demo backend (other ports: BACKEND_PORT, BACKEND_HTTP_PORT)")?;
        let mut options = SidecarOptions::shipped(&self.root, backend.grpc_addr());
        options.config.listen = loopback(self.grpc_port);
        options.config.metrics = loopback(self.metrics_port);
        options.env = std::env::vars().filter(|(name, _)| is_setting(name)).collect();
        let sidecar =
            Sidecar::start(options).await.context("the sidecar (other ports: GRPC_PORT, METRICS_PORT)")?;
        Ok(Pair { backend, sidecar })
    }
}

/// Variables of this process that the sidecar is to see.
fn is_setting(name: &str) -> bool {
    name.starts_with("COLLAPSER_") || name == "BACKEND_TIMEOUT"
}

impl Pair {
    fn describe(&self) {
        println!("sidecar    {}  ({})", self.sidecar.addr(), self.sidecar.metrics_url());
        let counters = self.backend.http_uri().unwrap_or_default();
        println!("backend    {}  ({counters}/calls)", self.backend.grpc_addr());
    }

    async fn stop(self) -> anyhow::Result<()> {
        self.sidecar.stop()?;
        self.backend.shutdown().await;
        Ok(())
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Run { ports } => run(ports).await,
        Command::Affinity(affinity) => tokio::select! {
            done = affinity.show() => done,
            () = interrupted() => Err(anyhow::anyhow!("interrupted")),
        },
        Command::Gateway(gateway) => tokio::select! {
            done = gateway.show() => done,
            () = interrupted() => Err(anyhow::anyhow!("interrupted")),
        },
        Command::AffinitySim { callers, keys, seed } => {
            print!(
                "{}",
                affinity_sim::report(Plan { callers, keys, cached: 100_000 }, &[10, 100, 1_000], seed)
            );
            Ok(())
        }
        Command::Quickstart { ports, calls, connections, min_ratio } => {
            let work = quickstart(ports, calls, connections, min_ratio);
            tokio::select! {
                done = work => done,
                () = interrupted() => Err(anyhow::anyhow!("interrupted")),
            }
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(ports: Ports) -> anyhow::Result<()> {
    let mut pair = ports.start().await?;
    pair.describe();
    println!("Ctrl-C stops both.");
    loop {
        tokio::select! {
            () = interrupted() => break,
            () = tokio::time::sleep(Duration::from_secs(1)) => {
                if !pair.sidecar.is_running() {
                    bail!("Envoy has stopped:\n{}", pair.sidecar.log());
                }
            }
        }
    }
    pair.stop().await
}

async fn quickstart(ports: Ports, calls: u64, connections: usize, min_ratio: f64) -> anyhow::Result<()> {
    let pair = ports.start().await?;
    pair.describe();
    println!("sending    {} identical calls at once over {connections} connections\n", grouped(calls));
    let options = LoadOptions {
        backend_url: pair.backend.http_uri(),
        connections,
        ..LoadOptions::burst(pair.sidecar.uri(), calls)
    };
    let mut display = Display::new(false);
    let report = load::run(options, |progress| display.show(progress)).await;
    display.clear();
    let report = report?;
    print!("{report}");
    tokio::time::sleep(METRICS_LAG).await;
    show_metrics(&pair.sidecar.metrics().await?);
    pair.stop().await?;
    if !report.is_clean() {
        bail!("{} calls failed and {} answers were wrong", report.failed, report.wrong);
    }
    if !report.reaches_ratio(min_ratio) {
        bail!("fewer than {min_ratio} calls to a backend call");
    }
    println!("\n{} calls, {} backend calls.", grouped(calls), report.backend_calls.unwrap_or_default());
    Ok(())
}

fn show_metrics(metrics: &Metrics) {
    println!("\nas the sidecar's own metrics tell it:");
    for name in [
        "collapser_requests_total",
        "collapser_backend_calls_total",
        "collapser_collapsed_requests_total",
        "collapser_cache_hits_total",
    ] {
        println!("  {name:<36}{:>10}", grouped(metrics.get(name) as u64));
    }
}

/// Ends with Ctrl-C or SIGTERM.
async fn interrupted() {
    let terminated = async {
        match signal(SignalKind::terminate()) {
            Ok(mut stream) => drop(stream.recv().await),
            // Without a handler, the signal ends the process all the same.
            Err(_) => std::future::pending().await,
        }
    };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => (),
        () = terminated => (),
    }
}
