//! A simulation of many replicas: what affinity saves, what it costs in balance, and what a lost replica costs. There are no
//! more of them on one machine.
//!
//! A burst is in flight all at once, each replica collapses for itself, and what it has computed it keeps for the TTL.

mod balancers;

use std::collections::HashSet;
use std::fmt::Write as _;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use balancers::{InFlight, Maglev, Ring, hash};

/// What is simulated.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Callers of a burst.
    pub callers: u64,
    /// Different keys on offer to them.
    pub keys: u64,
    /// Keys in the caches when a replica is lost.
    pub cached: u64,
}

/// How the callers' replicas are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Balance {
    /// One after the other, as without affinity.
    RoundRobin,
    /// By the key, with a bound in percent of the mean, if any.
    Key(Option<u64>),
}

const BALANCES: [(&str, Balance); 4] = [
    ("round robin", Balance::RoundRobin),
    ("by key", Balance::Key(None)),
    ("by key, at most 10 × the mean", Balance::Key(Some(1_000))),
    ("by key, at most 1.5 × the mean", Balance::Key(Some(150))),
];

/// What a burst comes to, and the same burst again within the TTL.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Outcome {
    /// Backend calls for each key that was asked for.
    calls_per_key: f64,
    /// Further ones of the second burst.
    again_per_key: f64,
    /// Callers at the busiest replica, by the mean.
    busiest: f64,
}

/// The keys that callers ask for. Some are asked for far more often: the n-th by 1/n (Zipf).
fn asked(plan: Plan, is_even: bool, random: &mut StdRng) -> Vec<u64> {
    let mut sum = 0.0;
    let weights = (1..=plan.keys).map(|n| if is_even { 1.0 } else { 1.0 / n as f64 });
    let sums: Vec<f64> = weights
        .map(|weight| {
            sum += weight;
            sum
        })
        .collect();
    let draw = |random: &mut StdRng| {
        let at = random.random::<f64>() * sum;
        sums.partition_point(|sum| *sum < at).min(sums.len() - 1) as u64
    };
    (0..plan.callers).map(|_| draw(random)).collect()
}

fn burst(replicas: u64, balance: Balance, bursts: [&[u64]; 2]) -> Outcome {
    let maglev = Maglev::new(&(0..replicas).collect::<Vec<_>>());
    let mut computed = HashSet::new();
    let mut turn = 0;
    let mut calls = [0, 0];
    let mut busiest = 0.0_f64;
    for (burst, calls) in bursts.iter().zip(&mut calls) {
        let mut in_flight =
            InFlight::new(replicas, if let Balance::Key(bound) = balance { bound } else { None });
        for key in *burst {
            let home = match balance {
                Balance::RoundRobin => turn % replicas,
                Balance::Key(_) => maglev.home(*key),
            };
            turn += 1;
            *calls += u64::from(computed.insert((in_flight.add(*key, home), *key)));
        }
        let most = in_flight.calls().iter().max().copied().unwrap_or_default();
        busiest = busiest.max(most as f64 * replicas as f64 / burst.len() as f64);
    }
    let keys = bursts[0].iter().collect::<HashSet<_>>().len() as f64;
    Outcome { calls_per_key: calls[0] as f64 / keys, again_per_key: calls[1] as f64 / keys, busiest }
}

/// Keys with another home once one of the replicas is gone: modulo, Envoy's ring, Maglev; and those that were its own.
fn moved(replicas: u64, keys: u64) -> [u64; 4] {
    let all: Vec<_> = (0..replicas).collect();
    // Not the last one, which would flatter what counts from the front.
    let gone = replicas / 2;
    let left: Vec<_> = all.iter().copied().filter(|replica| *replica != gone).collect();
    let modulo = |replicas: &[u64], key: u64| replicas[(hash(key, 0) % replicas.len() as u64) as usize];
    let rings = [Ring::new(&all), Ring::new(&left)];
    let tables = [Maglev::new(&all), Maglev::new(&left)];
    let mut moved = [0; 4];
    for key in 0..keys {
        moved[0] += u64::from(modulo(&all, key) != modulo(&left, key));
        moved[1] += u64::from(rings[0].home(key) != rings[1].home(key));
        moved[2] += u64::from(tables[0].home(key) != tables[1].home(key));
        moved[3] += u64::from(tables[0].home(key) == gone);
    }
    moved
}

