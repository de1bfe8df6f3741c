//! The speed that is promised, and whether it is there.

use crate::memory::{self, Memory};
use crate::results::{CPU, EXCESS, Outcome};

struct Goal {
    what: &'static str,
    must: f64,
    aim: f64,
    got: Option<f64>,
}

/// Prints what was promised beside what was measured of candidate `filter`. Whether every `must` that was measured is
/// kept, and at least one was measured.
pub fn check(scenarios: &[Outcome], waiting: &[Memory]) -> bool {
    let ratio = |scenario: &str, quantity: &str, to: &str| {
        scenarios.iter().find(|outcome| outcome.name == scenario)?.ratio(quantity, "filter", to)
    };
    let waiter = memory::extra(waiting, "filter", memory::HELD_WITH_SLOT);
    let goal = |what, must, aim, got| Goal { what, must, aim, got };
    let goals = [
        goal("hit / plain, CPU", 1.0, 0.75, ratio("hit-10B", CPU, "plain")),
        goal("follower / plain, CPU", 1.0, 0.75, ratio("followers", CPU, "plain")),
        goal("hit / direct_response, CPU", 2.6, 1.9, ratio("hit-10B", CPU, "direct")),
        goal("distinct / plain, CPU", 1.6, 1.25, ratio("distinct", CPU, "plain")),
        goal("burst: excess / plain, time", 1.0, 0.7, ratio("burst", EXCESS, "plain")),
        goal("waiter memory, bytes beside Envoy's", 512.0, 128.0, waiter),
    ];
    println!("\n{:<36} {:>8} {:>8} {:>9}", "goal", "must", "aim", "got");
    let (mut measured, mut kept) = (false, true);
    for Goal { what, must, aim, got } in goals {
        let verdict = match got {
            None => "not measured",
            Some(got) if got <= aim => "aim",
            Some(got) if got <= must => "must",
            Some(_) => "MISSED",
        };
        measured |= got.is_some();
        kept &= verdict != "MISSED";
        let got = got.map_or("-".to_owned(), |got| format!("{got:.3}"));
        println!("{what:<36} {must:>8} {aim:>8} {got:>9}  {verdict}");
    }
    kept && measured
}
