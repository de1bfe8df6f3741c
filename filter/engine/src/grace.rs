//! Requests that may turn out to be open streams.
//!
//! A call whose headers came without a message, or whose first message came without END_STREAM, is
//! most often a unary one of which the rest comes a moment later in a frame of its own. It may also be
//! a stream, whose caller waits for an answer before it sends more. After a while they are released
//! upstream: after the *grace* if a whole message is there and the method is not known to be unary; after
//! the longer *patience* if there is no message yet, or if there is and the method is known.
//!
//! Both waits are for the caller, not for the proxy: while the event loop is busy, what callers have
//! sent lies unread. A tick that came late says so; it moves the deadlines ([`Grace::postpone`]), though
//! never by more than [`LONGEST_POSTPONEMENT`].
//!
//! Within each of the two waits requests fall due in the order in which they came, so entering,
//! leaving and falling due are all O(1).

use crate::catalog::MethodId;
use crate::{Nanos, Waiter};
use std::collections::VecDeque;

/// By how much a deadline may move in all, in nanoseconds: under lasting overload, streams must go
/// on too.
pub const LONGEST_POSTPONEMENT: Nanos = 1_000_000_000;

/// The patience, in graces: one second by default. A burst of 10,000 calls over one HTTP/2 connection has
/// its messages some 150 ms behind its headers, and several times that where the client lacks
/// processor time (measured). What really is a stream waits so long once, until the catalog knows.
pub const PATIENCE: u64 = 50;

const VACANT: Waiter = 0;

/// A place in the queues, to leave with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    slot: u32,
    generation: u32,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    generation: u32,
    waiter: Waiter,
    method: Option<MethodId>,
    entered: Nanos,
    /// All postponements before the entry.
    postponed: Nanos,
}

/// What a request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// The first message.
    Message,
    /// END_STREAM, after a whole message.
    EndOfStream,
}

/// The queues of one worker.
#[derive(Debug)]
pub struct Grace {
    grace: Nanos,
    slots: Vec<Entry>,
    vacant: Vec<u32>,
    brief: VecDeque<Place>,
    patient: VecDeque<Place>,
    postponed: Nanos,
}

impl Grace {
    /// Empty queues with a grace of so many nanoseconds.
    pub fn new(grace: Nanos) -> Self {
        Self {
            grace,
            slots: Vec::new(),
            vacant: Vec::new(),
            brief: VecDeque::new(),
            patient: VecDeque::new(),
            postponed: 0,
        }
    }

    /// Enters a request.
    pub fn enter(&mut self, waiter: Waiter, method: Option<MethodId>, until: Until, now: Nanos) -> Place {
        let place = self.occupy(waiter, method, now);
        match until {
            Until::Message => self.patient.push_back(place),
            Until::EndOfStream => self.brief.push_back(place),
        }
        place
    }

    /// Takes a request out again; returns whether it was there still, and not released meanwhile.
    pub fn leave(&mut self, place: Place) -> bool {
        let Some(entry) = self.slots.get_mut(place.slot as usize) else { return false };
        if entry.generation != place.generation || entry.waiter == VACANT {
            return false;
        }
        entry.waiter = VACANT;
        entry.generation = entry.generation.wrapping_add(1);
        self.vacant.push(place.slot);
        self.drop_vacated();
        true
    }

    /// The next request that is due at `now`, with its method. Those whose method `is_unary` by now get the patience.
    pub fn next_due(
        &mut self,
        now: Nanos,
        is_unary: impl Fn(MethodId) -> bool,
    ) -> Option<(Waiter, Option<MethodId>)> {
        while self.deadline(&self.brief, self.grace).is_some_and(|due| due <= now) {
            let place = self.brief.pop_front()?;
            let entry = self.slots.get(place.slot as usize)?;
            if !entry.method.is_some_and(&is_unary) {
                return self.release(place);
            }
            self.patient.push_back(place);
            self.drop_vacated();
        }
        if self.deadline(&self.patient, self.patience()).is_some_and(|due| due <= now) {
            let place = self.patient.pop_front()?;
            return self.release(place);
        }
        None
    }

    /// Moves the deadlines of all that are in the queues.
    pub fn postpone(&mut self, by: Nanos) {
        self.postponed = self.postponed.saturating_add(by);
    }

    /// When the next one falls due.
    pub fn next_deadline(&self) -> Option<Nanos> {
        let brief = self.deadline(&self.brief, self.grace);
        let patient = self.deadline(&self.patient, self.patience());
        brief.into_iter().chain(patient).min()
    }

    fn patience(&self) -> Nanos {
        self.grace.saturating_mul(PATIENCE)
    }

    fn occupy(&mut self, waiter: Waiter, method: Option<MethodId>, now: Nanos) -> Place {
        let entry = Entry { generation: 0, waiter, method, entered: now, postponed: self.postponed };
        if let Some(slot) = self.vacant.pop()
            && let Some(vacant) = self.slots.get_mut(slot as usize)
        {
            let generation = vacant.generation;
            *vacant = Entry { generation, ..entry };
            return Place { slot, generation };
        }
        self.slots.push(entry);
        Place { slot: (self.slots.len() - 1) as u32, generation: 0 }
    }