/// The results as two tables of Markdown. The same plan and seed give the same ones.
pub fn report(plan: Plan, replicas: &[u64], seed: u64) -> String {
    let mut random = StdRng::seed_from_u64(seed);
    let mut draw = |is_even| [(); 2].map(|()| asked(plan, is_even, &mut random));
    let (even, uneven) = (draw(true), draw(false));
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = writeln!(
        out,
        "A burst of {} callers over {} keys, and another one within the TTL. Backend calls for each key; callers at the busiest replica, by the mean.\n",
        plan.callers, plan.keys
    );
    let _ = writeln!(
        out,
        "| replicas | balanced | calls a key | in the 2nd burst | busiest | uneven demand (Zipf): calls a key | busiest |"
    );
    let _ = writeln!(out, "|--:|---|--:|--:|--:|--:|--:|");
    for count in replicas {
        for (name, balance) in BALANCES {
            let [even, uneven] = [&even, &uneven].map(|[one, two]| burst(*count, balance, [one, two]));
            let _ = writeln!(
                out,
                "| {count} | {name} | {:.2} | {:.2} | {:.1} | {:.2} | {:.1} |",
                even.calls_per_key, even.again_per_key, even.busiest, uneven.calls_per_key, uneven.busiest
            );
        }
    }
    let _ = writeln!(
        out,
        "\nOne replica is lost, with {} keys cached: keys that move, each of which is one more call when it is asked for.\n",
        plan.cached
    );
    let _ = writeln!(out, "| replicas | its own keys | moved: Maglev | Envoy's ring hash | modulo |");
    let _ = writeln!(out, "|--:|--:|--:|--:|--:|");
    for count in replicas {
        let [modulo, ring, maglev, own] = moved(*count, plan.cached)
            .map(|keys| format!("{:.2} %", keys as f64 * 100.0 / plan.cached as f64));
        let _ = writeln!(out, "| {count} | {own} | {maglev} | {ring} | {modulo} |");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAN: Plan = Plan { callers: 5_000, keys: 50, cached: 10_000 };

    fn outcome(replicas: u64, balance: Balance) -> Outcome {
        let mut random = StdRng::seed_from_u64(1);
        let bursts = [(); 2].map(|()| asked(PLAN, true, &mut random));
        burst(replicas, balance, [&bursts[0], &bursts[1]])
    }

    #[test]
    fn by_key_each_key_is_computed_once_and_round_robin_nearly_everywhere() {
        let by_key = outcome(100, Balance::Key(None));
        assert_eq!((by_key.calls_per_key, by_key.again_per_key), (1.0, 0.0));
        let round_robin = outcome(100, Balance::RoundRobin);
        assert!((60.0..66.0).contains(&round_robin.calls_per_key), "{round_robin:?}");
        assert!(round_robin.again_per_key > 20.0 && round_robin.busiest == 1.0, "{round_robin:?}");
    }

    #[test]
    fn a_tight_bound_computes_keys_several_times() {
        let tight = outcome(10, Balance::Key(Some(110)));
        assert!(tight.calls_per_key > 1.0 && tight.busiest < 1.2, "{tight:?}");
        assert_eq!(outcome(10, Balance::Key(Some(1_000))).calls_per_key, 1.0);
    }

    #[test]
    fn modulo_moves_nearly_all_keys() {
        let [modulo, _, maglev, own] = moved(10, 10_000);
        assert!(
            modulo > 8_500 && own > 800 && maglev >= own && maglev < own + 300,
            "{modulo} {maglev} {own}"
        );
    }

    #[test]
    fn uneven_demand_favours_the_first_keys() {
        let asked = asked(PLAN, false, &mut StdRng::seed_from_u64(1));
        let first = asked.iter().filter(|key| **key == 0).count();
        assert!((900..1_400).contains(&first), "{first} of 5,000; 1/4.5 of them are expected");
    }

    #[test]
    fn the_report_has_a_row_for_each_case() {
        let report = report(PLAN, &[4, 8], 1);
        assert_eq!(report.lines().filter(|line| line.starts_with('|')).count(), 2 + 8 + 2 + 2, "{report}");
    }
}
