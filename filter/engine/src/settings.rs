//! The settings: one table of names, ranges and meanings, read from JSON and from the environment.
//!
//! Each setting has a JSON field and an environment variable; JSON wins. Anything unknown, of the
//! wrong type or out of range is an error that names the setting, the value and what is allowed. All
//! errors are reported at once.

use crate::affinity;
use crate::methods::Methods;
use crate::policy::{Policies, Policy, Statuses};
use crate::rules::Rules;
use crate::values::{
    self, GIB, HOUR, MIB, Raw, Wrong, boolean, cluster, count, header_names, hold, method_patterns, mode,
    put, scope, size, time,
};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::time::Duration;

/// The settings of a filter.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// What is done with a request that may collapse.
    pub mode: Mode,
    /// Envoy cluster that a flight goes to.
    pub cluster: String,
    /// Deadline of a flight; 1 ms to 1 h.
    pub backend_timeout: Duration,
    /// TTL of a reply, up to 24 h; zero turns caching off.
    pub cache_duration: Duration,
    /// How often expired replies are dropped; 10 ms to 1 h.
    pub cleanup_interval: Duration,
    /// Whether failed replies are kept for the TTL too.
    pub cache_errors: bool,
    /// Replies kept; 0 is unlimited.
    pub max_cache_entries: usize,
    /// Bytes kept; 0 is unlimited.
    pub max_cache_bytes: usize,
    /// Lower-case names of the headers in the key, sorted.
    pub key_headers: Vec<String>,
    /// Which methods may collapse.
    pub methods: Methods,
    /// Larger request bodies bypass; 5 bytes to 64 MiB.
    pub max_request_bytes: usize,
    /// Larger replies are delivered but not cached; up to 1 GiB.
    pub max_response_bytes: usize,
    /// Larger replies are refused, since Envoy has no room for them; 64 KiB to 1 GiB. The default is that of Envoy's
    /// smallest buffer, `per_connection_buffer_limit_bytes`.
    pub max_replay_bytes: usize,
    /// Bytes of replies that may be on their way to callers at a time in one worker; 64 KiB to 3 GiB.
    pub max_fanout_bytes: usize,
    /// Requests that may wait at a time in one worker; 1 to 10,000,000.
    pub max_waiters: usize,
    /// How long a complete first message may wait for END_STREAM; up to 10 s.
    pub stream_grace: Duration,
    /// Flights of a method in a row that nobody shared, after which its requests pass until one repeats; up to
    /// 1,000,000,000, zero is never.
    pub pass_after: usize,
    /// Who keeps a request from going upstream before it is whole.
    pub hold: Hold,
    /// Among whom flights and replies are shared.
    pub scope: Scope,
    /// The longest TTL that a backend may ask for; 1 ms to 365 days.
    pub max_ttl: Duration,
    /// For how long an expired reply stands in for one that failed; up to 24 h, zero is never.
    pub stale_if_error: Duration,
    /// For how long an expired reply still answers while a flight fetches its successor; up to 24 h, zero is never.
    pub stale_while_revalidate: Duration,
    /// How early a reply is refreshed before it expires: the beta of XFetch, 0 to 10 ([`Policy::early_refresh`]).
    pub early_refresh: f64,
    /// By which share of itself, at most, a TTL is shortened at random; 0 to 1.
    pub ttl_jitter: f64,
    /// What counts as a failure for `stale_if_error`.
    pub stale_statuses: Statuses,
    /// Whether callers' `cache-control` is heeded.
    pub caller_control: bool,
    /// Whether answers tell how they came about, in the header `cache-status` (RFC 9211).
    pub cache_status: bool,
    /// Whether outcome and short key become filter state, for access logs.
    pub filter_state: bool,
    /// What is done with requests that are not gRPC; `None` lets them pass.
    pub http: Option<Http>,
    /// What differs for some paths.
    pub rules: Rules,
    /// All of the above that depends on the path, made by [`Self::resolve`].
    pub policies: Policies,
}

/// What is done with requests that are not gRPC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Http {
    /// Methods that may collapse, sorted; at least one, never CONNECT or TRACE.
    pub methods: Vec<String>,
    /// TTL where a response says nothing of its freshness, up to 24 h.
    pub default_ttl: Duration,
    /// How long a key is remembered whose reply may not be shared, up to 1 h.
    pub unshareable_for: Duration,
}

/// Among whom flights and replies are shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// All workers of the Envoy process.
    Process,
    /// The requests of one worker.
    Worker,
}

/// What is done with a request that may collapse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// It joins a flight, or is answered from the cache.
    Collapse,
    /// It goes on with its key in a header, by which a load balancer further on chooses the replica that collapses it
    /// ([`crate::affinity`]).
    Affinity,
}

/// Who keeps a request from going upstream before it is whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hold {
    /// This filter, by pausing on the headers. The host must be told to hand over the body all the same
    /// (`allow_on_headers_stop_iteration`, Envoy 1.36).
    Headers,
    /// A filter that follows, for hosts that cannot be told so. It waits for the whole request, so methods that
    /// stream must be excluded by name.
    Filter,
}

type Assign = fn(&mut Settings, &Raw) -> Result<(), Wrong>;

/// One row of the table of settings.
struct Field {
    json: &'static str,
    env: &'static str,
    assign: Assign,
}

