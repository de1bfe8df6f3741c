//! What a load consists of, and which combinations make no sense.

use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use http::Uri;

use crate::MAX_MESSAGE_BYTES;
use crate::args::metadata_map;
use crate::proto::Metadata;

/// More connections than this run into the limits of ports and file descriptors.
const MAX_CONNECTIONS: usize = 10_000;

/// What to send, where to, and how to tell the answers apart.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Where the calls go: `http://host:port`.
    pub target: String,
    /// The demo backend's HTTP side, whose counters say how many calls got
    /// through; `None` leaves that out of the report.
    pub backend_url: Option<String>,
    /// Zero the backend's counters first.
    pub reset_backend: bool,
    /// How many calls, and when.
    pub mode: LoadMode,
    /// How many different keys are asked for; from 1.
    pub keys: u64,
    /// Which key comes next.
    pub key_order: KeyOrder,
    /// What a key starts with; its number follows.
    pub key_prefix: String,
    /// HTTP/2 connections, 1 to 10,000, used in turn.
    pub connections: usize,
    /// Payload bytes to ask for; 0 takes the backend's own setting.
    pub payload_bytes: u32,
    /// Bytes to add to every request.
    pub padding_bytes: usize,
    /// Latency to ask of the backend, in milliseconds; 0 takes the backend's own setting.
    pub latency_ms: u32,
    /// Metadata sent with every call.
    pub headers: Vec<Metadata>,
    /// When the client gives up on a call; `None` waits for ever.
    pub timeout: Option<Duration>,
    /// Send the timeout as `grpc-timeout` too.
    pub send_grpc_timeout: bool,
}

/// How many calls are made, and when.
#[derive(Clone, Debug, PartialEq)]
pub enum LoadMode {
    /// All at once.
    Burst {
        /// How many.
        calls: u64,
    },
    /// Closed loop: each worker sends its next call when it has its answer.
    Workers {
        /// How many workers.
        workers: usize,
        /// For how long calls are started.
        duration: Duration,
    },
    /// Open loop: calls are sent at fixed times, however long answers take.
    Rate {
        /// Calls per second.
        per_second: f64,
        /// For how long calls are started.
        duration: Duration,
    },
}

/// In which order the keys are asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KeyOrder {
    /// One after the other, over and over.
    #[default]
    RoundRobin,
    /// Each time any of them.
    Random,
}

impl LoadOptions {
    /// One burst over one key on one connection; the fields say what can be changed.
    pub fn burst(target: impl Into<String>, calls: u64) -> Self {
        Self {
            target: target.into(),
            backend_url: None,
            reset_backend: false,
            mode: LoadMode::Burst { calls },
            keys: 1,
            key_order: KeyOrder::RoundRobin,
            key_prefix: "key-".to_owned(),
            connections: 1,
            payload_bytes: 0,
            padding_bytes: 0,
            latency_ms: 0,
            headers: Vec::new(),
            timeout: Some(Duration::from_secs(30)),
            send_grpc_timeout: false,
        }
    }

    pub(super) fn validate(&self) -> anyhow::Result<()> {
        parse_http_uri(&self.target).context("the target")?;
        ensure!(self.keys > 0, "there must be at least one key");
        ensure!(
            (1..=MAX_CONNECTIONS).contains(&self.connections),
            "{} connections; there can be 1 to {MAX_CONNECTIONS}",
            self.connections
        );
        ensure!(
            self.padding_bytes < MAX_MESSAGE_BYTES,
            "{} bytes of padding; a request holds less than {MAX_MESSAGE_BYTES}",
            self.padding_bytes
        );
        ensure!(self.timeout != Some(Duration::ZERO), "a timeout of zero leaves no time for an answer");
        ensure!(
            self.timeout.is_some() || !self.send_grpc_timeout,
            "there is no timeout that could be sent as grpc-timeout"
        );
        ensure!(
            self.backend_url.is_some() || !self.reset_backend,
            "the backend's counters can only be reset when its address is given"
        );
        metadata_map(&self.headers).map_err(anyhow::Error::msg)?;
        self.mode.validate()
    }
}

