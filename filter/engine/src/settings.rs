//! The settings: one table of names, ranges and meanings, read from JSON and from the environment.
//!
//! Each setting has a JSON field and an environment variable; JSON wins. Anything unknown, of the
//! wrong type or out of range is an error that names the setting, the value and what is allowed. All
//! errors are reported at once.

use crate::methods::{self, Methods};
use crate::{bytesize, duration};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::time::Duration;

/// The settings of a filter.
#[derive(Clone, Debug, PartialEq, Eq)]
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

/// A value from either source, before it is understood.
#[derive(Clone, Debug)]
enum Raw {
    Json(Value),
    Text(String),
}

impl Raw {
    /// The value as it is shown in an error.
    fn shown(&self) -> String {
        match self {
            Self::Json(value) => value.to_string(),
            Self::Text(text) => format!("{text:?}"),
        }
    }

    /// The value as text: JSON strings and numbers, and anything from the environment.
    fn text(&self) -> Option<String> {
        match self {
            Self::Json(Value::String(text)) | Self::Text(text) => Some(text.clone()),
            Self::Json(Value::Number(number)) => Some(whole_number(number)),
            Self::Json(_) => None,
        }
    }

    fn list(&self) -> Option<Vec<String>> {
        match self {
            Self::Json(Value::Array(items)) => {
                items.iter().map(|item| item.as_str().map(str::to_string)).collect()
            }
            Self::Text(text) if text == NONE => Some(Vec::new()),
            Self::Text(text) => Some(text.split(',').map(|item| item.trim().to_string()).collect()),
            Self::Json(_) => None,
        }
    }
}

/// Control planes carry plugin configuration as a protobuf `Struct`, where every number is a double
/// and may be written `1e+06`.
fn whole_number(number: &serde_json::Number) -> String {
    match number.as_f64() {
        Some(float) if number.is_f64() && float.fract() == 0.0 && (0.0..9e15).contains(&float) => {
            format!("{float:.0}")
        }
        _ => number.to_string(),
    }
}

/// The word for an empty list in the environment, where an empty value means "not set".
const NONE: &str = "none";

type Assign = fn(&mut Settings, &Raw) -> Result<(), String>;

/// One row of the table of settings.
struct Field {
    json: &'static str,
    env: &'static str,
    assign: Assign,
}

const FIELDS: [Field; 19] = [
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
        assign: |s, raw| put(&mut s.cache_duration, time(raw, Duration::ZERO, DAY)),
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
];

/// The settings that have a meaning with `mode` `affinity`, where nothing is called, answered or cached.
const OF_AFFINITY: [&str; 6] =
    ["mode", "key_headers", "methods", "max_request_bytes", "stream_grace", "hold"];

const HOUR: Duration = Duration::from_secs(3_600);
const DAY: Duration = Duration::from_secs(24 * 3_600);
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

