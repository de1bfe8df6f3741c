//! The sidecar as a pod runs it: configuration from the environment, Envoy as a child, and a
//! drain when the pod is told to stop.
//!
//! Envoy itself exits at once on SIGTERM, with all calls in flight. This process fails readiness first, waits until
//! callers have noticed, lets calls end, and then stops Envoy.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::{ExitCode, ExitStatus};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, bail};
use clap::{CommandFactory, FromArgMatches, Parser, ValueEnum};
use collapser_loadgen::args::parse_duration;
use collapser_loadgen::http_ask::ask;
use collapser_loadgen::sidecar::{BackendTls, ConfigOptions, Identity, ListenerTls, Metrics, check_settings};
use http::{Method, Uri};
use serde_json::json;
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};

/// What a large fan-out may take on top of the backend's time.
const FAN_OUT_ALLOWANCE: Duration = Duration::from_secs(5);

/// How often the drain looks whether calls are still in flight.
const DRAIN_POLL: Duration = Duration::from_millis(100);

/// Runs the sidecar. The filter's own settings are environment variables too; see the README.
///
/// On SIGTERM: /ready fails at once; new calls are still taken for --drain-delay; then connections are told to
/// go away and calls in flight may end within --drain-timeout; then Envoy stops.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// Where callers connect.
    #[arg(long, env = "GRPC_PORT", default_value_t = 50052, value_parser = clap::value_parser!(u16).range(1..))]
    grpc_port: u16,
    /// Where /metrics, /health and /ready are served.
    #[arg(long, env = "METRICS_PORT", default_value_t = 2112, value_parser = clap::value_parser!(u16).range(1..))]
    metrics_port: u16,
    /// The address of these two ports; `::` takes callers of both families.
    #[arg(long, env = "LISTEN_ADDRESS", default_value = "0.0.0.0")]
    listen_address: IpAddr,
    /// Envoy's admin interface, on loopback only.
    #[arg(long, env = "ADMIN_PORT", default_value_t = 9901, value_parser = clap::value_parser!(u16).range(1..))]
    admin_port: u16,
    /// The backend, as host:port.
    #[arg(long, env = "BACKEND_ADDRESS", value_parser = parse_address)]
    backend_address: (String, u16),
    /// Speak TLS to the backend. The other BACKEND_TLS_* variables need it.
    #[arg(long, env = "BACKEND_USE_TLS", default_value_t = false, action = clap::ArgAction::Set)]
    backend_use_tls: bool,
    /// PEM file of the authorities to trust; the system's by default.
    #[arg(long, env = "BACKEND_TLS_CA_FILE", value_parser = parse_file)]
    backend_tls_ca_file: Option<PathBuf>,
    /// PEM file of the certificate to show the backend.
    #[arg(long, env = "BACKEND_TLS_CERT_FILE", value_parser = parse_file, requires = "backend_tls_key_file")]
    backend_tls_cert_file: Option<PathBuf>,
    /// PEM file of its key.
    #[arg(long, env = "BACKEND_TLS_KEY_FILE", value_parser = parse_file, requires = "backend_tls_cert_file")]
    backend_tls_key_file: Option<PathBuf>,
    /// The name to ask for and to find in the backend's certificate; the backend's host by default.
    #[arg(long, env = "BACKEND_TLS_SNI")]
    backend_tls_sni: Option<String>,
    /// PEM file of the certificate to show callers; without it they speak plain text.
    #[arg(long, env = "TLS_CERT_FILE", value_parser = parse_file, requires = "tls_key_file")]
    tls_cert_file: Option<PathBuf>,
    /// PEM file of its key.
    #[arg(long, env = "TLS_KEY_FILE", value_parser = parse_file, requires = "tls_cert_file")]
    tls_key_file: Option<PathBuf>,
    /// PEM file of the authorities one of which must have signed the caller's certificate.
    #[arg(long, env = "TLS_CLIENT_CA_FILE", value_parser = parse_file, requires = "tls_cert_file")]
    tls_client_ca_file: Option<PathBuf>,
    /// The filter's deadline of a flight; here only to give held requests a little longer.
    #[arg(long, env = "BACKEND_TIMEOUT", default_value = "10s", value_parser = parse_duration)]
    backend_timeout: Duration,
    /// How much is logged.
    #[arg(long, env = "LOG_LEVEL", value_enum, default_value = "info")]
    log_level: LogLevel,
    /// In what form.
    #[arg(long, env = "LOG_FORMAT", value_enum, default_value = "console")]
    log_format: LogFormat,
    /// Envoy's worker threads. They share flights and replies, unless scope is worker.
    #[arg(long, env = "CONCURRENCY", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    concurrency: u32,
    /// How long new calls are still taken after readiness has failed.
    #[arg(long, env = "DRAIN_DELAY", default_value = "5s", value_parser = parse_patience)]
    drain_delay: Duration,
    /// How long calls in flight may take to end after that.
    #[arg(long, env = "DRAIN_TIMEOUT", default_value = "20s", value_parser = parse_patience)]
    drain_timeout: Duration,
    /// The Envoy binary.
    #[arg(long, env = "ENVOY", default_value = "envoy")]
    envoy: PathBuf,
    /// The configuration to start from.
    #[arg(long, env = "COLLAPSER_CONFIG", default_value = "envoy/envoy.yaml", value_parser = parse_file)]
    config: PathBuf,
    /// The Wasm module.
    #[arg(long, env = "COLLAPSER_MODULE", default_value = "target/collapser.wasm", value_parser = parse_file)]
    module: PathBuf,
}

