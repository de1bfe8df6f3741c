//! The table of one worker: cache and flights behind one decision.

use crate::budget::{Budget, Charged};
use crate::cache::{Cache, Inserted};
use crate::flights::{Call, Collected, FlightId, Flights, Landed, Portion, Ticket};
use crate::grpc::Code;
use crate::key::Key;
use crate::reply::Reply;
use crate::settings::Settings;
use crate::sightings::{Sighting, Sightings};
use crate::{Nanos, Waiter, nanos};
use std::rc::Rc;

/// What the one who arrives with a request does next.
#[derive(Debug)]
pub enum Outcome {
    /// Take this reply: it was cached.
    Hit(Collected),
    /// Wait to be called: the reply is cached, but cannot be given at once.
    Queued(Ticket),
    /// Wait: a flight for the key is in the air.
    Joined(Ticket),
    /// Start a flight, and wait for it like the others.
    Leads(Ticket),
    /// Go away with RESOURCE_EXHAUSTED: as many wait as may.
    Full,
}

/// What came of a landing.
#[derive(Clone, Debug)]
pub struct Landing {
    /// The flight's key.
    pub key: Key,
    /// The reply.
    pub reply: Rc<Reply>,
    /// Until when it may be given to those who come later; not after now if to nobody.
    pub expires: Nanos,
    /// When the flight began.
    pub started: Nanos,
    /// Whether more than one waited for it at a time.
    pub shared: bool,
    /// Replies evicted to keep this one.
    pub evicted: usize,
}

/// Cache and flights of one worker.
#[derive(Debug)]
pub struct Table {
    cache: Cache,
    flights: Flights,
    sightings: Sightings,
    budget: Budget,
    /// Whether those who wait to be called wait for room.
    blocked: bool,
    ttl: Nanos,
    timeout: Nanos,
    cache_errors: bool,
    max_response_bytes: usize,
    max_waiters: usize,
}

impl Table {
    /// An empty table that follows `settings`.
    pub fn new(settings: &Settings) -> Self {
        Self {
            cache: Cache::new(settings.max_cache_entries, settings.max_cache_bytes),
            flights: Flights::default(),
            sightings: Sightings::default(),
            budget: Budget::new(settings.max_fanout_bytes),
            blocked: false,
            ttl: nanos(settings.cache_duration),
            timeout: nanos(settings.backend_timeout),
            cache_errors: settings.cache_errors,
            max_response_bytes: settings.max_response_bytes,
            max_waiters: settings.max_waiters,
        }
    }

    /// A request for `key` has arrived whole.
    pub fn arrive(&mut self, key: Key, waiter: Waiter, now: Nanos) -> Outcome {
        let cached = self.cache.get(&key, now).map(Rc::clone);
        if let Some(reply) = &cached
            && reply.can_answer_at_once()
            && let Some(charged) = self.budget.take(reply.body.len(), now)
        {
            return Outcome::Hit(Collected { reply: Rc::clone(reply), charged });
        }
        if self.flights.waiting() >= self.max_waiters {
            return Outcome::Full;
        }
        if let Some(reply) = cached {
            return Outcome::Queued(self.flights.queue(reply, waiter, now));
        }
        match self.flights.join(&key, waiter, now) {
            Some(ticket) => Outcome::Joined(ticket),
            None => Outcome::Leads(self.flights.lead(key, waiter, now)),
        }
    }

    /// A request may pass instead of arriving if there is nothing to share: no reply, no flight, and no other with its
    /// `tag` that has passed and whose answer could be shared now. Its `key` is not asked for if there is nothing at
    /// all. Tell [`Self::passed`] when it is over.
    pub fn pass(&mut self, tag: u64, now: Nanos, key: impl FnOnce() -> Key) -> Option<Sighting> {
        if !self.cache.is_empty() || self.flights.in_air() > 0 {
            let key = key();
            if self.cache.get(&key, now).is_some() || self.flights.is_in_air(&key) {
                return None;
            }
        }
        self.sightings.first(tag, now, now.saturating_add(self.timeout))
    }

    /// A request that passed has its answer.
    pub fn passed(&mut self, sighting: Sighting, now: Nanos) {
        self.sightings.ended(sighting, now.saturating_add(self.ttl));
    }