const FIELDS: [Field; 30] = [
    Field { json: "mode", env: "COLLAPSER_MODE", assign: |s, raw| put(&mut s.mode, mode(raw)) },
    Field { json: "cluster", env: "COLLAPSER_CLUSTER", assign: |s, raw| put(&mut s.cluster, cluster(raw)) },
    Field {
        json: "backend_timeout",
        env: "BACKEND_TIMEOUT",
        assign: |s, raw| put(&mut s.backend_timeout, time(raw, Duration::from_millis(1), HOUR)),
    },
    Field {
        json: "cache_duration",
        env: "COLLAPSER_CACHE_DURATION",
        assign: |s, raw| put(&mut s.cache_duration, values::ttl(raw)),
    },
    Field {
        json: "cleanup_interval",
        env: "COLLAPSER_CLEANUP_INTERVAL",
        assign: |s, raw| put(&mut s.cleanup_interval, time(raw, Duration::from_millis(10), HOUR)),
    },
    Field {
        json: "cache_errors",
        env: "COLLAPSER_CACHE_ERRORS",
        assign: |s, raw| put(&mut s.cache_errors, boolean(raw)),
    },
    Field {
        json: "max_cache_entries",
        env: "COLLAPSER_MAX_CACHE_ENTRIES",
        assign: |s, raw| put(&mut s.max_cache_entries, count(raw, 0, 1_000_000_000)),
    },
    Field {
        json: "max_cache_bytes",
        env: "COLLAPSER_MAX_CACHE_BYTES",
        assign: |s, raw| put(&mut s.max_cache_bytes, size(raw, 0, 3 * GIB)),
    },
    Field {
        json: "key_headers",
        env: "COLLAPSER_KEY_HEADERS",
        assign: |s, raw| put(&mut s.key_headers, header_names(raw)),
    },
    Field {
        json: "methods",
        env: "COLLAPSER_METHODS",
        assign: |s, raw| put(&mut s.methods, method_patterns(raw)),
    },
    Field {
        json: "max_request_bytes",
        env: "COLLAPSER_MAX_REQUEST_BYTES",
        assign: |s, raw| put(&mut s.max_request_bytes, size(raw, 5, 64 * MIB)),
    },
    Field {
        json: "max_response_bytes",
        env: "COLLAPSER_MAX_RESPONSE_BYTES",
        assign: |s, raw| put(&mut s.max_response_bytes, size(raw, 0, GIB)),
    },
    Field {
        json: "max_replay_bytes",
        env: "COLLAPSER_MAX_REPLAY_BYTES",
        assign: |s, raw| put(&mut s.max_replay_bytes, size(raw, 64 << 10, GIB)),
    },
    Field {
        json: "max_fanout_bytes",
        env: "COLLAPSER_MAX_FANOUT_BYTES",
        assign: |s, raw| put(&mut s.max_fanout_bytes, size(raw, 64 << 10, 3 * GIB)),
    },
    Field {
        json: "max_waiters",
        env: "COLLAPSER_MAX_WAITERS",
        assign: |s, raw| put(&mut s.max_waiters, count(raw, 1, 10_000_000)),
    },
    Field {
        json: "stream_grace",
        env: "COLLAPSER_STREAM_GRACE",
        assign: |s, raw| put(&mut s.stream_grace, time(raw, Duration::ZERO, Duration::from_secs(10))),
    },
    Field {
        json: "pass_after",
        env: "COLLAPSER_PASS_AFTER",
        assign: |s, raw| put(&mut s.pass_after, count(raw, 0, 1_000_000_000)),
    },
    Field { json: "hold", env: "COLLAPSER_HOLD", assign: |s, raw| put(&mut s.hold, hold(raw)) },
    Field { json: "scope", env: "COLLAPSER_SCOPE", assign: |s, raw| put(&mut s.scope, scope(raw)) },
    Field {
        json: "max_ttl",
        env: "COLLAPSER_MAX_TTL",
        assign: |s, raw| put(&mut s.max_ttl, values::max_ttl(raw)),
    },
    Field {
        json: "stale_if_error",
        env: "COLLAPSER_STALE_IF_ERROR",
        assign: |s, raw| put(&mut s.stale_if_error, values::stale(raw)),
    },
    Field {
        json: "stale_while_revalidate",
        env: "COLLAPSER_STALE_WHILE_REVALIDATE",
        assign: |s, raw| put(&mut s.stale_while_revalidate, values::stale(raw)),
    },
    Field {
        json: "early_refresh",
        env: "COLLAPSER_EARLY_REFRESH",
        assign: |s, raw| put(&mut s.early_refresh, values::earliness(raw)),
    },
    Field {
        json: "ttl_jitter",
        env: "COLLAPSER_TTL_JITTER",
        assign: |s, raw| put(&mut s.ttl_jitter, values::share(raw)),
    },
    Field {
        json: "stale_statuses",
        env: "COLLAPSER_STALE_STATUSES",
        assign: |s, raw| put(&mut s.stale_statuses, values::statuses(raw)),
    },
    Field {
        json: "caller_control",
        env: "COLLAPSER_CALLER_CONTROL",
        assign: |s, raw| put(&mut s.caller_control, boolean(raw)),
    },
    Field {
        json: "cache_status",
        env: "COLLAPSER_CACHE_STATUS",
        assign: |s, raw| put(&mut s.cache_status, boolean(raw)),
    },
    Field {
        json: "filter_state",
        env: "COLLAPSER_FILTER_STATE",
        assign: |s, raw| put(&mut s.filter_state, boolean(raw)),
    },
    Field {
        json: "http",
        env: "COLLAPSER_HTTP",
        assign: |s, raw| {
            s.http = Http::read(raw)?;
            Ok(())
        },
    },
    Field {
        json: "rules",
        env: "COLLAPSER_RULES",
        assign: |s, raw| {
            s.rules = Rules::read(raw)?;
            Ok(())
        },
    },
];

