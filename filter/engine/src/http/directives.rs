//! The directives of `cache-control`, since both callers and backends steer sharing with them (RFC 9111, section 5.2).
//!
//! Nothing is allocated, and the time taken grows with the length of the headers only.

use crate::pairs::{Pairs, same};
use std::time::Duration;

/// What a larger number of seconds counts as (RFC 9111, section 1.2.2).
const MOST_SECONDS: u64 = 1 << 31;

/// The length of the longest known directive, `stale-while-revalidate`.
const LONGEST: usize = 22;

/// What a response says in `cache-control` (RFC 9111, section 5.2.2; RFC 5861).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResponseDirectives {
    /// Not to be kept.
    pub no_store: bool,
    /// Not to be used again unasked. With field names as well, which then forbid the whole response.
    pub no_cache: bool,
    /// For one caller only. With field names as well, like [`Self::no_cache`].
    pub private: bool,
    /// May be shared even if the request was authorised.
    pub public: bool,
    /// Never to be given out stale.
    pub must_revalidate: bool,
    /// Never to be given out stale by a shared cache.
    pub proxy_revalidate: bool,
    /// Only for caches that know the status; for them it overrules [`Self::no_store`].
    pub must_understand: bool,
    /// How long the response is fresh, in whole seconds, at most 2^31.
    pub max_age: Option<Duration>,
    /// The same for shared caches, before which [`Self::max_age`] does not count.
    pub s_maxage: Option<Duration>,
    /// How long it may be given out stale instead of an error (RFC 5861, section 4).
    pub stale_if_error: Option<Duration>,
    /// How long it may be given out stale while a new one is fetched (RFC 5861, section 3).
    pub stale_while_revalidate: Option<Duration>,
}

impl ResponseDirectives {
    /// The directives of all `cache-control` lines together.
    pub fn of(headers: Pairs<'_>) -> Self {
        let mut directives = Self::default();
        for value in headers.all(b"cache-control") {
            each(value, |name, argument| directives.take(name, argument));
        }
        directives
    }

    fn take(&mut self, name: &[u8], argument: Option<&[u8]>) {
        match name {
            b"no-store" => self.no_store = true,
            b"no-cache" => self.no_cache = true,
            b"private" => self.private = true,
            // What permits is taken only as the specification writes it.
            b"public" => self.public |= argument.is_none(),
            b"must-understand" => self.must_understand |= argument.is_none(),
            b"must-revalidate" => self.must_revalidate = true,
            b"proxy-revalidate" => self.proxy_revalidate = true,
            b"max-age" => lower(&mut self.max_age, seconds(argument)),
            b"s-maxage" => lower(&mut self.s_maxage, seconds(argument)),
            b"stale-if-error" => lower(&mut self.stale_if_error, seconds(argument)),
            b"stale-while-revalidate" => lower(&mut self.stale_while_revalidate, seconds(argument)),
            _ => (),
        }
    }
}

/// What a request asks for in `cache-control` (RFC 9111, section 5.2.1) or `pragma`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestDirectives {
    /// The reply is not to be kept.
    pub no_store: bool,
    /// No kept reply is wanted.
    pub no_cache: bool,
    /// Nothing but a kept reply is wanted.
    pub only_if_cached: bool,
    /// The greatest age wanted, in whole seconds, at most 2^31.
    pub max_age: Option<Duration>,
    /// For how long the reply is still to be fresh.
    pub min_fresh: Option<Duration>,
    /// For how long the reply may have been stale; [`Duration::MAX`] without a value.
    pub max_stale: Option<Duration>,
}

impl RequestDirectives {
    /// The directives of all `cache-control` lines together. Without any, `pragma: no-cache` counts (RFC 9111, section
    /// 5.4).
    pub fn of(headers: Pairs<'_>) -> Self {
        let mut directives = Self::default();
        let (mut controlled, mut pragma) = (false, false);
        for (name, value) in headers.iter() {
            if same(name, b"cache-control") {
                controlled = true;
                each(value, |name, argument| directives.take(name, argument));
            } else if same(name, b"pragma") {
                each(value, |name, _| pragma |= name == b"no-cache");
            }
        }
        directives.no_cache |= pragma && !controlled;
        directives
    }

