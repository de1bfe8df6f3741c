//! Rules: settings that differ for some paths.
//!
//! A service is seldom of one piece: one method changes with the hour, another with every call. The first rule whose
//! patterns match a path is the one that counts, so a rule behind one that matches all it does is a mistake, and is
//! reported as one.

use crate::affinity;
use crate::policy::Policy;
use crate::values::{self, Field, Raw, Wrong, boolean, header_names, put};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::time::Duration;

/// More rules than this are refused: a request may have to be compared with all of them.
const MOST: usize = 1_000;

/// More patterns than this in one rule are refused, for the same reason.
const MOST_PATTERNS: usize = 100;

/// The field that says for which paths a rule is.
const MATCH: &str = "match";

/// What `match` may look like, for error messages.
const ALLOWED_MATCH: &str = "a path such as \"/pkg.Service/Method\", the beginning of paths such as \
    \"/pkg.Service/*\" or \"/api/*\", without a query, or a list of 1 to 100 of these";

/// All rules, in the order in which they are tried.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rules(Vec<Rule>);

/// What differs for the paths that match.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rule {
    patterns: Vec<Pattern>,
    collapse: Option<bool>,
    ttl: Option<Duration>,
    max_ttl: Option<Duration>,
    key_headers: Option<Vec<String>>,
    stale_if_error: Option<Duration>,
    stale_while_revalidate: Option<Duration>,
    early_refresh: Option<f64>,
    ttl_jitter: Option<f64>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Pattern {
    Exact(String),
    /// The beginning of paths, without the asterisk.
    Prefix(String),
}

const FIELDS: [Field<Rule>; 9] = [
    Field { json: MATCH, assign: |r, raw| put(&mut r.patterns, patterns(raw)) },
    Field { json: "collapse", assign: |r, raw| put(&mut r.collapse, boolean(raw).map(Some)) },
    Field { json: "key_headers", assign: |r, raw| put(&mut r.key_headers, header_names(raw).map(Some)) },
    Field { json: "cache_duration", assign: |r, raw| put(&mut r.ttl, values::ttl(raw).map(Some)) },
    Field { json: "max_ttl", assign: |r, raw| put(&mut r.max_ttl, values::max_ttl(raw).map(Some)) },
    Field {
        json: "stale_if_error",
        assign: |r, raw| put(&mut r.stale_if_error, values::stale(raw).map(Some)),
    },
    Field {
        json: "stale_while_revalidate",
        assign: |r, raw| put(&mut r.stale_while_revalidate, values::stale(raw).map(Some)),
    },
    Field {
        json: "early_refresh",
        assign: |r, raw| put(&mut r.early_refresh, values::earliness(raw).map(Some)),
    },
    Field { json: "ttl_jitter", assign: |r, raw| put(&mut r.ttl_jitter, values::share(raw).map(Some)) },
];

/// The fields that have a meaning with `mode` `affinity`, for error messages.
const OF_AFFINITY: &str = "match, collapse, key_headers";

impl Rules {
    /// Reads `rules`.
    pub(crate) fn read(raw: &Raw) -> Result<Self, Wrong> {
        let Some(Value::Array(items)) = raw.json() else {
            let fields = values::names(&FIELDS);
            return Err(Wrong::Whole(format!("a list in JSON of objects with {fields}")));
        };
        if items.len() > MOST {
            return Err(Wrong::Within(vec![format!(" has {} rules; allowed: up to {MOST}", items.len())]));
        }
        let mut rules = Self::default();
        let mut faults = Vec::new();
        for (at, item) in items.into_iter().enumerate() {
            match Rule::read(item) {
                Ok(rule) => rules.0.push(rule),
                Err(parts) => faults.extend(parts.iter().map(|part| format!("[{at}]{part}"))),
            }
        }
        // With a rule missing, the others would be named by wrong numbers.
        if faults.is_empty() {
            faults = rules.covered();
        }
        if faults.is_empty() { Ok(rules) } else { Err(Wrong::Within(faults)) }
    }

