//! Which requests no recorded reply can answer, whatever the backend says later.

use super::conditional::is_precondition;
use crate::pairs::Pairs;

/// Why a request passes untouched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Its method is not one whose replies are shared.
    Method,
    /// It asks for another protocol or for a tunnel.
    Upgrade,
    /// It asks for a part of the content.
    Range,
    /// It depends on what the backend has or expects of it (`if-match` and its like, `expect`).
    Precondition,
    /// It may be answered by a stream that does not end.
    EventStream,
}

impl Pass {
    /// A short name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Method => "method",
            Self::Upgrade => "upgrade",
            Self::Range => "range",
            Self::Precondition => "precondition",
            Self::EventStream => "event-stream",
        }
    }
}

/// Judges a request that is not gRPC by its headers, the list of methods aside.
///
/// # Errors
/// Why it must pass untouched; if there are several reasons, the one whose header comes first.
pub fn judge(headers: Pairs<'_>) -> Result<(), Pass> {
    for (name, value) in headers.iter() {
        match name {
            b":method" if value == b"CONNECT" => return Err(Pass::Upgrade),
            b":protocol" | b"upgrade" => return Err(Pass::Upgrade),
            b"range" => return Err(Pass::Range),
            b"expect" => return Err(Pass::Precondition),
            b"accept" if takes_events(value) => return Err(Pass::EventStream),
            _ if is_precondition(name) => return Err(Pass::Precondition),
            _ => (),
        }
    }
    Ok(())
}

/// Whether `accept` names server-sent events, whatever their parameters.
fn takes_events(accept: &[u8]) -> bool {
    let kind = |range: &[u8]| {
        let end = range.iter().position(|byte| *byte == b';').unwrap_or(range.len());
        range.get(..end).unwrap_or_default().trim_ascii().eq_ignore_ascii_case(b"text/event-stream")
    };
    accept.split(|byte| *byte == b',').any(kind)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pairs::{PairsBuilder, block};
    use crate::testing::{runner, test};
    use proptest::prelude::*;

    fn judged(headers: &[(&str, &str)]) -> Result<(), Pass> {
        judge(Pairs::parse(&block(headers)).unwrap())
    }

    #[test]
    fn an_ordinary_request_does_not_pass() {
        let headers = [
            (":method", "GET"),
            (":path", "/"),
            (":authority", "a"),
            ("accept", "text/html, */*;q=0.8"),
            ("if-none-match", "\"a\""),
            ("if-modified-since", "x"),
            ("authorization", "x"),
            ("connection", "keep-alive"),
        ];
        assert_eq!(judged(&headers), Ok(()));
        assert_eq!(judged(&[]), Ok(()));
    }

    #[test]
    fn the_rest_passes_with_its_reason() {
        let cases = [
            (":method", "CONNECT", Pass::Upgrade),
            (":protocol", "websocket", Pass::Upgrade),
            ("upgrade", "websocket", Pass::Upgrade),
            ("range", "bytes=0-1", Pass::Range),
            ("if-match", "*", Pass::Precondition),
            ("if-unmodified-since", "x", Pass::Precondition),
            ("if-range", "\"a\"", Pass::Precondition),
            ("expect", "100-continue", Pass::Precondition),
            ("accept", "text/event-stream", Pass::EventStream),
            ("accept", "text/html,Text/Event-Stream ; q=0.5", Pass::EventStream),
        ];
        for (name, value, reason) in cases {
            assert_eq!(judged(&[(":path", "/"), (name, value)]), Err(reason), "{name}: {value}");
        }
        assert_eq!(judged(&[("accept", "*/*"), ("accept", "text/event-stream")]), Err(Pass::EventStream));
        for accept in ["text/event-streams", "x/text/event-stream", "text/plain;x=text/event-stream", ""] {
            assert_eq!(judged(&[("accept", accept)]), Ok(()), "{accept}");
        }
    }

    #[test]
    fn reasons_have_names_of_their_own() {
        let all = [Pass::Method, Pass::Upgrade, Pass::Range, Pass::Precondition, Pass::EventStream];
        let names: std::collections::HashSet<_> = all.iter().map(|reason| reason.name()).collect();
        assert_eq!(names.len(), all.len());
    }

    #[test]
    fn no_bytes_panic() {
        runner(1_024)
            .run(&prop::collection::vec(any::<u8>(), 0..32), |value| {
                let mut headers = PairsBuilder::default();
                headers.push(b"accept", &value).push(&value, &value);
                let _ = judge(Pairs::parse(&headers.build()).unwrap());
                Ok(())
            })
            .unwrap();
    }
}