#[derive(Clone, Copy, ValueEnum)]
enum LogLevel {
    Trace,
    Debug,
    Info,
    Warn,
    Error,
    Off,
}

#[derive(Clone, Copy, ValueEnum)]
enum LogFormat {
    Json,
    Console,
}

fn parse_address(text: &str) -> Result<(String, u16), String> {
    let wrong = || "an address such as backend:50051 or [::1]:50051 is needed".to_owned();
    let (host, port) = text.trim().rsplit_once(':').ok_or_else(wrong)?;
    let port = port.parse().ok().filter(|port| *port > 0).ok_or_else(wrong)?;
    let inner = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let is_name = |host: &str| {
        !host.is_empty() && host.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b))
    };
    let is_good = inner.map_or(is_name(host), |inner| inner.parse::<Ipv6Addr>().is_ok());
    let host = inner.unwrap_or(host);
    if !is_good {
        return Err(wrong());
    }
    Ok((host.to_owned(), port))
}

/// No pod is given longer than this to stop.
fn parse_patience(text: &str) -> Result<Duration, String> {
    const LONGEST: Duration = Duration::from_secs(24 * 3_600);
    let patience = parse_duration(text)?;
    if patience > LONGEST { Err("at most 24h are allowed".to_owned()) } else { Ok(patience) }
}

fn parse_file(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    if path.is_file() { Ok(path) } else { Err("there is no such file".to_owned()) }
}

impl Args {
    fn config(&self) -> ConfigOptions {
        let (host, port) = &self.backend_address;
        let any = |port| SocketAddr::from((self.listen_address, port));
        ConfigOptions {
            template: self.config.clone(),
            module: self.module.clone(),
            listen: any(self.grpc_port),
            metrics: any(self.metrics_port),
            admin: self.admin(),
            backend_tls: self.backend_use_tls.then(|| self.backend_tls()),
            tls: identity(&self.tls_cert_file, &self.tls_key_file)
                .map(|identity| ListenerTls { identity, client_ca: self.tls_client_ca_file.clone() }),
            hold_timeout: Some(self.backend_timeout + FAN_OUT_ALLOWANCE),
            ..ConfigOptions::new(host, *port)
        }
    }

    /// Tells in the form that Envoy logs in.
    fn say(&self, level: &str, message: &str) {
        if matches!(self.log_format, LogFormat::Json) {
            let time = humantime::format_rfc3339_millis(SystemTime::now()).to_string();
            let line = json!({"time": time, "level": level, "logger": "collapser", "message": message});
            eprintln!("{line}");
        } else {
            eprintln!("{message}");
        }
    }

