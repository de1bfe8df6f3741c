//! The load generator as a program.

use std::io::{self, Write as _};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use collapser_loadgen::args::{parse_duration, parse_metadata};
use collapser_loadgen::load::{self, KeyOrder, LoadMode, LoadOptions};
use collapser_loadgen::progress::Display;
use collapser_loadgen::proto::Metadata;
use collapser_loadgen::report::{Report, grouped};

const DEFAULT_CALLS: u64 = 10_000;
const DEFAULT_WORKERS: usize = 100;

/// The load did run, but not as it should have.
const BAD_RESULT: u8 = 1;
/// The load could not be run.
const NO_RESULT: u8 = 2;

/// Sends many gRPC calls and reports how they went, and how many reached the backend.
///
/// Without --duration, all calls are sent at once. With it, workers send one call
/// after the other, or, with --rate, calls are sent at fixed times.
///
/// Exit status: 0 when all is well, 1 when a call failed, an answer was wrong or
/// the ratio is too low, 2 when the load could not be run.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// Where the calls go.
    #[arg(long, value_name = "URI", default_value = "http://127.0.0.1:50052")]
    target: String,

    /// The demo backend's HTTP side, to learn how many calls reached it.
    #[arg(long, value_name = "URI")]
    backend: Option<String>,

    /// Send this many calls at once [default: 10000, without --duration].
    #[arg(long, value_name = "N", conflicts_with_all = ["duration", "workers", "rate"],
          value_parser = clap::value_parser!(u64).range(1..))]
    calls: Option<u64>,

    /// Send calls for this long, such as 60s.
    #[arg(long, value_parser = parse_duration)]
    duration: Option<Duration>,

    /// How many workers send one call after the other [default: 100, with --duration].
    #[arg(long, value_name = "N", requires = "duration", conflicts_with = "rate")]
    workers: Option<usize>,

    /// Send this many calls a second, whether answers come or not.
    #[arg(long, value_name = "PER_SECOND", requires = "duration")]
    rate: Option<f64>,

    /// How many different keys to ask for.
    #[arg(long, value_name = "N", default_value_t = 1)]
    keys: u64,

    /// Which key comes next.
    #[arg(long, value_enum, default_value = "round-robin")]
    key_order: Order,

    /// What keys start with.
    #[arg(long, value_name = "TEXT", default_value = "key-")]
    key_prefix: String,

    /// How many HTTP/2 connections to use.
    #[arg(long, value_name = "N", default_value_t = 10)]
    connections: usize,

    /// Payload bytes to ask for; 0 leaves it to the backend.
    #[arg(long, value_name = "BYTES", default_value_t = 0)]
    payload: u32,

    /// Bytes to add to every request.
    #[arg(long, value_name = "BYTES", default_value_t = 0)]
    padding: usize,

    /// Latency to ask of the backend, in milliseconds; 0 leaves it to the backend.
    #[arg(long, value_name = "MS", default_value_t = 0)]
    latency_ms: u32,

    /// Metadata to send with every call; repeatable.
    #[arg(long, short = 'H', value_name = "NAME=VALUE", value_parser = parse_metadata)]
    header: Vec<Metadata>,

    /// When to give up on a call; 0 never does.
    #[arg(long, default_value = "30s", value_parser = parse_duration)]
    timeout: Duration,

    /// Send the timeout as grpc-timeout too.
    #[arg(long)]
    grpc_timeout: bool,

    /// Zero the backend's counters first.
    #[arg(long, requires = "backend")]
    reset: bool,

    /// Fail if there are fewer calls than this to a backend call.
    #[arg(long, value_name = "RATIO", requires = "backend")]
    min_ratio: Option<f64>,

    /// Do not fail because calls failed; wrong answers still do.
    #[arg(long)]
    allow_errors: bool,

    /// Report as one line of JSON.
    #[arg(long)]
    json: bool,

    /// Do not show progress.
    #[arg(long)]
    quiet: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Order {
    RoundRobin,
    Random,
}

