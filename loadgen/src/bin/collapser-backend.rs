//! The demo backend as a program.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use collapser_loadgen::args::{parse_duration, parse_metadata};
use collapser_loadgen::backend::{Backend, BackendOptions, Failure};
use collapser_loadgen::proto::Metadata;
use tokio::signal::unix::{SignalKind, signal};
use tonic::Code;

/// A gRPC backend that does what it is told and counts its calls.
///
/// It serves collapser.demo.v1.Demo, health and reflection over gRPC, and over
/// HTTP/1.1: GET /calls, POST /reset, GET /health, POST /latency?ms=N.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// Where gRPC is served.
    #[arg(long, env = "BACKEND_GRPC_ADDR", default_value = "0.0.0.0:50051")]
    grpc_addr: SocketAddr,

    /// Where the HTTP side is served.
    #[arg(long, env = "BACKEND_HTTP_ADDR", default_value = "0.0.0.0:8080")]
    http_addr: SocketAddr,

    /// How long a call takes that does not say so itself, such as 50ms.
    #[arg(long, env = "BACKEND_LATENCY", default_value = "50ms", value_parser = parse_duration)]
    latency: Duration,

    /// gRPC status code, 1 to 16, that calls fail with; without it none fail by themselves.
    #[arg(long, env = "BACKEND_FAIL_CODE", value_parser = clap::value_parser!(i32).range(1..=16))]
    fail_code: Option<i32>,

    /// Message of those failures.
    #[arg(long, env = "BACKEND_FAIL_MESSAGE", default_value = "failing as told", requires = "fail_code")]
    fail_message: String,

    /// Share of the calls that fails, from 0 to 1.
    #[arg(long, env = "BACKEND_FAIL_RATIO", default_value_t = 1.0, requires = "fail_code")]
    fail_ratio: f64,

    /// Payload bytes of a reply when the request does not ask for any.
    #[arg(long, env = "BACKEND_PAYLOAD_BYTES", default_value_t = 16)]
    payload_bytes: u32,

    /// Initial metadata of every reply; repeatable, or with commas in between.
    #[arg(long, env = "BACKEND_INITIAL_METADATA", value_name = "NAME=VALUE",
          value_delimiter = ',', value_parser = parse_metadata)]
    initial_metadata: Vec<Metadata>,

    /// Trailing metadata of every reply; repeatable, or with commas in between.
    #[arg(long, env = "BACKEND_TRAILING_METADATA", value_name = "NAME=VALUE",
          value_delimiter = ',', value_parser = parse_metadata)]
    trailing_metadata: Vec<Metadata>,
}

impl Args {
    fn into_options(self) -> BackendOptions {
        let failure = self.fail_code.map(|code| Failure {
            code: Code::from_i32(code),
            message: self.fail_message,
            ratio: self.fail_ratio,
        });
        BackendOptions {
            grpc_addr: self.grpc_addr,
            http_addr: Some(self.http_addr),
            latency: self.latency,
            failure,
            payload_bytes: self.payload_bytes,
            initial_metadata: self.initial_metadata,
            trailing_metadata: self.trailing_metadata,
        }
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    match serve(Args::parse().into_options()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn serve(options: BackendOptions) -> anyhow::Result<()> {
    // Before anything is served, so that no signal goes unheard.
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let backend = Backend::start(options).await?;
    let http = backend.http_uri().unwrap_or_default();
    eprintln!("gRPC at {}, counters at {http}/calls", backend.grpc_uri());
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    eprintln!("stopping after {} calls", backend.calls());
    backend.shutdown().await;
    Ok(())
}