    /// The flight's reply has come. It is cached for the TTL if it may be. `None` if the flight is
    /// not in the air.
    pub fn land(&mut self, flight: FlightId, reply: Reply, now: Nanos) -> Option<Landing> {
        let ttl = if self.cacheable(&reply) { self.ttl } else { 0 };
        self.land_until(flight, reply, now, now.saturating_add(ttl))
    }

    /// The same with a reply that another worker has got, which is fresh until `expires`.
    pub fn land_until(
        &mut self,
        flight: FlightId,
        reply: Reply,
        now: Nanos,
        expires: Nanos,
    ) -> Option<Landing> {
        self.blocked = false;
        let reply = Rc::new(reply);
        let Landed { key, started, shared } = self.flights.land(flight, Rc::clone(&reply))?;
        let mut evicted = 0;
        if expires > now
            && let Inserted::Kept { evicted: others } = self.cache.insert(key, Rc::clone(&reply), expires)
        {
            evicted = others;
        }
        Some(Landing { key, reply, expires, started, shared, evicted })
    }

    fn cacheable(&self, reply: &Reply) -> bool {
        self.ttl > 0
            && (reply.code == Code::OK || self.cache_errors)
            && reply.body.len() <= self.max_response_bytes
    }

    /// See [`Flights::next_calls`].
    pub fn next_calls(&mut self, portion: Portion, now: Nanos, calls: &mut Vec<Call>) {
        self.blocked = self.flights.next_calls(portion, &mut self.budget, now, calls);
    }

    /// Whether waiters remain that can be called now.
    pub fn has_calls(&self) -> bool {
        self.flights.has_landed() && !self.blocked
    }

    /// Envoy has passed on a reply of so many body bytes, of a hit or one that was collected. Returns whether
    /// this made room for waiters that had none.
    pub fn passed_on(&mut self, bytes: usize, charged: Charged) -> bool {
        self.budget.give_back(bytes, charged);
        std::mem::take(&mut self.blocked)
    }

    /// A called waiter takes its reply. See [`Flights::collect`].
    pub fn collect(&mut self, ticket: Ticket) -> Option<Collected> {
        self.flights.collect(ticket)
    }

    /// A waiter goes away. See [`Flights::leave`].
    pub fn leave(&mut self, ticket: Ticket) -> bool {
        self.blocked = false;
        self.flights.leave(ticket, &mut self.budget)
    }

    /// Drops expired replies; returns how many.
    pub fn sweep(&mut self, now: Nanos) -> usize {
        self.cache.sweep(now)
    }

    /// Time has passed: replies that callers do not take no longer keep others from being called.
    pub fn lapse(&mut self, now: Nanos) {
        if self.budget.lapse(now) {
            self.blocked = false;
        }
    }

    /// Requests that wait for a reply.
    pub fn waiting(&self) -> usize {
        self.flights.waiting()
    }

    /// Flights in the air.
    pub fn in_air(&self) -> usize {
        self.flights.in_air()
    }

    /// Replies cached.
    pub fn cached(&self) -> usize {
        self.cache.len()
    }