    fn release(&mut self, place: Place) -> Option<(Waiter, Option<MethodId>)> {
        let Entry { waiter, method, .. } = *self.slots.get(place.slot as usize)?;
        self.leave(place).then_some((waiter, method))
    }

    fn deadline(&self, queue: &VecDeque<Place>, wait: Nanos) -> Option<Nanos> {
        let entry = self.slots.get(queue.front()?.slot as usize)?;
        let postponed = (self.postponed - entry.postponed).min(LONGEST_POSTPONEMENT);
        Some(entry.entered.saturating_add(wait).saturating_add(postponed))
    }

    /// Keeps the front of both queues occupied.
    fn drop_vacated(&mut self) {
        let slots = &self.slots;
        let is_stale = |place: &Place| {
            slots.get(place.slot as usize).is_none_or(|entry| entry.generation != place.generation)
        };
        for queue in [&mut self.brief, &mut self.patient] {
            while queue.front().is_some_and(is_stale) {
                queue.pop_front();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::test;

    const UNKNOWN: fn(MethodId) -> bool = |_| false;
    const UNARY: fn(MethodId) -> bool = |_| true;

    fn due(grace: &mut Grace, now: Nanos, is_unary: fn(MethodId) -> bool) -> Option<Waiter> {
        grace.next_due(now, is_unary).map(|(waiter, _)| waiter)
    }

    fn method() -> Option<MethodId> {
        Some(MethodId::FIRST)
    }

    #[test]
    fn falls_due_in_order_and_only_when_due() {
        let mut grace = Grace::new(10);
        grace.enter(1, method(), Until::EndOfStream, 0);
        grace.enter(2, None, Until::EndOfStream, 10);
        assert_eq!(grace.next_deadline(), Some(10));
        assert_eq!(due(&mut grace, 9, UNKNOWN), None);
        assert_eq!(due(&mut grace, 10, UNKNOWN), Some(1));
        assert_eq!(due(&mut grace, 10, UNKNOWN), None);
        assert_eq!(due(&mut grace, 25, UNKNOWN), Some(2));
        assert_eq!(grace.next_deadline(), None);
    }

    #[test]
    fn one_without_a_message_gets_the_patience() {
        let mut grace = Grace::new(10);
        grace.enter(1, method(), Until::Message, 0);
        grace.enter(2, method(), Until::EndOfStream, 5);
        assert_eq!(due(&mut grace, 15, UNKNOWN), Some(2));
        assert_eq!(due(&mut grace, 499, UNKNOWN), None);
        assert_eq!(due(&mut grace, 500, UNKNOWN), Some(1));
    }

    #[test]
    fn one_whose_method_has_become_known_gets_the_patience() {
        let mut grace = Grace::new(10);
        let place = grace.enter(1, method(), Until::EndOfStream, 0);
        grace.enter(2, None, Until::EndOfStream, 0);
        assert_eq!(due(&mut grace, 10, UNARY), Some(2));
        assert_eq!(due(&mut grace, 499, UNARY), None);
        assert_eq!(grace.next_deadline(), Some(500));
        assert!(grace.leave(place), "it kept its place");
        assert_eq!(grace.next_deadline(), None);
    }

    #[test]
    fn one_who_left_is_not_released_and_memory_stays_bounded() {
        let mut grace = Grace::new(10);
        let first = grace.enter(1, None, Until::EndOfStream, 0);
        for waiter in 2..1_000 {
            let place = grace.enter(waiter, None, Until::EndOfStream, 0);
            assert!(grace.leave(place));
        }
        assert_eq!(grace.slots.len(), 2);
        assert!(grace.leave(first));
        assert!(grace.brief.is_empty());
        let place = grace.enter(7, None, Until::EndOfStream, 10);
        assert!(!grace.leave(first), "a stale place takes nobody else out");
        assert_eq!(due(&mut grace, 20, UNKNOWN), Some(7));
        assert!(!grace.leave(place), "it was released");
    }

    #[test]
    fn postponing_moves_those_who_wait_and_nobody_else() {
        let mut grace = Grace::new(10);
        grace.enter(1, None, Until::EndOfStream, 0);
        grace.postpone(5);
        grace.enter(2, None, Until::EndOfStream, 6);
        assert_eq!(due(&mut grace, 14, UNKNOWN), None);
        assert_eq!(due(&mut grace, 15, UNKNOWN), Some(1));
        assert_eq!(due(&mut grace, 15, UNKNOWN), None);
        assert_eq!(due(&mut grace, 16, UNKNOWN), Some(2));
    }

    #[test]
    fn nobody_is_postponed_for_ever() {
        let mut grace = Grace::new(10);
        grace.enter(1, None, Until::EndOfStream, 0);
        (0..1_000).for_each(|_| grace.postpone(LONGEST_POSTPONEMENT));
        assert_eq!(grace.next_deadline(), Some(10 + LONGEST_POSTPONEMENT));
    }
}
