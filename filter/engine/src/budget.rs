//! How many bytes of replies may be on their way to callers at a time.
//!
//! Inside the filter a reply is shared by all its waiters, but Envoy copies it into every caller's
//! stream and keeps that copy until the caller has read it. A thousand callers of a large reply who
//! read slowly, or not at all, would take a thousand times its size. So each copy is charged here when it
//! is handed over and given back when its stream ends; those for whom there is no room wait.

/// The budget of one worker.
#[derive(Debug)]
pub struct Budget {
    limit: usize,
    used: usize,
}

impl Budget {
    /// A budget of `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Self { limit, used: 0 }
    }

    /// Charges `bytes` if there is room. A reply larger than the whole budget has room when it is alone.
    pub fn take(&mut self, bytes: usize) -> bool {
        let used = self.used.saturating_add(bytes);
        let has_room = self.used == 0 || used <= self.limit;
        if has_room {
            self.used = used;
        }
        has_room
    }

    /// Gives back what was charged.
    pub fn give_back(&mut self, bytes: usize) {
        self.used = self.used.saturating_sub(bytes);
    }

    /// What is charged now.
    pub fn used(&self) -> usize {
        self.used
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::test;

    #[test]
    fn there_is_room_up_to_the_limit() {
        let mut budget = Budget::new(10);
        assert!(budget.take(6) && budget.take(4));
        assert!(!budget.take(1));
        assert!(budget.take(0), "nothing always fits");
        budget.give_back(4);
        assert!(!budget.take(5));
        assert!(budget.take(4));
        assert_eq!(budget.used(), 10);
    }

    #[test]
    fn one_that_never_fits_goes_alone() {
        let mut budget = Budget::new(10);
        assert!(budget.take(1));
        assert!(!budget.take(100));
        budget.give_back(1);
        assert!(budget.take(100));
        assert!(!budget.take(1));
        budget.give_back(100);
        assert!(budget.take(1));
    }
}