    fn take(&mut self, name: &[u8], argument: Option<&[u8]>) {
        match name {
            b"no-store" => self.no_store = true,
            b"no-cache" => self.no_cache = true,
            b"only-if-cached" => self.only_if_cached = true,
            b"max-age" => lower(&mut self.max_age, seconds(argument)),
            b"min-fresh" => self.min_fresh = self.min_fresh.max(Some(seconds(argument))),
            b"max-stale" => {
                lower(&mut self.max_stale, argument.map_or(Duration::MAX, |_| seconds(argument)));
            }
            _ => (),
        }
    }
}

/// Of two values of one directive, the lower one counts.
fn lower(kept: &mut Option<Duration>, new: Duration) {
    *kept = Some(kept.map_or(new, |kept| kept.min(new)));
}

/// The time that an argument names. One that is missing or no number is 0: the response counts as stale (RFC 9111,
/// section 4.2.1).
fn seconds(argument: Option<&[u8]>) -> Duration {
    let number = argument.map(|argument| unquoted(argument).unwrap_or(argument));
    Duration::from_secs(number.and_then(delta_seconds).unwrap_or(0))
}

/// What is between the quotes.
fn unquoted(argument: &[u8]) -> Option<&[u8]> {
    argument.strip_prefix(b"\"")?.strip_suffix(b"\"")
}

/// A number of seconds, at most 2^31 (RFC 9111, section 1.2.2); `None` for anything but digits.
pub(super) fn delta_seconds(text: &[u8]) -> Option<u64> {
    let digit = |byte: &u8| byte.is_ascii_digit().then(|| u64::from(byte - b'0'));
    let add = |sum: u64, byte: &u8| Some((sum * 10 + digit(byte)?).min(MOST_SECONDS));
    if text.is_empty() { None } else { text.iter().try_fold(0, add) }
}

/// Hands out each directive of a line: its name in lower case and what follows the name, which is the argument if a `=`
/// is right behind the name, else something malformed. Names too long to be known are left out.
fn each(line: &[u8], mut take: impl FnMut(&[u8], Option<&[u8]>)) {
    for member in Members::of(line) {
        let end = member.iter().position(|byte| *byte == b'=' || byte.is_ascii_whitespace());
        let (name, rest) = member.split_at(end.unwrap_or(member.len()));
        let mut buffer = [0; LONGEST];
        if let Some(lower) = buffer.get_mut(..name.len()) {
            lower.copy_from_slice(name);
            lower.make_ascii_lowercase();
            let argument = (!rest.is_empty()).then(|| rest.strip_prefix(b"=").unwrap_or(rest));
            take(lower, argument);
        }
    }
}

/// The members of a list of directives: what is between commas, those within a quoted argument aside.
struct Members<'a> {
    rest: &'a [u8],
    /// Whether quotes count. A quote that nothing closes must not hide what follows it.
    quotes: bool,
}

impl<'a> Members<'a> {
    fn of(line: &'a [u8]) -> Self {
        Self { rest: line, quotes: true }
    }

    /// Where the first member ends.
    fn end(&mut self) -> usize {
        let mut at = 0;
        loop {
            match self.rest.get(at..).unwrap_or_default() {
                [] | [b',', ..] => return at,
                [b'=', b'"', quoted @ ..] if self.quotes => match closing(quoted) {
                    Some(len) => at += 2 + len,
                    None => self.quotes = false,
                },
                _ => at += 1,
            }
        }
    }
}

/// How many bytes there are up to the closing quote and with it (RFC 9110, section 5.6.4).
fn closing(quoted: &[u8]) -> Option<usize> {
    let mut escaped = false;
    let position = quoted.iter().position(|byte| {
        let closes = *byte == b'"' && !escaped;
        escaped = *byte == b'\\' && !escaped;
        closes
    });
    position.map(|at| at + 1)
}

