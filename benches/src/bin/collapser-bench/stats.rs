//! Rounds, and what is made of them.

use serde::Serialize;

/// What one round of one candidate took.
#[derive(Clone, Debug, Serialize)]
pub struct Round {
    /// Calls made.
    pub calls: u64,
    /// Until the last answer.
    pub seconds: f64,
    /// CPU time of the proxy for each call, in microseconds.
    pub cpu_us: f64,
    /// Calls per second.
    pub per_second: f64,
    /// Median of the calls' latency.
    pub p50_ms: f64,
    /// The latency that one call in a hundred exceeds.
    pub p99_ms: f64,
    /// The proxy's memory at its most.
    pub peak_rss_mib: f64,
    /// Calls that reached the backend.
    pub backend_calls: u64,
}

/// Least, middle and most.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// The least.
    pub min: f64,
    /// The one in the middle.
    pub median: f64,
    /// The most.
    pub max: f64,
}

/// How one candidate compares with another.
#[derive(Clone, Debug, Serialize)]
pub struct Ratio {
    /// Which one.
    pub of: String,
    /// With which.
    pub to: String,
    /// In what.
    pub quantity: &'static str,
    /// Of the medians.
    pub of_medians: f64,
    /// Of the least of each: other work on the machine only ever adds.
    pub of_minima: f64,
    /// Of the rounds, each with the one that ran next to it.
    pub of_rounds: Spread,
}

impl Spread {
    /// Of these; none of nothing.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<_> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let middle = values.len() / 2;
        let median = match values.len() {
            0 => return None,
            len if len.is_multiple_of(2) => (values[middle - 1] + values[middle]) / 2.0,
            _ => values[middle],
        };
        Some(Self { min: values[0], median, max: values[values.len() - 1] })
    }
}

impl Ratio {
    /// Compares in one quantity; `None` without rounds.
    pub fn new(
        quantity: &'static str,
        (of, ours): (&str, &[Round]),
        (to, theirs): (&str, &[Round]),
        value: impl Fn(&Round) -> f64,
        base: impl Fn(&Round) -> f64,
    ) -> Option<Self> {
        let (mine, other) = (Spread::of(ours.iter().map(&value))?, Spread::of(theirs.iter().map(&base))?);
        let of_rounds = Spread::of(ours.iter().zip(theirs).map(|(a, b)| value(a) / base(b)))?;
        Some(Self {
            of: of.to_owned(),
            to: to.to_owned(),
            quantity,
            of_medians: mine.median / other.median,
            of_minima: mine.min / other.min,
            of_rounds,
        })
    }
}

/// The latency that a share of the calls stays below, in milliseconds.
pub fn quantile_ms(sorted_micros: &[u32], share: f64) -> f64 {
    let last = sorted_micros.len().saturating_sub(1);
    let index = (last as f64 * share).round() as usize;
    sorted_micros.get(index).map_or(0.0, |micros| f64::from(*micros) / 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(Spread::of([3.0, 1.0, 2.0]), Some(Spread { min: 1.0, median: 2.0, max: 3.0 }));
        assert_eq!(Spread::of([4.0, 1.0, 2.0, 3.0]).unwrap().median, 2.5);
        assert_eq!(Spread::of([]), None);
    }

    #[test]
    fn quantiles() {
        let micros: Vec<_> = (0..=100).map(|n| n * 1000).collect();
        assert_eq!(quantile_ms(&micros, 0.5), 50.0);
        assert_eq!(quantile_ms(&micros, 0.99), 99.0);
        assert_eq!(quantile_ms(&[], 0.5), 0.0);
    }
}
