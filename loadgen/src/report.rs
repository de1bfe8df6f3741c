//! The outcome of a load, for people and for programs.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use hdrhistogram::Histogram;
use serde::Serialize;
use tonic::Code;

/// What a load came to.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// `burst`, `workers` or `rate`.
    pub mode: String,
    /// Where the calls went.
    pub target: String,
    /// Connections in use.
    pub connections: u64,
    /// Different keys on offer.
    pub keys: u64,
    /// Calls made; each is either ok, failed or wrong.
    pub calls: u64,
    /// Calls with the right answer.
    pub ok: u64,
    /// Calls that ended with a status other than OK.
    pub failed: u64,
    /// The failed calls by status name, such as `UNAVAILABLE`.
    pub errors: BTreeMap<String, ErrorCount>,
    /// Calls answered with another's key or payload.
    pub wrong: u64,
    /// What was wrong with the first of those.
    pub wrong_sample: Option<String>,
    /// From the first call's start to the last one's end.
    pub elapsed_seconds: f64,
    /// Calls per second, over that time.
    pub rate_per_second: f64,
    /// How long calls took, failed ones included.
    pub latency_ms: LatencyMs,
    /// Compute calls that reached the backend meanwhile, where that is known.
    pub backend_calls: Option<u64>,
    /// Calls made per backend call; `None` also when no call reached the backend.
    pub ratio: Option<f64>,
}

/// Failed calls of one status.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ErrorCount {
    /// How many.
    pub count: u64,
    /// The message of the first.
    pub sample: String,
}

impl ErrorCount {
    pub(crate) fn new(sample: String) -> Self {
        Self { count: 0, sample }
    }
}

/// A distribution of latencies in milliseconds, exact to three digits; all zero
/// when there was no call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LatencyMs {
    /// The shortest.
    pub min: f64,
    /// The average.
    pub mean: f64,
    /// Half of the calls took no longer.
    pub p50: f64,
    /// 90 % took no longer.
    pub p90: f64,
    /// 95 % took no longer.
    pub p95: f64,
    /// 99 % took no longer.
    pub p99: f64,
    /// 99.9 % took no longer.
    #[serde(rename = "p99.9")]
    pub p999: f64,
    /// The longest.
    pub max: f64,
}

impl LatencyMs {
    /// Reads a histogram of microseconds.
    pub fn from_micros(histogram: &Histogram<u64>) -> Self {
        if histogram.is_empty() {
            return Self::default();
        }
        let ms = |micros: u64| micros as f64 / 1e3;
        let at = |quantile| ms(histogram.value_at_quantile(quantile));
        Self {
            min: ms(histogram.min()),
            mean: histogram.mean() / 1e3,
            p50: at(0.5),
            p90: at(0.9),
            p95: at(0.95),
            p99: at(0.99),
            p999: at(0.999),
            max: ms(histogram.max()),
        }
    }

    fn named(&self) -> [(&'static str, f64); 8] {
        [
            ("min", self.min),
            ("mean", self.mean),
            ("p50", self.p50),
            ("p90", self.p90),
            ("p95", self.p95),
            ("p99", self.p99),
            ("p99.9", self.p999),
            ("max", self.max),
        ]
    }
}

impl Report {
    /// Fills in what follows from the counts.
    pub(crate) fn with_rates(mut self) -> Self {
        if self.elapsed_seconds > 0.0 {
            self.rate_per_second = self.calls as f64 / self.elapsed_seconds;
        }
        self.ratio = match self.backend_calls {
            Some(backend_calls) if backend_calls > 0 => Some(self.calls as f64 / backend_calls as f64),
            _ => None,
        };
        self
    }

    /// The report with the number of backend calls, for whoever has counted them.
    pub fn with_backend_calls(mut self, backend_calls: u64) -> Self {
        self.backend_calls = Some(backend_calls);
        self.with_rates()
    }

    /// Whether every call was answered, and rightly.
    pub fn is_clean(&self) -> bool {
        self.failed == 0 && self.wrong == 0
    }

    /// Whether there were at least `ratio` calls to a backend call. True when no
    /// call had to go to the backend; false when the backend's calls are unknown.
    pub fn reaches_ratio(&self, ratio: f64) -> bool {
        match (self.backend_calls, self.ratio) {
            (Some(_), Some(reached)) => reached >= ratio,
            (Some(_), None) => self.ok > 0,
            (None, _) => false,
        }
    }

