//! Whether a request may collapse, as far as its headers tell.

use crate::grpc;
use crate::http::directives::RequestDirectives;
use crate::http::request::{self, Pass};
use crate::pairs::Pairs;
use crate::settings::Settings;

/// Why a request went upstream untouched. Each is a label of the metric for bypassed requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bypass {
    /// Not a gRPC POST, where nothing else collapses.
    NotGrpc,
    /// Plain HTTP with a method that does not collapse (`http.methods`).
    HttpMethod,
    /// The rule for its path says so (`collapse`).
    Rule,
    /// It asks for another protocol.
    Upgrade,
    /// It asks for a part of the content.
    Range,
    /// It depends on what the backend has, or expects something of it.
    Precondition,
    /// It may be answered by a stream that does not end.
    EventStream,
    /// The last reply for its key was for its caller only.
    Unshareable,
    /// The method is excluded by the `methods` setting, or is one of gRPC's own streams.
    Method,
    /// The caller asked for it with `cache-control: no-store`.
    Asked,
    /// More than one message, an open stream, or a method that has shown itself to stream.
    Streaming,
    /// The method's last flight met its deadline; one call passes to tell whether it streams.
    Probe,
    /// Nobody has shared the method's last flights (`pass_after`), nor has anybody asked for the same lately.
    Unshared,
    /// The body is larger than `max_request_bytes`.
    TooLarge,
    /// The filter that was to hold the request (`hold` is `filter`) let it go upstream.
    NotHeld,
    /// Not a request that the filter could repeat faithfully: no message, a truncated one, request trailers, a
    /// header twice that may be there once.
    Malformed,
}

impl Bypass {
    /// All reasons, in the order of their [`Self::index`].
    pub const ALL: [Self; 16] = [
        Self::NotGrpc,
        Self::HttpMethod,
        Self::Rule,
        Self::Upgrade,
        Self::Range,
        Self::Precondition,
        Self::EventStream,
        Self::Unshareable,
        Self::Method,
        Self::Asked,
        Self::Streaming,
        Self::Probe,
        Self::Unshared,
        Self::TooLarge,
        Self::NotHeld,
        Self::Malformed,
    ];

    /// The label.
    pub fn name(self) -> &'static str {
        match self {
            Self::NotGrpc => "not_grpc",
            Self::HttpMethod => "http_method",
            Self::Rule => "rule",
            Self::Upgrade => "upgrade",
            Self::Range => "range",
            Self::Precondition => "precondition",
            Self::EventStream => "event_stream",
            Self::Unshareable => "unshareable",
            Self::Method => "method",
            Self::Asked => "asked",
            Self::Streaming => "streaming",
            Self::Probe => "probe",
            Self::Unshared => "unshared",
            Self::TooLarge => "too_large",
            Self::NotHeld => "not_held",
            Self::Malformed => "malformed",
        }
    }

    /// The position in [`Self::ALL`].
    pub fn index(self) -> usize {
        self as usize
    }
}

/// A request that may collapse, as far as its headers tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate<'a> {
    /// What it speaks.
    pub protocol: Protocol,
    /// Its path, which names the gRPC method; with the query.
    pub path: &'a [u8],
    /// Whether it says something to caches that is to be heeded.
    pub steers: bool,
}

/// What a request speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// gRPC.
    Grpc,
    /// HTTP without anything on top of it.
    Http,
}

/// Judges a request by its headers. `no_body` says that they end the stream.
///
/// # Errors
/// Why the request must pass untouched.
pub fn classify<'a>(headers: Pairs<'a>, no_body: bool, settings: &Settings) -> Result<Candidate<'a>, Bypass> {
    let (mut method, mut authority) = (None, false);
    let (mut path, mut content_type) = (None, None);
    let (mut repeated, mut steers) = (false, false);
    for (name, value) in headers.iter() {
        match name {
            b":method" => method = Some(value),
            b":path" => repeated |= path.replace(value).is_some(),
            b":authority" => authority = !value.is_empty(),
            b"content-type" => repeated |= content_type.replace(value).is_some(),
            b"cache-control" => steers = settings.caller_control,
            _ => (),
        }
    }
    let is_grpc = method == Some(b"POST") && content_type.is_some_and(grpc::is_grpc_content_type);
    let protocol = match &settings.http {
        _ if is_grpc => Protocol::Grpc,
        None => return Err(Bypass::NotGrpc),
        Some(http) if http.methods.iter().any(|named| Some(named.as_bytes()) == method) => Protocol::Http,
        Some(_) => return Err(Bypass::HttpMethod),
    };
    if steers && RequestDirectives::of(headers).no_store {
        return Err(Bypass::Asked);
    }
    if protocol == Protocol::Http {
        // An older word for it, which gRPC has never known.
        steers |= settings.caller_control && headers.first(b"pragma").is_some();
        request::judge(headers).map_err(Bypass::from)?;
    }
    let is_whole = protocol == Protocol::Grpc && no_body;
    let Some(path) = path.filter(|_| authority && !is_whole && !repeated) else {
        return Err(Bypass::Malformed);
    };
    Ok(Candidate { protocol, path, steers })
}