    /// The rules in their order.
    pub fn iter(&self) -> impl Iterator<Item = &Rule> {
        self.0.iter()
    }

    /// Rules that can never match, since earlier ones match all that they do.
    fn covered(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let mut earlier = Earlier::default();
        for (at, rule) in self.0.iter().enumerate() {
            let covering: Option<Vec<_>> =
                rule.patterns.iter().map(|pattern| earlier.covers(pattern)).collect();
            if let Some(mut covering) = covering {
                covering.sort_unstable();
                covering.dedup();
                let names: Vec<_> = covering.iter().map(|rule| format!("rules[{rule}]")).collect();
                faults.push(format!(
                    "[{at}] can never match, since {} matches first what it would; allowed: the narrower rule first",
                    names.join(" or ")
                ));
            }
            rule.patterns.iter().for_each(|pattern| earlier.add(pattern, at));
        }
        faults
    }

    /// What does not go together with `mode` `affinity`, where nothing is cached.
    pub(crate) fn faults_of_affinity(&self) -> impl Iterator<Item = String> {
        let numbered = self.0.iter().enumerate();
        numbered.flat_map(|(at, rule)| {
            rule.faults_of_affinity().into_iter().map(move |part| format!("[{at}]{part}"))
        })
    }
}

/// The patterns of rules that come first, each with the number of its rule.
#[derive(Default)]
struct Earlier<'a> {
    exact: BTreeMap<&'a str, usize>,
    prefixes: BTreeMap<&'a str, usize>,
}

impl<'a> Earlier<'a> {
    fn add(&mut self, pattern: &'a Pattern, rule: usize) {
        match pattern {
            Pattern::Exact(path) => self.exact.entry(path).or_insert(rule),
            Pattern::Prefix(prefix) => self.prefixes.entry(prefix).or_insert(rule),
        };
    }

    /// A rule that matches whatever `pattern` does.
    fn covers(&self, pattern: &Pattern) -> Option<usize> {
        let (text, same) = match pattern {
            Pattern::Exact(path) => (path, self.exact.get(path.as_str())),
            Pattern::Prefix(prefix) => (prefix, None),
        };
        let beginnings = (1..=text.len()).filter_map(|end| text.get(..end));
        same.copied().or_else(|| beginnings.filter_map(|start| self.prefixes.get(start)).min().copied())
    }
}

impl Rule {
    /// Reads a rule. Returns each fault as what follows the rule's own name.
    fn read(item: Value) -> Result<Self, Vec<String>> {
        let object = match item {
            Value::Object(object) => object,
            other => {
                let fields = values::names(&FIELDS);
                return Err(vec![format!(" is {other}; allowed: an object with {fields}")]);
            }
        };
        let mut faults = Vec::new();
        faults.extend(incomplete(&object));
        let mut rule = Self::default();
        faults.extend(values::read_fields(&mut rule, object, &FIELDS));
        if faults.is_empty() { Ok(rule) } else { Err(faults) }
    }

    /// Whether the rule is for `path`, which has no query.
    pub fn matches(&self, path: &[u8]) -> bool {
        self.patterns.iter().any(|pattern| match pattern {
            Pattern::Exact(exact) => path == exact.as_bytes(),
            Pattern::Prefix(prefix) => path.starts_with(prefix.as_bytes()),
        })
    }

    /// What the rule gives, and from `base` what it does not.
    pub fn over(&self, base: &Policy) -> Policy {
        Policy {
            collapse: self.collapse.unwrap_or(base.collapse),
            ttl: self.ttl.unwrap_or(base.ttl),
            max_ttl: self.max_ttl.unwrap_or(base.max_ttl),
            key_headers: self.key_headers.as_ref().unwrap_or(&base.key_headers).clone(),
            stale_if_error: self.stale_if_error.unwrap_or(base.stale_if_error),
            stale_while_revalidate: self.stale_while_revalidate.unwrap_or(base.stale_while_revalidate),
            early_refresh: self.early_refresh.unwrap_or(base.early_refresh),
            ttl_jitter: self.ttl_jitter.unwrap_or(base.ttl_jitter),
        }
    }

