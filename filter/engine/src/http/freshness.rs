//! Whether a reply may be shared and for how long it is fresh, as the backend itself says (RFC 9111, sections 3 and 4).

use super::directives::{ResponseDirectives, delta_seconds};
use super::{date, vary};
use crate::pairs::Pairs;
use std::time::Duration;

/// Why a reply may be given only to the one who asked. If there are several reasons, the first one counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forbidden {
    /// `cache-control: no-store`.
    NoStore,
    /// `cache-control: no-cache`, with field names or without.
    NoCache,
    /// `cache-control: private`, with field names or without.
    Private,
    /// It sets a cookie.
    SetCookie,
    /// The request was authorised, and the response does not say that it may be shared nevertheless (RFC 9111, section
    /// 3.5).
    Authorization,
    /// `vary: *`.
    VaryAll,
    /// Its status does not allow it.
    Status,
    /// It says how long it is fresh, and is not any more.
    Expired,
}

impl Forbidden {
    /// A short name.
    pub fn name(self) -> &'static str {
        match self {
            Self::NoStore => "no-store",
            Self::NoCache => "no-cache",
            Self::Private => "private",
            Self::SetCookie => "set-cookie",
            Self::Authorization => "authorization",
            Self::VaryAll => "vary-all",
            Self::Status => "status",
            Self::Expired => "expired",
        }
    }
}

/// What a reply's headers say about sharing it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Why it may be given only to the one who asked; `None` if it may be shared.
    pub forbidden: Option<Forbidden>,
    /// For how long it is fresh from the moment the backend made it, if it says so.
    pub lifetime: Option<Duration>,
    /// How old it was when it was received (RFC 9111, section 4.2.3, `corrected_initial_age`).
    pub age: Duration,
    /// Whether it may be given out after its lifetime at all; without this, the following two do not count (RFC 9111,
    /// section 4.2.4).
    pub may_be_stale: bool,
    /// For how long after its lifetime it may be given out instead of an error (RFC 5861, section 4).
    pub stale_if_error: Option<Duration>,
    /// For how long after its lifetime it may be given out while a new one is fetched (RFC 5861, section 3).
    pub stale_while_revalidate: Option<Duration>,
}

impl Verdict {
    /// On a reply that says nothing of all this.
    pub const SILENT: Self = Self {
        forbidden: None,
        lifetime: None,
        age: Duration::ZERO,
        may_be_stale: true,
        stale_if_error: None,
        stale_while_revalidate: None,
    };
}

/// Judges the reply to a request. `received` is the wall clock at its arrival in Unix seconds, `delay` how long the
/// call took.
pub fn judge(request: Pairs<'_>, response: Pairs<'_>, received: u64, delay: Duration) -> Verdict {
    let directives = ResponseDirectives::of(response);
    let fields = Fields::of(response);
    let lifetime = directives.s_maxage.or(directives.max_age).or_else(|| fields.until_expiry(received));
    let age = fields.age(delay);
    // Whoever waited for it has waited for as long as the call took, which makes it no older for them.
    let age_when_sent = fields.age(Duration::ZERO);
    let forbidden = forbidden(&directives, &fields, lifetime.is_some(), request)
        .or_else(|| lifetime.filter(|lifetime| *lifetime <= age_when_sent).map(|_| Forbidden::Expired));
    Verdict {
        forbidden,
        lifetime,
        age,
        may_be_stale: !directives.must_revalidate
            && !directives.proxy_revalidate
            && directives.s_maxage.is_none(),
        stale_if_error: directives.stale_if_error,
        stale_while_revalidate: directives.stale_while_revalidate,
    }
}

/// All reasons but the last.
fn forbidden(
    directives: &ResponseDirectives,
    fields: &Fields,
    explicit: bool,
    request: Pairs<'_>,
) -> Option<Forbidden> {
    let understood = is_understood(fields.status);
    let shared_if_authorised =
        directives.public || directives.s_maxage.is_some() || directives.must_revalidate;
    if directives.no_store && !(directives.must_understand && understood) {
        Some(Forbidden::NoStore)
    } else if directives.no_cache {
        Some(Forbidden::NoCache)
    } else if directives.private {
        Some(Forbidden::Private)
    } else if fields.set_cookie {
        Some(Forbidden::SetCookie)
    } else if !shared_if_authorised && request.first(b"authorization").is_some() {
        Some(Forbidden::Authorization)
    } else if fields.vary_all {
        Some(Forbidden::VaryAll)
    } else if !is_sharable(fields.status, explicit) || (directives.must_understand && !understood) {
        Some(Forbidden::Status)
    } else {
        None
    }
}

