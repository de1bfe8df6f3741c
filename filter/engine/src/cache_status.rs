//! What the filter did with a request, in the words that HTTP has for it: a member of `cache-status` (RFC 9211).

/// How this cache calls itself.
const NAME: &str = "collapser";

/// The largest integer of a structured field (RFC 9651, section 3.3.1).
const MOST: i64 = 999_999_999_999_999;

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status<'a> {
    /// It was answered from a kept reply that is fresh.
    Hit {
        /// For how many seconds more it is.
        ttl: i64,
    },
    /// It was answered from a kept reply that is stale.
    Stale {
        /// The seconds since it is, as a negative number.
        ttl: i64,
        /// Why it was given out.
        detail: &'a str,
    },
    /// It went upstream, or waited for one that did.
    Forward {
        /// Why.
        reason: Reason,
        /// Whether it waited for another one.
        collapsed: bool,
        /// Whether the reply was kept.
        stored: bool,
        /// The status that came from upstream, where it differs from what the caller is given.
        status: Option<u16>,
        /// Anything else.
        detail: Option<&'a str>,
    },
}

/// Why a request was not answered from a kept reply (RFC 9211, section 2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// There was none.
    Miss,
    /// The request did not want it.
    Request,
    /// It was stale.
    Stale,
    /// Such requests pass.
    Bypass,
    /// Requests with this method pass.
    Method,
    /// There was none for the headers that `vary` names.
    VaryMiss,
}

impl Reason {
    /// The value of `fwd`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Miss => "miss",
            Self::Request => "request",
            Self::Stale => "stale",
            Self::Bypass => "bypass",
            Self::Method => "method",
            Self::VaryMiss => "vary-miss",
        }
    }
}

/// The member of `cache-status` for this cache, such as `collapser; hit; ttl=3`.
pub fn member(status: &Status<'_>) -> String {
    let mut out = String::from(NAME);
    match *status {
        Status::Hit { ttl } => push_hit(&mut out, ttl),
        Status::Stale { ttl, detail } => {
            push_hit(&mut out, ttl);
            push_detail(&mut out, detail);
        }
        Status::Forward { reason, collapsed, stored, status, detail } => {
            out.push_str("; fwd=");
            out.push_str(reason.name());
            if let Some(status) = status {
                out.push_str("; fwd-status=");
                out.push_str(&status.to_string());
            }
            if stored {
                out.push_str("; stored");
            }
            if collapsed {
                out.push_str("; collapsed");
            }
            if let Some(detail) = detail {
                push_detail(&mut out, detail);
            }
        }
    }
    out
}

fn push_hit(out: &mut String, ttl: i64) {
    out.push_str("; hit; ttl=");
    out.push_str(&ttl.clamp(-MOST, MOST).to_string());
}

/// A token as it is, all else as a string (RFC 9651, sections 3.3.3 and 3.3.4). Characters that a string cannot hold
/// become `?`.
fn push_detail(out: &mut String, detail: &str) {
    out.push_str("; detail=");
    if is_token(detail) {
        return out.push_str(detail);
    }
    out.push('"');
    for character in detail.chars() {
        match character {
            '"' | '\\' => out.extend(['\\', character]),
            ' '..='~' => out.push(character),
            _ => out.push('?'),
        }
    }
    out.push('"');
}

fn is_token(text: &str) -> bool {
    let inner = |byte: &u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~:/".contains(byte);
    let starts = text.starts_with(|first: char| first.is_ascii_alphabetic() || first == '*');
    starts && text.as_bytes().iter().all(inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{runner, test};
    use proptest::prelude::*;

    const MISS: Status<'_> =
        Status::Forward { reason: Reason::Miss, collapsed: false, stored: false, status: None, detail: None };

    fn forward(reason: Reason, collapsed: bool, stored: bool, status: Option<u16>) -> Status<'static> {
        Status::Forward { reason, collapsed, stored, status, detail: None }
    }

    fn bypass(detail: &str) -> String {
        member(&Status::Forward {
            reason: Reason::Bypass,
            collapsed: false,
            stored: false,
            status: None,
            detail: Some(detail),
        })
    }

    #[test]
    fn members_read_as_the_specification_writes_them() {
        let cases = [
            (Status::Hit { ttl: 3 }, "collapser; hit; ttl=3"),
            (Status::Hit { ttl: 0 }, "collapser; hit; ttl=0"),
            (Status::Hit { ttl: i64::MAX }, "collapser; hit; ttl=999999999999999"),
            (
                Status::Stale { ttl: -4, detail: "stale-if-error" },
                "collapser; hit; ttl=-4; detail=stale-if-error",
            ),
            (Status::Stale { ttl: i64::MIN, detail: "x" }, "collapser; hit; ttl=-999999999999999; detail=x"),
            (MISS, "collapser; fwd=miss"),
            (forward(Reason::Miss, true, false, None), "collapser; fwd=miss; collapsed"),
            (forward(Reason::Miss, false, true, None), "collapser; fwd=miss; stored"),
            (forward(Reason::Miss, false, false, Some(503)), "collapser; fwd=miss; fwd-status=503"),
            (
                forward(Reason::Stale, true, true, Some(304)),
                "collapser; fwd=stale; fwd-status=304; stored; collapsed",
            ),
            (forward(Reason::Request, false, false, None), "collapser; fwd=request"),
            (forward(Reason::Method, false, false, None), "collapser; fwd=method"),
            (forward(Reason::VaryMiss, false, false, None), "collapser; fwd=vary-miss"),
        ];
        for (status, expected) in cases {
            assert_eq!(member(&status), expected);
        }
    }

    #[test]
    fn details_are_tokens_or_strings() {
        let cases = [
            ("range", "range"),
            ("event-stream", "event-stream"),
            ("*a:/b", "*a:/b"),
            ("", "\"\""),
            ("two words", "\"two words\""),
            ("1st", "\"1st\""),
            ("-a", "\"-a\""),
            ("a;b", "\"a;b\""),
            ("a,b=c", "\"a,b=c\""),
            ("say \"a\\b\"", "\"say \\\"a\\\\b\\\"\""),
            ("sp\u{e4}t\r\n", "\"sp?t??\""),
        ];
        for (detail, expected) in cases {
            assert_eq!(bypass(detail), format!("collapser; fwd=bypass; detail={expected}"));
        }
    }

    #[test]
    fn no_detail_leaves_its_place() {
        runner(1_024)
            .run(&any::<String>(), |detail| {
                let member = bypass(&detail);
                let value = member.strip_prefix("collapser; fwd=bypass; detail=").unwrap();
                prop_assert!(value.bytes().all(|byte| (b' '..=b'~').contains(&byte)));
                if let Some(quoted) = value.strip_prefix('"') {
                    let plain = quoted.replace("\\\\", "").replace("\\\"", "");
                    prop_assert_eq!(plain.find('"'), Some(plain.len() - 1));
                } else {
                    prop_assert_eq!(value, detail);
                }
                Ok(())
            })
            .unwrap();
    }
}
