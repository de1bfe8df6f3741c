//! The loads.

use std::time::Duration;

use serde_json::{Value, json};

use crate::client::Keys;
use crate::wire;

/// A load, and what the filter is set to for it.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Its name.
    pub name: String,
    /// What it is, in a line.
    pub about: String,
    /// Size of a reply's message.
    pub reply_bytes: usize,
    /// The filter's settings.
    pub settings: Value,
    /// How long the backend takes.
    pub latency: Duration,
    /// How long it takes for those without the filter, where that differs.
    pub plain_latency: Option<Duration>,
    /// Who calls, and how.
    pub drive: Drive,
    /// Headers that every request has besides.
    pub extra_headers: usize,
    /// Whether Envoy's own answer is a measure for it: all answers are the same.
    pub floor: bool,
    /// Envoy's workers, which share the one core. With more than one, the filter is also tried with each by itself.
    pub workers: u32,
    /// So many rounds for each that was asked for; more where they are short.
    pub repeat: usize,
}

/// Who calls, and how.
#[derive(Clone, Copy, Debug)]
pub enum Drive {
    /// h2load, with one and the same request.
    H2load {
        /// Connections, opened anew in each round.
        connections: usize,
        /// Streams on each.
        streams: usize,
    },
    /// Each stream sends its next call when it has its answer.
    Loop {
        /// Connections, which stay open.
        connections: usize,
        /// Streams on each.
        streams: usize,
        /// What is asked for.
        keys: Keys,
    },
    /// All call at once, for new keys, and again when the last has its answer.
    Waves {
        /// Connections, which stay open.
        connections: usize,
        /// Calls at once.
        callers: u64,
        /// Keys that they ask for.
        flights: u64,
        /// Whether a round is just one.
        one: bool,
    },
}

/// Small replies, from a backend that takes no time.
pub fn hit(name: &str, about: &str, drive: Drive, settings: Value) -> Scenario {
    Scenario {
        name: name.to_owned(),
        about: about.to_owned(),
        reply_bytes: wire::SMALLEST,
        settings,
        latency: Duration::ZERO,
        plain_latency: None,
        drive,
        extra_headers: 0,
        floor: true,
        workers: 1,
        repeat: 1,
    }
}

/// All loads but that for memory.
pub fn all() -> Vec<Scenario> {
    let h2load = |connections, streams| Drive::H2load { connections, streams };
    let lasting = |connections, streams, keys| Drive::Loop { connections, streams, keys };
    let cached = |name, about, reply_bytes, drive| Scenario {
        reply_bytes,
        // For as long as the benchmark takes.
        ..hit(name, about, drive, json!({"cache_duration": "1h"}))
    };
    let other = |name, about, settings, drive| Scenario { floor: false, ..hit(name, about, drive, settings) };
    let millis = Duration::from_millis;
    let wave = Drive::Waves { connections: 10, callers: 1_000, flights: 1, one: false };
    let burst = Drive::Waves { connections: 10, callers: 10_000, flights: 1, one: true };
    vec![
        cached("hit-10B", "all cached, 10 bytes, 10 connections x 20 streams (h2load)", 10, h2load(10, 20)),
        cached("hit-10KiB", "all cached, 10 KiB, 10 x 20 (h2load)", 10 * 1024, h2load(10, 20)),
        cached("hit-1MiB", "all cached, 1 MiB, 10 x 2 (h2load)", 1024 * 1024, h2load(10, 2)),
        cached("hit-1conn", "all cached, 10 bytes, 1 connection x 20 streams (h2load)", 10, h2load(1, 20)),
        cached(
            "hit-1000conn",
            "all cached, 10 bytes, 1,000 open connections x 1 stream",
            10,
            lasting(1_000, 1, Keys::One),
        ),
        Scenario {
            latency: millis(20),
            ..other(
                "followers",
                "no cache, 1,000 callers at once for one key over 10 connections, backend 20 ms, again and again",
                json!({"cache_duration": "0"}),
                wave,
            )
        },
        other(
            "distinct",
            "every key is new, 10 bytes, 10 x 20, cache as shipped",
            json!({}),
            lasting(10, 20, Keys::Distinct),
        ),
        other(
            "distinct-led",
            "the same, but each call leads a flight (pass_after 0)",
            json!({"pass_after": 0}),
            lasting(10, 20, Keys::Distinct),
        ),
        other(
            "mix",
            "9 of 10 calls for one of 7 keys, the others for new ones, 10 x 20, cache as shipped",
            json!({}),
            lasting(10, 20, Keys::NineOfTen(7)),
        ),
        Scenario {
            workers: 4,
            floor: false,
            ..cached(
                "workers-hit",
                "4 workers, all cached, 10 bytes, 40 connections x 5 streams",
                10,
                lasting(40, 5, Keys::One),
            )
        },
        Scenario {
            workers: 4,
            ..other(
                "workers-distinct",
                "4 workers, every key is new, each call leads a flight (pass_after 0), 40 x 5",
                json!({"pass_after": 0}),
                lasting(40, 5, Keys::Distinct),
            )
        },
        Scenario {
            latency: millis(50),
            plain_latency: Some(Duration::ZERO),
            repeat: 3,
            ..other(
                "burst",
                "10,000 calls at once for one key over 10 connections; backend 50 ms, 0 ms for plain",
                json!({}),
                burst,
            )
        },
    ]
}

impl Drive {
    /// Connections that stay open.
    pub fn lasting(self) -> usize {
        match self {
            Self::H2load { .. } => 0,
            Self::Loop { connections, .. } | Self::Waves { connections, .. } => connections,
        }
    }

    /// Calls that there are at the least.
    pub fn step(self) -> u64 {
        match self {
            Self::H2load { connections, streams } | Self::Loop { connections, streams, .. } => {
                (connections * streams) as u64
            }
            Self::Waves { callers, .. } => callers,
        }
    }

    /// How many calls may reach the backend through the filter when everything has been asked for once.
    pub fn backend_calls(self, calls: u64, seconds: f64, kept: bool) -> std::ops::RangeInclusive<u64> {
        match self {
            Self::H2load { .. } => 0..=0,
            Self::Loop { keys: keys @ Keys::NineOfTen(hot), .. } if !kept => {
                // Each of the hot ones once per 100 ms.
                let new = keys.new_of(calls);
                new..=new + u64::from(hot) * ((seconds / 0.1) as u64 + 2)
            }
            Self::Loop { keys, .. } => keys.new_of(calls)..=keys.new_of(calls),
            // Some may come when the flight has landed, without a cache.
            Self::Waves { callers, flights, .. } => {
                let waves = calls / callers;
                waves * flights..=waves * flights * 2
            }
        }
    }
}
