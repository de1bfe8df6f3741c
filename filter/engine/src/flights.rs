//! Flights in the air and their waiters.
//!
//! A flight belongs to none of its waiters. Each waiter holds a [`Ticket`] (flight and seat), with
//! which it collects its reply or gives up its seat, both in O(1); seats given up are taken again
//! by the next to join. Once a flight has landed, nobody joins any more and its waiters are called
//! in batches, flights taking turns, so that one with many waiters does not hold up the rest.

use crate::budget::{Budget, Charged};
use crate::cache::Seed;
use crate::key::Key;
use crate::reply::{Reply, Shape};
use crate::{Nanos, Waiter};
use hashbrown::HashTable;
use std::collections::VecDeque;
use std::rc::Rc;

const EMPTY: Waiter = 0;
const NIL: u32 = u32::MAX;

/// Seats that a finished flight keeps for the next one in its place, so that joining rarely
/// allocates (16 bytes each).
const SEATS_KEPT: usize = 1_024;

/// Names a flight. Stale ids are recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlightId {
    slot: u32,
    generation: u32,
}

/// A waiter's seat on a flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket {
    /// The flight it waits for.
    pub flight: FlightId,
    seat: u32,
}

/// One waiter to be answered now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Who.
    pub waiter: Waiter,
    /// With which [`Flights::collect`] gives out the reply, and [`Flights::leave`] the seat back.
    pub ticket: Ticket,
    /// When it began to wait, to the microsecond.
    pub joined: Nanos,
    /// Whether it started the flight.
    pub leader: bool,
    /// What it left to be reminded of.
    pub note: u8,
    /// The shape of the reply that it will collect.
    pub shape: Shape,
    /// The bytes of that reply's body.
    pub bytes: usize,
}

/// How much a batch may be: so many calls, and so many bytes of replies. One call is made however large its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Portion {
    /// Calls.
    pub calls: usize,
    /// Bytes of their replies' bodies.
    pub bytes: usize,
}

/// A reply and what was charged for its copy.
#[derive(Clone, Debug)]
pub struct Collected {
    /// The reply.
    pub reply: Rc<Reply>,
    /// When it was charged.
    pub charged: Charged,
    /// How its receiver came by it.
    pub by: By,
}

/// How a waiter comes by its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// Its own flight.
    Leading,
    /// A flight that it joined.
    Following,
    /// It was there, and fresh.
    Cache,
    /// It was there, and is given while a flight gets another one.
    Revalidate,
    /// It was there, and stands in for a failure.
    Error,
}

/// A flight that has landed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Landed {
    /// Its key.
    pub key: Key,
    /// When it began.
    pub started: Nanos,
    /// Whether more than one waited for it at a time, or it was for those who come later.
    pub shared: bool,
}

/// Occupied: `waiter` is not [`EMPTY`]. Vacant: `joined` holds the number of the next vacant seat. Small, since there is
/// one for each waiter.
#[derive(Clone, Copy, Debug)]
struct Seat {
    waiter: Waiter,
    /// Microseconds since the flight started, up to 71 minutes.
    joined: u32,
    leader: bool,
    note: u8,
    /// Set when it is called.
    charged: Charged,
}

impl Seat {
    fn new(waiter: Waiter, leader: bool, joined: u32) -> Self {
        Self { waiter, leader, joined, note: 0, charged: Charged::default() }
    }
}

#[derive(Debug)]
struct Flight {
    key: Key,
    generation: u32,
    started: Nanos,
    seats: Vec<Seat>,
    /// First vacant seat.
    vacant: u32,
    /// Occupied seats.
    waiting: usize,
    /// Set on landing.
    reply: Option<Rc<Reply>>,
    /// If not by the flight itself.
    by: Option<By>,
    /// Seats before this one have been called.
    called: usize,
}

/// The flights of one worker.
#[derive(Debug)]
pub struct Flights {
    seed: Seed,
    by_key: HashTable<u32>,
    slots: Vec<Flight>,
    vacant: Vec<u32>,
    landed: VecDeque<u32>,
    waiting: usize,
}

