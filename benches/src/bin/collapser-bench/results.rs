//! Results, as tables and as JSON.

use serde::Serialize;

use crate::bench::Contender;
use crate::candidate::Kind;
use crate::machine::About;
use crate::memory::{self, Memory};
use crate::scenario::Scenario;
use crate::stats::{Ratio, Round, Spread};

/// All of a run.
#[derive(Serialize)]
pub struct Results {
    /// Where and with what.
    pub about: About,
    /// Rounds of each candidate.
    pub rounds: usize,
    /// The loads.
    pub scenarios: Vec<Outcome>,
    /// Memory of waiting calls.
    pub memory: Vec<Memory>,
}

/// Of one load.
#[derive(Serialize)]
pub struct Outcome {
    /// Its name.
    pub name: String,
    /// What it is.
    pub about: String,
    /// Each candidate's rounds.
    pub candidates: Vec<Measured>,
    /// How they compare.
    pub ratios: Vec<Ratio>,
}

/// One candidate's rounds.
#[derive(Serialize)]
pub struct Measured {
    /// Which one.
    pub name: String,
    /// Its rounds.
    pub rounds: Vec<Round>,
    /// Of the rounds.
    pub summary: Option<Summary>,
}

/// Of the rounds.
#[derive(Serialize)]
pub struct Summary {
    cpu_us: Spread,
    per_second: Spread,
    p50_ms: Spread,
    p99_ms: Spread,
    peak_rss_mib: Spread,
    milliseconds: Spread,
}

/// CPU time.
pub const CPU: &str = "cpu";

/// Time until the last answer, less what the backend takes.
pub const EXCESS: &str = "excess";

impl Outcome {
    /// Compares what was measured.
    pub fn new(scenario: &Scenario, contenders: &[Contender]) -> Self {
        let mut ratios = Vec::new();
        let latency = scenario.latency.as_secs_f64();
        for contender in contenders {
            let mine = (contender.candidate.name.as_str(), contender.rounds.as_slice());
            for base in contenders {
                let is_measure = match base.candidate.kind {
                    Kind::Plain | Kind::Direct => {
                        !matches!(contender.candidate.kind, Kind::Plain | Kind::Direct)
                    }
                    Kind::FilterOfWorker(_) => matches!(contender.candidate.kind, Kind::Filter(_)),
                    _ => false,
                };
                if !is_measure {
                    continue;
                }
                let theirs = (base.candidate.name.as_str(), base.rounds.as_slice());
                ratios.extend(Ratio::new(CPU, mine, theirs, |round| round.cpu_us, |round| round.cpu_us));
                if scenario.plain_latency.is_some() {
                    let excess = |round: &Round| round.seconds - latency;
                    ratios.extend(Ratio::new(EXCESS, mine, theirs, excess, |round| round.seconds));
                }
            }
        }
        let measured = |contender: &Contender| Measured {
            name: contender.candidate.name.clone(),
            rounds: contender.rounds.clone(),
            summary: Summary::of(&contender.rounds),
        };
        let candidates = contenders.iter().map(measured).collect();
        Self { name: scenario.name.clone(), about: scenario.about.clone(), candidates, ratios }
    }

    /// As a table.
    pub fn table(&self) -> String {
        let mut text = format!("\n{}: {}\n", self.name, self.about);
        let burst = self.ratios.iter().any(|ratio| ratio.quantity == EXCESS);
        text += &format!(
            "  {:<12} {:>20} {:>23} {:>21} {:>23} {:>17} {:>14}\n",
            "",
            "CPU us/request",
            if burst { "ms to last answer" } else { "requests/s" },
            "p50 ms",
            "p99 ms",
            "peak RSS MiB",
            "backend calls"
        );
        for candidate in &self.candidates {
            let Some(summary) = &candidate.summary else { continue };
            let speed = if burst { spread(summary.milliseconds, 1) } else { spread(summary.per_second, 0) };
            let sum = |value: fn(&Round) -> u64| candidate.rounds.iter().map(value).sum::<u64>();
            text += &format!(
                "  {:<12} {:>20} {:>23} {:>21} {:>23} {:>17} {:>14}\n",
                candidate.name,
                spread(summary.cpu_us, 2),
                speed,
                spread(summary.p50_ms, 2),
                spread(summary.p99_ms, 2),
                spread(summary.peak_rss_mib, 0),
                format!("{}/{}", sum(|round| round.backend_calls), sum(|round| round.calls)),
            );
        }
        for ratio in &self.ratios {
            text += &format!(
                "  {} / {}, {}: {:.3} (of the least {:.3}; of rounds {})\n",
                ratio.of,
                ratio.to,
                if ratio.quantity == CPU { "CPU" } else { "time less the backend's" },
                ratio.of_medians,
                ratio.of_minima,
                spread(ratio.of_rounds, 3)
            );
        }
        text
    }

    /// How a candidate compares.
    pub fn ratio(&self, quantity: &str, of: &str, to: &str) -> Option<f64> {
        let is = |ratio: &&Ratio| ratio.quantity == quantity && ratio.of == of && ratio.to == to;
        self.ratios.iter().find(is).map(|ratio| ratio.of_medians)
    }
}

impl Summary {
    fn of(rounds: &[Round]) -> Option<Self> {
        let spread = |value: fn(&Round) -> f64| Spread::of(rounds.iter().map(value));
        Some(Self {
            cpu_us: spread(|round| round.cpu_us)?,
            per_second: spread(|round| round.per_second)?,
            p50_ms: spread(|round| round.p50_ms)?,
            p99_ms: spread(|round| round.p99_ms)?,
            peak_rss_mib: spread(|round| round.peak_rss_mib)?,
            milliseconds: spread(|round| round.seconds * 1e3)?,
        })
    }
}

/// Least, middle, most.
pub fn spread(spread: Spread, digits: usize) -> String {
    format!("{:.digits$}-{:.digits$}-{:.digits$}", spread.min, spread.median, spread.max)
}

/// Memory as a table.
pub fn memory_table(waiting: &[Memory]) -> String {
    let mut text =
        "\nwaiter-memory: 10,000 calls for one key wait for a backend that hangs (held: Envoy's own fault \
                    filter keeps them from it; held+slot: with the Lua filter in the chain)\n"
            .to_owned();
    for candidate in waiting {
        let Some(bytes) = candidate.spread else { continue };
        let name = &candidate.candidate;
        text += &format!("  {name:<12} {} bytes/waiter", spread(bytes, 0));
        for base in ["plain", memory::HELD, memory::HELD_WITH_SLOT] {
            if let Some(extra) = memory::extra(waiting, name, base).filter(|_| name != base) {
                text += &format!("; {extra:+.0} beside {base}");
            }
        }
        text.push('\n');
    }
    text
}