impl From<Pass> for Bypass {
    fn from(pass: Pass) -> Self {
        match pass {
            Pass::Method => Self::HttpMethod,
            Pass::Upgrade => Self::Upgrade,
            Pass::Range => Self::Range,
            Pass::Precondition => Self::Precondition,
            Pass::EventStream => Self::EventStream,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pairs::{PairsBuilder, block};
    use crate::settings::Http;
    use crate::testing::test;

    const GOOD: [(&str, &str); 4] =
        [(":method", "POST"), (":path", "/a.B/C"), (":authority", "x"), ("content-type", "application/grpc")];

    fn judge_by(settings: &Settings, change: &[(&str, &str)], no_body: bool) -> Result<String, Bypass> {
        let kept = GOOD.iter().filter(|(name, _)| !change.iter().any(|(changed, _)| changed == name));
        let headers: Vec<_> = kept.chain(change).copied().collect();
        let block = block(&headers);
        let candidate = classify(Pairs::parse(&block).unwrap(), no_body, settings)?;
        let path = String::from_utf8_lossy(candidate.path).into_owned();
        assert_eq!(candidate.protocol == Protocol::Http, path.starts_with("/page"), "{path}");
        Ok(path)
    }

    fn judge(change: &[(&str, &str)], no_body: bool) -> Result<String, Bypass> {
        judge_by(&Settings::for_cluster("c"), change, no_body)
    }

    fn judge_http(change: &[(&str, &str)]) -> Result<String, Bypass> {
        let settings = Settings { http: Some(Http::default()), ..Settings::for_cluster("c") };
        let plain = [(":method", "GET"), (":path", "/page?1"), ("content-type", "text/html")];
        let kept = plain.iter().filter(|(name, _)| !change.iter().any(|(changed, _)| changed == name));
        judge_by(&settings, &kept.chain(change).copied().collect::<Vec<_>>(), true)
    }

    #[test]
    fn plain_http_collapses_where_that_is_set() {
        assert_eq!(judge_http(&[]), Ok("/page?1".to_string()));
        assert_eq!(judge_http(&[(":method", "HEAD")]), Ok("/page?1".to_string()));
        assert_eq!(judge_http(&[("if-none-match", "*")]), Ok("/page?1".to_string()));
        let cases = [
            (":method", "POST", Bypass::HttpMethod),
            (":method", "get", Bypass::HttpMethod),
            ("upgrade", "websocket", Bypass::Upgrade),
            ("range", "bytes=0-", Bypass::Range),
            ("if-match", "*", Bypass::Precondition),
            ("accept", "text/event-stream", Bypass::EventStream),
            ("cache-control", "no-store", Bypass::Asked),
            (":authority", "", Bypass::Malformed),
        ];
        for (name, value, reason) in cases {
            assert_eq!(judge_http(&[(name, value)]), Err(reason), "{name}: {value}");
        }
    }

    #[test]
    fn callers_steer_only_where_they_may() {
        let deaf = Settings { caller_control: false, ..Settings::for_cluster("c") };
        assert_eq!(judge_by(&deaf, &[("cache-control", "no-store")], false), Ok("/a.B/C".to_string()));
        for (settings, steers) in [(deaf, false), (Settings::for_cluster("c"), true)] {
            let mut headers = GOOD.to_vec();
            headers.push(("cache-control", "no-cache"));
            let block = block(&headers);
            let candidate = classify(Pairs::parse(&block).unwrap(), false, &settings);
            assert_eq!(candidate.unwrap().steers, steers);
        }
    }

    #[test]
    fn a_grpc_post_may_collapse() {
        assert_eq!(judge(&[], false), Ok("/a.B/C".to_string()));
        assert_eq!(judge(&[("content-type", "application/grpc+proto")], false), Ok("/a.B/C".to_string()));
        assert_eq!(judge(&[("cache-control", "no-cache, max-age=0")], false), Ok("/a.B/C".to_string()));
    }

    #[test]
    fn the_rest_passes_with_its_reason() {
        let cases = [
            (":method", "GET", Bypass::NotGrpc),
            ("content-type", "application/grpc-web", Bypass::NotGrpc),
            ("content-type", "application/json", Bypass::NotGrpc),
            ("cache-control", "private,  No-Store", Bypass::Asked),
            (":authority", "", Bypass::Malformed),
        ];
        for (name, value, reason) in cases {
            assert_eq!(judge(&[(name, value)], false), Err(reason), "{name}: {value}");
        }
        assert_eq!(judge(&[], true), Err(Bypass::Malformed));
        let twice = [(":path", "/a.B/C"), (":path", "/a.B/D")];
        assert_eq!(judge(&twice, false), Err(Bypass::Malformed));
        let twice = [("content-type", "application/grpc"), ("content-type", "application/grpc")];
        assert_eq!(judge(&twice, false), Err(Bypass::Malformed));
    }

    #[test]
    fn headers_need_not_be_text() {
        let mut headers = PairsBuilder::default();
        for (name, value) in GOOD {
            headers.push(name.as_bytes(), value.as_bytes());
        }
        headers.push(b"x", b"\xff");
        let block = headers.build();
        assert!(classify(Pairs::parse(&block).unwrap(), false, &Settings::for_cluster("c")).is_ok());
    }

    #[test]
    fn reasons_know_their_place() {
        for (index, reason) in Bypass::ALL.into_iter().enumerate() {
            assert_eq!(reason.index(), index);
        }
    }
}