/// The fields of `http`.
const HTTP_FIELDS: [values::Field<Http>; 3] = [
    values::Field { json: "methods", assign: |h, raw| put(&mut h.methods, values::http_methods(raw)) },
    values::Field { json: "default_ttl", assign: |h, raw| put(&mut h.default_ttl, values::ttl(raw)) },
    values::Field {
        json: "unshareable_for",
        assign: |h, raw| put(&mut h.unshareable_for, time(raw, Duration::ZERO, HOUR)),
    },
];

/// The settings that have a meaning with `mode` `affinity`, where nothing is called, answered or cached.
const OF_AFFINITY: [&str; 8] =
    ["mode", "key_headers", "methods", "max_request_bytes", "stream_grace", "hold", "filter_state", "rules"];

impl Default for Http {
    fn default() -> Self {
        Self {
            methods: vec!["GET".to_string(), "HEAD".to_string()],
            default_ttl: Duration::ZERO,
            unshareable_for: Duration::from_secs(10),
        }
    }
}

impl Http {
    /// Reads `http`: `true` is an object without fields, `false` is off.
    fn read(raw: &Raw) -> Result<Option<Self>, Wrong> {
        let mut http = Self::default();
        match raw.json() {
            Some(Value::Bool(on)) => Ok(on.then_some(http)),
            Some(Value::Object(object)) => {
                let faults = values::read_fields(&mut http, object, &HTTP_FIELDS);
                if faults.is_empty() { Ok(Some(http)) } else { Err(Wrong::Within(faults)) }
            }
            _ => {
                let fields = values::names(&HTTP_FIELDS);
                Err(Wrong::Whole(format!("true, false, or an object in JSON with {fields}")))
            }
        }
    }
}

impl Settings {
    /// The defaults, for flights to `cluster`.
    pub fn for_cluster(cluster: &str) -> Self {
        let mut settings = Self {
            mode: Mode::Collapse,
            cluster: cluster.to_string(),
            backend_timeout: Duration::from_secs(10),
            cache_duration: Duration::from_millis(100),
            cleanup_interval: Duration::from_secs(1),
            cache_errors: false,
            max_cache_entries: 10_000,
            max_cache_bytes: 64 << 20,
            key_headers: vec!["authorization".to_string(), "cookie".to_string()],
            methods: Methods::default(),
            max_request_bytes: 256 << 10,
            max_response_bytes: 4 << 20,
            max_replay_bytes: 1 << 20,
            max_fanout_bytes: 64 << 20,
            max_waiters: 100_000,
            stream_grace: Duration::from_millis(20),
            pass_after: 256,
            hold: Hold::Headers,
            scope: Scope::Process,
            max_ttl: HOUR,
            stale_if_error: Duration::ZERO,
            stale_while_revalidate: Duration::ZERO,
            early_refresh: 0.0,
            ttl_jitter: 0.0,
            stale_statuses: Statuses::default(),
            caller_control: true,
            cache_status: false,
            filter_state: false,
            http: None,
            rules: Rules::default(),
            policies: Policies::default(),
        };
        settings.resolve();
        settings
    }

    /// Makes [`Self::policies`] anew. [`Self::load`] has done so; whoever changes other fields afterwards does it
    /// again.
    pub fn resolve(&mut self) {
        let grpc = Policy {
            collapse: true,
            ttl: self.cache_duration,
            max_ttl: self.max_ttl,
            key_headers: self.key_headers.clone(),
            stale_if_error: self.stale_if_error,
            stale_while_revalidate: self.stale_while_revalidate,
            early_refresh: self.early_refresh,
            ttl_jitter: self.ttl_jitter,
        };
        let ttl = self.http.as_ref().map_or(Duration::ZERO, |http| http.default_ttl);
        let http = Policy { ttl, ..grpc.clone() };
        self.policies = Policies::new(grpc, http, &self.rules);
    }