    /// Bytes that the cached replies take.
    pub fn cached_bytes(&self) -> usize {
        self.cache.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::tests::numbered;
    use crate::reply::tests::of_weight;
    use crate::testing::{runner, test};
    use proptest::prelude::*;
    use std::collections::{HashMap, HashSet};
    use std::time::Duration;

    fn table(change: impl FnOnce(&mut Settings)) -> Table {
        let mut settings =
            Settings { cache_duration: Duration::from_nanos(100), ..Settings::for_cluster("c") };
        change(&mut settings);
        Table::new(&settings)
    }

    fn lead(table: &mut Table, key: u32, waiter: Waiter, now: Nanos) -> Ticket {
        match table.arrive(numbered(key), waiter, now) {
            Outcome::Leads(ticket) => ticket,
            other => panic!("{other:?}"),
        }
    }

    fn portion(calls: usize) -> Portion {
        Portion { calls, bytes: usize::MAX }
    }

    fn calls(table: &mut Table) -> Vec<Call> {
        let mut calls = Vec::new();
        table.next_calls(portion(usize::MAX), 0, &mut calls);
        calls
    }

    #[test]
    fn leads_then_joins_then_hits_then_leads_again() {
        let mut table = table(|_| ());
        let ticket = lead(&mut table, 1, 1, 0);
        assert!(matches!(table.arrive(numbered(1), 2, 1), Outcome::Joined(_)));
        let landing = table.land(ticket.flight, of_weight(3), 50).unwrap();
        assert_eq!((landing.started, landing.expires, landing.shared), (0, 150, true));
        assert!(matches!(table.arrive(numbered(1), 3, 149), Outcome::Hit(_)));
        assert!(matches!(table.arrive(numbered(1), 4, 150), Outcome::Leads(_)));
        assert_eq!(calls(&mut table).len(), 2);
    }

    #[test]
    fn no_ttl_means_no_cache() {
        let mut table = table(|s| s.cache_duration = Duration::ZERO);
        let ticket = lead(&mut table, 1, 1, 0);
        table.land(ticket.flight, of_weight(3), 0);
        assert_eq!(table.cached(), 0);
        lead(&mut table, 1, 2, 0);
    }

    #[test]
    fn another_workers_reply_is_fresh_for_as_long_as_it_was_there() {
        for (expires, fresh) in [(60, true), (50, false)] {
            let mut table = table(|_| ());
            let ticket = lead(&mut table, 1, 1, 0);
            table.land_until(ticket.flight, of_weight(3), 50, expires).unwrap();
            assert_eq!(matches!(table.arrive(numbered(1), 2, 59), Outcome::Hit(_)), fresh);
            assert!(!matches!(table.arrive(numbered(1), 3, 60), Outcome::Hit(_)));
        }
    }

    #[test]
    fn failures_are_cached_only_when_asked() {
        for asked in [false, true] {
            let mut table = table(|s| s.cache_errors = asked);
            let ticket = lead(&mut table, 1, 1, 0);
            table.land(ticket.flight, Reply::failure(Code::UNAVAILABLE, ""), 0);
            assert_eq!(matches!(table.arrive(numbered(1), 2, 1), Outcome::Hit(_)), asked);
        }
    }

    #[test]
    fn a_large_reply_is_delivered_but_not_cached() {
        for (payload, cached) in [(5, 1), (6, 0)] {
            let mut table = table(|s| s.max_response_bytes = 10);
            let ticket = lead(&mut table, 1, 1, 0);
            table.land(ticket.flight, of_weight(payload), 0);
            assert_eq!(table.cached(), cached);
            assert_eq!(calls(&mut table).len(), 1);
        }
    }

    #[test]
    fn beyond_max_waiters_one_is_refused_but_hits_are_not() {
        let mut table = table(|s| s.max_waiters = 2);
        let ticket = lead(&mut table, 1, 1, 0);
        table.land(ticket.flight, of_weight(0), 0);
        calls(&mut table);
        assert!(table.collect(ticket).is_some());
        let first = lead(&mut table, 2, 2, 0);
        lead(&mut table, 3, 3, 0);
        assert!(matches!(table.arrive(numbered(2), 4, 0), Outcome::Full));
        assert!(matches!(table.arrive(numbered(1), 5, 0), Outcome::Hit(_)));
        table.leave(first);
        assert!(matches!(table.arrive(numbered(2), 6, 0), Outcome::Joined(_)));
    }

    #[test]
    fn what_passes_has_nothing_to_share() {
        let mut table = table(|s| s.backend_timeout = Duration::from_nanos(1_000));
        let pass = |table: &mut Table, now| table.pass(1, now, || numbered(1));
        let ticket = lead(&mut table, 1, 1, 0);
        assert_eq!(pass(&mut table, 1), None, "in flight");
        assert!(!table.land(ticket.flight, of_weight(3), 50).unwrap().shared);
        assert_eq!(pass(&mut table, 149), None, "cached");
        let sighting = pass(&mut table, 150).unwrap();
        assert_eq!(pass(&mut table, 1_149), None, "passed, and may still be under way");
        table.passed(sighting, 200);
        assert_eq!(pass(&mut table, 299), None, "passed, and would be cached");
        assert!(pass(&mut table, 300).is_some());
    }

    #[test]
    fn what_passes_needs_no_key_where_there_is_nothing() {
        let mut table = table(|_| ());
        assert!(table.pass(1, 0, || panic!("no key is needed")).is_some());
        lead(&mut table, 2, 1, 0);
        assert!(table.pass(3, 0, || numbered(3)).is_some());
        assert_eq!(table.pass(2, 0, || numbered(2)), None);
    }

    #[derive(Clone, Debug)]
    enum Op {
        Arrive { key: u32 },
        Land { nth: usize, ok: bool },
        Call { max: usize },
        Collect { nth: usize },
        PassedOn { nth: usize },
        Leave { nth: usize },
        Tick { by: Nanos },
    }

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let op = prop_oneof![
            6 => (0u32..4).prop_map(|key| Op::Arrive { key }),
            2 => (any::<usize>(), prop::bool::weighted(0.8)).prop_map(|(nth, ok)| Op::Land { nth, ok }),
            3 => (1usize..5).prop_map(|max| Op::Call { max }),
            3 => any::<usize>().prop_map(|nth| Op::Collect { nth }),
            3 => any::<usize>().prop_map(|nth| Op::PassedOn { nth }),
            2 => any::<usize>().prop_map(|nth| Op::Leave { nth }),
            1 => (0u64..60).prop_map(|by| Op::Tick { by }),
        ];
        prop::collection::vec(op, 0..200)
    }