impl Settings {
    /// The defaults, for flights to `cluster`.
    pub fn for_cluster(cluster: &str) -> Self {
        Self {
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
        }
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
            if let Err(allowed) = (field.assign)(&mut settings, &raw) {
                faults.push(format!("{name} is {}; allowed: {allowed}", raw.shown()));
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
        if faults.is_empty() { Ok(settings) } else { Err(faults) }
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
        if self.key_headers.iter().any(|name| name == crate::affinity::HEADER) {
            let header = crate::affinity::HEADER;
            faults.push(format!(
                "key_headers names {header}, which carries the key itself; allowed: any other"
            ));
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

fn put<T>(place: &mut T, value: Result<T, String>) -> Result<(), String> {
    *place = value?;
    Ok(())
}

fn cluster(raw: &Raw) -> Result<String, String> {
    match raw {
        Raw::Json(Value::String(name)) | Raw::Text(name) if !name.is_empty() => Ok(name.clone()),
        _ => Err("the name of an Envoy cluster".to_string()),
    }
}

fn time(raw: &Raw, least: Duration, most: Duration) -> Result<Duration, String> {
    let allowed = || {
        let (least, most) = (duration::format(least), duration::format(most));
        format!("{}, from {least} to {most}", duration::ALLOWED)
    };
    raw.text()
        .and_then(|text| duration::parse(&text))
        .filter(|value| (least..=most).contains(value))
        .ok_or_else(allowed)
}

fn boolean(raw: &Raw) -> Result<bool, String> {
    match raw {
        Raw::Json(Value::Bool(value)) => Ok(*value),
        Raw::Text(text) if text == "true" || text == "1" => Ok(true),
        Raw::Text(text) if text == "false" || text == "0" => Ok(false),
        _ => Err("true or false".to_string()),
    }
}

fn mode(raw: &Raw) -> Result<Mode, String> {
    match raw.text().as_deref() {
        Some("collapse") => Ok(Mode::Collapse),
        Some("affinity") => Ok(Mode::Affinity),
        _ => Err("collapse or affinity".to_string()),
    }
}

fn hold(raw: &Raw) -> Result<Hold, String> {
    match raw.text().as_deref() {
        Some("headers") => Ok(Hold::Headers),
        Some("filter") => Ok(Hold::Filter),
        _ => Err("headers or filter".to_string()),
    }
}

fn scope(raw: &Raw) -> Result<Scope, String> {
    match raw.text().as_deref() {
        Some("process") => Ok(Scope::Process),
        Some("worker") => Ok(Scope::Worker),
        _ => Err("process or worker".to_string()),
    }
}

fn in_range(value: Option<u64>, least: u64, most: u64) -> Option<usize> {
    usize::try_from(value.filter(|value| (least..=most).contains(value))?).ok()
}

fn count(raw: &Raw, least: u64, most: u64) -> Result<usize, String> {
    let parsed = raw.text().and_then(|text| text.parse().ok());
    in_range(parsed, least, most).ok_or_else(|| format!("a whole number from {least} to {most}"))
}

fn size(raw: &Raw, least: u64, most: u64) -> Result<usize, String> {
    let parsed = raw.text().and_then(|text| bytesize::parse(&text));
    in_range(parsed, least, most).ok_or_else(|| format!("{}, from {least} to {most}", bytesize::ALLOWED))
}

fn header_names(raw: &Raw) -> Result<Vec<String>, String> {
    let names = raw.list().filter(|names| names.iter().all(|name| is_header_name(name)));
    let mut names = names.ok_or("a list of header names, or \"none\" in the environment for an empty one")?;
    names.iter_mut().for_each(|name| name.make_ascii_lowercase());
    names.sort_unstable();
    names.dedup();
    Ok(names)
}

/// A field name (RFC 9110, section 5.1), or one of HTTP/2's pseudo-headers.
fn is_header_name(name: &str) -> bool {
    let token = name.strip_prefix(':').unwrap_or(name);
    !token.is_empty() && token.bytes().all(|b| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b))
}

fn method_patterns(raw: &Raw) -> Result<Methods, String> {
    let allowed = || format!("a list of {}", methods::ALLOWED);
    Methods::parse(&raw.list().ok_or_else(allowed)?)
        .map_err(|bad| format!("{}, which {bad:?} is not", allowed()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{runner, test};

    fn load(json: &str, env: &[(&str, &str)]) -> Result<Settings, Vec<String>> {
        Settings::load(json.as_bytes(), |name| {
            env.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string())
        })
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
            "pass_after":0,"hold":"filter","scope":"worker"}"#;
        let expected = Settings {
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
        };
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
        ];
        let expected = Settings {
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
        };
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
            faults[1].ends_with("key_headers, methods, max_request_bytes, stream_grace, hold"),
            "{faults:?}"
        );
        let faults = load(r#"{"mode":"affinity","hold":"filter"}"#, &[]).unwrap_err();
        assert!(faults.len() == 1 && faults[0].contains("held"), "{faults:?}");
        let faults = load(r#"{"mode":"affinity","key_headers":["X-Collapser-Key"]}"#, &[]).unwrap_err();
        assert!(faults.len() == 1 && faults[0].contains("carries the key itself"), "{faults:?}");
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
}
