//! Counts outcomes and latencies while a load runs.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use hdrhistogram::Histogram;

use super::options::LoadMode;
use crate::lock;
use crate::report::{ErrorCount, LatencyMs, Report};

/// Latencies are kept from 1 µs to an hour, to three digits.
const MAX_MICROS: u64 = 3_600_000_000;
const DIGITS: u8 = 3;

/// How far a load has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Calls that have ended.
    pub ended: u64,
    /// Those among them that failed or were answered wrongly.
    pub bad: u64,
    /// Calls there will be, where that is known.
    pub calls: Option<u64>,
    /// Time since the first call could be sent.
    pub elapsed: Duration,
    /// For how long calls are started, where that is known.
    pub duration: Option<Duration>,
}

/// What became of a call.
pub(crate) enum Outcome {
    /// The right answer.
    Right,
    /// An answer, but not to this question. Says what is wrong with it.
    Wrong(String),
    /// A status that is no success, or no answer.
    Failed {
        /// The status's name.
        status: Cow<'static, str>,
        /// What else is known of it.
        message: String,
    },
}

/// What a report is about.
pub(crate) struct Subject<'a> {
    pub(crate) target: &'a str,
    pub(crate) connections: usize,
    pub(crate) keys: u64,
}

pub(crate) struct Tally {
    mode: &'static str,
    start: OnceLock<Instant>,
    calls: Option<u64>,
    duration: Option<Duration>,
    counts: Mutex<Counts>,
}

struct Counts {
    latency: Histogram<u64>,
    ok: u64,
    failed: u64,
    wrong: u64,
    wrong_sample: Option<String>,
    errors: BTreeMap<Cow<'static, str>, ErrorCount>,
}

impl Tally {
    pub(crate) fn new(mode: &LoadMode) -> anyhow::Result<Self> {
        let latency =
            Histogram::new_with_bounds(1, MAX_MICROS, DIGITS).context("a histogram of latencies")?;
        Ok(Self {
            mode: mode.name(),
            start: OnceLock::new(),
            calls: mode.calls(),
            duration: mode.duration(),
            counts: Mutex::new(Counts {
                latency,
                ok: 0,
                failed: 0,
                wrong: 0,
                wrong_sample: None,
                errors: BTreeMap::new(),
            }),
        })
    }

    /// Starts the clock that [`Progress`] shows.
    pub(crate) fn start(&self) {
        self.start.get_or_init(Instant::now);
    }

    pub(crate) fn record(&self, latency: Duration, outcome: Outcome) {
        let micros = u64::try_from(latency.as_micros()).unwrap_or(MAX_MICROS);
        let mut counts = lock(&self.counts);
        counts.latency.saturating_record(micros.max(1));
        match outcome {
            Outcome::Right => counts.ok += 1,
            Outcome::Wrong(what) => {
                counts.wrong += 1;
                counts.wrong_sample.get_or_insert(what);
            }
            Outcome::Failed { status, message } => {
                counts.failed += 1;
                counts.errors.entry(status).or_insert_with(|| ErrorCount::new(message)).count += 1;
            }
        }
    }

    pub(crate) fn progress(&self) -> Progress {
        let counts = lock(&self.counts);
        let bad = counts.failed + counts.wrong;
        Progress {
            ended: counts.ok + bad,
            bad,
            calls: self.calls,
            elapsed: self.start.get().map_or(Duration::ZERO, Instant::elapsed),
            duration: self.duration,
        }
    }

    pub(crate) fn report(
        &self,
        subject: Subject<'_>,
        elapsed: Duration,
        backend_calls: Option<u64>,
    ) -> Report {
        let counts = lock(&self.counts);
        let errors = counts.errors.iter();
        let report = Report {
            mode: self.mode.to_owned(),
            target: subject.target.to_owned(),
            connections: subject.connections as u64,
            keys: subject.keys,
            calls: counts.ok + counts.failed + counts.wrong,
            ok: counts.ok,
            failed: counts.failed,
            errors: errors.map(|(name, error)| (name.to_string(), error.clone())).collect(),
            wrong: counts.wrong,
            wrong_sample: counts.wrong_sample.clone(),
            elapsed_seconds: elapsed.as_secs_f64(),
            rate_per_second: 0.0,
            latency_ms: LatencyMs::from_micros(&counts.latency),
            backend_calls,
            ratio: None,
        };
        report.with_rates()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUBJECT: Subject<'static> = Subject { target: "http://127.0.0.1:1", connections: 1, keys: 1 };

    fn failed(message: &str) -> Outcome {
        Outcome::Failed { status: "UNAVAILABLE".into(), message: message.to_owned() }
    }

    #[test]
    fn counts_every_outcome() {
        let tally = Tally::new(&LoadMode::Burst { calls: 5 }).unwrap();
        tally.start();
        let ms = Duration::from_millis;
        tally.record(ms(10), Outcome::Right);
        tally.record(ms(20), Outcome::Right);
        tally.record(ms(30), Outcome::Wrong("first".into()));
        tally.record(ms(40), failed("gone"));
        tally.record(ms(50), failed("gone again"));

        let progress = tally.progress();
        assert_eq!((progress.ended, progress.bad, progress.calls), (5, 3, Some(5)));

        let report = tally.report(SUBJECT, Duration::from_secs(2), Some(2));
        assert_eq!((report.calls, report.ok), (5, 2));
        assert_eq!((report.failed, report.wrong), (2, 1));
        assert_eq!(report.wrong_sample.as_deref(), Some("first"));
        let error = &report.errors["UNAVAILABLE"];
        assert_eq!((error.count, error.sample.as_str()), (2, "gone"));
        assert_eq!((report.rate_per_second, report.ratio), (2.5, Some(2.5)));
        assert!((report.latency_ms.p50 - 30.0).abs() < 0.1);
    }

    #[test]
    fn a_latency_beyond_the_range_is_kept_at_its_end() {
        let tally = Tally::new(&LoadMode::Burst { calls: 2 }).unwrap();
        tally.record(Duration::ZERO, Outcome::Right);
        tally.record(Duration::from_secs(86_400), Outcome::Right);
        let report = tally.report(SUBJECT, Duration::from_secs(1), None);
        assert_eq!(report.latency_ms.min, 0.001);
        assert!(report.latency_ms.max >= 3_600_000.0);
    }
}
