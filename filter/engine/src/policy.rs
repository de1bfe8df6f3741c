//! What applies to one request, resolved once at start.
//!
//! The flat settings say what applies to all requests, the rules what differs for some paths. Both are put together
//! when the settings are read, so that a request is looked up once, by its path, and carries no more than a number.

use crate::rules::{Rule, Rules};
use std::time::Duration;

/// What applies to a request. The default is of no use but as a place to start from: nothing collapses.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Policy {
    /// Whether the request may collapse; if not, it passes untouched.
    pub collapse: bool,
    /// TTL of a reply that says nothing of its own freshness, up to 24 h; zero is not cached.
    pub ttl: Duration,
    /// The longest TTL that a backend may ask for; 1 ms to 365 days.
    pub max_ttl: Duration,
    /// Lower-case names of the headers in the key, sorted.
    pub key_headers: Vec<String>,
    /// For how long an expired reply stands in for one that failed; up to 24 h, zero is never.
    pub stale_if_error: Duration,
    /// For how long an expired reply still answers while a flight fetches its successor; up to 24 h, zero is never.
    pub stale_while_revalidate: Duration,
    /// How early a reply is refreshed before it expires, 0 to 10: the beta of XFetch (Vattani, Chierichetti,
    /// Lowenstein, "Optimal Probabilistic Cache Stampede Prevention", VLDB 2015). 0 is off, 1 the paper's optimum.
    pub early_refresh: f64,
    /// By which share of itself, at most, a TTL is shortened at random; 0 to 1.
    pub ttl_jitter: f64,
}

/// Names one of the [`Policies`]. The default is what applies to gRPC where no rule does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PolicyId(u16);

impl PolicyId {
    /// Its position in [`Policies::all`].
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// What applies to gRPC and to all else, which differ in their default TTL. Even ids are the former.
#[derive(Clone, Debug, Default, PartialEq)]
struct Pair {
    grpc: Policy,
    http: Policy,
}

/// All policies: the two defaults, and two for each rule.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Policies {
    defaults: Pair,
    ruled: Vec<(Rule, Pair)>,
}

impl Policies {
    /// Those of the rules, which inherit from `grpc` and `http` what they do not give.
    pub fn new(grpc: Policy, http: Policy, rules: &Rules) -> Self {
        let pair = |rule: &Rule| Pair { grpc: rule.over(&grpc), http: rule.over(&http) };
        let ruled = rules.iter().map(|rule| (rule.clone(), pair(rule))).collect();
        Self { ruled, defaults: Pair { grpc, http } }
    }

    /// What applies to a gRPC call of `path`: the first rule that matches, else the flat settings.
    pub fn grpc(&self, path: &[u8]) -> PolicyId {
        PolicyId(self.pair(path) * 2)
    }

    /// What applies to any other request for `path`, whose query is of no account: the first rule that matches, else
    /// the flat settings with the TTL of `http`.
    pub fn http(&self, path: &[u8]) -> PolicyId {
        PolicyId(self.pair(path) * 2 + 1)
    }

    /// The number of the first rule that matches, from 1 on; 0 if none does.
    fn pair(&self, path: &[u8]) -> u16 {
        if self.ruled.is_empty() {
            return 0;
        }
        let path = path.split(|byte| *byte == b'?').next().unwrap_or(path);
        let found = (1..).zip(&self.ruled).find(|(_, (rule, _))| rule.matches(path));
        found.map_or(0, |(number, _)| number)
    }

    /// The policy of this name; for a name that is not from here, the default.
    pub fn get(&self, id: PolicyId) -> &Policy {
        let rule = (id.0 / 2).checked_sub(1);
        let pair = rule.and_then(|rule| self.ruled.get(usize::from(rule))).map(|(_, pair)| pair);
        let pair = pair.unwrap_or(&self.defaults);
        if id.0.is_multiple_of(2) { &pair.grpc } else { &pair.http }
    }

    /// All policies with their names.
    pub fn all(&self) -> impl Iterator<Item = (PolicyId, &Policy)> {
        let pairs = std::iter::once(&self.defaults).chain(self.ruled.iter().map(|(_, pair)| pair));
        (0..).map(PolicyId).zip(pairs.flat_map(|pair| [&pair.grpc, &pair.http]))
    }