/// Whether replies with this status may be shared; `explicit` if the reply says how long it is fresh.
fn is_sharable(status: u16, explicit: bool) -> bool {
    match status {
        // A part only; a word on what somebody else has.
        206 | 304 => false,
        // What concerns one client: too many requests of it, its headers, its network. Not to be stored (RFC 6585,
        // sections 3 to 6).
        428 | 429 | 431 | 511 => false,
        // Cacheable without a word about it (RFC 9110, section 15.1).
        200 | 203 | 204 | 300 | 301 | 308 | 404 | 405 | 410 | 414 => true,
        // Not to be kept without a word about it, but the same for all who ask at the same time.
        302 | 303 | 307 => true,
        // A failure is given to all who wait: a herd on a failing backend is what must not be.
        500..=599 => true,
        200..=499 => explicit,
        _ => false,
    }
}

/// Whether this is a final status whose rules for caching are known and kept, as `must-understand` asks (RFC 9111,
/// section 5.2.2.3): those of RFC 9110, section 15, but 206 and 304.
fn is_understood(status: u16) -> bool {
    matches!(status, 200..=205 | 300..=303 | 305 | 307 | 308 | 400..=417 | 421 | 422 | 426 | 500..=505)
}

/// What counts of a response's headers besides `cache-control`.
#[derive(Default)]
struct Fields {
    /// 0 if there is none, or none that is a number.
    status: u16,
    /// The first valid `date`, in Unix seconds.
    date: Option<u64>,
    /// `expires`, in Unix seconds; within, `None` if it is invalid.
    expires: Option<Option<u64>>,
    /// `age` in seconds; within, `None` if it is invalid.
    age: Option<Option<u64>>,
    set_cookie: bool,
    vary_all: bool,
}

impl Fields {
    fn of(response: Pairs<'_>) -> Self {
        let mut fields = Self::default();
        for (name, value) in response.iter() {
            match name {
                b":status" => fields.status = status(value),
                b"date" => fields.date = fields.date.or_else(|| date::parse(value)),
                b"expires" => fields.take_expires(date::parse(value)),
                b"age" => fields.age = fields.age.or_else(|| Some(age(value))),
                b"set-cookie" => fields.set_cookie = true,
                b"vary" => fields.vary_all |= vary::is_all(value),
                _ => (),
            }
        }
        fields
    }

    /// Of several dates that differ, none is valid.
    fn take_expires(&mut self, date: Option<u64>) {
        let same = self.expires.is_none_or(|known| known == date);
        self.expires = Some(date.filter(|_| same));
    }

    /// The lifetime that `expires` gives (RFC 9111, section 4.2.1): 0 if it is invalid (section 5.3).
    fn until_expiry(&self, received: u64) -> Option<Duration> {
        let expires = self.expires?.unwrap_or(0);
        Some(Duration::from_secs(expires.saturating_sub(self.date.unwrap_or(received))))
    }

    /// The age at arrival, as the caches on the way counted it (RFC 9111, section 4.2.3, `corrected_age_value`). How long
    /// the call took counts only for what a cache has sent: what its origin has just made is new, however long that
    /// took. The date does not count, which the section leaves open: it knows whole seconds only, and a clock that
    /// runs behind by a few would make all that is to be kept for less than that a caller's own.
    fn age(&self, delay: Duration) -> Duration {
        self.age.flatten().map_or(Duration::ZERO, |told| Duration::from_secs(told).saturating_add(delay))
    }
}

/// The status code; 0 for what is not three digits.
fn status(value: &[u8]) -> u16 {
    let digits = value.len() == 3 && value.iter().all(u8::is_ascii_digit);
    if digits { value.iter().fold(0, |sum, byte| sum * 10 + u16::from(byte - b'0')) } else { 0 }
}

