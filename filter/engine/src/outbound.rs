//! The headers of a flight: the leader's, less what was meant for the leader alone.

use crate::pairs::{Pairs, PairsBuilder};
use std::time::Duration;

/// Headers that end with this hop, that Envoy sets anew, or that a flight has of its own.
const DROPPED: [&[u8]; 8] = [
    b"connection",
    b"content-length",
    b"grpc-timeout",
    b"keep-alive",
    b"proxy-connection",
    b"transfer-encoding",
    b"upgrade",
    b"x-envoy-expected-rq-timeout-ms",
];

/// Headers by which a request steers Envoy's router (Envoy docs, "Router", HTTP headers consumed), or
/// that mean something between the filter and its configuration. One caller's timeout or retry policy must not
/// become everybody's.
const STEERING: [&[u8]; 7] = [
    b"x-collapser-",
    b"x-envoy-hedge-",
    b"x-envoy-max-retries",
    b"x-envoy-retriable-",
    b"x-envoy-retry-",
    b"x-envoy-upstream-",
    b"x-envoy-is-timeout-retry",
];

/// Headers of a plain HTTP request that only its own caller's answer depends on. The flight's reply is for all of them,
/// and each is then told whether what it has will do.
const CONDITIONS: [&[u8]; 2] = [b"if-none-match", b"if-modified-since"];

/// The headers of a plain HTTP flight, in the host's form. HEAD becomes GET, whose reply answers both.
pub fn http_headers(leader: Pairs<'_>) -> Box<[u8]> {
    let mut headers = PairsBuilder::with_capacity(leader.len());
    for (name, value) in leader.iter().filter(|(name, _)| is_repeated(name) && !CONDITIONS.contains(name)) {
        let is_head = name == b":method" && value == b"HEAD";
        headers.push(name, if is_head { b"GET" } else { value });
    }
    headers.build()
}

/// The headers of a flight, in the host's form.
pub fn headers(leader: Pairs<'_>, timeout: &str) -> Box<[u8]> {
    let mut headers = PairsBuilder::with_capacity(leader.len() + 1);
    for (name, value) in leader.iter().filter(|(name, _)| is_repeated(name)) {
        headers.push(name, value);
    }
    headers.push(b"grpc-timeout", timeout.as_bytes());
    headers.build()
}

fn is_repeated(name: &[u8]) -> bool {
    !DROPPED.contains(&name) && !STEERING.iter().any(|prefix| name.starts_with(prefix))
}

/// A deadline as the value of `grpc-timeout`, rounded up (gRPC over HTTP/2, "Timeout": at most eight
/// digits and a unit).
pub fn grpc_timeout(timeout: Duration) -> String {
    const MOST: u128 = 99_999_999;
    let micros = timeout.as_nanos().div_ceil(1_000);
    for (unit, size) in [("u", 1), ("m", 1_000), ("S", 1_000_000)] {
        let count = micros.div_ceil(size);
        if count <= MOST {
            return format!("{count}{unit}");
        }
    }
    format!("{MOST}S")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pairs::block;
    use crate::testing::test;

    #[test]
    fn the_leaders_own_limits_are_replaced() {
        let leader = block(&[
            (":path", "/a.B/C"),
            ("grpc-timeout", "50m"),
            ("te", "trailers"),
            ("x", "1"),
            ("x", "2"),
            ("x-envoy-upstream-rq-timeout-ms", "1"),
            ("x-envoy-max-retries", "9"),
            ("x-collapser-pass", "1"),
            ("x-envoy-external-address", "a"),
            ("content-length", "7"),
        ]);
        let headers = headers(Pairs::parse(&leader).unwrap(), "10S");
        let expected = [
            (":path", "/a.B/C"),
            ("te", "trailers"),
            ("x", "1"),
            ("x", "2"),
            ("x-envoy-external-address", "a"),
            ("grpc-timeout", "10S"),
        ];
        assert_eq!(headers, block(&expected));
    }

    #[test]
    fn what_the_leader_alone_wants_is_not_everybodys() {
        let leader = block(&[
            (":method", "HEAD"),
            (":path", "/a"),
            ("if-none-match", "\"1\""),
            ("if-modified-since", "x"),
            ("accept", "text/html"),
            ("x-envoy-max-retries", "9"),
        ]);
        let headers = http_headers(Pairs::parse(&leader).unwrap());
        assert_eq!(headers, block(&[(":method", "GET"), (":path", "/a"), ("accept", "text/html")]));
    }

    #[test]
    fn timeouts_have_at_most_eight_digits() {
        let cases = [
            (Duration::from_millis(10), "10000u"),
            (Duration::from_secs(10), "10000000u"),
            (Duration::from_secs(100), "100000m"),
            (Duration::from_secs(86_400 * 2), "172800S"),
            (Duration::from_nanos(1), "1u"),
        ];
        for (timeout, text) in cases {
            assert_eq!(grpc_timeout(timeout), text);
        }
        assert_eq!(grpc_timeout(Duration::MAX), "99999999S");
    }
}