impl Default for Flights {
    fn default() -> Self {
        Self {
            seed: Seed::random(),
            by_key: HashTable::new(),
            slots: Vec::new(),
            vacant: Vec::new(),
            landed: VecDeque::new(),
            waiting: 0,
        }
    }
}

impl Flights {
    /// Flights in the air; those that have landed are not counted.
    pub fn in_air(&self) -> usize {
        self.by_key.len()
    }

    /// Waiters on all flights, landed or not, that have not collected their reply.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Whether waiters remain to be called.
    pub fn has_landed(&self) -> bool {
        !self.landed.is_empty()
    }

    /// When the flight for `key` began that is in the air.
    pub fn began(&self, key: &Key) -> Option<Nanos> {
        self.slots.get(self.find(key)? as usize).map(|flight| flight.started)
    }

    /// Whether a flight for `key` is in the air.
    pub fn is_in_air(&self, key: &Key) -> bool {
        self.find(key).is_some()
    }

    /// Joins the flight for `key`, if one is in the air.
    pub fn join(&mut self, key: &Key, waiter: Waiter, now: Nanos, note: u8) -> Option<Ticket> {
        let slot = self.find(key)?;
        let joined = self.slots.get(slot as usize)?.micros(now);
        Some(self.sit(slot, Seat { note, ..Seat::new(waiter, false, joined) }))
    }

    /// Starts a flight for `key`, which must not have one, with `waiter` as its leader.
    pub fn lead(&mut self, key: Key, waiter: Waiter, now: Nanos, note: u8) -> Ticket {
        let slot = self.begin(key, now);
        self.sit(slot, Seat { note, ..Seat::new(waiter, true, 0) })
    }

    /// Starts a flight for `key`, which must not have one, for which nobody waits yet.
    pub fn lead_unattended(&mut self, key: Key, now: Nanos) -> FlightId {
        let slot = self.begin(key, now);
        let generation = self.slots.get(slot as usize).map_or(0, |flight| flight.generation);
        FlightId { slot, generation }
    }

    fn begin(&mut self, key: Key, now: Nanos) -> u32 {
        let slot = self.vacate();
        let flight = &mut self.slots[slot as usize];
        flight.key = key;
        flight.started = now;
        let (seed, slots) = (self.seed, &self.slots);
        self.by_key.insert_unique(seed.hash(&key), slot, |slot| hash_of(seed, slots, *slot));
        slot
    }

    /// The key of a flight in the air, and when it began.
    pub fn in_air_as(&self, id: FlightId) -> Option<(Key, Nanos)> {
        let flight = self.slots.get(id.slot as usize)?;
        let is_in_air = flight.generation == id.generation && flight.reply.is_none();
        is_in_air.then_some((flight.key, flight.started))
    }

    /// The reply for which a waiter is called.
    pub fn reply(&self, ticket: Ticket) -> Option<&Rc<Reply>> {
        let flight = self.slots.get(ticket.flight.slot as usize)?;
        flight.reply.as_ref().filter(|_| flight.generation == ticket.flight.generation)
    }

    /// Ends the flight with `reply`. Its key is free for a new flight at once; its waiters are then
    /// called by [`Self::next_calls`]. `by` tells how they came by it, if not by the flight. Returns what it was, or
    /// `None` if there is no such flight in the air.
    pub fn land(&mut self, id: FlightId, reply: Rc<Reply>, by: Option<By>) -> Option<Landed> {
        let flight = self.slots.get_mut(id.slot as usize)?;
        if flight.generation != id.generation || flight.reply.is_some() {
            return None;
        }
        flight.reply = Some(reply);
        flight.by = by;
        let (key, started, shared) = (flight.key, flight.started, flight.seats.len() != 1);
        if let Ok(found) = self.by_key.find_entry(self.seed.hash(&key), |slot| *slot == id.slot) {
            found.remove();
        }
        self.landed.push_back(id.slot);
        self.drop_if_done(id.slot);
        Some(Landed { key, started, shared })
    }

