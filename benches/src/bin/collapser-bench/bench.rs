//! Runs one load against all candidates, in turn.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use http::{HeaderMap, HeaderName, HeaderValue};
use serde_json::json;

use crate::backend::Backend;
use crate::candidate::{Candidate, Kind, Running, Setup};
use crate::client::{Client, Keys, Load, Shape};
use crate::h2load::{H2load, Run};
use crate::machine::Cores;
use crate::process;
use crate::scenario::{Drive, Scenario};
use crate::stats::{Round, quantile_ms};
use crate::wire;

/// Streams on each connection while a cache is filled.
const FILL_STREAMS: usize = 20;

/// What all runs have in common.
pub struct Bench<'a> {
    /// The repository.
    pub root: &'a Path,
    /// Who runs where.
    pub cores: Cores,
    /// Rounds of each candidate.
    pub rounds: usize,
    /// How long a round is to take.
    pub seconds: f64,
    /// h2load.
    pub h2load: &'a H2load,
}

/// A candidate while a load runs.
pub struct Contender {
    /// Which one.
    pub candidate: Candidate,
    /// What it took so far.
    pub rounds: Vec<Round>,
    running: Running,
    client: Option<Client>,
    headers: HeaderMap,
    calls: u64,
}

/// Headers that can be keyed.
pub fn extra_headers(count: usize) -> anyhow::Result<HeaderMap> {
    let header = |n| {
        let name = HeaderName::try_from(wire::header_name(n))?;
        Ok((name, HeaderValue::from_static("Bearer 0123456789abcdef0123456789abcdef")))
    };
    (0..count).map(header).collect()
}

impl Bench<'_> {
    /// Starts every candidate, warms them up, and lets them take turns. `on_round` is told of each round.
    pub async fn run(
        &self,
        scenario: &Scenario,
        candidates: &[Candidate],
        mut on_round: impl FnMut(),
    ) -> anyhow::Result<Vec<Contender>> {
        let backend = Backend::start(scenario.reply_bytes)?;
        let mut contenders = Vec::new();
        for candidate in candidates {
            if candidate.kind == Kind::Direct && !scenario.floor {
                continue;
            }
            contenders.push(self.prepare(scenario, candidate, &backend, scenario.workers).await?);
            if let Kind::Filter(module) = &candidate.kind
                && scenario.workers > 1
            {
                let name = format!("{}/worker", candidate.name);
                let by_itself = Candidate { name, kind: Kind::FilterOfWorker(module.clone()) };
                contenders.push(self.prepare(scenario, &by_itself, &backend, scenario.workers).await?);
            }
        }
        for _ in 0..self.rounds * scenario.repeat {
            for contender in &mut contenders {
                self.round(scenario, contender, &backend).await?;
                on_round();
            }
        }
        Ok(contenders)
    }

    /// Starts a candidate and warms it up.
    pub async fn prepare(
        &self,
        scenario: &Scenario,
        candidate: &Candidate,
        backend: &Backend,
        concurrency: u32,
    ) -> anyhow::Result<Contender> {
        let setup = Setup {
            root: self.root,
            backend: backend.addr(),
            settings: &scenario.settings,
            concurrency,
            reply_bytes: scenario.reply_bytes,
        };
        let running = self.cores.as_proxy(candidate.start(&setup)).await?;
        let headers = extra_headers(scenario.extra_headers)?;
        let shape = Shape {
            content_type: candidate.content_type(),
            grpc: candidate.kind != Kind::Direct,
            reply_bytes: scenario.reply_bytes,
            headers: headers.clone(),
        };
        let client = match scenario.drive.lasting() {
            0 => None,
            connections => Some(Client::connect(running.addr(), connections, shape).await?),
        };
        let candidate = candidate.clone();
        let mut contender = Contender { candidate, rounds: Vec::new(), running, client, headers, calls: 0 };
        contender.warm_up(self, scenario, backend).await?;
        Ok(contender)
    }

    /// One round, whose answers and calls to the backend are checked.
    pub async fn round(
        &self,
        scenario: &Scenario,
        contender: &mut Contender,
        backend: &Backend,
    ) -> anyhow::Result<()> {
        contender.set_latency(scenario, backend);
        let pid = contender.running.pid();
        let calls = contender.calls;
        let before = backend.calls();
        process::reset_peak(pid)?;
        let cpu = process::cpu_time(pid)?;
        let mut load = contender.load(self, scenario, calls).await?;
        let cpu = process::cpu_time(pid)? - cpu;
        load.latencies.sort_unstable();
        let seconds = load.elapsed.as_secs_f64();
        let round = Round {
            calls,
            seconds,
            cpu_us: cpu.as_secs_f64() * 1e6 / calls as f64,
            per_second: calls as f64 / seconds,
            p50_ms: quantile_ms(&load.latencies, 0.5),
            p99_ms: quantile_ms(&load.latencies, 0.99),
            peak_rss_mib: process::peak_rss_kib(pid)? as f64 / 1024.0,
            backend_calls: backend.calls() - before,
        };
        contender.check(scenario, &round, load.latencies.len() as u64)?;
        contender.rounds.push(round);
        Ok(())
    }
}

