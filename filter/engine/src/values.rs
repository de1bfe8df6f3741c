//! What the values of settings may look like: one function for each kind, for the flat settings and for those within
//! others alike, so that a range is written once and an error reads the same everywhere.
//!
//! Each of them says in its error what is allowed; who asked adds the name and the value.

use crate::methods::{self, Methods};
use crate::policy::{self, Statuses};
use crate::settings::{Hold, Mode, Scope};
use crate::{bytesize, duration};
use serde_json::{Map, Value};
use std::time::Duration;

pub const HOUR: Duration = Duration::from_secs(3_600);
pub const DAY: Duration = Duration::from_secs(24 * 3_600);
const YEAR: Duration = Duration::from_secs(365 * 24 * 3_600);
pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;

/// The word for an empty list in the environment, where an empty value means "not set".
const NONE: &str = "none";

/// A value from either source, before it is understood.
#[derive(Clone, Debug)]
pub enum Raw {
    Json(Value),
    Text(String),
}

impl Raw {
    /// The value as it is shown in an error.
    pub fn shown(&self) -> String {
        match self {
            Self::Json(value) => value.to_string(),
            Self::Text(text) => format!("{text:?}"),
        }
    }

    /// The value as JSON, which in the environment is written as text.
    pub fn json(&self) -> Option<Value> {
        match self {
            Self::Json(value) => Some(value.clone()),
            Self::Text(text) => serde_json::from_str(text).ok(),
        }
    }

    /// The value as text: JSON strings and numbers, and anything from the environment.
    pub fn text(&self) -> Option<String> {
        match self {
            Self::Json(value) => text_of(value),
            Self::Text(text) => Some(text.clone()),
        }
    }

    /// The value as a list of texts; `item` reads those of a JSON array.
    fn list_of(&self, item: impl Fn(&Value) -> Option<String>) -> Option<Vec<String>> {
        match self {
            Self::Json(Value::Array(items)) => items.iter().map(item).collect(),
            Self::Text(text) if text == NONE => Some(Vec::new()),
            Self::Text(text) => Some(text.split(',').map(|item| item.trim().to_string()).collect()),
            Self::Json(_) => None,
        }
    }

    /// The value as a list of texts, which in the environment are separated by commas.
    pub fn list(&self) -> Option<Vec<String>> {
        self.list_of(|item| item.as_str().map(str::to_string))
    }
}

fn text_of(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(whole_number(number)),
        _ => None,
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

/// What is wrong with a setting.
#[derive(Debug, PartialEq, Eq)]
pub enum Wrong {
    /// All of it; this is allowed.
    Whole(String),
    /// Something within it: for each fault what follows the setting's name, such as `[2].cache_duration is …`.
    Within(Vec<String>),
}

impl From<String> for Wrong {
    fn from(allowed: String) -> Self {
        Self::Whole(allowed)
    }
}

/// One row of a table of fields within a setting.
pub struct Field<T> {
    pub json: &'static str,
    pub assign: fn(&mut T, &Raw) -> Result<(), String>,
}

/// Reads an object by a table of its fields. Returns each fault as what follows the object's own name.
pub fn read_fields<T>(into: &mut T, mut object: Map<String, Value>, table: &[Field<T>]) -> Vec<String> {
    let mut faults = Vec::new();
    for field in table {
        let Some(value) = object.remove(field.json) else { continue };
        let raw = Raw::Json(value);
        if let Err(allowed) = (field.assign)(into, &raw) {
            faults.push(format!(".{} is {}; allowed: {allowed}", field.json, raw.shown()));
        }
    }
    for (name, value) in object {
        let allowed = names(table);
        faults.push(format!(".{name} is {value}, but there is no such field; allowed: {allowed}"));
    }
    faults
}

/// The names of all fields, for error messages.
pub fn names<T>(table: &[Field<T>]) -> String {
    table.iter().map(|field| field.json).collect::<Vec<_>>().join(", ")
}

/// Puts a value into its place, if there is one.
pub fn put<T, E: From<String>>(place: &mut T, value: Result<T, String>) -> Result<(), E> {
    *place = value?;
    Ok(())
}

pub fn cluster(raw: &Raw) -> Result<String, String> {
    match raw {
        Raw::Json(Value::String(name)) | Raw::Text(name) if !name.is_empty() => Ok(name.clone()),
        _ => Err("the name of an Envoy cluster".to_string()),
    }
}

pub fn time(raw: &Raw, least: Duration, most: Duration) -> Result<Duration, String> {
    let allowed = || {
        let (least, most) = (duration::format(least), duration::format(most));
        format!("{}, from {least} to {most}", duration::ALLOWED)
    };
    raw.text()
        .and_then(|text| duration::parse(&text))
        .filter(|value| (least..=most).contains(value))
        .ok_or_else(allowed)
}

pub fn boolean(raw: &Raw) -> Result<bool, String> {
    match raw {
        Raw::Json(Value::Bool(value)) => Ok(*value),
        Raw::Text(text) if text == "true" || text == "1" => Ok(true),
        Raw::Text(text) if text == "false" || text == "0" => Ok(false),
        _ => Err("true or false".to_string()),
    }
}

pub fn mode(raw: &Raw) -> Result<Mode, String> {
    match raw.text().as_deref() {
        Some("collapse") => Ok(Mode::Collapse),
        Some("affinity") => Ok(Mode::Affinity),
        _ => Err("collapse or affinity".to_string()),
    }
}

pub fn hold(raw: &Raw) -> Result<Hold, String> {
    match raw.text().as_deref() {
        Some("headers") => Ok(Hold::Headers),
        Some("filter") => Ok(Hold::Filter),
        _ => Err("headers or filter".to_string()),
    }
}

pub fn scope(raw: &Raw) -> Result<Scope, String> {
    match raw.text().as_deref() {
        Some("process") => Ok(Scope::Process),
        Some("worker") => Ok(Scope::Worker),
        _ => Err("process or worker".to_string()),
    }
}

fn in_range(value: Option<u64>, least: u64, most: u64) -> Option<usize> {
    usize::try_from(value.filter(|value| (least..=most).contains(value))?).ok()
}

pub fn count(raw: &Raw, least: u64, most: u64) -> Result<usize, String> {
    let parsed = raw.text().and_then(|text| text.parse().ok());
    in_range(parsed, least, most).ok_or_else(|| format!("a whole number from {least} to {most}"))
}

pub fn size(raw: &Raw, least: u64, most: u64) -> Result<usize, String> {
    let parsed = raw.text().and_then(|text| bytesize::parse(&text));
    in_range(parsed, least, most).ok_or_else(|| format!("{}, from {least} to {most}", bytesize::ALLOWED))
}

pub fn header_names(raw: &Raw) -> Result<Vec<String>, String> {
    let names = raw.list().filter(|names| names.iter().all(|name| is_header_name(name)));
    let mut names = names.ok_or("a list of header names, or \"none\" in the environment for an empty one")?;
    names.iter_mut().for_each(|name| name.make_ascii_lowercase());
    names.sort_unstable();
    names.dedup();
    Ok(names)
}

/// A field name (RFC 9110, section 5.1), or one of HTTP/2's pseudo-headers.
fn is_header_name(name: &str) -> bool {
    is_token(name.strip_prefix(':').unwrap_or(name))
}

/// A token (RFC 9110, section 5.6.2).
fn is_token(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b))
}