    fn admin(&self) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, self.admin_port))
    }

    fn backend_tls(&self) -> BackendTls {
        BackendTls {
            ca: self.backend_tls_ca_file.clone(),
            identity: identity(&self.backend_tls_cert_file, &self.backend_tls_key_file),
            sni: self.backend_tls_sni.clone(),
        }
    }

    fn command(&self, config: &str) -> Command {
        let level = match self.log_level {
            LogLevel::Trace => "trace",
            LogLevel::Debug => "debug",
            LogLevel::Info => "info",
            LogLevel::Warn => "warning",
            LogLevel::Error => "error",
            LogLevel::Off => "off",
        };
        let mut command = Command::new(&self.envoy);
        command
            .args(["--config-yaml", config, "--log-level", level, "--use-dynamic-base-id"])
            .args(["--concurrency", &self.concurrency.to_string()])
            // While draining, connections are told to go away over this time.
            .args(["--drain-time-s", &self.drain_timeout.as_secs().max(1).to_string()])
            // Envoy exits at once on a signal; one to the whole group must reach only this process.
            .process_group(0)
            .kill_on_drop(true);
        if matches!(self.log_format, LogFormat::Json) {
            // Envoy escapes %j for JSON.
            let format = r#"{"time":"%Y-%m-%dT%T.%e%z","level":"%l","logger":"%n","message":"%j"}"#;
            command.args(["--log-format", format]);
        }
        command
    }
}

fn identity(certificate: &Option<PathBuf>, key: &Option<PathBuf>) -> Option<Identity> {
    Some(Identity { certificate: certificate.clone()?, key: key.clone()? })
}

/// The arguments. A variable that is set to nothing counts as not set, as templates of pods often leave it.
fn arguments() -> Args {
    let is_empty = |arg: &clap::Arg| {
        arg.get_env().is_some_and(|name| std::env::var_os(name).is_some_and(|v| v.is_empty()))
    };
    let command = <Args as CommandFactory>::command()
        .mut_args(|arg| if is_empty(&arg) { arg.env(None::<&str>) } else { arg });
    match Args::from_arg_matches(&command.get_matches()) {
        Ok(args) => args,
        Err(error) => error.exit(),
    }
}

/// What is wrong with the environment and that clap cannot see.
fn check(args: &Args) -> anyhow::Result<()> {
    let has_tls = args.backend_tls_ca_file.is_some()
        || args.backend_tls_cert_file.is_some()
        || args.backend_tls_sni.is_some();
    if has_tls && !args.backend_use_tls {
        bail!("BACKEND_TLS_CA_FILE, _CERT_FILE, _KEY_FILE and _SNI need BACKEND_USE_TLS=true");
    }
    check_settings(&args.config().template)?;
    // All are held until all are there, so that two variables with the same port are noticed.
    let mut held = Vec::new();
    for (variable, port) in
        [("GRPC_PORT", args.grpc_port), ("METRICS_PORT", args.metrics_port), ("ADMIN_PORT", args.admin_port)]
    {
        let host = if variable == "ADMIN_PORT" { Ipv4Addr::LOCALHOST.into() } else { args.listen_address };
        let listener = TcpListener::bind((host, port)).with_context(|| {
            format!("cannot listen on {host} port {port}; choose another with {variable}")
        })?;
        held.push(listener);
    }
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let args = arguments();
    let error = match run(&args).await {
        Ok(status) if status.success() => return ExitCode::SUCCESS,
        Ok(status) => format!("Envoy ended with {status}"),
        Err(error) => format!("{error:#}"),
    };
    args.say("error", &format!("error: {error}"));
    ExitCode::FAILURE
}