    /// Reads the settings from plugin configuration (a JSON object, or nothing) and from the
    /// environment. An empty variable counts as not set.
    ///
    /// # Errors
    /// Every fault found, a line each, naming the setting, its value and what is allowed.
    pub fn load(json: &[u8], env: impl Fn(&str) -> Option<String>) -> Result<Self, Vec<String>> {
        let mut settings = Self::for_cluster("");
        let mut faults = Vec::new();
        let mut object = parse_object(json).map_err(|fault| vec![fault])?;
        let mut given = Vec::new();
        for field in &FIELDS {
            let from_env = || env(field.env).filter(|text| !text.is_empty());
            let (name, raw) = match object.remove(field.json) {
                Some(value) => (field.json, Raw::Json(value)),
                None => match from_env() {
                    Some(text) => (field.env, Raw::Text(text)),
                    None => continue,
                },
            };
            given.push((name, field.json));
            match (field.assign)(&mut settings, &raw) {
                Ok(()) => {}
                Err(Wrong::Whole(allowed)) => {
                    faults.push(format!("{name} is {}; allowed: {allowed}", raw.shown()));
                }
                Err(Wrong::Within(parts)) => faults.extend(parts.iter().map(|part| format!("{name}{part}"))),
            }
        }
        if settings.mode == Mode::Affinity {
            faults.extend(settings.faults_of_affinity(&given));
        } else if settings.cluster.is_empty() && !faults.iter().any(|fault| fault.contains("cluster")) {
            faults.push("cluster (COLLAPSER_CLUSTER) is not set; allowed: the name of the Envoy cluster that calls go to".to_string());
        }
        for (name, value) in object {
            faults.push(format!("{name} is {value}, but there is no such setting; allowed: {}", names()));
        }
        settings.resolve();
        if faults.is_empty() { Ok(settings) } else { Err(faults) }
    }

    /// How long a key is remembered whose reply may not be shared.
    pub fn unshareable_for(&self) -> Duration {
        self.http.as_ref().map_or(Http::default().unshareable_for, |http| http.unshareable_for)
    }

    /// The same for filters with the same settings, which may share replies, and different for all others.
    pub fn realm(&self) -> u64 {
        let digest = Sha256::digest(format!("{self:?}"));
        digest.iter().take(8).fold(0, |realm, byte| realm << 8 | u64::from(*byte))
    }

    /// What does not go together with `mode` `affinity`, of the settings that were given: their name at the source, and
    /// in JSON. Somebody who sets a TTL there believes that something is cached.
    fn faults_of_affinity(&self, given: &[(&'static str, &'static str)]) -> Vec<String> {
        let is_idle = |(_, json): &&(&str, &str)| !OF_AFFINITY.contains(json);
        let idle = given.iter().filter(is_idle).map(|(name, _)| {
            let allowed = OF_AFFINITY.join(", ");
            format!(
                "{name} is set, but mode is \"affinity\", where it has no meaning; allowed there: {allowed}"
            )
        });
        let mut faults: Vec<_> = idle.collect();
        if self.hold == Hold::Filter {
            faults.push(
                "hold is \"filter\", but mode is \"affinity\"; allowed there: headers, since the key is set on headers that are held"
                    .to_string(),
            );
        }
        if self.key_headers.iter().any(|name| name == affinity::HEADER) {
            faults.push(format!("key_headers {}", affinity::NAMES_ITSELF));
        }
        if let Some((name, _)) = given.iter().find(|(_, json)| *json == "rules") {
            faults.extend(self.rules.faults_of_affinity().map(|part| format!("{name}{part}")));
        }
        faults
    }

    /// The environment variables that [`Self::load`] asks for.
    pub fn environment() -> impl Iterator<Item = &'static str> {
        FIELDS.iter().map(|field| field.env)
    }
}

fn names() -> String {
    FIELDS.iter().map(|field| field.json).collect::<Vec<_>>().join(", ")
}