    /// The report as one line of JSON.
    pub fn to_json(&self) -> serde_json::Result<String> {
        serde_json::to_string(self)
    }
}

impl fmt::Display for Report {
    /// The report as aligned text.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut row = |name: &str, value: String| writeln!(out, "{name:<15}{value}");
        row("target", self.target.clone())?;
        row("mode", self.mode.clone())?;
        row("connections", grouped(self.connections))?;
        row("keys", grouped(self.keys))?;
        row("calls", grouped(self.calls))?;
        row("  ok", grouped(self.ok))?;
        row("  failed", grouped(self.failed))?;
        for (name, error) in &self.errors {
            let text = format!("{name} {}, such as: {}", grouped(error.count), error.sample);
            row("", text)?;
        }
        row("  wrong", grouped(self.wrong))?;
        if let Some(sample) = &self.wrong_sample {
            row("", format!("such as: {sample}"))?;
        }
        row("elapsed", format!("{:.3} s", self.elapsed_seconds))?;
        row("rate", format!("{:.0} calls/s", self.rate_per_second))?;
        row("latency (ms)", latency_text(&self.latency_ms)?)?;
        row("backend calls", self.backend_text())
    }
}

impl Report {
    fn backend_text(&self) -> String {
        match (self.backend_calls, self.ratio) {
            (None, _) => "unknown".to_owned(),
            (Some(calls), None) => grouped(calls),
            (Some(calls), Some(ratio)) => format!("{} ({ratio:.1}:1)", grouped(calls)),
        }
    }
}

fn latency_text(latency: &LatencyMs) -> Result<String, fmt::Error> {
    let mut text = String::new();
    for (name, ms) in latency.named() {
        let gap = if text.is_empty() { "" } else { "  " };
        write!(text, "{gap}{name} {ms:.3}")?;
    }
    Ok(text)
}

/// A number with its thousands apart: 391,400.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// The name that gRPC's own documents give a status code.
pub fn status_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(calls: u64, backend_calls: Option<u64>) -> Report {
        let report = Report {
            mode: "burst".into(),
            target: "http://127.0.0.1:1".into(),
            connections: 1,
            keys: 1,
            calls,
            ok: calls,
            failed: 0,
            errors: BTreeMap::new(),
            wrong: 0,
            wrong_sample: None,
            elapsed_seconds: 2.0,
            rate_per_second: 0.0,
            latency_ms: LatencyMs::default(),
            backend_calls,
            ratio: None,
        };
        report.with_rates()
    }

    #[test]
    fn ratios() {
        let collapsed = report(10_000, Some(2));
        assert_eq!((collapsed.ratio, collapsed.rate_per_second), (Some(5000.0), 5000.0));
        assert!(collapsed.reaches_ratio(5000.0));
        assert!(!collapsed.reaches_ratio(5000.1));
        assert!(report(10, Some(0)).reaches_ratio(1e9));
        assert!(!report(0, Some(0)).reaches_ratio(1.0));
        assert!(!report(10, None).reaches_ratio(1.0));
    }

    #[test]
    fn latencies() {
        let mut histogram = Histogram::new(3).unwrap();
        assert_eq!(LatencyMs::from_micros(&histogram), LatencyMs::default());
        for micros in 1..=1000 {
            histogram.record(micros).unwrap();
        }
        let latency = LatencyMs::from_micros(&histogram);
        assert_eq!((latency.min, latency.p50, latency.max), (0.001, 0.5, 1.0));
        assert_eq!((latency.p90, latency.p99, latency.p999), (0.9, 0.99, 0.999));
        assert!((latency.mean - 0.5005).abs() < 1e-9);
    }

    #[test]
    fn thousands() {
        for (number, text) in [(0, "0"), (999, "999"), (1000, "1,000"), (1_234_567, "1,234,567")] {
            assert_eq!(grouped(number), text);
        }
    }

    #[test]
    fn text_and_json_tell_the_same() {
        let mut report = report(10_000, Some(2));
        let mut error = ErrorCount::new("gone".into());
        error.count = 7;
        report.errors.insert("UNAVAILABLE".into(), error);
        report.failed = 7;
        assert!(!report.is_clean());

        let text = report.to_string();
        for line in ["calls          10,000", "backend calls  2 (5000.0:1)", "7, such as: gone"] {
            assert!(text.contains(line), "{text}");
        }
        let json: serde_json::Value = serde_json::from_str(&report.to_json().unwrap()).unwrap();
        assert_eq!(json["calls"], 10_000);
        assert_eq!(json["errors"]["UNAVAILABLE"]["count"], 7);
        assert_eq!(json["latency_ms"]["p99.9"], 0.0);
        assert_eq!(json["ratio"], 5000.0);
    }
}