impl<'a> Iterator for Members<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        if self.rest.is_empty() {
            return None;
        }
        let end = self.end();
        let (member, rest) = self.rest.split_at_checked(end)?;
        self.rest = rest.get(1..).unwrap_or_default();
        Some(member.trim_ascii())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pairs::{PairsBuilder, block};
    use crate::testing::{runner, test};
    use proptest::prelude::*;

    fn response(lines: &[&str]) -> ResponseDirectives {
        let lines: Vec<_> = lines.iter().map(|line| ("cache-control", *line)).collect();
        ResponseDirectives::of(Pairs::parse(&block(&lines)).unwrap())
    }

    fn request(headers: &[(&str, &str)]) -> RequestDirectives {
        RequestDirectives::of(Pairs::parse(&block(headers)).unwrap())
    }

    fn secs(seconds: u64) -> Option<Duration> {
        Some(Duration::from_secs(seconds))
    }

    #[test]
    fn a_response_without_directives_says_nothing() {
        for lines in [&[][..], &[""], &[" , ,,"], &["foobar, baz=1"]] {
            assert_eq!(response(lines), ResponseDirectives::default(), "{lines:?}");
        }
    }

    #[test]
    fn every_directive_of_a_response_is_known() {
        let all = response(&[
            "no-store, no-cache, private, public, must-revalidate, proxy-revalidate, must-understand",
            "max-age=1, s-maxage=2, stale-if-error=3, stale-while-revalidate=4",
        ]);
        let expected = ResponseDirectives {
            no_store: true,
            no_cache: true,
            private: true,
            public: true,
            must_revalidate: true,
            proxy_revalidate: true,
            must_understand: true,
            max_age: secs(1),
            s_maxage: secs(2),
            stale_if_error: secs(3),
            stale_while_revalidate: secs(4),
        };
        assert_eq!(all, expected);
    }

    #[test]
    fn every_directive_of_a_request_is_known() {
        let all = request(&[
            ("cache-control", "no-store, no-cache, only-if-cached"),
            ("cache-control", "max-age=1, min-fresh=2, max-stale=3"),
        ]);
        let expected = RequestDirectives {
            no_store: true,
            no_cache: true,
            only_if_cached: true,
            max_age: secs(1),
            min_fresh: secs(2),
            max_stale: secs(3),
        };
        assert_eq!(all, expected);
    }

    #[test]
    fn ages_are_read_as_the_specification_asks() {
        let cases = [
            ("max-age=3600", 3600),
            ("MaX-aGe=3600", 3600),
            ("max-age=\"3600\"", 3600),
            ("\t max-age=3600 \t", 3600),
            ("foobar,max-age=3600", 3600),
            ("max-age=003600", 3600),
            ("max-age=0", 0),
            // Too large.
            ("max-age=2147483647", 2_147_483_647),
            ("max-age=2147483648", 2_147_483_648),
            ("max-age=99999999999", 2_147_483_648),
            ("max-age=99999999999999999999999999999999", 2_147_483_648),
            // Invalid.
            ("max-age", 0),
            ("max-age=", 0),
            ("max-age=\"\"", 0),
            ("max-age=\"", 0),
            ("max-age=-100", 0),
            ("max-age=+100", 0),
            ("max-age=3600.0", 0),
            ("max-age=3600.5", 0),
            ("max-age=a100", 0),
            ("max-age=100a", 0),
            ("max-age='3600'", 0),
            ("max-age=\"-1\"", 0),
            ("max-age=\"1\\0\"", 0),
            ("max-age=\"10\"0", 0),
            ("max-age =100", 0),
            ("max-age= 100", 0),
            ("max-age 100", 0),
            ("max-age=100 200", 0),
            ("max-age=100;x", 0),
            ("max-age=\u{661}", 0),
            // Twice: the lower one.
            ("max-age=1800, max-age=1", 1),
            ("max-age=1, max-age=1800", 1),
            ("max-age=1800, max-age=x", 0),
            // In quotes, it is another directive's argument.
            ("extension=\"max-age=100\", max-age=7", 7),
            ("max-age=7, extension=\"max-age=1\"", 7),
            ("extension=\"a, max-age=1, b\", max-age=\"7\"", 7),
            ("extension=\"a\\\", max-age=1, b\", max-age=7", 7),
            ("extension=\"a\\\\\", max-age=7", 7),
            // A quote that nothing closes, or that does not open an argument.
            ("extension=\"a, max-age=7", 7),
            ("extension=\"\\\", max-age=7, max-age=6", 6),
            ("a\"b, max-age=7, c\"", 7),
        ];
        for (line, expected) in cases {
            assert_eq!(response(&[line]).max_age, secs(expected), "{line}");
        }
        assert_eq!(response(&["max-age=1800", "max-age=1"]).max_age, secs(1));
        assert_eq!(response(&["max-age=1", "max-age=1800"]).max_age, secs(1));
        assert_eq!(response(&["xmax-age=1, max-agex=1, max-ag=1, x-stale-while-revalidate=1"]).max_age, None);
    }

    #[test]
    fn what_forbids_does_so_with_an_argument_too() {
        for line in [
            "no-cache",
            "No-Cache",
            "no-cache=\"set-cookie\"",
            "no-cache=\"a, b\", max-age=1",
            "no-cache=",
            "no-cache=x",
            "no-cache =\"x\"",
            "max-age=1,,no-cache",
            "x=\"y, no-cache",
            "x\"y, no-cache, z\"",
        ] {
            assert!(response(&[line]).no_cache, "{line}");
        }
        assert!(response(&["private=\"x\""]).private);
        assert!(response(&["no-store=1"]).no_store);
        for line in ["x=\"no-cache\"", "x=\"a, no-cache, b\"", "no-cachex", "no_cache", "\"no-cache\""] {
            assert!(!response(&[line]).no_cache, "{line}");
        }
    }

    #[test]
    fn what_permits_does_not() {
        assert!(response(&["PUBLIC"]).public && response(&["must-understand"]).must_understand);
        for line in ["public=1", "public=\"x\"", "public x", "must-understand=no"] {
            assert_eq!(response(&[line]), ResponseDirectives::default(), "{line}");
        }
    }

    #[test]
    fn a_request_may_take_anything_stale() {
        let max_stale = |line: &str| request(&[("cache-control", line)]).max_stale;
        assert_eq!(max_stale("max-stale"), Some(Duration::MAX));
        assert_eq!(max_stale("max-stale=5"), secs(5));
        assert_eq!(max_stale("max-stale, max-stale=5"), secs(5));
        assert_eq!(max_stale("max-stale="), secs(0));
        assert_eq!(max_stale("max-stale=x"), secs(0));
        assert_eq!(max_stale("no-cache"), None);
    }

    #[test]
    fn of_two_demands_the_stronger_counts() {
        let both = request(&[("cache-control", "max-age=5, max-age=6, min-fresh=5, min-fresh=6")]);
        assert_eq!((both.max_age, both.min_fresh), (secs(5), secs(6)));
    }

    #[test]
    fn pragma_counts_without_cache_control() {
        assert!(request(&[("pragma", "no-cache")]).no_cache);
        assert!(request(&[("pragma", "x=1, No-Cache")]).no_cache);
        assert!(!request(&[("pragma", "x=\"no-cache\"")]).no_cache);
        assert!(!request(&[("pragma", "no-store")]).no_store);
        assert!(!request(&[("pragma", "no-cache"), ("cache-control", "max-age=1")]).no_cache);
        assert!(!request(&[("cache-control", ""), ("pragma", "no-cache")]).no_cache);
    }

    #[test]
    fn no_bytes_panic_and_none_hide_what_forbids() {
        let part = prop::sample::select(vec![
            &b"max-age"[..],
            b"no-store",
            b"=",
            b"\"",
            b"\\",
            b",",
            b" ",
            b"9",
            b"\xff",
            b"\0",
        ]);
        runner(2_048)
            .run(&prop::collection::vec(part, 0..24), |parts| {
                let line = parts.concat();
                let mut headers = PairsBuilder::default();
                headers
                    .push(b"cache-control", &line)
                    .push(b"cache-control", b"no-store")
                    .push(b"pragma", &line);
                let block = headers.build();
                let headers = Pairs::parse(&block).unwrap();
                prop_assert!(ResponseDirectives::of(headers).no_store);
                prop_assert!(RequestDirectives::of(headers).no_store);
                Ok(())
            })
            .unwrap();
        runner(2_048)
            .run(&prop::collection::vec(any::<u8>(), 0..64), |line| {
                let members: usize = Members::of(&line).map(<[u8]>::len).sum();
                prop_assert!(members <= line.len());
                Ok(())
            })
            .unwrap();
    }
}