    /// Seats a waiter for a reply that is there already, to be called in its turn.
    pub fn queue(&mut self, reply: Rc<Reply>, by: By, waiter: Waiter, now: Nanos, note: u8) -> Ticket {
        let slot = self.vacate();
        let flight = &mut self.slots[slot as usize];
        flight.reply = Some(reply);
        flight.by = Some(by);
        flight.started = now;
        self.landed.push_back(slot);
        self.sit(slot, Seat { note, ..Seat::new(waiter, false, 0) })
    }

    /// Calls a portion of the waiters of landed flights into `calls` (cleared first), the flights taking turns. Each is
    /// called once, and its copy of the reply charged to the `budget`. Returns whether nobody was called
    /// because there is no room for any of those who wait.
    pub fn next_calls(
        &mut self,
        portion: Portion,
        budget: &mut Budget,
        now: Nanos,
        calls: &mut Vec<Call>,
    ) -> bool {
        calls.clear();
        let (mut passed_over, mut bytes) = (0, portion.bytes);
        while calls.len() < portion.calls && passed_over < self.landed.len() {
            let Some(slot) = self.landed.pop_front() else { break };
            let Some(flight) = self.slots.get_mut(slot as usize) else { continue };
            // An equal share for every flight that waits for its turn, but never so small a one that
            // turning costs more than calling.
            let left = portion.calls - calls.len();
            let share = (left / (self.landed.len() + 1)).max(4).min(left);
            let id = FlightId { slot, generation: flight.generation };
            let before = calls.len();
            flight.call(id, Portion { calls: share, bytes }, budget, now, calls);
            bytes = bytes.saturating_sub((calls.len() - before).saturating_mul(flight.reply_bytes()));
            if flight.called == flight.seats.len() {
                self.drop_if_done(slot);
                continue;
            }
            self.landed.push_back(slot);
            passed_over = if calls.len() == before { passed_over + 1 } else { 0 };
        }
        portion.calls > 0 && calls.is_empty() && !self.landed.is_empty()
    }

    /// Hands a called waiter its reply and gives up its seat; the charge for its copy is now the
    /// waiter's to give back. `None` if it has not been called, or the ticket was used before.
    pub fn collect(&mut self, ticket: Ticket) -> Option<Collected> {
        let charged = self.charged(ticket)?;
        let flight = self.flight(ticket)?;
        let reply = flight.reply.clone()?;
        let leads = flight.seats.get(ticket.seat as usize).is_some_and(|seat| seat.leader);
        let by = flight.by.unwrap_or(if leads { By::Leading } else { By::Following });
        self.give_up(ticket).then_some(Collected { reply, charged, by })
    }

    /// Gives up a seat; what was charged for a waiter that has been called goes back to the `budget`. Returns
    /// whether the ticket was still good.
    pub fn leave(&mut self, ticket: Ticket, budget: &mut Budget) -> bool {
        let charged = self.charged(ticket);
        let bytes = self.flight(ticket).map_or(0, |flight| flight.reply_bytes());
        let left = self.give_up(ticket);
        if left && let Some(charged) = charged {
            budget.give_back(bytes, charged);
        }
        left
    }

    /// When the copy of a waiter that has been called was charged.
    fn charged(&mut self, ticket: Ticket) -> Option<Charged> {
        let flight = self.flight(ticket)?;
        let seat = flight.seats.get(ticket.seat as usize)?;
        let is_called = (ticket.seat as usize) < flight.called && seat.waiter != EMPTY;
        is_called.then_some(seat.charged)
    }

    fn give_up(&mut self, ticket: Ticket) -> bool {
        let Some(flight) = self.flight(ticket) else { return false };
        let next = flight.vacant;
        let Some(seat) = flight.seats.get_mut(ticket.seat as usize) else { return false };
        if seat.waiter == EMPTY {
            return false;
        }
        *seat = Seat::new(EMPTY, false, next);
        flight.vacant = ticket.seat;
        flight.waiting -= 1;
        self.waiting -= 1;
        self.drop_if_done(ticket.flight.slot);
        true
    }

    /// The slot of a flight that is not in use.
    fn vacate(&mut self) -> u32 {
        self.vacant.pop().unwrap_or_else(|| {
            self.slots.push(Flight::new());
            (self.slots.len() - 1) as u32
        })
    }

