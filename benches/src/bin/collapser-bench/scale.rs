//! How the cost of a call depends on how much there is: cached keys, callers waiting for one flight, key headers, workers.

use std::time::Duration;

use anyhow::Context as _;
use serde::Serialize;
use serde_json::{Value, json};

use crate::backend::Backend;
use crate::bench::{Bench, Contender};
use crate::candidate::Candidate;
use crate::client::Keys;
use crate::machine::About;
use crate::process::rss_kib;
use crate::results::{Outcome, spread};
use crate::scenario::{self, Drive, Scenario};
use crate::stats::Spread;
use crate::wire;

/// All of a run.
#[derive(Serialize)]
pub struct Scale {
    /// Where and with what.
    pub about: About,
    /// Rounds of each candidate.
    pub rounds: usize,
    /// One for each thing that grows.
    pub curves: Vec<Curve>,
}

/// Something that grows.
#[derive(Serialize)]
pub struct Curve {
    /// Its name.
    pub name: &'static str,
    /// What it is, in a line.
    pub about: &'static str,
    /// How it went.
    pub points: Vec<Point>,
}

/// How it went with so many.
#[derive(Serialize)]
pub struct Point {
    /// How many.
    pub x: u64,
    /// The proxy's memory afterwards.
    pub rss_mib: Vec<(String, f64)>,
    /// Everything else.
    pub outcome: Outcome,
}

const KEYS: [u32; 7] = [1, 10, 100, 1_000, 10_000, 100_000, 1_000_000];
const WAITERS: [u64; 6] = [1, 10, 100, 1_000, 10_000, 50_000];
const HEADERS: [usize; 6] = [0, 1, 2, 4, 8, 16];
const WORKERS: [u32; 4] = [1, 2, 3, 4];

/// Everything that grows, and in how many steps.
pub const CURVES: [(&str, usize); 4] = [
    ("keys", KEYS.len()),
    ("waiters", WAITERS.len()),
    ("headers", HEADERS.len()),
    ("workers", WORKERS.len()),
];

/// Measures one of them. `on_point` is told of each point.
pub async fn measure(
    bench: &Bench<'_>,
    candidates: &[Candidate],
    name: &'static str,
    on_point: impl Fn(&Point),
) -> anyhow::Result<Curve> {
    let mut points = Vec::new();
    let mut add = |point| {
        on_point(&point);
        points.push(point);
    };
    let about = match name {
        "keys" => {
            keys(bench, candidates, add).await?;
            "cached keys; calls ask for any of them"
        }
        "waiters" => {
            for count in WAITERS {
                add(point(bench, candidates, &waiters(count), count, 1).await?);
            }
            "callers that wait for one flight, no cache"
        }
        "headers" => {
            for count in HEADERS {
                add(point(bench, candidates, &headers(count), count as u64, 1).await?);
            }
            "key headers, of 16 that each request has; all cached"
        }
        _ => {
            for count in WORKERS {
                add(point(bench, candidates, &workers(), count.into(), count).await?);
            }
            "workers of Envoy, which share one core here, so it is what they cost that shows and not what they gain; \
             all cached, 40 connections x 5 streams"
        }
    };
    Ok(Curve { name, about, points })
}

fn workers() -> Scenario {
    let drive = Drive::Loop { connections: 40, streams: 5, keys: Keys::One };
    hits("workers", drive, json!({"cache_duration": "1h"}))
}

fn hits(name: &str, drive: Drive, settings: Value) -> Scenario {
    Scenario { floor: false, ..scenario::hit(name, "", drive, settings) }
}

fn waiters(count: u64) -> Scenario {
    // Few callers would leave the proxy idle, so there are more flights of them.
    let callers = count.max(1_000);
    let drive = Drive::Waves { connections: 10, callers, flights: callers / count, one: callers > 1_000 };
    Scenario {
        // Long enough for all to arrive.
        latency: Duration::from_millis(20) + Duration::from_micros(100) * count as u32,
        ..hits("waiters", drive, json!({"cache_duration": "0", "backend_timeout": "60s", "pass_after": 0}))
    }
}

fn headers(count: usize) -> Scenario {
    let names: Vec<_> = (0..count).map(wire::header_name).collect();
    let settings = json!({"cache_duration": "1h", "key_headers": names});
    let drive = Drive::H2load { connections: 10, streams: 20 };
    Scenario { extra_headers: 16, ..hits("headers", drive, settings) }
}

async fn point(
    bench: &Bench<'_>,
    candidates: &[Candidate],
    scenario: &Scenario,
    x: u64,
    concurrency: u32,
) -> anyhow::Result<Point> {
    let backend = Backend::start(scenario.reply_bytes)?;
    let mut contenders = Vec::new();
    for candidate in candidates {
        contenders.push(bench.prepare(scenario, candidate, &backend, concurrency).await?);
    }
    rounds(bench, scenario, &mut contenders, &backend).await?;
    finish(scenario, &contenders, x)
}

/// The same processes are filled more and more.
async fn keys(
    bench: &Bench<'_>,
    candidates: &[Candidate],
    mut on_point: impl FnMut(Point),
) -> anyhow::Result<()> {
    let drive = |count| Drive::Loop { connections: 10, streams: 20, keys: Keys::Among(count) };
    let settings =
        json!({"cache_duration": "24h", "max_cache_entries": 0, "max_cache_bytes": "3GiB", "pass_after": 0});
    let scenario = hits("keys", drive(1), settings);
    let backend = Backend::start(scenario.reply_bytes)?;
    let mut contenders = Vec::new();
    for candidate in candidates {
        contenders.push(bench.prepare(&scenario, candidate, &backend, 1).await?);
    }
    let mut filled = 1;
    for count in KEYS {
        for contender in &mut contenders {
            contender.rounds.clear();
            if contender.candidate.caches() {
                contender.fill(filled, count).await.context("filling the cache")?;
            }
        }
        filled = count;
        let scenario = Scenario { drive: drive(count), ..scenario.clone() };
        rounds(bench, &scenario, &mut contenders, &backend).await?;
        on_point(finish(&scenario, &contenders, count.into())?);
    }
    Ok(())
}

async fn rounds(
    bench: &Bench<'_>,
    scenario: &Scenario,
    contenders: &mut [Contender],
    backend: &Backend,
) -> anyhow::Result<()> {
    for _ in 0..bench.rounds {
        for contender in &mut *contenders {
            bench.round(scenario, contender, backend).await?;
        }
    }
    Ok(())
}

fn finish(scenario: &Scenario, contenders: &[Contender], x: u64) -> anyhow::Result<Point> {
    let memory = |contender: &Contender| {
        let mib = rss_kib(contender.pid())? as f64 / 1024.0;
        anyhow::Ok((contender.candidate.name.clone(), mib))
    };
    let rss_mib = contenders.iter().map(memory).collect::<Result<_, _>>()?;
    Ok(Point { x, rss_mib, outcome: Outcome::new(scenario, contenders) })
}

impl Point {
    /// As lines of a table.
    pub fn lines(&self, curve: &str) -> String {
        let mut text = String::new();
        for (candidate, (_, rss)) in self.outcome.candidates.iter().zip(&self.rss_mib) {
            let Some(cpu) = Spread::of(candidate.rounds.iter().map(|round| round.cpu_us)) else { continue };
            let name = &candidate.name;
            text += &format!(
                "{curve:<8} {:>9} {name:<10} CPU {:>20} us/request  RSS {rss:>6.0} MiB\n",
                self.x,
                spread(cpu, 2)
            );
        }
        text
    }
}