/// The first member of `age`, if it is a number (RFC 9111, section 5.1).
fn age(value: &[u8]) -> Option<u64> {
    delta_seconds(value.split(|byte| *byte == b',').next()?.trim_ascii())
}

/// Who may be given a gRPC reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Steering {
    /// All who ask.
    Anyone,
    /// Those who wait for it; it is not kept.
    Waiters,
    /// Only the one whose request went upstream.
    Leader,
}

/// What a gRPC reply's initial metadata says about sharing it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrpcVerdict {
    /// Who may be given it.
    pub sharing: Steering,
    /// For how long it may be kept, if it says so; never 0, and only with [`Steering::Anyone`].
    pub ttl: Option<Duration>,
}

/// Judges a gRPC reply, whose backend has only `cache-control` to steer sharing with. One without it, as nearly all
/// are, costs a look at the lengths of the names.
pub fn judge_grpc(initial_metadata: Pairs<'_>) -> GrpcVerdict {
    let said = ResponseDirectives::of(initial_metadata);
    let ttl = said.s_maxage.or(said.max_age);
    let sharing = if said.private {
        Steering::Leader
    } else if said.no_store || said.no_cache || ttl == Some(Duration::ZERO) {
        Steering::Waiters
    } else {
        Steering::Anyone
    };
    GrpcVerdict { sharing, ttl: ttl.filter(|_| sharing == Steering::Anyone) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pairs::{PairsBuilder, block};
    use crate::testing::{runner, test};
    use proptest::prelude::*;

    /// Sun, 06 Nov 1994 08:49:37 GMT.
    const NOW: u64 = 784_111_777;
    const DATE: (&str, &str) = ("date", "Sun, 06 Nov 1994 08:49:37 GMT");
    const TEN_LATER: (&str, &str) = ("expires", "Sun, 06 Nov 1994 08:49:47 GMT");

    fn judged(request: &[(&str, &str)], response: &[(&str, &str)], delay: Duration) -> Verdict {
        let (request, response) = (block(request), block(response));
        judge(Pairs::parse(&request).unwrap(), Pairs::parse(&response).unwrap(), NOW, delay)
    }

    /// The verdict on a 200 with these headers that came at once.
    fn verdict(headers: &[(&str, &str)]) -> Verdict {
        let headers: Vec<_> = [(":status", "200")].iter().chain(headers).copied().collect();
        judged(&[], &headers, Duration::ZERO)
    }

    fn secs(seconds: u64) -> Option<Duration> {
        Some(Duration::from_secs(seconds))
    }

    #[test]
    fn a_plain_reply_may_be_shared_and_says_no_lifetime() {
        let plain = Verdict::SILENT;
        assert_eq!(verdict(&[]), plain);
        assert_eq!(
            verdict(&[DATE, ("etag", "\"a\""), ("vary", "accept"), ("cache-control", "public")]),
            plain
        );
    }

    #[test]
    fn what_forbids_sharing() {
        use Forbidden::*;
        let cases = [
            ("cache-control", "no-store", NoStore),
            ("cache-control", "No-Store, max-age=100", NoStore),
            ("cache-control", "public, no-store", NoStore),
            ("cache-control", "no-cache", NoCache),
            ("cache-control", "no-cache=\"x-field\", max-age=100", NoCache),
            ("cache-control", "private", Private),
            ("cache-control", "private=\"x-field\", s-maxage=100", Private),
            ("set-cookie", "a=b", SetCookie),
            ("set-cookie", "", SetCookie),
            ("vary", "*", VaryAll),
            ("vary", "accept, *", VaryAll),
            ("cache-control", "max-age=0", Expired),
            ("cache-control", "max-age=-1", Expired),
            ("cache-control", "s-maxage=0, max-age=100", Expired),
            ("expires", "0", Expired),
            ("expires", "", Expired),
            ("expires", "Sun, 06 Nov 1994 08:49:37 GMT", Expired),
        ];
        for (name, value, reason) in cases {
            assert_eq!(verdict(&[(name, value)]).forbidden, Some(reason), "{name}: {value}");
        }
    }

    #[test]
    fn the_first_of_several_reasons_counts() {
        let all = [
            ("cache-control", "no-store", Forbidden::NoStore),
            ("cache-control", "no-cache", Forbidden::NoCache),
            ("cache-control", "private", Forbidden::Private),
            ("set-cookie", "a", Forbidden::SetCookie),
            ("x", "authorization", Forbidden::Authorization),
            ("vary", "*", Forbidden::VaryAll),
            (":status", "206", Forbidden::Status),
            ("cache-control", "max-age=0", Forbidden::Expired),
        ];
        for from in 0..all.len() {
            let headers: Vec<_> = all[from..].iter().rev().map(|(name, value, _)| (*name, *value)).collect();
            let headers: Vec<_> = [(":status", "200")].into_iter().chain(headers).collect();
            let request: &[_] = if from <= 4 { &[("authorization", "x")] } else { &[] };
            let verdict = judged(request, &headers, Duration::ZERO);
            assert_eq!(verdict.forbidden, Some(all[from].2));
        }
        let names: std::collections::HashSet<_> = all.iter().map(|(_, _, reason)| reason.name()).collect();
        assert_eq!(names.len(), all.len());
    }

    #[test]
    fn authorised_replies_are_shared_if_they_say_so() {
        let forbidden = |line: &str| {
            let request = [("authorization", "Basic eA==")];
            judged(&request, &[(":status", "200"), ("cache-control", line)], Duration::ZERO).forbidden
        };
        for line in
            ["public", "max-age=9, public", "s-maxage=9", "must-revalidate", "max-age=9, must-revalidate"]
        {
            assert_eq!(forbidden(line), None, "{line}");
        }
        for line in ["", "max-age=9", "proxy-revalidate", "public=1"] {
            assert_eq!(forbidden(line), Some(Forbidden::Authorization), "{line}");
        }
    }

    #[test]
    fn the_status_must_allow_it() {
        let forbidden = |status: &str, line: &str| {
            judged(&[], &[(":status", status), ("cache-control", line)], Duration::ZERO).forbidden
        };
        for status in [
            "200", "203", "204", "300", "301", "302", "303", "307", "308", "404", "405", "410", "414", "500",
            "501", "502", "503", "504", "599",
        ] {
            assert_eq!(forbidden(status, ""), None, "{status}");
            assert_eq!(forbidden(status, "max-age=9"), None, "{status}");
        }
        for status in ["201", "202", "299", "305", "400", "401", "403", "409", "499"] {
            assert_eq!(forbidden(status, ""), Some(Forbidden::Status), "{status}");
            assert_eq!(forbidden(status, "public"), Some(Forbidden::Status), "{status}");
            assert_eq!(forbidden(status, "max-age=9"), None, "{status}");
        }
        for status in [
            "100", "101", "103", "206", "304", "428", "429", "431", "511", "600", "999", "000", "", "20",
            "2000", "+20", "abc", "2\u{e9}",
        ] {
            assert_eq!(forbidden(status, ""), Some(Forbidden::Status), "{status}");
            assert_eq!(forbidden(status, "max-age=9"), Some(Forbidden::Status), "{status}");
        }
        assert_eq!(judged(&[], &[], Duration::ZERO).forbidden, Some(Forbidden::Status));
    }

    #[test]
    fn who_must_understand_does_or_does_not() {
        let forbidden = |status: &str, line: &str| {
            judged(&[], &[(":status", status), ("cache-control", line)], Duration::ZERO).forbidden
        };
        for status in ["200", "404", "503"] {
            assert_eq!(forbidden(status, "max-age=9, no-store, must-understand"), None, "{status}");
        }
        for status in ["206", "299", "429", "599"] {
            let with = forbidden(status, "max-age=9, no-store, must-understand");
            assert_eq!(with, Some(Forbidden::NoStore), "{status}");
            let without = forbidden(status, "max-age=9, must-understand");
            assert_eq!(without, Some(Forbidden::Status), "{status}");
        }
        let private = forbidden("200", "no-store, must-understand, private");
        assert_eq!(private, Some(Forbidden::Private));
    }

    #[test]
    fn the_lifetime_is_the_shared_one_else_the_private_one_else_the_date() {
        let later = ("expires", "Sun, 06 Nov 1994 08:50:37 GMT");
        let earlier_date = ("date", "Sun, 06 Nov 1994 08:49:36 GMT");
        let cases: [(&[(&str, &str)], u64); 16] = [
            (&[("cache-control", "max-age=5, s-maxage=7"), TEN_LATER], 7),
            (&[("cache-control", "s-maxage=3, max-age=5"), TEN_LATER], 3),
            (&[("cache-control", "max-age=5"), TEN_LATER], 5),
            (&[("cache-control", "max-age=5"), ("expires", "0")], 5),
            (&[("cache-control", "max-age=0"), TEN_LATER], 0),
            (&[("cache-control", "max-age=x"), TEN_LATER], 0),
            (&[TEN_LATER], 10),
            (&[TEN_LATER, DATE], 10),
            (&[TEN_LATER, earlier_date], 11),
            (&[TEN_LATER, ("date", "foo")], 10),
            (&[TEN_LATER, ("date", "foo"), earlier_date], 11),
            (&[TEN_LATER, TEN_LATER], 10),
            (&[TEN_LATER, ("expires", "Sunday, 06-Nov-94 08:49:47 GMT")], 10),
            (&[TEN_LATER, later], 0),
            (&[TEN_LATER, ("expires", "0")], 0),
            (&[TEN_LATER, later, TEN_LATER], 0),
        ];
        for (headers, expected) in cases {
            assert_eq!(verdict(headers).lifetime, secs(expected), "{headers:?}");
        }
        // Before its date; both clocks are fast.
        let fast = [("date", "Sun, 06 Nov 1994 08:56:17 GMT"), ("expires", "Sun, 06 Nov 1994 08:54:37 GMT")];
        assert_eq!(verdict(&fast).lifetime, secs(0));
        assert_eq!(verdict(&[("cache-control", "foo"), ("pragma", "no-cache")]).lifetime, None);
    }

    #[test]
    fn the_age_is_read_as_the_specification_asks() {
        let cases: [(&[(&str, &str)], u64); 16] = [
            (&[("age", "7")], 7),
            (&[("age", " 7 ")], 7),
            (&[("age", "007")], 7),
            (&[("age", "7, 0")], 7),
            (&[("age", "0,7")], 0),
            (&[("age", "7"), ("age", "0")], 7),
            (&[("age", "0"), ("age", "7")], 0),
            (&[("age", "99999999999999999999")], 1 << 31),
            (&[("age", "-7")], 0),
            (&[("age", "7.0")], 0),
            (&[("age", "abc")], 0),
            (&[("age", "")], 0),
            (&[("age", "x"), ("age", "7")], 0),
            (&[("age", "\"7\"")], 0),
            // The clocks do not count.
            (&[("date", "Sun, 06 Nov 1994 08:49:28 GMT")], 0),
            (&[("date", "Sun, 06 Nov 1994 08:49:28 GMT"), ("age", "7")], 7),
        ];
        for (headers, expected) in cases {
            assert_eq!(verdict(headers).age, Duration::from_secs(expected), "{headers:?}");
        }
    }

    #[test]
    fn the_call_makes_what_a_cache_has_sent_older() {
        let age = |headers: &[(&str, &str)]| judged(&[], headers, Duration::from_millis(1_500)).age;
        assert_eq!(age(&[]), Duration::ZERO);
        assert_eq!(age(&[("age", "0")]), Duration::from_millis(1_500));
        assert_eq!(age(&[("age", "2")]), Duration::from_millis(3_500));
    }

    #[test]
    fn a_slow_call_is_no_reason_not_to_share() {
        for (age, forbidden) in [(None, None), (Some("9"), None), (Some("10"), Some(Forbidden::Expired))] {
            let mut headers = vec![(":status", "200"), ("cache-control", "max-age=10")];
            headers.extend(age.map(|age| ("age", age)));
            assert_eq!(judged(&[], &headers, Duration::from_secs(60)).forbidden, forbidden, "{age:?}");
        }
    }

    #[test]
    fn what_is_older_than_its_lifetime_is_not_shared() {
        let forbidden = |headers: &[(&str, &str)]| verdict(headers).forbidden;
        let max_age = ("cache-control", "max-age=10");
        assert_eq!(forbidden(&[max_age, ("age", "9")]), None);
        assert_eq!(forbidden(&[max_age, ("age", "10")]), Some(Forbidden::Expired));
        let slow = [("date", "Sun, 06 Nov 1994 08:49:27 GMT"), TEN_LATER];
        assert_eq!(forbidden(&[slow[0], slow[1], ("age", "25")]), Some(Forbidden::Expired));
        assert_eq!(forbidden(&slow), None);
        let fast = [("date", "Sun, 06 Nov 1994 08:49:47 GMT"), ("expires", "Sun, 06 Nov 1994 08:49:57 GMT")];
        assert_eq!(forbidden(&[fast[0], fast[1], ("age", "15")]), Some(Forbidden::Expired));
        assert_eq!(forbidden(&fast), None);
        assert_eq!(forbidden(&[("age", "1000")]), None);
    }

    #[test]
    fn what_may_be_stale() {
        for line in ["must-revalidate", "proxy-revalidate", "s-maxage=9"] {
            assert!(!verdict(&[("cache-control", line)]).may_be_stale, "{line}");
        }
        let may = verdict(&[("cache-control", "max-age=1, stale-if-error=2, stale-while-revalidate=3")]);
        assert!(may.may_be_stale && may.forbidden.is_none());
        assert_eq!((may.stale_if_error, may.stale_while_revalidate), (secs(2), secs(3)));
    }

    #[test]
    fn backends_steer_grpc_replies() {
        let cases = [
            ("", Steering::Anyone, None),
            ("foo", Steering::Anyone, None),
            ("public", Steering::Anyone, None),
            ("max-age=5", Steering::Anyone, secs(5)),
            ("max-age=5, s-maxage=6", Steering::Anyone, secs(6)),
            ("max-age=0, s-maxage=6", Steering::Anyone, secs(6)),
            ("max-age=0", Steering::Waiters, None),
            ("max-age=5, s-maxage=0", Steering::Waiters, None),
            ("max-age=x", Steering::Waiters, None),
            ("no-store", Steering::Waiters, None),
            ("no-cache, max-age=5", Steering::Waiters, None),
            ("private", Steering::Leader, None),
            ("no-store, private, max-age=5", Steering::Leader, None),
        ];
        for (line, sharing, ttl) in cases {
            let headers = block(&[(":status", "200"), ("cache-control", line)]);
            let judged = judge_grpc(Pairs::parse(&headers).unwrap());
            assert_eq!(judged, GrpcVerdict { sharing, ttl }, "{line}");
        }
        let nothing = GrpcVerdict { sharing: Steering::Anyone, ttl: None };
        assert_eq!(judge_grpc(Pairs::default()), nothing);
    }

    #[test]
    fn no_headers_panic() {
        let name = prop::sample::select(vec![
            &b":status"[..],
            b"date",
            b"expires",
            b"age",
            b"vary",
            b"cache-control",
            b"authorization",
        ]);
        let value = prop_oneof![
            prop::collection::vec(any::<u8>(), 0..24),
            any::<u64>().prop_map(|n| format!("max-age={n}").into_bytes()),
            any::<u64>().prop_map(|n| n.to_string().into_bytes()),
            Just(b"Fri, 31 Dec 9999 23:59:59 GMT".to_vec()),
            Just(b"200".to_vec()),
        ];
        let clocks = (any::<u64>(), any::<u64>(), 0..1_000_000_000_u32);
        runner(2_048)
            .run(&(prop::collection::vec((name, value), 0..8), clocks), |(list, (received, secs, nanos))| {
                let mut headers = PairsBuilder::default();
                for (name, value) in &list {
                    headers.push(name, value);
                }
                let block = headers.build();
                let headers = Pairs::parse(&block).unwrap();
                let verdict = judge(headers, headers, received, Duration::new(secs, nanos));
                let told =
                    headers.first(b"age").is_some_and(|age| age.first().is_some_and(u8::is_ascii_digit));
                prop_assert!(told || verdict.age.subsec_nanos() == 0);
                let _ = judge_grpc(headers);
                Ok(())
            })
            .unwrap();
    }
}