impl Contender {
    /// The process.
    pub fn pid(&self) -> u32 {
        self.running.pid()
    }

    /// Asks once for each key from `first` up to `end`.
    pub async fn fill(&self, first: u32, end: u32) -> anyhow::Result<()> {
        let client = self.client.as_ref().context("there is no client")?;
        let calls = u64::from(end.saturating_sub(first));
        client.closed_loop(FILL_STREAMS, Keys::From(first), calls).await?;
        Ok(())
    }

    fn set_latency(&self, scenario: &Scenario, backend: &Backend) {
        let plain = scenario.plain_latency.filter(|_| self.candidate.kind == Kind::Plain);
        backend.set_latency(plain.unwrap_or(scenario.latency));
    }

    /// Runs until code is compiled and caches are filled, and learns how many calls fill a round.
    async fn warm_up(
        &mut self,
        bench: &Bench<'_>,
        scenario: &Scenario,
        backend: &Backend,
    ) -> anyhow::Result<()> {
        self.set_latency(scenario, backend);
        let step = scenario.drive.step();
        let mut calls = step;
        if matches!(scenario.drive, Drive::Waves { one: true, .. }) {
            for _ in 0..3 {
                self.load(bench, scenario, calls).await?;
            }
            self.calls = calls;
            return Ok(());
        }
        let start = Instant::now();
        loop {
            let load = self.load(bench, scenario, calls).await?;
            let seconds = load.elapsed.as_secs_f64().max(1e-6);
            let fitting =
                (calls as f64 * bench.seconds / seconds / step as f64).round().max(1.0) as u64 * step;
            if start.elapsed() > Duration::from_secs(1) && seconds > bench.seconds / 4.0 {
                self.calls = fitting;
                return Ok(());
            }
            // A first load is slow; it must not decide alone.
            calls = fitting.min(calls * 4);
        }
    }

    async fn load(&self, bench: &Bench<'_>, scenario: &Scenario, calls: u64) -> anyhow::Result<Load> {
        let patience = Duration::from_secs_f64(60.0 + bench.seconds * 20.0);
        let loaded = match tokio::time::timeout(patience, self.try_load(bench, scenario, calls)).await {
            Ok(loaded) => loaded,
            Err(_) => Err(anyhow::anyhow!("some calls had no answer within {patience:?}")),
        };
        loaded.with_context(|| {
            let complaints = self.running.complaints();
            format!("{} with {}; it said:\n{complaints}", scenario.name, self.candidate.name)
        })
    }

    async fn try_load(&self, bench: &Bench<'_>, scenario: &Scenario, calls: u64) -> anyhow::Result<Load> {
        match (scenario.drive, &self.client) {
            (Drive::H2load { connections, streams }, _) => bench.h2load.run(&Run {
                addr: self.running.addr(),
                connections,
                streams,
                content_type: self.candidate.content_type(),
                headers: &self.headers,
                calls,
                reply_bytes: scenario.reply_bytes,
            }),
            (Drive::Loop { streams, keys, .. }, Some(client)) => {
                client.closed_loop(streams, keys, calls).await
            }
            (Drive::Waves { callers, flights, .. }, Some(client)) => {
                let mut all = Load { elapsed: Duration::ZERO, latencies: Vec::with_capacity(calls as usize) };
                for _ in 0..calls / callers {
                    let mut wave = client.wave(callers, flights).await?;
                    all.elapsed += wave.elapsed;
                    all.latencies.append(&mut wave.latencies);
                }
                Ok(all)
            }
            (_, None) => anyhow::bail!("there is no client"),
        }
    }

    /// A benchmark of wrong answers is worth nothing.
    fn check(&self, scenario: &Scenario, round: &Round, answers: u64) -> anyhow::Result<()> {
        let name = &self.candidate.name;
        let Round { calls, backend_calls, .. } = *round;
        ensure!(answers == calls, "{}: {name} gave {answers} answers to {calls} calls", scenario.name);
        let kept = scenario.settings["cache_duration"] != json!(null);
        let expected = match self.candidate.kind {
            Kind::Plain => calls..=calls,
            Kind::Direct | Kind::Held | Kind::HeldWithSlot => 0..=0,
            Kind::Filter(_) | Kind::FilterOfWorker(_) => {
                scenario.drive.backend_calls(calls, round.seconds, kept)
            }
            Kind::Peer(_) => return Ok(()),
        };
        ensure!(
            expected.contains(&backend_calls),
            "{}: {name} let {backend_calls} of {calls} calls reach the backend; expected {expected:?}",
            scenario.name
        );
        Ok(())
    }
}
