//! The list of what the filter passes, and why it does not pass the rest.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::path::Path;

use anyhow::Context as _;
use serde::Deserialize;

use crate::{Outcome, Verdict};

/// The list, as the file has it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Known {
    /// Tests that pass, by group.
    #[serde(default)]
    pub pass: BTreeMap<String, Vec<String>>,
    /// Those that do not, by reason: what they ask for is not what the filter is for.
    #[serde(default)]
    pub does_not_apply: BTreeMap<String, Vec<String>>,
    /// Those that do not, by reason: the filter should do better.
    #[serde(default)]
    pub fail: BTreeMap<String, Vec<String>>,
    /// Those that say nothing, by reason: what they rest on did not work.
    #[serde(default)]
    pub untested: BTreeMap<String, Vec<String>>,
}

const HEADER: &str = "\
# What the filter makes of the public HTTP cache tests: `make http-cache-tests` fails where this is not so, and writes it
# anew with BLESS=1. A test that is new under `fail` or `untested` has the tests' own words for a reason, until somebody
# finds better ones or moves it. `untested`: what they rest on did not work, so they say nothing.
";

impl Known {
    /// Reads the file.
    ///
    /// # Errors
    /// If it is not there, or is none.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let text = fs::read_to_string(path).with_context(|| {
            format!("cannot read {}; to write it: make http-cache-tests BLESS=1", path.display())
        })?;
        serde_saphyr::from_str(&text).with_context(|| format!("{} is no list of tests", path.display()))
    }

    /// Where outcomes differ from the list, a line each.
    pub fn faults(&self, outcomes: &[Outcome]) -> Vec<String> {
        let passing: BTreeSet<_> = self.pass.values().flatten().collect();
        let reasons = self.reasons();
        let mut faults = Vec::new();
        for outcome in outcomes {
            let Outcome { id, message, .. } = outcome;
            match (outcome.verdict == Verdict::Pass, passing.contains(id), reasons.get(id)) {
                (true, true, None) | (false, false, Some(_)) => (),
                (true, _, Some(reason)) => faults.push(format!("{id} passes, but is listed: {reason}")),
                (false, true, _) => faults.push(format!("{id} is listed as passing, but: {message}")),
                (_, false, None) => faults.push(format!("{id} is not listed")),
            }
        }
        let ids: BTreeSet<_> = outcomes.iter().map(|outcome| &outcome.id).collect();
        let gone = passing.into_iter().chain(reasons.keys().copied()).filter(|id| !ids.contains(id));
        faults.extend(gone.map(|id| format!("{id} is listed, but there is no such test")));
        faults
    }

    /// The list that these outcomes would agree with. A test that still does not pass keeps its reason.
    pub fn updated(&self, outcomes: &[Outcome]) -> Self {
        let mut new = Self::default();
        let not_ours: BTreeSet<_> = self.does_not_apply.values().flatten().collect();
        let failing: BTreeSet<_> = self.fail.values().flatten().collect();
        let untested: BTreeSet<_> = self.untested.values().flatten().collect();
        let reasons = self.reasons();
        for outcome in outcomes {
            let id = &outcome.id;
            let (list, under) = match (outcome.verdict, reasons.get(id)) {
                (Verdict::Pass, _) => (&mut new.pass, outcome.suite.clone()),
                (_, Some(reason)) if not_ours.contains(id) => (&mut new.does_not_apply, (*reason).to_owned()),
                (Verdict::Untested, Some(reason)) if untested.contains(id) => {
                    (&mut new.untested, (*reason).to_owned())
                }
                (Verdict::Untested, _) => (&mut new.untested, outcome.message.clone()),
                (Verdict::Fail, Some(reason)) if failing.contains(id) => {
                    (&mut new.fail, (*reason).to_owned())
                }
                (Verdict::Fail, _) => (&mut new.fail, outcome.message.clone()),
            };
            list.entry(under).or_default().push(id.clone());
        }
        new
    }

    fn reasons(&self) -> BTreeMap<&String, &str> {
        let groups = self.does_not_apply.iter().chain(&self.fail).chain(&self.untested);
        groups.flat_map(|(reason, ids)| ids.iter().map(move |id| (id, reason.as_str()))).collect()
    }
}

impl fmt::Display for Known {
    /// The file.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(HEADER)?;
        let sections = [
            ("pass", &self.pass),
            ("does_not_apply", &self.does_not_apply),
            ("fail", &self.fail),
            ("untested", &self.untested),
        ];
        for (name, groups) in sections {
            writeln!(out, "\n{name}:{}", if groups.is_empty() { " {}" } else { "" })?;
            for (title, ids) in groups {
                // A debug-formatted string is one that YAML reads, for text without odd characters.
                writeln!(out, "  {title:?}:")?;
                for id in ids {
                    writeln!(out, "  - {id}")?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Kind;

    fn outcome(id: &str, verdict: Verdict) -> Outcome {
        let message = if verdict == Verdict::Pass { "" } else { "Response 2 is \"x\"" };
        Outcome {
            suite: "Vary: all".into(),
            id: id.into(),
            kind: Kind::Required,
            verdict,
            message: message.into(),
        }
    }

    #[test]
    fn what_is_written_is_read_and_agrees() {
        let outcomes =
            [outcome("a", Verdict::Pass), outcome("b", Verdict::Fail), outcome("c", Verdict::Untested)];
        let known = Known::default().updated(&outcomes);
        assert_eq!(known.fail["Response 2 is \"x\""], ["b"]);
        assert_eq!(known.untested["Response 2 is \"x\""], ["c"]);
        let read: Known = serde_saphyr::from_str(&known.to_string()).unwrap();
        assert_eq!(read, known);
        assert!(read.faults(&outcomes).is_empty());
    }

    #[test]
    fn every_difference_is_told() {
        let known = Known::default().updated(&[
            outcome("a", Verdict::Pass),
            outcome("b", Verdict::Fail),
            outcome("gone", Verdict::Pass),
        ]);
        let now = [outcome("a", Verdict::Fail), outcome("b", Verdict::Pass), outcome("new", Verdict::Pass)];
        let faults = known.faults(&now).join("\n");
        for fault in
            ["a is listed as passing, but: Resp", "b passes, but", "new is not listed", "gone is listed, but"]
        {
            assert!(faults.contains(fault), "{faults}");
        }
    }

    #[test]
    fn reasons_stay_for_as_long_as_they_are_true() {
        let mut known = Known::default();
        known.does_not_apply.insert("No ranges.".into(), vec!["a".into(), "b".into()]);
        known.untested.insert("Not yet.".into(), vec!["c".into(), "d".into()]);
        let updated = known.updated(&[
            outcome("a", Verdict::Fail),
            outcome("b", Verdict::Pass),
            outcome("c", Verdict::Untested),
            outcome("d", Verdict::Fail),
        ]);
        assert_eq!(updated.does_not_apply["No ranges."], ["a"]);
        assert_eq!(updated.untested["Not yet."], ["c"]);
        assert_eq!(updated.fail["Response 2 is \"x\""], ["d"]);
        assert_eq!(updated.pass["Vary: all"], ["b"]);
    }
}
