//! On which terms a reply is kept: what its backend says, within what the settings allow.

use crate::http::freshness::{GrpcVerdict, Steering, Verdict};
use crate::life::Terms;
use crate::policy::Policy;
use crate::reply::{Reply, Share};
use crate::{Nanos, nanos};
use std::time::Duration;

/// The terms for a gRPC reply, and who may be given it. What its backend says of freshness counts for failures too; if it
/// says nothing, those are kept only if `cache_errors` is set. A reply that counts as a failure itself stands in for none.
pub fn of_grpc(
    reply: &Reply,
    verdict: &GrpcVerdict,
    policy: &Policy,
    cache_errors: bool,
    failed: bool,
) -> (Share, Terms) {
    let default = if reply.is_ok() || cache_errors { policy.ttl } else { Duration::ZERO };
    let (share, ttl) = match verdict.sharing {
        Steering::Anyone => (Share::Anyone, verdict.ttl.map_or(default, |ttl| ttl.min(policy.max_ttl))),
        Steering::Waiters => (Share::Anyone, Duration::ZERO),
        Steering::Leader => (Share::Leader, Duration::ZERO),
    };
    let terms = Terms {
        age: 0,
        ttl: nanos(ttl),
        revalidate: nanos(policy.stale_while_revalidate),
        error: nanos(policy.stale_if_error),
        jitter: policy.ttl_jitter,
    };
    (share, without_stale(terms, failed))
}

/// The terms for a plain HTTP reply. Its lifetime counts from when its origin made it (RFC 9111, section 4.2); its own
/// word on staleness (RFC 5861) goes before the settings'.
pub fn of_http(reply: &Reply, verdict: &Verdict, policy: &Policy, cache_errors: bool, failed: bool) -> Terms {
    let default = if reply.is_ok() || cache_errors { policy.ttl } else { Duration::ZERO };
    let left = |lifetime: Duration| lifetime.saturating_sub(verdict.age);
    let ttl = match (verdict.forbidden, verdict.lifetime) {
        (Some(_), _) => Duration::ZERO,
        (None, Some(lifetime)) => left(lifetime).min(policy.max_ttl),
        (None, None) => left(default),
    };
    let stale = |own: Option<Duration>, set: Duration| own.map_or(set, |own| own.min(policy.max_ttl));
    let terms = Terms {
        age: nanos(verdict.age),
        ttl: nanos(ttl),
        revalidate: nanos(stale(verdict.stale_while_revalidate, policy.stale_while_revalidate)),
        error: nanos(stale(verdict.stale_if_error, policy.stale_if_error)),
        jitter: policy.ttl_jitter,
    };
    without_stale(terms, failed || !verdict.may_be_stale)
}

/// How long any reply may be kept, fresh or stale, whatever its backend says.
pub fn longest(policy: &Policy) -> Nanos {
    let stale = policy.max_ttl.max(policy.stale_if_error).max(policy.stale_while_revalidate);
    nanos(policy.max_ttl.max(policy.ttl)).saturating_add(nanos(stale))
}