    fn flight(&mut self, ticket: Ticket) -> Option<&mut Flight> {
        let flight = self.slots.get_mut(ticket.flight.slot as usize)?;
        (flight.generation == ticket.flight.generation).then_some(flight)
    }

    fn find(&self, key: &Key) -> Option<u32> {
        let same = |slot: &u32| self.slots.get(*slot as usize).is_some_and(|flight| flight.key == *key);
        self.by_key.find(self.seed.hash(key), same).copied()
    }

    fn sit(&mut self, slot: u32, seat: Seat) -> Ticket {
        self.waiting += 1;
        let flight = &mut self.slots[slot as usize];
        let seat = flight.sit(seat);
        Ticket { flight: FlightId { slot, generation: flight.generation }, seat }
    }

    /// Frees a landed flight whose waiters have all been called and have collected or left.
    fn drop_if_done(&mut self, slot: u32) {
        let Some(flight) = self.slots.get_mut(slot as usize) else { return };
        if flight.reply.is_none() || flight.waiting > 0 {
            return;
        }
        self.landed.retain(|landed| *landed != slot);
        flight.reset();
        self.vacant.push(slot);
    }
}

impl Flight {
    fn new() -> Self {
        Self {
            key: Key([0; 32]),
            generation: 0,
            started: 0,
            seats: Vec::new(),
            vacant: NIL,
            waiting: 0,
            reply: None,
            by: None,
            called: 0,
        }
    }

    fn sit(&mut self, seat: Seat) -> u32 {
        self.waiting += 1;
        if let Some(vacant) = self.seats.get_mut(self.vacant as usize) {
            let number = self.vacant;
            self.vacant = vacant.joined;
            *vacant = seat;
            return number;
        }
        self.seats.push(seat);
        (self.seats.len() - 1) as u32
    }

    /// How long after its start `now` is.
    fn micros(&self, now: Nanos) -> u32 {
        u32::try_from(now.saturating_sub(self.started) / 1_000).unwrap_or(u32::MAX)
    }

    fn reply_bytes(&self) -> usize {
        self.reply.as_ref().map_or(0, |reply| reply.body.len())
    }

    fn call(
        &mut self,
        flight: FlightId,
        portion: Portion,
        budget: &mut Budget,
        now: Nanos,
        calls: &mut Vec<Call>,
    ) {
        let Some(shape) = self.reply.as_ref().map(|reply| reply.shape) else { return };
        let size = self.reply_bytes();
        let (mut left, mut bytes) = (portion.calls, portion.bytes);
        while left > 0 {
            let Some(seat) = self.seats.get_mut(self.called) else { return };
            if seat.waiter != EMPTY {
                // The first of a batch is called in any case.
                if size > bytes && !calls.is_empty() {
                    return;
                }
                let Some(charged) = budget.take(size, now) else { return };
                seat.charged = charged;
                let ticket = Ticket { flight, seat: self.called as u32 };
                let Seat { waiter, leader, joined, note, .. } = *seat;
                let joined = self.started.saturating_add(u64::from(joined) * 1_000);
                calls.push(Call { waiter, ticket, joined, leader, note, shape, bytes: size });
                left -= 1;
                bytes = bytes.saturating_sub(size);
            }
            self.called += 1;
        }
    }

    fn reset(&mut self) {
        self.generation = self.generation.wrapping_add(1);
        self.seats.clear();
        self.seats.shrink_to(SEATS_KEPT);
        self.vacant = NIL;
        self.reply = None;
        self.by = None;
        self.called = 0;
    }
}