    fn pick<T: Copy>(list: &[T], nth: usize) -> Option<T> {
        (!list.is_empty()).then(|| list[nth % list.len()])
    }

    /// The reference: who waits for which flight, what is fresh, who was called.
    #[derive(Default)]
    struct Model {
        now: Nanos,
        in_air: HashMap<u32, FlightId>,
        fresh_until: HashMap<u32, Nanos>,
        seated: Vec<(Waiter, Ticket)>,
        landed: HashSet<FlightId>,
        called: Vec<(Waiter, Ticket)>,
        answered: HashSet<Waiter>,
        gone: HashSet<Waiter>,
        /// Copies of replies that Envoy holds. The clock of these tests stays within a second: no charge lapses.
        copies: Vec<Charged>,
    }

    /// What all replies of the model weigh, and how many of them the budget has room for.
    const BODY: usize = 6;
    const COPIES: usize = 3;

    impl Model {
        fn keep(&mut self, collected: &Collected) {
            if !collected.reply.body.is_empty() {
                self.copies.push(collected.charged);
            }
        }

        fn unseat(&mut self, waiter: Waiter) {
            self.seated.retain(|(w, _)| *w != waiter);
            self.called.retain(|(w, _)| *w != waiter);
        }
    }

    fn step(table: &mut Table, model: &mut Model, op: Op, next: Waiter) -> Result<(), TestCaseError> {
        match op {
            Op::Arrive { key } => {
                let fresh = model.fresh_until.get(&key).is_some_and(|until| *until > model.now);
                match table.arrive(numbered(key), next, model.now) {
                    Outcome::Hit(hit) => {
                        prop_assert!(fresh);
                        prop_assert_eq!(hit.reply.body.len(), BODY);
                        model.answered.insert(next);
                        model.copies.push(hit.charged);
                    }
                    Outcome::Queued(ticket) => {
                        prop_assert!(fresh);
                        model.landed.insert(ticket.flight);
                        model.seated.push((next, ticket));
                    }
                    Outcome::Joined(ticket) => {
                        prop_assert!(!fresh);
                        prop_assert_eq!(Some(&ticket.flight), model.in_air.get(&key));
                        model.seated.push((next, ticket));
                    }
                    Outcome::Leads(ticket) => {
                        prop_assert!(!fresh);
                        prop_assert!(
                            model.in_air.insert(key, ticket.flight).is_none(),
                            "two flights of one key"
                        );
                        model.seated.push((next, ticket));
                    }
                    Outcome::Full => prop_assert!(false, "refused below the limit"),
                }
            }
            Op::Land { nth, ok } => {
                let mut flights: Vec<_> = model.in_air.iter().map(|(k, f)| (*k, *f)).collect();
                flights.sort_by_key(|(key, _)| *key);
                let Some((key, flight)) = pick(&flights, nth) else { return Ok(()) };
                let reply = if ok { of_weight(1) } else { Reply::failure(Code::UNAVAILABLE, "") };
                prop_assert!(table.land(flight, reply, model.now).is_some());
                model.in_air.remove(&key);
                model.landed.insert(flight);
                if ok {
                    model.fresh_until.insert(key, model.now + 100);
                }
            }
            Op::Call { max } => {
                let mut calls = Vec::new();
                table.next_calls(portion(max), model.now, &mut calls);
                prop_assert!(calls.len() <= max);
                for call in calls {
                    prop_assert!(
                        model.seated.contains(&(call.waiter, call.ticket)),
                        "called one who is gone"
                    );
                    prop_assert!(model.landed.contains(&call.ticket.flight));
                    prop_assert!(!model.called.contains(&(call.waiter, call.ticket)), "called twice");
                    model.called.push((call.waiter, call.ticket));
                }
            }
            Op::Collect { nth } => {
                let Some((waiter, ticket)) = pick(&model.called, nth) else { return Ok(()) };
                let Some(collected) = table.collect(ticket) else { panic!("nothing to collect") };
                prop_assert!(model.answered.insert(waiter), "answered twice");
                model.unseat(waiter);
                model.keep(&collected);
            }
            Op::PassedOn { nth } => {
                let Some(charged) = pick(&model.copies, nth) else { return Ok(()) };
                table.passed_on(BODY, charged);
                model.copies.swap_remove(nth % model.copies.len());
            }
            Op::Leave { nth } => {
                let Some((waiter, ticket)) = pick(&model.seated, nth) else { return Ok(()) };
                prop_assert!(table.leave(ticket));
                model.gone.insert(waiter);
                model.unseat(waiter);
            }
            Op::Tick { by } => {
                model.now += by;
                table.sweep(model.now);
                let fresh = model.fresh_until.values().filter(|until| **until > model.now).count();
                prop_assert_eq!(table.cached(), fresh);
            }
        }
        prop_assert_eq!(table.waiting(), model.seated.len());
        prop_assert_eq!(table.in_air(), model.in_air.len());
        prop_assert!(model.copies.len() <= COPIES && table.budget.used() <= COPIES * BODY);
        prop_assert!(table.budget.used() >= model.copies.len() * BODY);
        Ok(())
    }