fn without_stale(terms: Terms, is_so: bool) -> Terms {
    if is_so { Terms { revalidate: 0, error: 0, ..terms } } else { terms }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grpc::Code;
    use crate::http::freshness::Forbidden;
    use crate::reply::tests::of_weight;
    use crate::testing::test;

    const SECOND: Duration = Duration::from_secs(1);

    fn policy() -> Policy {
        Policy {
            ttl: SECOND,
            max_ttl: 10 * SECOND,
            stale_if_error: 30 * SECOND,
            stale_while_revalidate: 20 * SECOND,
            ttl_jitter: 0.1,
            ..Policy::default()
        }
    }

    const SILENT: GrpcVerdict = GrpcVerdict { sharing: Steering::Anyone, ttl: None };

    fn seconds(terms: Terms) -> (u64, u64, u64) {
        let second = nanos(SECOND);
        (terms.ttl / second, terms.revalidate / second, terms.error / second)
    }

    #[test]
    fn nothing_is_kept_for_longer_than_the_longest() {
        let hours = |hours: u64| Duration::from_secs(3_600 * hours);
        for (max_ttl, stale_if_error, expected) in [(1, 24, 25), (2, 0, 4), (0, 0, 0)] {
            let (max_ttl, stale_if_error) = (hours(max_ttl), hours(stale_if_error));
            let policy = Policy { ttl: Duration::ZERO, max_ttl, stale_if_error, ..policy() };
            assert_eq!(
                longest(&Policy { stale_while_revalidate: hours(0), ..policy }),
                nanos(hours(expected))
            );
        }
    }

    #[test]
    fn grpc_backends_steer_within_the_settings() {
        let says = |sharing, ttl: Option<u64>| GrpcVerdict { sharing, ttl: ttl.map(Duration::from_secs) };
        let cases = [
            (SILENT, Share::Anyone, (1, 20, 30)),
            (says(Steering::Anyone, Some(5)), Share::Anyone, (5, 20, 30)),
            (says(Steering::Anyone, Some(50)), Share::Anyone, (10, 20, 30)),
            (says(Steering::Waiters, None), Share::Anyone, (0, 20, 30)),
            (says(Steering::Leader, None), Share::Leader, (0, 20, 30)),
        ];
        for (verdict, share, expected) in cases {
            let (got, terms) = of_grpc(&of_weight(0), &verdict, &policy(), false, false);
            assert_eq!((got, seconds(terms)), (share, expected), "{verdict:?}");
            assert_eq!(terms.jitter, 0.1);
        }
    }

    #[test]
    fn grpc_failures_are_kept_if_somebody_wants_that() {
        let failure = Reply::failure(Code::UNAVAILABLE, "");
        let keep = |verdict, cache_errors, failed| {
            seconds(of_grpc(&failure, verdict, &policy(), cache_errors, failed).1)
        };
        assert_eq!(keep(&SILENT, false, true), (0, 0, 0));
        assert_eq!(keep(&SILENT, true, true), (1, 0, 0));
        let says = GrpcVerdict { ttl: Some(3 * SECOND), ..SILENT };
        assert_eq!(keep(&says, false, true), (3, 0, 0));
        assert_eq!(keep(&says, false, false), (3, 20, 30), "one that is no failure of the backend");
    }

    const PLAIN: Verdict = Verdict::SILENT;

    #[test]
    fn http_replies_live_as_they_say() {
        let cases = [
            (PLAIN, (1, 20, 30)),
            (Verdict { lifetime: Some(5 * SECOND), ..PLAIN }, (5, 20, 30)),
            (Verdict { lifetime: Some(5 * SECOND), age: 2 * SECOND, ..PLAIN }, (3, 20, 30)),
            (Verdict { lifetime: Some(50 * SECOND), age: 45 * SECOND, ..PLAIN }, (5, 20, 30)),
            (Verdict { lifetime: Some(50 * SECOND), ..PLAIN }, (10, 20, 30)),
            (Verdict { age: 2 * SECOND, ..PLAIN }, (0, 20, 30)),
            (Verdict { forbidden: Some(Forbidden::Private), ..PLAIN }, (0, 20, 30)),
            (Verdict { may_be_stale: false, ..PLAIN }, (1, 0, 0)),
            (Verdict { stale_if_error: Some(SECOND), ..PLAIN }, (1, 20, 1)),
            (Verdict { stale_if_error: Some(99 * SECOND), ..PLAIN }, (1, 20, 10)),
            (Verdict { stale_while_revalidate: Some(Duration::ZERO), ..PLAIN }, (1, 0, 30)),
        ];
        for (verdict, expected) in cases {
            let terms = of_http(&of_weight(0), &verdict, &policy(), false, false);
            assert_eq!(seconds(terms), expected, "{verdict:?}");
        }
    }

    #[test]
    fn http_failures_are_kept_if_somebody_wants_that() {
        let failure = Reply::http_failure(503, "");
        let keep = |verdict: &Verdict, cache_errors| {
            seconds(of_http(&failure, verdict, &policy(), cache_errors, true))
        };
        assert_eq!(keep(&PLAIN, false), (0, 0, 0));
        assert_eq!(keep(&PLAIN, true), (1, 0, 0));
        assert_eq!(keep(&Verdict { lifetime: Some(5 * SECOND), ..PLAIN }, false), (5, 0, 0));
    }
}