    /// Whether there are any rules, so that a path can make a difference.
    pub fn has_rules(&self) -> bool {
        !self.ruled.is_empty()
    }
}

/// What a status may look like, for error messages.
pub const ALLOWED_STATUSES: &str =
    "gRPC codes by name or number such as \"UNAVAILABLE\" or 14 (1 to 16) and HTTP statuses from 400 to 599";

/// The names of gRPC's codes from 1 on (gRPC "Status codes and their use in gRPC").
const CODES: [&str; 16] = [
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
];

/// A set of statuses that are no success, of gRPC and of HTTP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statuses {
    /// A bit for each code.
    grpc: u32,
    /// Sorted.
    http: Vec<u16>,
}

impl Default for Statuses {
    /// What says that the backend is in trouble, rather than the request or its caller.
    fn default() -> Self {
        const UNKNOWN: u32 = 1 << 2;
        const DEADLINE_EXCEEDED: u32 = 1 << 4;
        const INTERNAL: u32 = 1 << 13;
        const UNAVAILABLE: u32 = 1 << 14;
        let grpc = UNKNOWN | DEADLINE_EXCEEDED | INTERNAL | UNAVAILABLE;
        Self { grpc, http: vec![500, 502, 503, 504] }
    }
}

impl Statuses {
    /// Reads a list of statuses.
    ///
    /// # Errors
    /// The first that is none, see [`ALLOWED_STATUSES`].
    pub fn parse<T: AsRef<str>>(statuses: &[T]) -> Result<Self, String> {
        let mut set = Self { grpc: 0, http: Vec::new() };
        for text in statuses.iter().map(AsRef::as_ref) {
            match number(text) {
                Some(code @ 1..=16) => set.grpc |= 1 << code,
                Some(status @ 400..=599) => set.http.push(status),
                _ => return Err(text.to_string()),
            }
        }
        set.http.sort_unstable();
        set.http.dedup();
        Ok(set)
    }

    /// Whether a gRPC status is one of these.
    pub fn contains_grpc(&self, code: u32) -> bool {
        1_u32.checked_shl(code).is_some_and(|bit| self.grpc & bit != 0)
    }

    /// Whether an HTTP status is one of these.
    pub fn contains_http(&self, status: u16) -> bool {
        self.http.binary_search(&status).is_ok()
    }
}

