//! Whether a request may collapse, as far as its headers tell.

use crate::grpc;
use crate::pairs::Pairs;

/// Why a request went upstream untouched. Each is a label of the metric for bypassed requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bypass {
    /// Not a gRPC POST.
    NotGrpc,
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
    pub const ALL: [Self; 9] = [
        Self::NotGrpc,
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

/// Judges a request by its headers and returns its path, which names the method. `no_body` says that the
/// headers end the stream.
///
/// # Errors
/// Why the request must pass untouched.
pub fn classify(headers: Pairs<'_>, no_body: bool) -> Result<&[u8], Bypass> {
    let (mut post, mut authority) = (false, false);
    let (mut path, mut content_type) = (None, None);
    let mut repeated = false;
    for (name, value) in headers.iter() {
        match name {
            b":method" => post = value == b"POST",
            b":path" => repeated |= path.replace(value).is_some(),
            b":authority" => authority = !value.is_empty(),
            b"content-type" => repeated |= content_type.replace(value).is_some(),
            b"cache-control" if asks_no_store(value) => return Err(Bypass::Asked),
            _ => (),
        }
    }
    if !post || !content_type.is_some_and(grpc::is_grpc_content_type) {
        return Err(Bypass::NotGrpc);
    }
    let Some(path) = path.filter(|_| authority && !no_body && !repeated) else {
        return Err(Bypass::Malformed);
    };
    Ok(path)
}

/// Whether a `cache-control` value holds the directive `no-store` (RFC 9111, section 5.2.1.5).
fn asks_no_store(value: &[u8]) -> bool {
    value
        .split(|byte| *byte == b',')
        .any(|directive| directive.trim_ascii().eq_ignore_ascii_case(b"no-store"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pairs::{PairsBuilder, block};
    use crate::testing::test;

    const GOOD: [(&str, &str); 4] =
        [(":method", "POST"), (":path", "/a.B/C"), (":authority", "x"), ("content-type", "application/grpc")];

    fn judge(change: &[(&str, &str)], no_body: bool) -> Result<String, Bypass> {
        let kept = GOOD.iter().filter(|(name, _)| !change.iter().any(|(changed, _)| changed == name));
        let headers: Vec<_> = kept.chain(change).copied().collect();
        classify(Pairs::parse(&block(&headers)).unwrap(), no_body)
            .map(|path| String::from_utf8_lossy(path).into_owned())
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
        assert!(classify(Pairs::parse(&block).unwrap(), false).is_ok());
    }

    #[test]
    fn reasons_know_their_place() {
        for (index, reason) in Bypass::ALL.into_iter().enumerate() {
            assert_eq!(reason.index(), index);
        }
    }
}
