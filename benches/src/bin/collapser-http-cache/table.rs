//! Counts by group, side by side, as Markdown.

use std::fmt::Write as _;

use crate::{Column, Kind, Outcome, Verdict};

const KINDS: [(Kind, &str); 3] = [
    (Kind::Required, "Required by the specification (RFC 9111): tests passed"),
    (Kind::Optimal, "Good to have, such as using what is stored: tests passed"),
    (Kind::Check, "Questions with no wrong answer: how often the answer is yes"),
];

/// A table for each kind of test. A cell has what passed and how many there are; `-n` are those that say nothing, since
/// what they rest on did not work.
pub fn markdown(columns: &[Column]) -> String {
    let mut text = "\
# The public HTTP cache tests

Written by `make http-cache-tests`. The tests are [http-tests/cache-tests](https://github.com/http-tests/cache-tests);
each cache stands in front of their origin server. The configurations: [the gateway](../../envoy/gateway.yaml),
[nginx](../http-cache/nginx.conf), [Varnish](../http-cache/varnish.vcl). What the filter passes, and why not the rest,
is [listed](../http-cache/collapser.yaml). `-n`: so many tests say nothing, since what they rest on did not work.
"
    .to_owned();
    for (kind, title) in KINDS {
        let names: Vec<_> = columns.iter().map(|column| column.name.as_str()).collect();
        // Writing to a string cannot fail, here and below.
        let _ = write!(
            text,
            "\n## {title}\n\n| | {} |\n|---|{}\n",
            names.join(" | "),
            "--:|".repeat(names.len())
        );
        for suite in suites(columns, kind) {
            row(&mut text, suite, columns, |outcome| outcome.kind == kind && outcome.suite == suite);
        }
        row(&mut text, "**all**", columns, |outcome| outcome.kind == kind);
    }
    text
}

fn row(text: &mut String, name: &str, columns: &[Column], is_meant: impl Fn(&Outcome) -> bool) {
    let _ = write!(text, "| {name} |");
    for column in columns {
        let meant: Vec<_> = column.outcomes.iter().filter(|outcome| is_meant(outcome)).collect();
        let count = |verdict| meant.iter().filter(|outcome| outcome.verdict == verdict).count();
        let _ = write!(text, " {} of {}", count(Verdict::Pass), meant.len());
        if count(Verdict::Untested) > 0 {
            let _ = write!(text, " (-{})", count(Verdict::Untested));
        }
        text.push_str(" |");
    }
    text.push('\n');
}

/// The groups that have tests of this kind, in the tests' order.
fn suites(columns: &[Column], kind: Kind) -> Vec<&str> {
    let mut suites: Vec<&str> = Vec::new();
    for outcome in columns.iter().flat_map(|column| &column.outcomes).filter(|outcome| outcome.kind == kind) {
        if !suites.contains(&outcome.suite.as_str()) {
            suites.push(&outcome.suite);
        }
    }
    suites
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_by_group_and_kind() {
        let outcome = |suite: &str, kind, verdict| Outcome {
            suite: suite.into(),
            id: "x".into(),
            kind,
            verdict,
            message: String::new(),
        };
        let outcomes = vec![
            outcome("Vary", Kind::Required, Verdict::Pass),
            outcome("Vary", Kind::Required, Verdict::Untested),
            outcome("Vary", Kind::Check, Verdict::Fail),
            outcome("Age", Kind::Required, Verdict::Pass),
        ];
        let text = markdown(&[Column { name: "one 1.0".into(), outcomes }]);
        for row in
            ["| | one 1.0 |", "| Vary | 1 of 2 (-1) |", "| Vary | 0 of 1 |", "| **all** | 2 of 3 (-1) |"]
        {
            assert!(text.contains(row), "{text}");
        }
    }
}
