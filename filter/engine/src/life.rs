//! Until when a reply may answer whom.
//!
//! A reply is fresh for its TTL; after that it may, if the settings or its backend say so, still answer while it is
//! refreshed (RFC 5861, section 3), and stand in for a failure (RFC 5861, section 4).

use crate::Nanos;
use crate::wire::Reader;

/// What a reply's life is to be.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Terms {
    /// How old it was when it came (RFC 9111, section 4.2.3).
    pub age: Nanos,
    /// How long it is fresh from now on; 0 is not at all.
    pub ttl: Nanos,
    /// How long after that it may answer while it is refreshed.
    pub revalidate: Nanos,
    /// How long after that it may stand in for a failure.
    pub error: Nanos,
    /// By which share of itself, at most, the TTL is shortened by chance, so that keys filled together do not expire
    /// together; 0 to 1.
    pub jitter: f64,
}

impl Terms {
    /// The same with a TTL that chance has settled; `chance` is above 0 and up to 1.
    pub fn settled(self, chance: f64) -> Self {
        let less = self.ttl as f64 * self.jitter * chance;
        Self { ttl: self.ttl.saturating_sub(less as Nanos), jitter: 0.0, ..self }
    }
}

/// The life of a reply. All but `age` and `took` are points in time; the default is one that nobody keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Life {
    /// When it came.
    pub landed: Nanos,
    /// How old it was then.
    pub age: Nanos,
    /// How long its call took.
    pub took: Nanos,
    /// Until then it answers whoever comes.
    pub fresh: Nanos,
    /// Until then it answers while it is refreshed.
    pub revalidate: Nanos,
    /// Until then it stands in for a failure.
    pub error: Nanos,
}

impl Life {
    /// Bytes of [`Self::encode`].
    pub(crate) const ENCODED: usize = 6 * 8;

    /// The life of a reply that comes at `now`, after a call that `took` so long. Without a TTL it is kept for nobody.
    pub fn new(terms: Terms, took: Nanos, now: Nanos) -> Self {
        let fresh = now.saturating_add(terms.ttl);
        let stale = |by| if terms.ttl == 0 { now } else { fresh.saturating_add(by) };
        Self {
            landed: now,
            age: terms.age,
            took,
            fresh,
            revalidate: stale(terms.revalidate),
            error: stale(terms.error),
        }
    }

    /// Until when it is of use to anybody.
    pub fn kept(&self) -> Nanos {
        self.fresh.max(self.revalidate).max(self.error)
    }

    /// When its call began.
    pub fn began(&self) -> Nanos {
        self.landed.saturating_sub(self.took)
    }

    /// How old it is.
    pub fn age_at(&self, now: Nanos) -> Nanos {
        self.age.saturating_add(now.saturating_sub(self.landed))
    }

    /// For how many seconds it is still fresh; negative for how many it has not been, rounded away from fresh.
    pub fn ttl_at(&self, now: Nanos) -> i64 {
        const SECOND: Nanos = 1_000_000_000;
        match self.fresh.checked_sub(now) {
            Some(left) => i64::try_from(left / SECOND).unwrap_or(i64::MAX),
            None => i64::try_from((now - self.fresh).div_ceil(SECOND)).map_or(i64::MIN, |gone| -gone),
        }
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        for nanos in [self.landed, self.age, self.took, self.fresh, self.revalidate, self.error] {
            out.extend_from_slice(&nanos.to_le_bytes());
        }
    }

    pub(crate) fn decode(reader: &mut Reader<'_>) -> Option<Self> {
        Some(Self {
            landed: reader.u64()?,
            age: reader.u64()?,
            took: reader.u64()?,
            fresh: reader.u64()?,
            revalidate: reader.u64()?,
            error: reader.u64()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::test;

    const SECOND: Nanos = 1_000_000_000;

    #[test]
    fn stale_times_begin_where_freshness_ends() {
        let terms = Terms { age: 5, ttl: 10, revalidate: 20, error: 30, jitter: 0.0 };
        let life = Life::new(terms, 3, 100);
        assert_eq!((life.fresh, life.revalidate, life.error, life.kept()), (110, 130, 140, 140));
        assert_eq!(life.age_at(107), 12);
    }

    #[test]
    fn without_a_ttl_nothing_is_kept() {
        let terms = Terms { ttl: 0, revalidate: 20, error: 30, ..Terms::default() };
        assert_eq!(Life::new(terms, 3, 100).kept(), 100);
    }

    #[test]
    fn jitter_shortens_by_its_share_at_most_and_never_lengthens() {
        let terms = Terms { ttl: 1_000, jitter: 0.2, error: 7, ..Terms::default() };
        assert_eq!(terms.settled(1.0), Terms { ttl: 800, jitter: 0.0, ..terms });
        assert_eq!(terms.settled(0.5).ttl, 900);
        assert_eq!(Terms { jitter: 0.0, ..terms }.settled(1.0).ttl, 1_000);
        assert_eq!(Terms { jitter: 1.0, ..terms }.settled(1.0).ttl, 0);
    }

    #[test]
    fn the_ttl_left_counts_whole_seconds_and_goes_below_zero() {
        let life = Life::new(Terms { ttl: 3 * SECOND, ..Terms::default() }, 0, 0);
        for (now, ttl) in [(0, 3), (1, 2), (3 * SECOND, 0), (3 * SECOND + 1, -1), (5 * SECOND, -2)] {
            assert_eq!(life.ttl_at(now), ttl, "{now}");
        }
    }

    #[test]
    fn what_was_written_is_read() {
        let life = Life { landed: 1, age: 2, took: 3, fresh: 4, revalidate: 5, error: u64::MAX };
        let mut out = Vec::new();
        life.encode(&mut out);
        assert_eq!(out.len(), Life::ENCODED);
        assert_eq!(Life::decode(&mut Reader::new(&out)), Some(life));
    }
}