/// The number of a status that is written as such, or by the name of a gRPC code.
fn number(text: &str) -> Option<u16> {
    (1..).zip(CODES).find(|(_, name)| *name == text).map(|(code, _)| code).or_else(|| text.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Settings;
    use crate::testing::test;

    fn policies(json: &str) -> Policies {
        Settings::load(json.as_bytes(), |_| None).unwrap().policies
    }

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn without_rules_the_flat_settings_apply() {
        let policies = policies(
            r#"{"cluster":"b","cache_duration":"1s","key_headers":["a"],"stale_if_error":"2s",
                "stale_while_revalidate":"3s","early_refresh":0.5,"ttl_jitter":"5%","max_ttl":"4s","http":{"default_ttl":"5s"}}"#,
        );
        assert!(!policies.has_rules());
        let (grpc, http) = (policies.grpc(b"/a.B/C"), policies.http(b"/a?b"));
        assert_eq!(grpc, PolicyId::default());
        assert_ne!(grpc, http);
        let expected = Policy {
            collapse: true,
            ttl: SECOND,
            max_ttl: SECOND * 4,
            key_headers: vec!["a".into()],
            stale_if_error: SECOND * 2,
            stale_while_revalidate: SECOND * 3,
            early_refresh: 0.5,
            ttl_jitter: 0.05,
        };
        assert_eq!(policies.get(grpc), &expected);
        assert_eq!(policies.get(http), &Policy { ttl: SECOND * 5, ..expected });
    }

    #[test]
    fn a_rule_gives_what_it_has_and_inherits_the_rest() {
        let policies = policies(
            r#"{"cluster":"b","cache_duration":"1s","early_refresh":2,"http":{"default_ttl":"5s"},"rules":[
                {"match":"/a","collapse":false},
                {"match":"/b","cache_duration":"7s","key_headers":["X-B"],"max_ttl":"8s","ttl_jitter":1},
                {"match":"/c","stale_if_error":"2s","stale_while_revalidate":"3s","early_refresh":0}]}"#,
        );
        assert!(policies.has_rules());
        let flat = policies.get(PolicyId::default());
        let at = |path: &[u8]| (policies.get(policies.grpc(path)), policies.get(policies.http(path)));
        let (grpc, http) = at(b"/a");
        assert_eq!(grpc, &Policy { collapse: false, ..flat.clone() });
        assert_eq!(http, &Policy { ttl: SECOND * 5, ..grpc.clone() });
        let (grpc, http) = at(b"/b");
        let expected = Policy {
            ttl: SECOND * 7,
            key_headers: vec!["x-b".into()],
            max_ttl: SECOND * 8,
            ttl_jitter: 1.0,
            ..flat.clone()
        };
        assert_eq!((grpc, http), (&expected, &expected));
        let (grpc, http) = at(b"/c");
        let expected = Policy {
            stale_if_error: SECOND * 2,
            stale_while_revalidate: SECOND * 3,
            early_refresh: 0.0,
            ..flat.clone()
        };
        assert_eq!(grpc, &expected);
        assert_eq!(http, &Policy { ttl: SECOND * 5, ..expected });
        assert_eq!(at(b"/d").0, flat);
    }

    #[test]
    fn the_first_rule_wins_and_queries_are_of_no_account() {
        let policies = policies(
            r#"{"cluster":"b","rules":[{"match":["/x","/a/b"],"cache_duration":"1s"},
                {"match":"/a/*","cache_duration":"2s"}]}"#,
        );
        let ttl = |path: &[u8]| policies.get(policies.http(path)).ttl.as_secs();
        assert_eq!(
            (ttl(b"/a/b"), ttl(b"/a/b?c=/a/d"), ttl(b"/a/c"), ttl(b"/x?"), ttl(b"/y?/a/b")),
            (1, 1, 2, 1, 0)
        );
        assert_eq!((ttl(b""), ttl(b"?"), ttl(b"/a?/")), (0, 0, 0));
    }

    #[test]
    fn every_policy_has_a_name_and_other_names_give_the_default() {
        let rules: Vec<_> =
            (0..1_000).map(|at| format!(r#"{{"match":"/{at}","cache_duration":"{}s"}}"#, at + 1)).collect();
        let policies = policies(&format!(r#"{{"cluster":"b","rules":[{}]}}"#, rules.join(",")));
        assert_eq!(policies.all().count(), 2_002);
        assert!(policies.all().all(|(id, policy)| std::ptr::eq(policies.get(id), policy)));
        assert_eq!(policies.get(policies.grpc(b"/999")).ttl, SECOND * 1_000);
        let default = policies.get(PolicyId::default()).clone();
        assert_eq!(policies.get(PolicyId(2_002)), &default);
        assert_eq!(policies.get(PolicyId(u16::MAX - 1)), &default);
        assert_eq!(policies.get(PolicyId(u16::MAX)), policies.get(policies.http(b"/")));
    }

    #[test]
    fn statuses_are_read_by_name_and_number() {
        let statuses = Statuses::parse(&["CANCELLED", "16", "599", "400", "503", "503"]).unwrap();
        let codes: Vec<_> = (0..100).filter(|code| statuses.contains_grpc(*code)).collect();
        assert_eq!(codes, [1, 16]);
        let http: Vec<_> = (0..=u16::MAX).filter(|status| statuses.contains_http(*status)).collect();
        assert_eq!(http, [400, 503, 599]);
        assert!(!statuses.contains_grpc(u32::MAX));
        for (code, name) in (1..).zip(CODES) {
            assert!(Statuses::parse(&[name]).unwrap().contains_grpc(code), "{name}");
        }
        for bad in ["", "OK", "0", "17", "399", "600", "unavailable", "-1", "5e2", "65537"] {
            assert_eq!(Statuses::parse(&["500", bad]), Err(bad.to_string()));
        }
    }

    #[test]
    fn by_default_statuses_are_those_of_a_backend_in_trouble() {
        let named = ["UNKNOWN", "DEADLINE_EXCEEDED", "INTERNAL", "UNAVAILABLE", "500", "502", "503", "504"];
        assert_eq!(Statuses::parse(&named), Ok(Statuses::default()));
    }
}
