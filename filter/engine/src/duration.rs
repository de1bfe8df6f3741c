//! Durations as people write them: `100ms`, `1.5s`, `1m30s`.
//!
//! The grammar is that of Go's `time.ParseDuration` without signs, since the settings and their
//! environment variables carry over from a Go program. A bare `0` needs no unit.

use std::time::Duration;

/// What a duration may look like, for error messages.
pub const ALLOWED: &str = "a duration such as \"100ms\", \"10s\" or \"1m30s\" (units ns, us, ms, s, m, h)";

/// The number of nanoseconds in `unit`.
fn unit_nanos(unit: &str) -> Option<u64> {
    Some(match unit {
        "ns" => 1,
        "us" | "µs" | "μs" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        "m" => 60_000_000_000,
        "h" => 3_600_000_000_000,
        _ => return None,
    })
}

/// Parses a duration; `None` if it is none, or longer than 584 years.
pub fn parse(text: &str) -> Option<Duration> {
    if text == "0" {
        return Some(Duration::ZERO);
    }
    let mut rest = text;
    let mut total: u64 = 0;
    while !rest.is_empty() {
        let (number, after) = split(rest, |c| !c.is_ascii_digit() && c != '.');
        let (unit, after) = split(after, |c| c.is_ascii_digit() || c == '.');
        total = total.checked_add(scale(number, unit_nanos(unit)?)?)?;
        rest = after;
    }
    (!text.is_empty()).then(|| Duration::from_nanos(total))
}

fn split(text: &str, at: impl Fn(char) -> bool) -> (&str, &str) {
    text.split_at(text.find(at).unwrap_or(text.len()))
}

/// `number` times `unit`; digits behind the point that are below a nanosecond are dropped.
fn scale(number: &str, unit: u64) -> Option<u64> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
        return None;
    }
    let whole: u64 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
    let mut nanos = whole.checked_mul(unit)?;
    let mut place = unit;
    for digit in fraction.bytes() {
        place /= 10;
        nanos = nanos.checked_add(u64::from(digit - b'0').checked_mul(place)?)?;
    }
    Some(nanos)
}

/// Writes a duration in the largest unit in which it is a whole number.
pub fn format(duration: Duration) -> String {
    let nanos = duration.as_nanos();
    if nanos == 0 {
        return "0".to_string();
    }
    for unit in ["h", "m", "s", "ms", "us"] {
        let size = u128::from(unit_nanos(unit).unwrap_or(1));
        if nanos.is_multiple_of(size) {
            return format!("{}{unit}", nanos / size);
        }
    }
    format!("{nanos}ns")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{runner, test};
    use proptest::prelude::*;

    #[test]
    fn reads_what_go_reads() {
        let cases = [
            ("0", 0),
            ("100ms", 100_000_000),
            ("10s", 10_000_000_000),
            ("1m", 60_000_000_000),
            ("1h2m3s", 3_723_000_000_000),
            ("1.5s", 1_500_000_000),
            (".5ms", 500_000),
            ("1.s", 1_000_000_000),
            ("7us", 7_000),
            ("7µs", 7_000),
            ("3ns", 3),
            ("0s", 0),
            ("1m30.25s", 90_250_000_000),
        ];
        for (text, nanos) in cases {
            assert_eq!(parse(text), Some(Duration::from_nanos(nanos)), "{text}");
        }
    }

    #[test]
    fn refuses_the_rest() {
        for text in [
            "",
            "soon",
            "10",
            "-1s",
            "+1s",
            "1 s",
            "s",
            ".s",
            "1..s",
            "1.2.3s",
            "1d",
            "1S",
            "99999999999999h",
            "1e3s",
            "١s",
        ] {
            assert_eq!(parse(text), None, "{text:?}");
        }
    }

    #[test]
    fn what_is_written_is_read_back() {
        runner(512)
            .run(&any::<u64>(), |nanos| {
                let duration = Duration::from_nanos(nanos);
                prop_assert_eq!(parse(&format(duration)), Some(duration));
                Ok(())
            })
            .unwrap();
    }

    #[test]
    fn no_text_panics() {
        let text = "[0-9.nsumhµ٣ -]{0,12}";
        runner(2_048)
            .run(&text, |text| {
                let _ = parse(&text);
                Ok(())
            })
            .unwrap();
    }
}