async fn run(args: &Args) -> anyhow::Result<ExitStatus> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    check(args)?;
    let config = args.config().render()?;
    let mut envoy =
        args.command(&config).spawn().with_context(|| format!("cannot run {}", args.envoy.display()))?;
    tokio::select! {
        status = envoy.wait() => return Ok(status?),
        _ = terminate.recv() => (),
        _ = interrupt.recv() => (),
    }
    tokio::select! {
        // Envoy may end by itself at any time, and a second signal ends the patience.
        status = envoy.wait() => bail!("Envoy ended before the drain was over ({})", status?),
        drained = drain(args) => drained?,
        _ = terminate.recv() => args.say("info", "second signal: stopping at once"),
        _ = interrupt.recv() => args.say("info", "second signal: stopping at once"),
    }
    stop(args, &mut envoy).await
}

/// Source: Envoy docs, "Draining" and "Administration interface". An Envoy that does not answer at once is busy, with the
/// very calls that the drain is for; only its end, or the end of the patience, ends the drain.
async fn drain(args: &Args) -> anyhow::Result<()> {
    let admin: Uri = format!("http://{}", args.admin()).parse()?;
    let delay = args.drain_delay;
    args.say("info", &format!("draining: readiness fails; new calls are taken for {delay:?} more"));
    tell(args, &admin, "/healthcheck/fail").await;
    tokio::time::sleep(delay).await;
    tell(args, &admin, "/drain_listeners?graceful&skip_exit").await;
    let deadline = Instant::now() + args.drain_timeout;
    loop {
        let active = active_calls(&admin).await;
        if active.as_ref().is_ok_and(|active| *active == 0.0) {
            args.say("info", "drained: no call is in flight");
            return Ok(());
        }
        if Instant::now() > deadline {
            let left = active.map_or_else(|error| format!("{error:#}"), |active| active.to_string());
            args.say("warning", &format!("drain timeout: calls still in flight: {left}"));
            return Ok(());
        }
        tokio::time::sleep(DRAIN_POLL).await;
    }
}

/// Posts to the admin interface, several times if need be: Envoy may be about to start.
async fn tell(args: &Args, admin: &Uri, path: &str) {
    const ATTEMPTS: u32 = 10;
    for _ in 1..ATTEMPTS {
        if post(admin, path).await.is_ok() {
            return;
        }
        tokio::time::sleep(DRAIN_POLL).await;
    }
    if let Err(error) = post(admin, path).await {
        args.say("warning", &format!("{error:#}"));
    }
}

async fn active_calls(admin: &Uri) -> anyhow::Result<f64> {
    let filter = "/stats/prometheus?filter=^http\\.public\\.downstream_rq_active$";
    let (_, body) = ask(Method::GET, admin, filter).await?;
    Ok(Metrics::parse(&String::from_utf8_lossy(&body)).sum("envoy_http_downstream_rq_active"))
}

async fn stop(args: &Args, envoy: &mut Child) -> anyhow::Result<ExitStatus> {
    let admin: Uri = format!("http://{}", args.admin()).parse()?;
    if post(&admin, "/quitquitquit").await.is_err() {
        envoy.start_kill()?;
    }
    Ok(envoy.wait().await?)
}

async fn post(admin: &Uri, path: &str) -> anyhow::Result<()> {
    let (status, _) = ask(Method::POST, admin, path).await.with_context(|| format!("{path} at {admin}"))?;
    if !status.is_success() {
        bail!("{path} at {admin}: {status}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_consistent() {
        <Args as CommandFactory>::command().debug_assert();
    }

    #[test]
    fn addresses_are_host_and_port() {
        assert_eq!(parse_address("backend:50051"), Ok(("backend".to_owned(), 50051)));
        assert_eq!(parse_address("[::1]:1"), Ok(("::1".to_owned(), 1)));
        for wrong in [
            "",
            "backend",
            ":1",
            "backend:",
            "backend:0",
            "backend:65536",
            "http://backend:1",
            "a b:1",
            "[::1:1",
            "[backend]:1",
            "bäckend:1",
        ] {
            assert!(parse_address(wrong).is_err(), "{wrong}");
        }
    }
}