fn hash_of(seed: Seed, slots: &[Flight], slot: u32) -> u64 {
    slots.get(slot as usize).map_or(0, |flight| seed.hash(&flight.key))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::tests::numbered;
    use crate::reply::tests::of_weight;
    use crate::testing::test;

    fn calls_only(calls: usize) -> Portion {
        Portion { calls, bytes: usize::MAX }
    }

    fn unlimited() -> Budget {
        Budget::new(usize::MAX)
    }

    fn call_all(flights: &mut Flights, batch: usize) -> Vec<Call> {
        let (mut all, mut calls) = (Vec::new(), Vec::new());
        while flights.has_landed() {
            flights.next_calls(calls_only(batch), &mut unlimited(), 0, &mut calls);
            assert!(calls.len() <= batch);
            all.extend_from_slice(&calls);
        }
        all
    }

    #[test]
    fn everyone_aboard_is_called_once_and_collects_once() {
        let mut flights = Flights::default();
        let leader = flights.lead(numbered(1), 1, 10, 0);
        for waiter in 2..=100 {
            flights.join(&numbered(1), waiter, 20, 0).unwrap();
        }
        assert_eq!((flights.in_air(), flights.waiting()), (1, 100));
        let reply = Rc::new(of_weight(0));
        assert_eq!(
            flights.land(leader.flight, reply.clone(), None),
            Some(Landed { key: numbered(1), started: 10, shared: true })
        );
        assert_eq!(flights.land(leader.flight, reply.clone(), None), None, "lands once");
        assert_eq!(flights.in_air(), 0);
        let calls = call_all(&mut flights, 32);
        let mut waiters: Vec<_> = calls.iter().map(|call| call.waiter).collect();
        waiters.sort_unstable();
        assert_eq!(waiters, (1..=100).collect::<Vec<_>>());
        assert!(calls.iter().all(|call| call.leader == (call.waiter == 1)));
        for call in &calls {
            assert!(Rc::ptr_eq(&flights.collect(call.ticket).unwrap().reply, &reply));
            assert!(flights.collect(call.ticket).is_none());
            assert!(!flights.leave(call.ticket, &mut unlimited()));
        }
        assert_eq!(flights.waiting(), 0);
        assert_eq!(Rc::strong_count(&reply), 1, "the last to leave frees the reply");
    }

    #[test]
    fn seats_given_up_are_taken_again() {
        let mut flights = Flights::default();
        let leader = flights.lead(numbered(1), 1, 0, 0);
        for round in 0..10_000 {
            let ticket = flights.join(&numbered(1), 2 + round, 0, 0).unwrap();
            assert!(flights.leave(ticket, &mut unlimited()));
            assert!(!flights.leave(ticket, &mut unlimited()));
        }
        assert!(flights.slots[0].seats.len() <= 2);
        assert!(flights.leave(leader, &mut unlimited()));
        assert_eq!((flights.in_air(), flights.waiting()), (1, 0), "a flight outlives its waiters");
        assert_eq!(
            flights.land(leader.flight, Rc::new(of_weight(0)), None).map(|landed| landed.shared),
            Some(true),
            "somebody joined"
        );
        assert!(!flights.has_landed());
    }

    #[test]
    fn a_stale_ticket_is_refused_by_the_next_flight_in_its_place() {
        let mut flights = Flights::default();
        let old = flights.lead(numbered(1), 1, 0, 0);
        flights.land(old.flight, Rc::new(of_weight(0)), None);
        assert!(flights.collect(old).is_none(), "not called yet");
        call_all(&mut flights, 1);
        assert!(flights.collect(old).is_some());
        let new = flights.lead(numbered(2), 2, 0, 0);
        assert_eq!(old.flight.slot, new.flight.slot);
        assert!(!flights.leave(old, &mut unlimited()));
        assert!(flights.land(old.flight, Rc::new(of_weight(0)), None).is_none());
        assert_eq!(flights.waiting(), 1);
    }

    #[test]
    fn one_who_leaves_between_batches_is_not_called() {
        let mut flights = Flights::default();
        let leader = flights.lead(numbered(1), 1, 0, 0);
        let last = (2..=10).map(|w| flights.join(&numbered(1), w, 0, 0).unwrap()).last().unwrap();
        flights.land(leader.flight, Rc::new(of_weight(0)), None);
        let mut calls = Vec::new();
        flights.next_calls(calls_only(4), &mut unlimited(), 0, &mut calls);
        assert!(flights.leave(last, &mut unlimited()));
        assert_eq!(call_all(&mut flights, 4).len() + calls.len(), 9);
    }

    #[test]
    fn a_small_flight_does_not_wait_for_a_large_one() {
        let mut flights = Flights::default();
        let large = flights.lead(numbered(1), 1, 0, 0);
        for waiter in 2..=1_000 {
            flights.join(&numbered(1), waiter, 0, 0).unwrap();
        }
        let small = flights.lead(numbered(2), 2_000, 0, 0);
        flights.land(large.flight, Rc::new(of_weight(0)), None);
        flights.land(small.flight, Rc::new(of_weight(0)), None);
        let mut calls = Vec::new();
        flights.next_calls(calls_only(32), &mut unlimited(), 0, &mut calls);
        assert!(calls.iter().any(|call| call.waiter == 2_000));
    }

    #[test]
    fn large_replies_wait_for_room_and_small_ones_pass_them() {
        let (mut flights, mut calls) = (Flights::default(), Vec::new());
        let reply = Rc::new(of_weight(95));
        let mut budget = Budget::new(250);
        for waiter in 1..=3 {
            flights.queue(Rc::clone(&reply), By::Cache, waiter, 0, 0);
        }
        let small = flights.queue(Rc::new(of_weight(0)), By::Cache, 4, 0, 0);
        assert!(!flights.next_calls(calls_only(32), &mut budget, 0, &mut calls));
        assert_eq!(calls.iter().map(|call| call.waiter).collect::<Vec<_>>(), [1, 2, 4]);
        let first = calls[0].ticket;
        assert!(flights.next_calls(calls_only(32), &mut budget, 0, &mut calls), "no room");
        assert!(!flights.next_calls(calls_only(0), &mut budget, 0, &mut calls), "nobody was to be called");
        assert!(flights.collect(small).is_some());
        assert!(flights.leave(first, &mut budget), "one who was called and leaves gives back its share");
        assert!(!flights.next_calls(calls_only(32), &mut budget, 0, &mut calls));
        assert_eq!(calls.len(), 1);
    }

    #[test]
    fn a_batch_has_so_many_bytes_at_most_but_at_least_one_call() {
        let (mut flights, mut calls) = (Flights::default(), Vec::new());
        let reply = Rc::new(of_weight(95));
        for waiter in 1..=3 {
            flights.queue(Rc::clone(&reply), By::Cache, waiter, 0, 0);
        }
        let mut sizes = Vec::new();
        for bytes in [1, 250] {
            flights.next_calls(Portion { calls: 32, bytes }, &mut unlimited(), 0, &mut calls);
            sizes.push(calls.len());
        }
        assert_eq!(sizes, [1, 2]);
    }

    #[test]
    fn a_flight_without_waiters_can_be_joined_and_lands() {
        let mut flights = Flights::default();
        let alone = flights.lead_unattended(numbered(1), 0);
        assert_eq!(flights.in_air_as(alone), Some((numbered(1), 0)));
        let landed = flights.land(alone, Rc::new(of_weight(0)), None).unwrap();
        assert!(landed.shared && !flights.has_landed(), "nobody is to be called");
        let joined = flights.lead_unattended(numbered(1), 0);
        let ticket = flights.join(&numbered(1), 7, 0, 3).unwrap();
        flights.land(joined, Rc::new(of_weight(0)), None);
        let calls = call_all(&mut flights, 9);
        assert_eq!((calls[0].waiter, calls[0].note, calls[0].leader), (7, 3, false));
        assert_eq!(flights.collect(ticket).unwrap().by, By::Following);
    }

    #[test]
    fn waiters_are_told_how_they_came_by_their_reply() {
        for (by, leader, follower) in
            [(None, By::Leading, By::Following), (Some(By::Error), By::Error, By::Error)]
        {
            let mut flights = Flights::default();
            let first = flights.lead(numbered(1), 1, 0, 0);
            let second = flights.join(&numbered(1), 2, 0, 0).unwrap();
            flights.land(first.flight, Rc::new(of_weight(0)), by);
            call_all(&mut flights, 9);
            assert_eq!(flights.collect(first).unwrap().by, leader);
            assert_eq!(flights.collect(second).unwrap().by, follower);
        }
    }
}
