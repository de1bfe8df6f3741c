//! How many bytes of replies may be on their way to callers at a time.
//!
//! Inside the filter a reply is shared by all its waiters, but Envoy copies it into every caller's
//! stream and keeps that copy until the caller has read it. A thousand callers of a large reply who
//! read slowly, or not at all, would take a thousand times its size. So each copy is charged here when it
//! is handed over and given back when its stream ends; those for whom there is no room wait.
//!
//! Callers who read nothing must not hold up the others for as long as Envoy has patience with them, so a
//! charge lapses after [`LAPSE`]. What they can pile up is thereby bounded too: the limit for every
//! [`LAPSE`] of Envoy's flush timeout. Charges are kept by the second in which they were made.

use crate::Nanos;

/// How long a charge lasts if it is not given back, in seconds; up to one less.
pub const LAPSE: u64 = 3;

const SECOND: Nanos = 1_000_000_000;

/// When a charge was made, to give it back with: a second, of which 32 bits tell enough. There is one for each waiter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Charged(u32);

/// The budget of one worker.
#[derive(Debug)]
pub struct Budget {
    limit: usize,
    second: u64,
    /// What was charged in each of the last seconds, the second itself modulo their number.
    charges: [usize; LAPSE as usize],
}

impl Budget {
    /// A budget of `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Self { limit, second: 0, charges: [0; LAPSE as usize] }
    }

    /// Charges `bytes` if there is room. A reply larger than the whole budget has room when it is alone.
    pub fn take(&mut self, bytes: usize, now: Nanos) -> Option<Charged> {
        self.lapse(now);
        let used = self.used();
        if used > 0 && used.saturating_add(bytes) > self.limit {
            return None;
        }
        let charge = &mut self.charges[(self.second % LAPSE) as usize];
        *charge = charge.saturating_add(bytes);
        Some(Charged(self.second as u32))
    }

    /// Gives back what was charged, unless that has lapsed.
    pub fn give_back(&mut self, bytes: usize, charged: Charged) {
        let ago = u64::from((self.second as u32).wrapping_sub(charged.0));
        if ago < LAPSE {
            let charge = &mut self.charges[(self.second.saturating_sub(ago) % LAPSE) as usize];
            *charge = charge.saturating_sub(bytes);
        }
    }

    /// What is charged.
    pub fn used(&self) -> usize {
        self.charges.iter().fold(0, |sum, charge| sum.saturating_add(*charge))
    }

    /// Drops the charges whose time is over; returns whether there were any.
    pub fn lapse(&mut self, now: Nanos) -> bool {
        let before = self.used();
        let second = (now / SECOND).max(self.second);
        for lapsed in (self.second + 1..=second).take(LAPSE as usize) {
            self.charges[(lapsed % LAPSE) as usize] = 0;
        }
        if second - self.second >= LAPSE {
            self.charges = [0; LAPSE as usize];
        }
        self.second = second;
        self.used() < before
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::test;

    #[test]
    fn there_is_room_up_to_the_limit() {
        let mut budget = Budget::new(10);
        budget.take(6, 0).unwrap();
        let charged = budget.take(4, 0).unwrap();
        assert_eq!(budget.take(1, 0), None);
        assert!(budget.take(0, 0).is_some(), "nothing always fits");
        budget.give_back(4, charged);
        assert_eq!(budget.take(5, 0), None);
        assert!(budget.take(4, 0).is_some());
        assert_eq!(budget.used(), 10);
    }

    #[test]
    fn one_that_never_fits_goes_alone() {
        let mut budget = Budget::new(10);
        let small = budget.take(1, 0).unwrap();
        assert_eq!(budget.take(100, 0), None);
        budget.give_back(1, small);
        let large = budget.take(100, 0).unwrap();
        assert_eq!(budget.take(1, 0), None);
        budget.give_back(100, large);
        assert!(budget.take(1, 0).is_some());
    }

    #[test]
    fn a_charge_that_nobody_gives_back_lapses() {
        let mut budget = Budget::new(10);
        let early = budget.take(6, 0).unwrap();
        let late = budget.take(4, SECOND).unwrap();
        assert!(!budget.lapse(LAPSE * SECOND - 1));
        assert!(budget.lapse(LAPSE * SECOND));
        assert_eq!(budget.used(), 4);
        budget.give_back(6, early);
        assert_eq!(budget.used(), 4, "what has lapsed is not given back again");
        budget.give_back(4, late);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn a_long_silence_lapses_everything() {
        let mut budget = Budget::new(10);
        budget.take(6, 0).unwrap();
        budget.take(1, 2 * SECOND).unwrap();
        assert!(budget.lapse(1_000 * SECOND));
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn a_clock_that_stands_or_goes_back_does_no_harm() {
        let mut budget = Budget::new(10);
        let charged = budget.take(6, 9 * SECOND).unwrap();
        assert!(!budget.lapse(0));
        budget.give_back(6, charged);
        assert_eq!(budget.used(), 0);
    }
}