impl Args {
    fn mode(&self) -> LoadMode {
        match (self.duration, self.rate) {
            (None, _) => LoadMode::Burst { calls: self.calls.unwrap_or(DEFAULT_CALLS) },
            (Some(duration), Some(per_second)) => LoadMode::Rate { per_second, duration },
            (Some(duration), None) => {
                LoadMode::Workers { workers: self.workers.unwrap_or(DEFAULT_WORKERS), duration }
            }
        }
    }

    fn options(&self) -> LoadOptions {
        LoadOptions {
            target: self.target.clone(),
            backend_url: self.backend.clone(),
            reset_backend: self.reset,
            mode: self.mode(),
            keys: self.keys,
            key_order: match self.key_order {
                Order::RoundRobin => KeyOrder::RoundRobin,
                Order::Random => KeyOrder::Random,
            },
            key_prefix: self.key_prefix.clone(),
            connections: self.connections,
            payload_bytes: self.payload,
            padding_bytes: self.padding,
            latency_ms: self.latency_ms,
            headers: self.header.clone(),
            timeout: Some(self.timeout).filter(|timeout| !timeout.is_zero()),
            send_grpc_timeout: self.grpc_timeout,
        }
    }

    /// What is wrong with the outcome, if something is.
    fn complaint(&self, report: &Report) -> Option<String> {
        if report.wrong > 0 {
            return Some(format!("wrong answers: {}", grouped(report.wrong)));
        }
        if report.failed > 0 && !self.allow_errors {
            return Some(format!("failed calls: {}", grouped(report.failed)));
        }
        let wanted = self.min_ratio?;
        (!report.reaches_ratio(wanted)).then(|| {
            let reached = report.ratio.map_or("unknown".to_owned(), |ratio| format!("{ratio:.1}"));
            format!("the ratio of calls to backend calls is {reached}, not {wanted} or more")
        })
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    match load_and_report(&args).await {
        Ok(None) => ExitCode::SUCCESS,
        Ok(Some(complaint)) => {
            eprintln!("error: {complaint}");
            ExitCode::from(BAD_RESULT)
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(NO_RESULT)
        }
    }
}

async fn load_and_report(args: &Args) -> anyhow::Result<Option<String>> {
    let mut display = Display::new(args.quiet);
    let report = load::run(args.options(), |progress| display.show(progress)).await;
    display.clear();
    let report = report?;
    let mut out = io::stdout().lock();
    if args.json {
        writeln!(out, "{}", report.to_json()?)?;
    } else {
        write!(out, "{report}")?;
    }
    Ok(args.complaint(&report))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    fn args(flags: &str) -> Result<Args, clap::Error> {
        Args::try_parse_from(std::iter::once("loadgen").chain(flags.split_whitespace()))
    }

    #[test]
    fn flags_are_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn flags_choose_the_mode() {
        let mode = |flags| args(flags).unwrap().mode();
        let duration = Duration::from_secs(60);
        assert_eq!(mode(""), LoadMode::Burst { calls: 10_000 });
        assert_eq!(mode("--calls 7"), LoadMode::Burst { calls: 7 });
        let workers = |workers| LoadMode::Workers { workers, duration };
        assert_eq!(mode("--duration 60s"), workers(100));
        assert_eq!(mode("--duration 1m --workers 3"), workers(3));
        let per_second = 5000.0;
        assert_eq!(mode("--rate 5000 --duration 60s"), LoadMode::Rate { per_second, duration });
    }

    #[test]
    fn contradicting_flags_are_refused() {
        for flags in [
            "--calls 1 --duration 1s",
            "--workers 1",
            "--rate 1",
            "--rate 1 --workers 1 --duration 1s",
            "--min-ratio 2",
            "--reset",
            "--calls 0",
            "--duration soon",
            "--header nonsense",
        ] {
            assert!(args(flags).is_err(), "{flags}");
        }
    }
}
