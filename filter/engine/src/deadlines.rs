//! Deadlines of requests that pass by themselves: all have the same time, so they fall due in the order they came.

use crate::{Nanos, Waiter};
use std::collections::VecDeque;

const GONE: Waiter = 0;

/// A place in the queue, to leave with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place(u64);

/// The requests of one worker that pass.
#[derive(Debug)]
pub struct Deadlines {
    limit: Nanos,
    /// How many have left the front of the queue.
    left: u64,
    queue: VecDeque<(Waiter, Nanos)>,
}

impl Deadlines {
    /// An empty queue whose members have so many nanoseconds.
    pub fn new(limit: Nanos) -> Self {
        Self { limit, left: 0, queue: VecDeque::new() }
    }

    /// A request begins at `now`, which is never before the last one's.
    pub fn enter(&mut self, waiter: Waiter, now: Nanos) -> Place {
        self.queue.push_back((waiter, now.saturating_add(self.limit)));
        Place(self.left + self.queue.len() as u64 - 1)
    }

    /// A request is over.
    pub fn leave(&mut self, place: Place) {
        let at = place.0.checked_sub(self.left).and_then(|at| usize::try_from(at).ok());
        if let Some((waiter, _)) = at.and_then(|at| self.queue.get_mut(at)) {
            *waiter = GONE;
        }
        while self.queue.front().is_some_and(|(waiter, _)| *waiter == GONE) {
            self.drop_first();
        }
    }

    /// Takes out a request whose time is over.
    pub fn next_due(&mut self, now: Nanos) -> Option<Waiter> {
        while let Some((waiter, _)) = self.queue.front().copied().filter(|(_, due)| *due <= now) {
            self.drop_first();
            if waiter != GONE {
                return Some(waiter);
            }
        }
        None
    }

    /// When the next request falls due, if none leaves before.
    pub fn next_deadline(&self) -> Option<Nanos> {
        self.queue.front().map(|(_, due)| *due)
    }

    fn drop_first(&mut self) {
        self.left += u64::from(self.queue.pop_front().is_some());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::test;

    #[test]
    fn requests_fall_due_in_their_order() {
        let mut deadlines = Deadlines::new(10);
        assert_eq!(deadlines.next_deadline(), None);
        for waiter in 1..=3 {
            deadlines.enter(waiter, u64::from(waiter));
        }
        assert_eq!(deadlines.next_deadline(), Some(11));
        assert_eq!(deadlines.next_due(10), None);
        assert_eq!(deadlines.next_due(12), Some(1));
        assert_eq!(deadlines.next_due(12), Some(2));
        assert_eq!(deadlines.next_due(12), None);
        assert_eq!(deadlines.next_deadline(), Some(13));
    }

    #[test]
    fn who_has_left_does_not_fall_due_and_takes_no_memory() {
        let mut deadlines = Deadlines::new(10);
        let [first, second, third] = [1, 2, 3].map(|waiter| deadlines.enter(waiter, 0));
        deadlines.leave(second);
        assert_eq!(deadlines.queue.len(), 3);
        deadlines.leave(first);
        assert_eq!(deadlines.queue.len(), 1);
        deadlines.leave(first);
        deadlines.leave(second);
        assert_eq!(deadlines.next_due(10), Some(3));
        deadlines.leave(third);
        assert_eq!((deadlines.next_due(10), deadlines.next_deadline()), (None, None));
    }

    #[test]
    fn a_place_stays_the_same_whoever_leaves() {
        let mut deadlines = Deadlines::new(10);
        for round in 0..1_000 {
            let early = deadlines.enter(1, round);
            let late = deadlines.enter(2, round);
            deadlines.leave(early);
            deadlines.leave(late);
        }
        let place = deadlines.enter(7, 1_000);
        deadlines.enter(8, 1_000);
        deadlines.leave(place);
        assert_eq!(deadlines.next_due(2_000), Some(8));
    }
}