/// The default TTL of a reply, up to 24 h.
pub fn ttl(raw: &Raw) -> Result<Duration, String> {
    time(raw, Duration::ZERO, DAY)
}

/// The longest TTL that a backend may ask for, 1 ms to 365 days.
pub fn max_ttl(raw: &Raw) -> Result<Duration, String> {
    time(raw, Duration::from_millis(1), YEAR)
}

/// For how long an expired reply may still be of use, up to 24 h.
pub fn stale(raw: &Raw) -> Result<Duration, String> {
    time(raw, Duration::ZERO, DAY)
}

/// How early replies are refreshed, 0 to 10.
pub fn earliness(raw: &Raw) -> Result<f64, String> {
    let parsed = raw.text().and_then(|text| text.parse().ok());
    in_span(parsed, 10.0).ok_or_else(|| "a number from 0 to 10".to_string())
}

/// A share of the whole, as a number from 0 to 1 or in percent.
pub fn share(raw: &Raw) -> Result<f64, String> {
    let parsed = raw.text().and_then(|text| match text.strip_suffix('%') {
        Some(percent) => percent.parse().ok().map(|percent: f64| percent / 100.0),
        None => text.parse().ok(),
    });
    in_span(parsed, 1.0).ok_or_else(|| "a number from 0 to 1, or a percentage such as \"10%\"".to_string())
}

/// A number from 0 to `most`. Minus zero becomes zero: equal settings must look alike.
fn in_span(value: Option<f64>, most: f64) -> Option<f64> {
    value.filter(|value| (0.0..=most).contains(value)).map(f64::abs)
}

pub fn statuses(raw: &Raw) -> Result<Statuses, String> {
    let allowed = || format!("a list of {}", policy::ALLOWED_STATUSES);
    Statuses::parse(&raw.list_of(text_of).ok_or_else(allowed)?)
        .map_err(|bad| format!("{}, which {bad:?} is not", allowed()))
}

/// Methods of HTTP (RFC 9110, section 9.1), which are case-sensitive. CONNECT opens a tunnel and TRACE tells what came
/// of the caller's own request; neither has an answer to share.
pub fn http_methods(raw: &Raw) -> Result<Vec<String>, String> {
    let is_refused =
        |name: &str| ["CONNECT", "TRACE"].iter().any(|refused| name.eq_ignore_ascii_case(refused));
    // `get` is another method than GET, and hardly ever the one that is meant.
    let is_misspelt = |name: &str| {
        let known = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "QUERY"];
        known.iter().any(|known| name.eq_ignore_ascii_case(known) && name != *known)
    };
    let are_good = |names: &Vec<String>| {
        !names.is_empty()
            && names.iter().all(|name| is_token(name) && !is_refused(name) && !is_misspelt(name))
    };
    let mut names = raw
        .list()
        .filter(are_good)
        .ok_or("a list of HTTP methods in capitals, of at least one, without CONNECT and TRACE")?;
    names.sort_unstable();
    names.dedup();
    Ok(names)
}

pub fn method_patterns(raw: &Raw) -> Result<Methods, String> {
    let allowed = || format!("a list of {}", methods::ALLOWED);
    Methods::parse(&raw.list().ok_or_else(allowed)?)
        .map_err(|bad| format!("{}, which {bad:?} is not", allowed()))
}