    fn faults_of_affinity(&self) -> Vec<String> {
        let caching = [
            ("cache_duration", self.ttl.is_some()),
            ("max_ttl", self.max_ttl.is_some()),
            ("stale_if_error", self.stale_if_error.is_some()),
            ("stale_while_revalidate", self.stale_while_revalidate.is_some()),
            ("early_refresh", self.early_refresh.is_some()),
            ("ttl_jitter", self.ttl_jitter.is_some()),
        ];
        let idle = caching.iter().filter(|(_, is_given)| *is_given).map(|(name, _)| {
            format!(
                ".{name} is set, but mode is \"affinity\", where it has no meaning; allowed there: {OF_AFFINITY}"
            )
        });
        let names_itself = self.key_headers.iter().flatten().any(|name| name == affinity::HEADER);
        idle.chain(names_itself.then(|| format!(".key_headers {}", affinity::NAMES_ITSELF))).collect()
    }
}

/// What a rule must have: something to match, and something that differs there.
fn incomplete(object: &Map<String, Value>) -> Option<String> {
    if !object.contains_key(MATCH) {
        return Some(format!(".{MATCH} is not set; allowed: {ALLOWED_MATCH}"));
    }
    let others = values::names(FIELDS.get(1..).unwrap_or_default());
    let fault = format!(" has nothing but {MATCH}, so it does nothing; allowed: one or more of {others}");
    (object.len() == 1).then_some(fault)
}

fn patterns(raw: &Raw) -> Result<Vec<Pattern>, String> {
    let texts = match raw {
        Raw::Json(Value::String(text)) => Some(vec![text.clone()]),
        _ => raw.list(),
    };
    let texts = texts.filter(|texts| (1..=MOST_PATTERNS).contains(&texts.len()));
    let texts = texts.ok_or_else(|| ALLOWED_MATCH.to_string())?;
    texts
        .iter()
        .map(|text| Pattern::parse(text).ok_or_else(|| format!("{ALLOWED_MATCH}, which {text:?} is not")))
        .collect()
}

