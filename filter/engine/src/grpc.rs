//! gRPC status codes, their mapping from HTTP, and the encoding of status messages.

/// A gRPC status code (gRPC "Status codes and their use in gRPC", 0 to 16). Codes that a backend
/// invents are kept as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Code(pub u32);

impl Code {
    /// Success.
    pub const OK: Self = Self(0);
    /// No better code is known.
    pub const UNKNOWN: Self = Self(2);
    /// The deadline passed.
    pub const DEADLINE_EXCEEDED: Self = Self(4);
    /// The caller may not do this.
    pub const PERMISSION_DENIED: Self = Self(7);
    /// A limit was reached.
    pub const RESOURCE_EXHAUSTED: Self = Self(8);
    /// The method does not exist.
    pub const UNIMPLEMENTED: Self = Self(12);
    /// The protocol was broken.
    pub const INTERNAL: Self = Self(13);
    /// Not now; a retry may succeed.
    pub const UNAVAILABLE: Self = Self(14);
    /// The caller is not known.
    pub const UNAUTHENTICATED: Self = Self(16);

    /// Parses the value of a `grpc-status` header.
    pub fn parse(value: &[u8]) -> Option<Self> {
        std::str::from_utf8(value).ok()?.parse().ok().map(Self)
    }

    /// The code for an HTTP status of a response that carries no gRPC status (gRPC "HTTP to gRPC
    /// Status Code Mapping").
    pub fn from_http(status: u32) -> Self {
        match status {
            400 => Self::INTERNAL,
            401 => Self::UNAUTHENTICATED,
            403 => Self::PERMISSION_DENIED,
            404 => Self::UNIMPLEMENTED,
            429 | 502 | 503 | 504 => Self::UNAVAILABLE,
            _ => Self::UNKNOWN,
        }
    }
}

/// Percent-encodes a status message for `grpc-message` (gRPC over HTTP/2, "Percent-Encoded"): bytes
/// outside printable ASCII and `%` itself become `%XX`.
pub fn encode_message(message: &str) -> String {
    use std::fmt::Write;
    let mut out = String::with_capacity(message.len());
    for byte in message.bytes() {
        match byte {
            b'%' => out.push_str("%25"),
            0x20..=0x7e => out.push(char::from(byte)),
            _ => {
                // Writing to a string cannot fail.
                let _ = write!(out, "%{byte:02X}");
            }
        }
    }
    out
}

/// Whether a `content-type` names gRPC as this filter handles it: `application/grpc`, with a
/// `+subtype` or not, with parameters or not. `application/grpc-web` is another protocol, whose
/// framing differs.
pub fn is_grpc_content_type(value: &[u8]) -> bool {
    const GRPC: &[u8] = b"application/grpc";
    let Some(prefix) = value.get(..GRPC.len()) else { return false };
    prefix.eq_ignore_ascii_case(GRPC) && matches!(value.get(GRPC.len()), None | Some(b'+' | b';' | b' '))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::test;

    #[test]
    fn messages_are_percent_encoded() {
        assert_eq!(encode_message("plain text"), "plain text");
        assert_eq!(encode_message("50% späť\n"), "50%25 sp%C3%A4%C5%A5%0A");
    }

    #[test]
    fn codes_are_parsed_strictly() {
        assert_eq!(Code::parse(b"14"), Some(Code::UNAVAILABLE));
        assert_eq!(Code::parse(b""), None);
        assert_eq!(Code::parse(b"-1"), None);
        assert_eq!(Code::parse(b"1x"), None);
        assert_eq!(Code::parse(b"\xff"), None);
    }

    #[test]
    fn http_statuses_map_as_the_specification_says() {
        let pairs = [
            (400, 13),
            (401, 16),
            (403, 7),
            (404, 12),
            (429, 14),
            (502, 14),
            (503, 14),
            (504, 14),
            (500, 2),
            (302, 2),
        ];
        for (http, grpc) in pairs {
            assert_eq!(Code::from_http(http), Code(grpc), "{http}");
        }
    }

    #[test]
    fn only_grpc_itself_is_grpc() {
        for yes in ["application/grpc", "application/grpc+proto", "application/grpc;x", "Application/GRPC"] {
            assert!(is_grpc_content_type(yes.as_bytes()), "{yes}");
        }
        for no in [
            "application/grpc-web",
            "application/grpc-web+proto",
            "application/grpcx",
            "application/json",
            "",
            "text/html",
        ] {
            assert!(!is_grpc_content_type(no.as_bytes()), "{no}");
        }
    }
}
