//! Requests that may turn out to be open streams.
//!
//! A call whose headers came without a message, or whose first message came without END_STREAM, is
//! most often a unary one of which the rest comes a moment later in a frame of its own. It may also
//! be a stream, whose caller waits for an answer before it sends more. After a short grace they are
//! released upstream. All have the same grace, so they fall due in the order in which they came, and
//! both entering and leaving are O(1).

use crate::{Nanos, Waiter};
use std::collections::VecDeque;

/// A place in the queue, to leave it with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place(u64);

/// The queue of one worker.
#[derive(Debug, Default)]
pub struct Grace {
    queue: VecDeque<(Nanos, Option<Waiter>)>,
    /// The place of the front of the queue.
    front: u64,
}

impl Grace {
    /// Enters a request that is to be released at `due`, no earlier than those before it.
    pub fn enter(&mut self, waiter: Waiter, due: Nanos) -> Place {
        let place = Place(self.front + self.queue.len() as u64);
        self.queue.push_back((due, Some(waiter)));
        place
    }

    /// Takes a request out again; returns whether it was there still, and not released meanwhile.
    pub fn leave(&mut self, place: Place) -> bool {
        let at = place.0.checked_sub(self.front).and_then(|at| usize::try_from(at).ok());
        let entry = at.and_then(|at| self.queue.get_mut(at));
        let was_there = entry.is_some_and(|(_, waiter)| waiter.take().is_some());
        self.drop_vacated();
        was_there
    }

    /// The next request that is due at `now`.
    pub fn next_due(&mut self, now: Nanos) -> Option<Waiter> {
        self.drop_vacated();
        let (due, waiter) = *self.queue.front()?;
        if due > now {
            return None;
        }
        self.queue.pop_front();
        self.front += 1;
        waiter
    }

    /// When the next one falls due.
    pub fn next_deadline(&self) -> Option<Nanos> {
        self.queue.front().map(|(due, _)| *due)
    }

    /// Keeps the front of the queue occupied, so that the queue is as short as it can be.
    fn drop_vacated(&mut self) {
        while let Some((_, None)) = self.queue.front() {
            self.queue.pop_front();
            self.front += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::test;

    #[test]
    fn falls_due_in_order_and_only_when_due() {
        let mut grace = Grace::default();
        grace.enter(1, 10);
        grace.enter(2, 20);
        assert_eq!(grace.next_deadline(), Some(10));
        assert_eq!(grace.next_due(9), None);
        assert_eq!(grace.next_due(10), Some(1));
        assert_eq!(grace.next_due(10), None);
        assert_eq!(grace.next_due(25), Some(2));
        assert_eq!(grace.next_deadline(), None);
    }

    #[test]
    fn one_who_left_is_not_released_and_the_queue_stays_short() {
        let mut grace = Grace::default();
        let first = grace.enter(1, 10);
        for waiter in 2..1_000 {
            let place = grace.enter(waiter, 10);
            grace.leave(place);
        }
        assert!(grace.leave(first));
        assert!(grace.queue.is_empty());
        let place = grace.enter(7, 20);
        assert!(!grace.leave(first));
        assert_eq!(grace.next_deadline(), Some(20), "a stale place takes nobody else out");
        assert_eq!(grace.next_due(20), Some(7));
        assert!(!grace.leave(place), "it was released");
        assert_eq!(grace.next_due(99), None);
    }
}