fn parse_object(json: &[u8]) -> Result<serde_json::Map<String, Value>, String> {
    if json.trim_ascii().is_empty() {
        return Ok(serde_json::Map::new());
    }
    match serde_json::from_slice(json) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(other) => Err(format!("the configuration is {other}; allowed: a JSON object with {}", names())),
        Err(fault) => {
            Err(format!("the configuration is no JSON ({fault}); allowed: a JSON object with {}", names()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{runner, test};
    use proptest::prelude::*;

    fn load(json: &str, env: &[(&str, &str)]) -> Result<Settings, Vec<String>> {
        Settings::load(json.as_bytes(), |name| {
            env.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string())
        })
    }

    fn rules(json: &str) -> Rules {
        Rules::read(&Raw::Text(json.to_string())).unwrap()
    }

    #[test]
    fn only_the_cluster_is_required() {
        assert_eq!(load(r#"{"cluster":"b"}"#, &[]), Ok(Settings::for_cluster("b")));
        assert_eq!(load("", &[("COLLAPSER_CLUSTER", "b")]), Ok(Settings::for_cluster("b")));
    }

    #[test]
    fn every_setting_is_read_from_json() {
        let json = r#"{"mode":"collapse","cluster":"b","backend_timeout":"1m30s","cache_duration":"0","cleanup_interval":"250ms",
            "cache_errors":true,"max_cache_entries":1e+06,"max_cache_bytes":"1GiB","key_headers":["X-Tenant","a","a"],
            "methods":["/a.B/*","!/a.B/C"],"max_request_bytes":1024,"max_response_bytes":0,"max_replay_bytes":"2MiB","max_fanout_bytes":"1MiB","max_waiters":7,"stream_grace":"5ms",
            "pass_after":0,"hold":"filter","scope":"worker","max_ttl":"8760h","stale_if_error":"24h",
            "stale_while_revalidate":"2s","early_refresh":1.5,"ttl_jitter":"12.5%",
            "stale_statuses":["DATA_LOSS",14,5.03e+02,"429"],"caller_control":false,"cache_status":true,"filter_state":true,
            "http":{"methods":["POST","GET","GET"],"default_ttl":"3s","unshareable_for":"0"},
            "rules":[{"match":"/a","collapse":false}]}"#;
        let mut expected = Settings {
            mode: Mode::Collapse,
            cluster: "b".into(),
            backend_timeout: Duration::from_secs(90),
            cache_duration: Duration::ZERO,
            cleanup_interval: Duration::from_millis(250),
            cache_errors: true,
            max_cache_entries: 1_000_000,
            max_cache_bytes: 1 << 30,
            key_headers: vec!["a".into(), "x-tenant".into()],
            methods: Methods::parse(&["/a.B/*", "!/a.B/C"]).unwrap(),
            max_request_bytes: 1024,
            max_response_bytes: 0,
            max_replay_bytes: 2 << 20,
            max_fanout_bytes: 1 << 20,
            max_waiters: 7,
            stream_grace: Duration::from_millis(5),
            pass_after: 0,
            hold: Hold::Filter,
            scope: Scope::Worker,
            max_ttl: Duration::from_secs(365 * 24 * 3_600),
            stale_if_error: Duration::from_secs(24 * 3_600),
            stale_while_revalidate: Duration::from_secs(2),
            early_refresh: 1.5,
            ttl_jitter: 0.125,
            stale_statuses: Statuses::parse(&["14", "15", "429", "503"]).unwrap(),
            caller_control: false,
            cache_status: true,
            filter_state: true,
            http: Some(Http {
                methods: vec!["GET".into(), "POST".into()],
                default_ttl: Duration::from_secs(3),
                unshareable_for: Duration::ZERO,
            }),
            rules: rules(r#"[{"match":"/a","collapse":false}]"#),
            policies: Policies::default(),
        };
        expected.resolve();
        assert_eq!(load(json, &[]), Ok(expected));
    }

    #[test]
    fn every_setting_is_read_from_the_environment() {
        let env = [
            ("COLLAPSER_MODE", "collapse"),
            ("COLLAPSER_CLUSTER", "b"),
            ("BACKEND_TIMEOUT", "2s"),
            ("COLLAPSER_CACHE_DURATION", "1s"),
            ("COLLAPSER_CLEANUP_INTERVAL", "2s"),
            ("COLLAPSER_CACHE_ERRORS", "true"),
            ("COLLAPSER_MAX_CACHE_ENTRIES", "5"),
            ("COLLAPSER_MAX_CACHE_BYTES", "6"),
            ("COLLAPSER_KEY_HEADERS", "x-tenant, Authorization"),
            ("COLLAPSER_METHODS", "/a.B/C,!/a.B/D"),
            ("COLLAPSER_MAX_REQUEST_BYTES", "7"),
            ("COLLAPSER_MAX_RESPONSE_BYTES", "8KiB"),
            ("COLLAPSER_MAX_REPLAY_BYTES", "128KiB"),
            ("COLLAPSER_MAX_FANOUT_BYTES", "64KiB"),
            ("COLLAPSER_MAX_WAITERS", "9"),
            ("COLLAPSER_STREAM_GRACE", "10ms"),
            ("COLLAPSER_PASS_AFTER", "11"),
            ("COLLAPSER_HOLD", "filter"),
            ("COLLAPSER_SCOPE", "worker"),
            ("COLLAPSER_MAX_TTL", "1ms"),
            ("COLLAPSER_STALE_IF_ERROR", "3s"),
            ("COLLAPSER_STALE_WHILE_REVALIDATE", "4s"),
            ("COLLAPSER_EARLY_REFRESH", "10"),
            ("COLLAPSER_TTL_JITTER", "0.25"),
            ("COLLAPSER_STALE_STATUSES", "ABORTED, 2,500"),
            ("COLLAPSER_CALLER_CONTROL", "false"),
            ("COLLAPSER_CACHE_STATUS", "1"),
            ("COLLAPSER_FILTER_STATE", "true"),
            ("COLLAPSER_HTTP", r#"{"default_ttl":"5s"}"#),
            ("COLLAPSER_RULES", r#"[{"match":["/a","/b/*"],"cache_duration":"6s"}]"#),
        ];
        let mut expected = Settings {
            mode: Mode::Collapse,
            cluster: "b".into(),
            backend_timeout: Duration::from_secs(2),
            cache_duration: Duration::from_secs(1),
            cleanup_interval: Duration::from_secs(2),
            cache_errors: true,
            max_cache_entries: 5,
            max_cache_bytes: 6,
            key_headers: vec!["authorization".into(), "x-tenant".into()],
            methods: Methods::parse(&["/a.B/C", "!/a.B/D"]).unwrap(),
            max_request_bytes: 7,
            max_response_bytes: 8192,
            max_replay_bytes: 131_072,
            max_fanout_bytes: 65536,
            max_waiters: 9,
            stream_grace: Duration::from_millis(10),
            pass_after: 11,
            hold: Hold::Filter,
            scope: Scope::Worker,
            max_ttl: Duration::from_millis(1),
            stale_if_error: Duration::from_secs(3),
            stale_while_revalidate: Duration::from_secs(4),
            early_refresh: 10.0,
            ttl_jitter: 0.25,
            stale_statuses: Statuses::parse(&["2", "10", "500"]).unwrap(),
            caller_control: false,
            cache_status: true,
            filter_state: true,
            http: Some(Http { default_ttl: Duration::from_secs(5), ..Http::default() }),
            rules: rules(r#"[{"match":["/a","/b/*"],"cache_duration":"6s"}]"#),
            policies: Policies::default(),
        };
        expected.resolve();
        assert_eq!(load("", &env), Ok(expected));
        assert_eq!(env.map(|(name, _)| name).to_vec(), Settings::environment().collect::<Vec<_>>());
    }

    #[test]
    fn only_the_same_settings_have_the_same_realm() {
        let settings = Settings::for_cluster("b");
        assert_eq!(settings.realm(), settings.clone().realm());
        assert_ne!(settings.realm(), Settings { cache_errors: true, ..settings.clone() }.realm());
        assert_ne!(settings.realm(), Settings::for_cluster("c").realm());
    }

    #[test]
    fn json_wins_over_the_environment() {
        let settings = load(r#"{"cluster":"json"}"#, &[("COLLAPSER_CLUSTER", "env")]).unwrap();
        assert_eq!(settings.cluster, "json");
    }

    #[test]
    fn an_empty_variable_is_not_set_and_none_is_an_empty_list() {
        let empty = load(r#"{"cluster":"b"}"#, &[("COLLAPSER_KEY_HEADERS", "")]).unwrap();
        assert_eq!(empty.key_headers.len(), 2, "identities stay apart");
        let none = load(r#"{"cluster":"b"}"#, &[("COLLAPSER_KEY_HEADERS", "none")]).unwrap();
        assert!(none.key_headers.is_empty());
    }

    #[test]
    fn faults_name_setting_value_and_what_is_allowed() {
        let cases = [
            (
                r#"{"cluster":"b","cache_duration":"soon"}"#,
                ["cache_duration", "\"soon\"", "a duration such as"],
            ),
            (r#"{"cluster":"b","cache_duration":100}"#, ["cache_duration", "100", "units"]),
            (r#"{"cluster":"b","backend_timeout":"0"}"#, ["backend_timeout", "\"0\"", "from 1ms to 1h"]),
            (r#"{"cluster":"b","max_waiters":-1}"#, ["max_waiters", "-1", "from 1 to 10000000"]),
            (r#"{"cluster":"b","max_waiters":1.5}"#, ["max_waiters", "1.5", "whole number"]),
            (r#"{"cluster":"b","max_cache_bytes":"1MB"}"#, ["max_cache_bytes", "\"1MB\"", "MiB"]),
            (r#"{"cluster":"b","cache_errors":"yes"}"#, ["cache_errors", "\"yes\"", "true or false"]),
            (r#"{"cluster":"b","key_headers":["a b"]}"#, ["key_headers", "a b", "header names"]),
            (r#"{"cluster":"b","key_headers":"a"}"#, ["key_headers", "\"a\"", "a list"]),
            (r#"{"cluster":"b","methods":["C"]}"#, ["methods", "\"C\"", "/pkg.Service/*"]),
            (r#"{"cluster":"b","color":"red"}"#, ["color", "\"red\"", "cache_duration"]),
            (r#"{"cluster":"b","hold":"body"}"#, ["hold", "\"body\"", "headers or filter"]),
            (r#"{"cluster":"b","scope":"pod"}"#, ["scope", "\"pod\"", "process or worker"]),
            (r#"{"cluster":"b","mode":"cache"}"#, ["mode", "\"cache\"", "collapse or affinity"]),
            (r#"{"cluster":"b","max_ttl":"0"}"#, ["max_ttl", "\"0\"", "from 1ms to 8760h"]),
            (r#"{"cluster":"b","max_ttl":"8761h"}"#, ["max_ttl", "\"8761h\"", "from 1ms to 8760h"]),
            (r#"{"cluster":"b","stale_if_error":"25h"}"#, ["stale_if_error", "\"25h\"", "from 0 to 24h"]),
            (
                r#"{"cluster":"b","stale_while_revalidate":1}"#,
                ["stale_while_revalidate", "1", "from 0 to 24h"],
            ),
            (r#"{"cluster":"b","early_refresh":-1}"#, ["early_refresh", "-1", "a number from 0 to 10"]),
            (r#"{"cluster":"b","early_refresh":"nan"}"#, ["early_refresh", "nan", "a number from 0 to 10"]),
            (
                r#"{"cluster":"b","ttl_jitter":1.1}"#,
                ["ttl_jitter", "1.1", "a number from 0 to 1, or a percentage"],
            ),
            (r#"{"cluster":"b","ttl_jitter":"%"}"#, ["ttl_jitter", "\"%\"", "such as \"10%\""]),
            (
                r#"{"cluster":"b","stale_statuses":["OK"]}"#,
                ["stale_statuses", "[\"OK\"]", "which \"OK\" is not"],
            ),
            (r#"{"cluster":"b","stale_statuses":[500.5]}"#, ["stale_statuses", "[500.5]", "from 400 to 599"]),
            (r#"{"cluster":"b","stale_statuses":503}"#, ["stale_statuses", "503", "a list of gRPC codes"]),
            (r#"{"cluster":"b","caller_control":"no"}"#, ["caller_control", "\"no\"", "true or false"]),
            (r#"{"cluster":"b","cache_status":1}"#, ["cache_status", "1", "true or false"]),
            (r#"{"cluster":"b","filter_state":null}"#, ["filter_state", "null", "true or false"]),
            (
                r#"{"cluster":"b","http":"on"}"#,
                ["http", "\"on\"", "true, false, or an object in JSON with methods"],
            ),
            (
                r#"{"cluster":"b","http":{"foo":1}}"#,
                ["http.foo is 1", "no such field", "methods, default_ttl"],
            ),
            (r#"{"cluster":"b","http":{"methods":[]}}"#, ["http.methods", "[]", "at least one"]),
            (
                r#"{"cluster":"b","http":{"methods":["GET","Trace"]}}"#,
                ["http.methods", "Trace", "without CONNECT"],
            ),
            (r#"{"cluster":"b","http":{"methods":["get"]}}"#, ["http.methods", "get", "in capitals"]),
            (r#"{"cluster":"b","http":{"methods":["G T"]}}"#, ["http.methods", "G T", "HTTP methods"]),
            (r#"{"cluster":"b","http":{"default_ttl":"25h"}}"#, ["http.default_ttl", "25h", "from 0 to 24h"]),
            (
                r#"{"cluster":"b","http":{"unshareable_for":"2h"}}"#,
                ["http.unshareable_for", "2h", "from 0 to 1h"],
            ),
            (r#"{"cluster":"b","rules":{}}"#, ["rules", "{}", "a list in JSON of objects with match"]),
            (
                r#"{"cluster":"b","rules":[{"match":"a","collapse":true}]}"#,
                ["rules[0].match", "\"a\"", "a path"],
            ),
            (r#"{"cluster":7}"#, ["cluster", "7", "name of an Envoy cluster"]),
            ("{}", ["cluster", "not set", "COLLAPSER_CLUSTER"]),
            ("[]", ["configuration", "[]", "JSON object"]),
            ("{", ["configuration", "EOF", "JSON object"]),
        ];
        for (json, words) in cases {
            let faults = load(json, &[]).unwrap_err();
            assert_eq!(faults.len(), 1, "{json}: {faults:?}");
            words
                .iter()
                .for_each(|word| assert!(faults[0].contains(word), "{json}: {faults:?} lacks {word}"));
        }
        let faults = load("", &[("COLLAPSER_CLUSTER", "b"), ("BACKEND_TIMEOUT", "x")]).unwrap_err();
        assert!(faults[0].starts_with("BACKEND_TIMEOUT is \"x\""), "{faults:?}");
        let env = [
            ("COLLAPSER_CLUSTER", "b"),
            ("COLLAPSER_HTTP", r#"{"foo":1}"#),
            ("COLLAPSER_RULES", r#"[{"match":"/a","max_ttl":1},{"match":"/a"}]"#),
        ];
        let faults = load("", &env).unwrap_err();
        let starts =
            ["COLLAPSER_HTTP.foo is 1", "COLLAPSER_RULES[0].max_ttl is 1", "COLLAPSER_RULES[1] has nothing"];
        assert!(faults.iter().zip(starts).all(|(fault, start)| fault.starts_with(start)), "{faults:?}");
        let faults = load("", &[("COLLAPSER_CLUSTER", "b"), ("COLLAPSER_RULES", "[")]).unwrap_err();
        assert!(faults[0].starts_with("COLLAPSER_RULES is \"[\"; allowed: a list in JSON"), "{faults:?}");
    }

    #[test]
    fn http_is_off_unless_it_is_true_or_an_object() {
        let http = |json: &str| load(json, &[]).unwrap().http;
        assert_eq!(http(r#"{"cluster":"b"}"#), None);
        assert_eq!(http(r#"{"cluster":"b","http":false}"#), None);
        assert_eq!(http(r#"{"cluster":"b","http":true}"#), Some(Http::default()));
        assert_eq!(http(r#"{"cluster":"b","http":{}}"#), Some(Http::default()));
        let http = |text| load("", &[("COLLAPSER_CLUSTER", "b"), ("COLLAPSER_HTTP", text)]).unwrap().http;
        assert_eq!(http("false"), None);
        assert_eq!(http("true"), Some(Http::default()));
        assert_eq!(http(" {} "), Some(Http::default()));
    }

    #[test]
    fn shares_and_factors_are_written_in_many_ways() {
        let jitter =
            |json: &str| load(&format!(r#"{{"cluster":"b","ttl_jitter":{json}}}"#), &[]).unwrap().ttl_jitter;
        for (json, share) in [
            ("0", 0.0),
            ("1", 1.0),
            ("1.0", 1.0),
            ("1e-1", 0.1),
            ("\"10%\"", 0.1),
            ("\"100%\"", 1.0),
            ("\"0.5\"", 0.5),
        ] {
            assert_eq!(jitter(json), share, "{json}");
        }
        let zero = load(r#"{"cluster":"b","ttl_jitter":-0.0,"early_refresh":"-0"}"#, &[]).unwrap();
        assert_eq!(zero.realm(), Settings::for_cluster("b").realm(), "minus zero is no other setting");
    }

    #[test]
    fn policies_follow_the_flat_settings_when_they_are_resolved() {
        let mut settings = Settings { stale_if_error: Duration::from_secs(7), ..Settings::for_cluster("b") };
        let stale =
            |settings: &Settings| settings.policies.get(settings.policies.grpc(b"/a.B/C")).stale_if_error;
        assert_eq!(stale(&settings), Duration::ZERO);
        settings.resolve();
        assert_eq!(stale(&settings), Duration::from_secs(7));
    }

    #[test]
    fn affinity_needs_no_cluster_and_takes_what_the_key_is_made_of() {
        let json = r#"{"mode":"affinity","key_headers":["x-tenant"],"methods":["/a.B/*"],"max_request_bytes":9,"stream_grace":"5ms","hold":"headers"}"#;
        let settings = load(json, &[]).unwrap();
        assert_eq!((settings.mode, settings.cluster.as_str()), (Mode::Affinity, ""));
        assert_eq!(settings.key_headers, ["x-tenant"]);
        assert_eq!(load("", &[("COLLAPSER_MODE", "affinity")]).unwrap().mode, Mode::Affinity);
    }

    #[test]
    fn affinity_refuses_what_has_no_meaning_there() {
        let faults = load(r#"{"mode":"affinity","cluster":"b"}"#, &[("COLLAPSER_CACHE_DURATION", "1s")]);
        let faults = faults.unwrap_err();
        assert_eq!(faults.len(), 2, "{faults:?}");
        assert!(faults[0].starts_with("cluster is set, but mode is \"affinity\""), "{faults:?}");
        assert!(faults[1].starts_with("COLLAPSER_CACHE_DURATION is set"), "{faults:?}");
        assert!(
            faults[1].ends_with(
                "key_headers, methods, max_request_bytes, stream_grace, hold, filter_state, rules"
            ),
            "{faults:?}"
        );
        let faults = load(r#"{"mode":"affinity","hold":"filter"}"#, &[]).unwrap_err();
        assert!(faults.len() == 1 && faults[0].contains("held"), "{faults:?}");
        let faults = load(r#"{"mode":"affinity","key_headers":["X-Collapser-Key"]}"#, &[]).unwrap_err();
        assert!(faults.len() == 1 && faults[0].contains("carries the key itself"), "{faults:?}");
        let json = r#"{"mode":"affinity","http":false,"max_ttl":"1s","stale_if_error":"0",
            "stale_while_revalidate":"0","early_refresh":0,"ttl_jitter":0,"stale_statuses":[],"caller_control":true,"cache_status":false}"#;
        assert_eq!(load(json, &[]).unwrap_err().len(), 9);
    }

    #[test]
    fn affinity_takes_rules_for_what_the_key_is_made_of() {
        let good = r#"{"mode":"affinity","filter_state":true,"rules":[{"match":"/a","collapse":false},
            {"match":"/b","key_headers":["x"]}]}"#;
        let policies = load(good, &[]).unwrap().policies;
        assert!(!policies.get(policies.grpc(b"/a")).collapse);
        assert_eq!(policies.get(policies.grpc(b"/b")).key_headers, ["x"]);
        let env = [
            ("COLLAPSER_MODE", "affinity"),
            ("COLLAPSER_RULES", r#"[{"match":"/a","collapse":true},{"match":"/b","cache_duration":"1s"}]"#),
        ];
        let faults = load("", &env).unwrap_err();
        assert!(
            faults.len() == 1 && faults[0].starts_with("COLLAPSER_RULES[1].cache_duration is set, but"),
            "{faults:?}"
        );
    }

    #[test]
    fn all_faults_are_reported_together() {
        assert_eq!(load(r#"{"max_waiters":0,"cache_errors":1,"x":1}"#, &[]).unwrap_err().len(), 4);
    }

    #[test]
    fn no_configuration_panics() {
        runner(1_024)
            .run(&"[{}\\[\\]\":,a-z0-9.e+-]{0,40}", |json| {
                let _ = load(&json, &[]);
                Ok(())
            })
            .unwrap();
    }

    /// Words and numbers that some setting takes, and any others.
    fn scalar() -> impl Strategy<Value = Value> {
        let words = "(/a|/a/\\*|/\\*|1s|10%|UNAVAILABLE|503|GET|TRACE|affinity|x-a|[ -~ä]{0,6})";
        prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            (-1..600_i64).prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            words.prop_map(Value::from),
        ]
    }

    /// Any JSON, whose fields are mostly ones that there are.
    fn anything() -> impl Strategy<Value = Value> {
        let inner = ["match", "collapse", "default_ttl", "unshareable_for", "odd"];
        let names: Vec<_> = FIELDS.iter().map(|field| field.json).chain(inner).collect();
        scalar().prop_recursive(4, 48, 8, move |value| {
            let fields = prop::collection::vec((prop::sample::select(names.clone()), value.clone()), 0..8);
            prop_oneof![
                prop::collection::vec(value, 0..6).prop_map(Value::from),
                fields.prop_map(|fields| fields
                    .into_iter()
                    .map(|(name, value)| (name.to_string(), value))
                    .collect()),
            ]
        })
    }

    #[test]
    fn no_json_panics_and_every_fault_says_what_is_allowed() {
        runner(2_048)
            .run(&(anything(), anything()), |(value, rules)| {
                let whole = serde_json::json!({"cluster": "b", "http": value, "rules": [rules, value]});
                for json in [value, whole] {
                    let text = json.to_string();
                    let faults = load(&text, &[("COLLAPSER_RULES", &text)]).err().unwrap_or_default();
                    prop_assert!(faults.iter().all(|fault| fault.contains("allowed")), "{:?}", faults);
                }
                Ok(())
            })
            .unwrap();
    }
}