impl LoadMode {
    pub(crate) fn validate(&self) -> anyhow::Result<()> {
        match *self {
            Self::Burst { calls } => ensure!(calls > 0, "there must be at least one call"),
            Self::Workers { workers, duration } => {
                ensure!(workers > 0, "there must be at least one worker");
                ensure!(!duration.is_zero(), "the duration must be more than zero");
            }
            Self::Rate { per_second, duration } => {
                ensure!(
                    per_second.is_finite() && per_second > 0.0,
                    "the rate must be more than zero calls per second"
                );
                ensure!(!duration.is_zero(), "the duration must be more than zero");
            }
        }
        Ok(())
    }

    /// How many calls there will be, where that is known.
    pub(super) fn calls(&self) -> Option<u64> {
        match *self {
            Self::Burst { calls } => Some(calls),
            Self::Workers { .. } => None,
            Self::Rate { per_second, duration } => {
                Some(((per_second * duration.as_secs_f64()).round() as u64).max(1))
            }
        }
    }

    /// For how long calls are started, where that is known.
    pub(super) fn duration(&self) -> Option<Duration> {
        match *self {
            Self::Burst { .. } => None,
            Self::Workers { duration, .. } | Self::Rate { duration, .. } => Some(duration),
        }
    }

    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Burst { .. } => "burst",
            Self::Workers { .. } => "workers",
            Self::Rate { .. } => "rate",
        }
    }
}

/// Reads `http://host:port` and says what is wrong with anything else.
pub(crate) fn parse_http_uri(text: &str) -> anyhow::Result<Uri> {
    let uri: Uri = text.parse().with_context(|| format!("`{text}` is not a URI; write http://host:port"))?;
    match uri.scheme_str() {
        Some("http") => {}
        Some("https") => bail!("`{text}` asks for TLS, which is not spoken here; write http://"),
        _ => bail!("`{text}` has no scheme; write http://host:port"),
    }
    ensure!(uri.port_u16().is_some(), "`{text}` has no port; write http://host:port");
    ensure!(
        matches!(uri.path(), "" | "/") && uri.query().is_none(),
        "`{text}` has a path; write http://host:port"
    );
    Ok(uri)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_addresses() {
        for text in ["http://127.0.0.1:50052", "http://[::1]:1/", "http://name:80"] {
            assert!(parse_http_uri(text).is_ok(), "{text}");
        }
        for text in [
            "",
            "127.0.0.1:50052",
            "localhost",
            "https://h:1",
            "http://h",
            "http://h:1/path",
            "http://h:1?q",
            "http://h:99999",
            "http:// h:1",
        ] {
            assert!(parse_http_uri(text).is_err(), "{text}");
        }
    }

    #[test]
    fn refuses_what_makes_no_sense() {
        let good = LoadOptions::burst("http://127.0.0.1:1", 1);
        assert!(good.validate().is_ok());
        let bad: [fn(&mut LoadOptions); 9] = [
            |options| options.target = "nowhere".into(),
            |options| options.keys = 0,
            |options| options.connections = 0,
            |options| options.connections = 10_001,
            |options| options.padding_bytes = MAX_MESSAGE_BYTES,
            |options| options.timeout = Some(Duration::ZERO),
            |options| options.reset_backend = true,
            |options| options.mode = LoadMode::Burst { calls: 0 },
            |options| {
                options.mode = LoadMode::Rate { per_second: f64::NAN, duration: Duration::from_secs(1) };
            },
        ];
        for spoil in bad {
            let mut options = good.clone();
            spoil(&mut options);
            assert!(options.validate().is_err(), "{options:?}");
        }
    }

    #[test]
    fn a_rate_knows_its_calls() {
        let mode = LoadMode::Rate { per_second: 2.5, duration: Duration::from_secs(10) };
        assert_eq!(mode.calls(), Some(25));
    }
}