impl Pattern {
    fn parse(text: &str) -> Option<Self> {
        let path = text.strip_suffix('*').unwrap_or(text);
        let is_plain = path.bytes().all(|byte| byte.is_ascii_graphic() && !b"*?".contains(&byte));
        if !path.starts_with('/') || !is_plain {
            return None;
        }
        Some(if path.len() < text.len() {
            Self::Prefix(path.to_string())
        } else {
            Self::Exact(path.to_string())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{runner, test};
    use proptest::prelude::*;
    use serde_json::json;

    fn read(rules: Value) -> Result<Rules, Wrong> {
        Rules::read(&Raw::Json(rules))
    }

    /// The one fault of these rules.
    fn fault(rules: Value) -> String {
        match read(rules.clone()) {
            Err(Wrong::Within(parts)) if parts.len() == 1 => parts[0].clone(),
            other => panic!("{rules}: {other:?}"),
        }
    }

    fn matches(pattern: &str, path: &str) -> bool {
        Pattern::parse(pattern)
            .map(|pattern| Rule { patterns: vec![pattern], ..Rule::default() })
            .unwrap()
            .matches(path.as_bytes())
    }

    #[test]
    fn paths_are_matched_whole_or_by_their_beginning() {
        assert!(matches("/a.B/C", "/a.B/C"));
        assert!(!matches("/a.B/C", "/a.B/CD"));
        assert!(!matches("/a.B/C", "/a.B/"));
        assert!(matches("/a.B/*", "/a.B/C"));
        assert!(matches("/a.B/*", "/a.B/"));
        assert!(!matches("/a.B/*", "/a.B"));
        assert!(matches("/api*", "/api/x/y"));
        assert!(matches("/*", "/"));
        assert!(matches("/", "/") && !matches("/", "/a"));
    }

    #[test]
    fn what_is_no_path_is_refused() {
        for bad in ["", "*", "a", "a/*", "/a*b", "/a**", "/*/", "/a b", "/ä", "/a?b", "/a?*", "!/a", "/a\n"]
        {
            assert_eq!(Pattern::parse(bad), None, "{bad:?}");
            let fault = fault(json!([{"match": ["/ok", bad], "collapse": false}]));
            assert!(fault.starts_with("[0].match is [\"/ok\","), "{fault}");
            assert!(fault.ends_with(&format!("which {bad:?} is not")), "{fault}");
        }
    }

    #[test]
    fn faults_name_rule_field_value_and_what_is_allowed() {
        let cases = [
            (json!([7]), "[0] is 7; allowed: an object with match, collapse"),
            (json!([{"collapse": false}]), "[0].match is not set; allowed: a path"),
            (json!([{}]), "[0].match is not set; allowed: a path"),
            (
                json!([{"match": "/a"}]),
                "[0] has nothing but match, so it does nothing; allowed: one or more of collapse",
            ),
            (json!([{"match": [], "collapse": true}]), "[0].match is []; allowed: a path"),
            (json!([{"match": 7, "collapse": true}]), "[0].match is 7; allowed: a path"),
            (json!([{"match": "/a", "collapse": 1}]), "[0].collapse is 1; allowed: true or false"),
            (
                json!([{"match": "/a", "cache_duration": "25h"}]),
                "[0].cache_duration is \"25h\"; allowed: a duration",
            ),
            (json!([{"match": "/a", "max_ttl": "0"}]), "[0].max_ttl is \"0\"; allowed: a duration"),
            (
                json!([{"match": "/a", "key_headers": "a"}]),
                "[0].key_headers is \"a\"; allowed: a list of header names",
            ),
            (json!([{"match": "/a", "stale_if_error": 1}]), "[0].stale_if_error is 1; allowed: a duration"),
            (
                json!([{"match": "/a", "stale_while_revalidate": "x"}]),
                "[0].stale_while_revalidate is \"x\"; allowed",
            ),
            (
                json!([{"match": "/a", "early_refresh": 11}]),
                "[0].early_refresh is 11; allowed: a number from 0 to 10",
            ),
            (
                json!([{"match": "/a", "ttl_jitter": "101%"}]),
                "[0].ttl_jitter is \"101%\"; allowed: a number from 0 to 1",
            ),
            (
                json!([{"match": "/a", "ttl": "1s"}]),
                "[0].ttl is \"1s\", but there is no such field; allowed: match, ",
            ),
        ];
        for (rules, start) in cases {
            let fault = fault(rules.clone());
            assert!(fault.starts_with(start), "{rules}: {fault}");
        }
    }

    #[test]
    fn all_faults_are_reported_together_by_the_number_of_their_rule() {
        let good = json!({"match": "/b", "collapse": true});
        let rules = json!([{"match": "/a", "collapse": 1}, good, {"ttl_jitter": 2, "x": 1}]);
        let Err(Wrong::Within(parts)) = read(rules) else { panic!("no faults") };
        let starts = ["[0].collapse", "[2].match", "[2].ttl_jitter", "[2].x"];
        assert!(parts.iter().zip(starts).all(|(part, start)| part.starts_with(start)), "{parts:?}");
        assert_eq!(parts.len(), starts.len());
    }

    #[test]
    fn what_is_no_list_is_refused() {
        for rules in [json!({}), json!("x"), json!(true), Value::Null] {
            assert!(
                matches!(read(rules), Err(Wrong::Whole(allowed)) if allowed.contains("a list in JSON of objects"))
            );
        }
        let text = Raw::Text(r#"[{"match":"/a","collapse":false}]"#.to_string());
        assert_eq!(Rules::read(&text).unwrap().iter().count(), 1);
    }

    #[test]
    fn there_are_limits() {
        let rule = |at| json!({"match": format!("/{at}"), "collapse": false});
        assert!(read((0..1_000).map(rule).collect()).is_ok());
        assert_eq!(fault((0..1_001).map(rule).collect()), " has 1001 rules; allowed: up to 1000");
        let patterns = |count| json!([{"match": vec!["/a"; count], "collapse": false}]);
        assert!(read(patterns(100)).is_ok());
        assert!(fault(patterns(101)).contains("a list of 1 to 100 of these"));
    }

    #[test]
    fn a_rule_behind_one_that_matches_all_it_does_is_refused() {
        let rules = |patterns: &[Value]| -> Value {
            patterns.iter().map(|pattern| json!({"match": pattern, "collapse": false})).collect()
        };
        let never = |patterns: &[Value]| fault(rules(patterns));
        let said = never(&[json!("/b"), json!("/a/*"), json!(["/a/b", "/a/c/*", "/a/*"])]);
        assert!(said.starts_with("[2] can never match, since rules[1] matches first"), "{said}");
        let said = never(&[json!("/a"), json!("/b*"), json!(["/a", "/bc"])]);
        assert!(said.starts_with("[2] can never match, since rules[0] or rules[1] matches first"), "{said}");
        assert!(never(&[json!("/*"), json!("/")]).starts_with("[1] can never match, since rules[0]"));
        for good in [
            [json!("/a/b"), json!("/a/*")],
            [json!("/a"), json!(["/a", "/b"])],
            [json!("/a/*"), json!("/a")],
            [json!("/a"), json!("/a*")],
        ] {
            assert!(read(rules(&good)).is_ok(), "{good:?}");
        }
    }

    /// Few letters, so that patterns meet.
    fn some_patterns() -> impl Strategy<Value = Vec<Vec<String>>> {
        prop::collection::vec(prop::collection::vec("/[ab]{0,2}\\*?", 1..3), 1..6)
    }

    #[test]
    fn exactly_rules_that_are_never_first_are_refused() {
        runner(1_024)
            .run(&some_patterns(), |patterns| {
                let rules = patterns.iter().map(|texts| Rule {
                    patterns: texts.iter().filter_map(|text| Pattern::parse(text)).collect(),
                    ..Rule::default()
                });
                let rules = Rules(rules.collect());
                // One letter more than any pattern has tells a prefix from a path.
                let letters = ["", "a", "b", "c"];
                let paths: Vec<String> = letters
                    .iter()
                    .flat_map(|a| letters.iter().flat_map(move |b| letters.map(|c| format!("/{a}{b}{c}"))))
                    .collect();
                let first = |path: &String| rules.iter().position(|rule| rule.matches(path.as_bytes()));
                let used: std::collections::BTreeSet<_> = paths.iter().filter_map(first).collect();
                let unused: Vec<_> = (0..patterns.len()).filter(|at| !used.contains(at)).collect();
                let said = rules.covered();
                prop_assert_eq!(unused.len(), said.len(), "{:?}: {:?}", patterns, said);
                for (at, said) in unused.iter().zip(said) {
                    prop_assert!(said.starts_with(&format!("[{at}] can never match")), "{:?}", said);
                }
                Ok(())
            })
            .unwrap();
    }

    #[test]
    fn with_affinity_only_what_makes_the_key_is_left() {
        let all = json!([
            {"match": "/a", "collapse": false},
            {"match": "/b", "key_headers": ["x-collapser-key"], "cache_duration": "1s", "max_ttl": "1s",
                "stale_if_error": "1s", "stale_while_revalidate": "1s", "early_refresh": 1, "ttl_jitter": 0}
        ]);
        let faults: Vec<_> = read(all).unwrap().faults_of_affinity().collect();
        let names = [
            "cache_duration",
            "max_ttl",
            "stale_if_error",
            "stale_while_revalidate",
            "early_refresh",
            "ttl_jitter",
        ];
        for (fault, name) in faults.iter().zip(names) {
            assert!(fault.starts_with(&format!("[1].{name} is set, but mode is \"affinity\"")), "{fault}");
            assert!(fault.ends_with("allowed there: match, collapse, key_headers"), "{fault}");
        }
        assert_eq!(faults.len(), names.len() + 1);
        assert!(faults[6].starts_with("[1].key_headers names x-collapser-key"), "{faults:?}");
    }
}