    /// Lands and answers whatever is left; then nobody may be left without an answer.
    fn drain(table: &mut Table, model: &mut Model) -> Result<(), TestCaseError> {
        for (_, flight) in model.in_air.drain() {
            prop_assert!(table.land(flight, of_weight(1), model.now).is_some());
        }
        let mut batch = Vec::new();
        while !model.called.is_empty() || !model.copies.is_empty() || table.has_calls() {
            table.next_calls(portion(2), model.now, &mut batch);
            model.called.extend(batch.iter().map(|call| (call.waiter, call.ticket)));
            for (waiter, ticket) in std::mem::take(&mut model.called) {
                let Some(collected) = table.collect(ticket) else { panic!("nothing to collect") };
                prop_assert!(model.answered.insert(waiter));
                model.keep(&collected);
            }
            for charged in std::mem::take(&mut model.copies) {
                table.passed_on(BODY, charged);
            }
        }
        prop_assert_eq!(table.waiting(), 0);
        prop_assert_eq!(table.budget.used(), 0);
        Ok(())
    }

    #[test]
    fn any_interleaving_answers_every_arrival_once() {
        runner(if cfg!(target_arch = "wasm32") { 200 } else { 3_000 })
            .run(&ops(), |ops| {
                let mut table = table(|s| s.max_fanout_bytes = COPIES * BODY);
                let mut model = Model::default();
                let mut arrivals = 0;
                for op in ops {
                    arrivals += u32::from(matches!(op, Op::Arrive { .. }));
                    step(&mut table, &mut model, op, arrivals)?;
                }
                drain(&mut table, &mut model)?;
                let accounted = model.answered.len() + model.gone.len();
                prop_assert_eq!(accounted, arrivals as usize);
                prop_assert!(model.answered.is_disjoint(&model.gone));
                Ok(())
            })
            .unwrap();
    }

    #[test]
    fn callers_who_read_nothing_do_not_hold_up_the_others_for_long() {
        let mut table = table(|s| {
            s.max_fanout_bytes = BODY;
            s.cache_duration = Duration::from_secs(3_600);
        });
        let ticket = lead(&mut table, 1, 1, 0);
        table.land(ticket.flight, of_weight(1), 0);
        assert_eq!(calls(&mut table).len(), 1);
        let Outcome::Queued(second) = table.arrive(numbered(1), 2, 0) else { panic!("there was room") };
        assert!(calls(&mut table).is_empty() && !table.has_calls());
        let later = crate::budget::LAPSE * 1_000_000_000;
        table.lapse(later);
        assert!(table.has_calls());
        let mut calls = Vec::new();
        table.next_calls(portion(32), later, &mut calls);
        assert_eq!(calls.first().map(|call| call.ticket), Some(second));
    }
}
