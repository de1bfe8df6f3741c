//! The table of one worker: cache and flights behind one decision.

use crate::budget::{Budget, Charged};
use crate::cache::{Cache, Inserted};
use crate::commons::Good;
use crate::flights::{By, Call, Collected, FlightId, Flights, Landed, Portion, Ticket};
use crate::key::Key;
use crate::life::{Life, Terms};
use crate::random::Random;
use crate::reply::{Reply, Share};
use crate::settings::Settings;
use crate::sightings::{Sighting, Sightings};
use crate::unshareable::Unshareable;
use crate::{Nanos, Waiter, nanos};
use std::rc::Rc;

/// After a flight has failed for a key of which there is a reply, the next one begins no sooner than this.
pub const RETRY: Nanos = 1_000_000_000;

/// What one who arrives asks for.
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    /// The key of the request.
    pub key: Key,
    /// What is to be remembered for it, see [`Call::note`].
    pub note: u8,
    /// How eager one is to refresh what is about to expire: the beta of XFetch (Vattani, Chierichetti and Lowenstein, "Optimal
    /// Probabilistic Cache Stampede Prevention", VLDB 2015); 0 is never.
    pub early_refresh: f64,
    /// Whether a flight's reply is wanted, not one that is there (`no-cache`; RFC 9111, section 5.2.1.4).
    pub anew: bool,
    /// The greatest age that a reply may have (`max-age`; RFC 9111, section 5.2.1.1).
    pub max_age: Option<Nanos>,
    /// For how long a reply must still be fresh (`min-fresh`; RFC 9111, section 5.2.1.3).
    pub min_fresh: Nanos,
    /// Replies of calls that began before then are no answer: what they tell of has changed since.
    pub changed: Nanos,
    /// Whether nothing but a reply that is there is wanted (RFC 9111, section 5.2.1.7).
    pub only_if_cached: bool,
}

impl Ask {
    /// Asks for any reply that is good for `key`.
    pub fn new(key: Key) -> Self {
        Self {
            key,
            note: 0,
            early_refresh: 0.0,
            anew: false,
            max_age: None,
            min_fresh: 0,
            changed: 0,
            only_if_cached: false,
        }
    }

    /// Whether a reply suits the one who asks, provided that it may be given at all.
    pub fn accepts(&self, life: &Life, now: Nanos) -> bool {
        if life.began() < self.changed {
            return false;
        }
        let is_young = self.max_age.is_none_or(|most| life.age_at(now) <= most);
        is_young && (self.min_fresh == 0 || now.saturating_add(self.min_fresh) <= life.fresh)
    }
}

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
    /// Go upstream alone: the key's last reply was for its caller only, or the flight in the air began too early.
    Unshareable,
    /// Go away with nothing: there is no reply, and a flight is not wanted.
    Missing,
}

/// What comes of an arrival.
#[derive(Debug)]
pub struct Arrival {
    /// For the one who arrives.
    pub outcome: Outcome,
    /// A flight to be started for those who come later, for which nobody waits.
    pub refresh: Option<FlightId>,
}

/// What came of a landing.
#[derive(Clone, Debug)]
pub struct Landing {
    /// The flight's key.
    pub key: Key,
    /// What its waiters are given.
    pub reply: Rc<Reply>,
    /// For how long that is good at other workers for those who come later; not after now if for nobody.
    pub good: Good,
    /// When the flight began.
    pub started: Nanos,
    /// Whether more than one waited for it at a time, or it was for those who come later.
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
    unshareable: Unshareable,
    budget: Budget,
    random: Random,
    /// Whether those who wait to be called wait for room.
    blocked: bool,
    timeout: Nanos,
    unshareable_for: Nanos,
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
            unshareable: Unshareable::default(),
            budget: Budget::new(settings.max_fanout_bytes),
            random: Random::seeded(),
            blocked: false,
            timeout: nanos(settings.backend_timeout),
            unshareable_for: nanos(settings.unshareable_for()),
            max_response_bytes: settings.max_response_bytes,
            max_waiters: settings.max_waiters,
        }
    }

    /// A request has arrived whole.
    pub fn arrive(&mut self, ask: &Ask, waiter: Waiter, now: Nanos) -> Arrival {
        let Some((reply, by, refresh)) = self.look_up(ask, now) else {
            return Arrival { outcome: self.wait(ask, waiter, now), refresh: None };
        };
        let refresh = refresh.then(|| self.flights.lead_unattended(ask.key, now));
        let outcome = if reply.can_answer_at_once()
            && let Some(charged) = self.budget.take(reply.body.len(), now)
        {
            Outcome::Hit(Collected { reply, charged, by })
        } else if self.flights.waiting() >= self.max_waiters {
            Outcome::Full
        } else {
            Outcome::Queued(self.flights.queue(reply, by, waiter, now, ask.note))
        };
        Arrival { outcome, refresh }
    }

    /// A waiter whose reply turned out to be another's arrives once more, with another key. If there is a reply for it, it
    /// is called in its turn.
    pub fn arrive_again(&mut self, ask: &Ask, waiter: Waiter, now: Nanos) -> Outcome {
        match self.look_up(&Ask { early_refresh: 0.0, ..*ask }, now) {
            Some((reply, by, _)) => Outcome::Queued(self.flights.queue(reply, by, waiter, now, ask.note)),
            None => self.wait(ask, waiter, now),
        }
    }

    /// There is no reply for a request.
    fn wait(&mut self, ask: &Ask, waiter: Waiter, now: Nanos) -> Outcome {
        if ask.only_if_cached {
            return Outcome::Missing;
        }
        if self.unshareable.knows(&ask.key, now)
            || self.flights.began(&ask.key).is_some_and(|at| at < ask.changed)
        {
            return Outcome::Unshareable;
        }
        if self.flights.waiting() >= self.max_waiters {
            return Outcome::Full;
        }
        match self.flights.join(&ask.key, waiter, now, ask.note) {
            Some(ticket) => Outcome::Joined(ticket),
            None => Outcome::Leads(self.flights.lead(ask.key, waiter, now, ask.note)),
        }
    }

    /// The reply that is there for a request, how it comes to be given, and whether it is time to get another one.
    fn look_up(&mut self, ask: &Ask, now: Nanos) -> Option<(Rc<Reply>, By, bool)> {
        if ask.anew {
            return None;
        }
        let found = self.cache.get(&ask.key, now)?;
        let (life, retry) = (found.reply.life, found.retry);
        let by = if now < life.fresh {
            By::Cache
        } else if now < life.revalidate {
            By::Revalidate
        } else if now < retry && now < life.error {
            By::Error
        } else {
            return None;
        };
        if !ask.accepts(&life, now) {
            return None;
        }
        let reply = Rc::clone(found.reply);
        let is_time = match by {
            By::Cache => ask.early_refresh > 0.0 && self.is_time_to_refresh(&life, ask.early_refresh, now),
            _ => by == By::Revalidate,
        };
        let refresh = is_time && now >= retry && !self.flights.is_in_air(&ask.key);
        Some((reply, by, refresh))
    }

    /// XFetch: each who asks refreshes the reply with a chance that grows as it nears its end, and the earlier the longer
    /// its call takes. So one of many does, just in time.
    fn is_time_to_refresh(&mut self, life: &Life, eagerness: f64, now: Nanos) -> bool {
        let ahead = life.took as f64 * eagerness * -self.random.unit().ln();
        now as f64 + ahead >= life.fresh as f64
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

    /// A request that passed has its answer, which could have been shared for `ttl`.
    pub fn passed(&mut self, sighting: Sighting, ttl: Nanos, now: Nanos) {
        self.sightings.ended(sighting, now.saturating_add(ttl));
    }

    /// What a key is for has changed: a reply whose call began before that stands in for nothing any more.
    pub fn changed(&mut self, key: &Key, at: Nanos) {
        self.cache.forget_if(key, |reply| reply.life.began() < at);
    }

    /// The flight's reply has come, to be kept on these terms if it is not too large. If it counts as a failure, its
    /// waiters are given what is left of an earlier one, as far as that may stand in. `None` if the flight is not in
    /// the air.
    pub fn land(
        &mut self,
        flight: FlightId,
        mut reply: Reply,
        terms: Terms,
        failed: bool,
        now: Nanos,
    ) -> Option<Landing> {
        let (_, started) = self.flights.in_air_as(flight)?;
        let is_kept = reply.body.len() <= self.max_response_bytes;
        let terms = if is_kept { terms.settled(self.random.unit()) } else { Terms { ttl: 0, ..terms } };
        reply.life = Life::new(terms, now.saturating_sub(started), now);
        self.settle(flight, reply, None, failed, now)
    }

    /// The same with a reply whose life has been settled, by another worker. All who wait here have followed that
    /// one's flight, unless the reply was there before.
    pub fn land_as_it_is(
        &mut self,
        flight: FlightId,
        reply: Reply,
        failed: bool,
        now: Nanos,
    ) -> Option<Landing> {
        let (key, started) = self.flights.in_air_as(flight)?;
        let by = if reply.life.landed >= started {
            By::Following
        } else if reply.life.fresh > now {
            By::Cache
        } else {
            // Another worker has had something stand in.
            By::Error
        };
        let landing = self.settle(flight, reply, Some(by), failed, now);
        if by == By::Error {
            self.cache.postpone(&key, now.saturating_add(RETRY));
        }
        landing
    }

    /// A reply of another worker's, which will not do by itself, is kept in case that the flight for it fails.
    pub fn adopt(&mut self, key: &Key, reply: Reply, now: Nanos) {
        let is_news =
            self.cache.get(key, now).is_none_or(|found| found.reply.life.landed < reply.life.landed);
        let kept = reply.life.kept();
        if is_news && kept > now {
            self.cache.insert(*key, Rc::new(reply), kept);
        }
    }

    /// A flight ends with this reply, which its waiters come by as `by` says, if not by the flight itself.
    fn settle(
        &mut self,
        flight: FlightId,
        reply: Reply,
        by: Option<By>,
        failed: bool,
        now: Nanos,
    ) -> Option<Landing> {
        self.blocked = false;
        let (key, started) = self.flights.in_air_as(flight)?;
        let (reply, by, is_new) = match self.stand_in(&key, failed, now) {
            Some((reply, by)) => (reply, Some(by), false),
            None => (Rc::new(reply), by, true),
        };
        let Landed { shared, .. } = self.flights.land(flight, Rc::clone(&reply), by)?;
        let evicted = if is_new { self.keep(&key, &reply, failed, now) } else { 0 };
        let life = reply.life;
        let good = match reply.share {
            Share::Anyone => Good { fresh: life.fresh, kept: life.kept() },
            _ => now.into(),
        };
        Some(Landing { key, reply, good, started, shared, evicted })
    }

    /// Keeps a reply for those who come later, or remembers that it is not for them. Returns how many were evicted.
    fn keep(&mut self, key: &Key, reply: &Rc<Reply>, failed: bool, now: Nanos) -> usize {
        let key = match reply.share {
            Share::Anyone => key,
            Share::Variant(ref key) => key,
            Share::Leader | Share::Nobody => {
                // Whoever comes after a failure does well to wait: the next reply may be for all.
                if !failed || reply.share == Share::Nobody {
                    self.unshareable.remember(key, now.saturating_add(self.unshareable_for));
                }
                // Nobody here has seen what is for nobody here.
                if reply.share == Share::Leader {
                    self.supersede(key, reply, failed);
                }
                return 0;
            }
        };
        let kept = reply.life.kept();
        if kept > now
            && let Inserted::Kept { evicted } = self.cache.insert(*key, Rc::clone(reply), kept)
        {
            return evicted;
        }
        self.supersede(key, reply, failed);
        0
    }

    /// A reply that is not kept takes the place of an earlier one all the same, unless it says nothing of what that was.
    fn supersede(&mut self, key: &Key, reply: &Reply, failed: bool) {
        if !failed && reply.is_about_content() {
            self.cache.forget_if(key, |_| true);
        }
    }

    /// What is there in place of a failure.
    fn stand_in(&mut self, key: &Key, failed: bool, now: Nanos) -> Option<(Rc<Reply>, By)> {
        if !failed {
            return None;
        }
        let reply = Rc::clone(self.cache.get(key, now)?.reply);
        self.cache.postpone(key, now.saturating_add(RETRY));
        let life = reply.life;
        let by = if now < life.fresh { By::Cache } else { By::Error };
        (now < life.error).then_some((reply, by))
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

    /// The reply for which a waiter is called. See [`Flights::reply`].
    pub fn reply(&self, ticket: Ticket) -> Option<&Rc<Reply>> {
        self.flights.reply(ticket)
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
    use crate::grpc::Code;
    use crate::key::tests::numbered;
    use crate::reply::tests::of_weight;
    use crate::testing::{runner, test};
    use proptest::prelude::*;
    use std::collections::{HashMap, HashSet};
    use std::time::Duration;

    const TTL: Terms = Terms { age: 0, ttl: 100, revalidate: 0, error: 0, jitter: 0.0 };
    const NONE: Terms = Terms { ttl: 0, ..TTL };

    fn table(change: impl FnOnce(&mut Settings)) -> Table {
        let mut settings = Settings::for_cluster("c");
        change(&mut settings);
        Table::new(&settings)
    }

    fn failure() -> Reply {
        Reply::failure(Code::UNAVAILABLE, "")
    }

    fn lead(table: &mut Table, key: u32, waiter: Waiter, now: Nanos) -> Ticket {
        match table.arrive(&Ask::new(numbered(key)), waiter, now).outcome {
            Outcome::Leads(ticket) => ticket,
            other => panic!("{other:?}"),
        }
    }

    fn arrive(table: &mut Table, key: u32, waiter: Waiter, now: Nanos) -> Outcome {
        table.arrive(&Ask::new(numbered(key)), waiter, now).outcome
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
        assert!(matches!(table.arrive(&Ask::new(numbered(1)), 2, 1).outcome, Outcome::Joined(_)));
        let landing = table.land(ticket.flight, of_weight(3), TTL, false, 50).unwrap();
        assert_eq!((landing.started, landing.good, landing.shared), (0, 150.into(), true));
        assert!(matches!(table.arrive(&Ask::new(numbered(1)), 3, 149).outcome, Outcome::Hit(_)));
        assert!(matches!(table.arrive(&Ask::new(numbered(1)), 4, 150).outcome, Outcome::Leads(_)));
        assert_eq!(calls(&mut table).len(), 2);
    }

    #[test]
    fn no_ttl_means_no_cache() {
        let mut table = table(|_| ());
        let ticket = lead(&mut table, 1, 1, 0);
        table.land(ticket.flight, of_weight(3), NONE, false, 0);
        assert_eq!(table.cached(), 0);
        lead(&mut table, 1, 2, 0);
    }

    #[test]
    fn another_workers_reply_is_fresh_for_as_long_as_it_was_there() {
        for (ttl, fresh) in [(10, true), (0, false)] {
            let mut table = table(|_| ());
            let ticket = lead(&mut table, 1, 1, 0);
            let reply = Reply { life: Life::new(Terms { ttl, ..TTL }, 5, 50), ..of_weight(3) };
            table.land_as_it_is(ticket.flight, reply, false, 50).unwrap();
            assert_eq!(matches!(arrive(&mut table, 1, 2, 59), Outcome::Hit(_)), fresh);
            assert!(!matches!(arrive(&mut table, 1, 3, 60), Outcome::Hit(_)));
        }
    }

    #[test]
    fn who_waits_for_another_worker_has_followed_or_found_what_was_there() {
        let cases = [
            (TTL, 20, By::Following),
            (NONE, 20, By::Following),
            (TTL, 10, By::Cache),
            (NONE, 10, By::Error),
        ];
        for (terms, landed, expected) in cases {
            let mut table = table(|_| ());
            let ticket = lead(&mut table, 1, 1, 15);
            assert!(matches!(arrive(&mut table, 1, 2, 16), Outcome::Joined(_)));
            let reply = Reply { life: Life::new(terms, 5, landed), ..of_weight(3) };
            table.land_as_it_is(ticket.flight, reply, false, 20).unwrap();
            assert_eq!(answer_all(&mut table, 20), [expected; 2], "{terms:?}, landed at {landed}");
        }
    }

    #[test]
    fn failures_are_kept_on_the_terms_that_they_come_with() {
        for terms in [NONE, TTL] {
            let mut table = table(|_| ());
            let ticket = lead(&mut table, 1, 1, 0);
            table.land(ticket.flight, failure(), terms, true, 0);
            assert_eq!(matches!(arrive(&mut table, 1, 2, 1), Outcome::Hit(_)), terms == TTL);
        }
    }

    const SECOND: Nanos = 1_000_000_000;

    /// A table with a reply for key 1 that is fresh for a second, refreshed for another and stands in for two.
    fn with_reply() -> Table {
        let mut table = table(|_| ());
        let ticket = lead(&mut table, 1, 1, 0);
        let terms = Terms { ttl: SECOND, revalidate: SECOND, error: 2 * SECOND, ..TTL };
        table.land(ticket.flight, of_weight(3), terms, false, 0);
        answer_all(&mut table, 0);
        table
    }

    fn answer_all(table: &mut Table, now: Nanos) -> Vec<By> {
        let mut calls = Vec::new();
        table.next_calls(portion(usize::MAX), now, &mut calls);
        calls.iter().map(|call| table.collect(call.ticket).unwrap().by).collect()
    }

    fn by(outcome: &Outcome) -> Option<By> {
        match outcome {
            Outcome::Hit(collected) => Some(collected.by),
            _ => None,
        }
    }

    #[test]
    fn a_stale_reply_answers_while_one_flight_refreshes_it() {
        let mut table = with_reply();
        let ask = Ask::new(numbered(1));
        let first = table.arrive(&ask, 2, SECOND);
        assert_eq!(by(&first.outcome), Some(By::Revalidate));
        let refresh = first.refresh.unwrap();
        let second = table.arrive(&ask, 3, SECOND);
        assert_eq!((by(&second.outcome), second.refresh), (Some(By::Revalidate), None));
        assert_eq!((table.in_air(), table.waiting()), (1, 0));
        let landing = table.land(refresh, of_weight(4), TTL, false, SECOND + 50).unwrap();
        assert!(landing.shared);
        let third = table.arrive(&ask, 4, SECOND + 51);
        assert_eq!((by(&third.outcome), third.refresh), (Some(By::Cache), None));
    }

    #[test]
    fn a_refresh_that_fails_is_not_tried_again_at_once() {
        let mut table = with_reply();
        let ask = Ask::new(numbered(1));
        let refresh = table.arrive(&ask, 2, SECOND).refresh.unwrap();
        table.land(refresh, failure(), NONE, true, SECOND).unwrap();
        assert_eq!(table.arrive(&ask, 3, SECOND + RETRY - 1).refresh, None);
        let later = table.arrive(&ask, 4, SECOND + RETRY);
        assert!(matches!(later.outcome, Outcome::Leads(_)), "no longer to be refreshed at leisure");
    }

    #[test]
    fn a_stale_reply_stands_in_for_a_failure_for_its_time() {
        let mut table = with_reply();
        let lead_and_fail = |table: &mut Table, now| {
            let ticket = lead(table, 1, 2, now);
            assert!(matches!(arrive(table, 1, 3, now), Outcome::Joined(_)));
            let landing = table.land(ticket.flight, failure(), NONE, true, now + 5).unwrap();
            assert!(landing.good.fresh <= now + 5, "nobody else is told that it is fresh");
            answer_all(table, now + 5)
        };
        assert_eq!(lead_and_fail(&mut table, 2 * SECOND), [By::Error; 2]);
        let soon = table.arrive(&Ask::new(numbered(1)), 4, 2 * SECOND + 6);
        assert_eq!((by(&soon.outcome), soon.refresh), (Some(By::Error), None), "at once, without a call");
        assert_eq!(lead_and_fail(&mut table, 3 * SECOND), [By::Leading, By::Following], "too old");
        assert!(matches!(arrive(&mut table, 1, 5, 3 * SECOND + 6), Outcome::Leads(_)));
    }

    #[test]
    fn what_began_before_a_change_stands_in_for_nothing() {
        for (at, expected) in [(0, By::Error), (1, By::Leading)] {
            let mut table = with_reply();
            let ticket = lead(&mut table, 1, 2, 2 * SECOND);
            table.changed(&numbered(1), at);
            table.land(ticket.flight, failure(), NONE, true, 2 * SECOND).unwrap();
            assert_eq!(answer_all(&mut table, 2 * SECOND), [expected], "changed at {at}");
        }
    }

    #[test]
    fn another_workers_stale_reply_stands_in_too() {
        let life = Life::new(Terms { ttl: SECOND, error: 5 * SECOND, ..TTL }, 0, 0);
        let mut table = table(|_| ());
        let ticket = lead(&mut table, 1, 1, 2 * SECOND);
        table.adopt(&numbered(1), Reply { life, ..of_weight(3) }, 2 * SECOND);
        let landing = table.land(ticket.flight, failure(), NONE, true, 2 * SECOND).unwrap();
        assert_eq!(answer_all(&mut table, 2 * SECOND), [By::Error]);
        assert_eq!(landing.good, Good { fresh: SECOND, kept: 6 * SECOND }, "it goes back to all");
        let older = Life { landed: 0, ..life };
        table.adopt(&numbered(1), Reply { life: older, ..of_weight(9) }, 2 * SECOND);
        let hit = table.arrive(&Ask::new(numbered(1)), 2, 2 * SECOND + 1).outcome;
        assert!(matches!(hit, Outcome::Hit(hit) if hit.reply.body.len() == of_weight(3).body.len()));
    }

    #[test]
    fn whoever_is_told_of_a_failure_elsewhere_leaves_the_backend_alone_too() {
        let life = Life::new(Terms { ttl: SECOND, error: 9 * SECOND, ..TTL }, 0, 0);
        let mut table = table(|_| ());
        let ticket = lead(&mut table, 1, 1, 2 * SECOND);
        table.land_as_it_is(ticket.flight, Reply { life, ..of_weight(3) }, false, 2 * SECOND);
        assert_eq!(answer_all(&mut table, 2 * SECOND), [By::Error]);
        assert_eq!(by(&arrive(&mut table, 1, 2, 2 * SECOND + RETRY - 1)), Some(By::Error));
        assert!(matches!(arrive(&mut table, 1, 3, 2 * SECOND + RETRY), Outcome::Leads(_)));
    }

    #[test]
    fn a_failure_while_the_reply_is_fresh_leaves_it_fresh() {
        let mut table = with_reply();
        let anew = Ask { anew: true, ..Ask::new(numbered(1)) };
        let Outcome::Leads(ticket) = table.arrive(&anew, 2, 10).outcome else { panic!("not anew") };
        table.land(ticket.flight, failure(), NONE, true, 20);
        assert_eq!(answer_all(&mut table, 20), [By::Cache]);
        assert_eq!(by(&arrive(&mut table, 1, 3, 30)), Some(By::Cache));
    }

    #[test]
    fn what_counts_as_no_failure_replaces_the_reply() {
        let mut table = with_reply();
        let ticket = lead(&mut table, 1, 2, 2 * SECOND);
        table.land(ticket.flight, failure(), NONE, false, 2 * SECOND);
        assert_eq!(answer_all(&mut table, 2 * SECOND), [By::Leading]);
    }

    #[test]
    fn what_is_not_kept_takes_the_place_of_a_stale_reply_if_it_is_about_the_same() {
        let exhausted = || Reply::failure(Code::RESOURCE_EXHAUSTED, "");
        let private = || Reply { share: Share::Leader, ..of_weight(0) };
        let cases = [
            (of_weight(0), false, true),
            (Reply::failure(Code(5), ""), false, true),
            (private(), false, true),
            (failure(), true, false),
            (exhausted(), false, false),
            (Reply { share: Share::Nobody, ..of_weight(0) }, false, false),
        ];
        for (reply, failed, expected) in cases {
            let mut table = with_reply();
            let refresh = table.arrive(&Ask::new(numbered(1)), 2, SECOND).refresh.unwrap();
            table.land(refresh, reply.clone(), NONE, failed, SECOND).unwrap();
            let later = table.arrive(&Ask::new(numbered(1)), 3, SECOND).outcome;
            assert_eq!(by(&later).is_none(), expected, "{reply:?}: {later:?}");
        }
    }

    #[test]
    fn callers_steer_what_they_are_given() {
        let ask = Ask::new(numbered(1));
        let cases = [
            (Ask { anew: true, ..ask }, 10, false),
            (Ask { max_age: Some(10), ..ask }, 10, true),
            (Ask { max_age: Some(10), ..ask }, 11, false),
            (Ask { min_fresh: SECOND - 10, ..ask }, 10, true),
            (Ask { min_fresh: SECOND - 10, ..ask }, 11, false),
            (Ask { min_fresh: 1, ..ask }, SECOND, false),
            (Ask { max_age: Some(10), ..ask }, SECOND, false),
            (Ask { only_if_cached: true, ..ask }, 10, true),
        ];
        for (ask, now, is_hit) in cases {
            let outcome = with_reply().arrive(&ask, 2, now).outcome;
            assert_eq!(by(&outcome).is_some(), is_hit, "{ask:?} at {now}: {outcome:?}");
        }
        let nothing = Ask { only_if_cached: true, ..Ask::new(numbered(2)) };
        assert!(matches!(with_reply().arrive(&nothing, 2, 0).outcome, Outcome::Missing));
    }

    #[test]
    fn what_began_before_a_change_is_no_answer_after_it() {
        let mut table = with_reply();
        let ask = |changed| Ask { changed, ..Ask::new(numbered(1)) };
        assert!(by(&table.arrive(&ask(0), 2, 10).outcome).is_some(), "its call began just then");
        let Outcome::Leads(ticket) = table.arrive(&ask(1), 3, 10).outcome else { panic!("a stale answer") };
        assert!(matches!(table.arrive(&ask(10), 4, 11).outcome, Outcome::Joined(_)));
        assert!(matches!(table.arrive(&ask(11), 5, 12).outcome, Outcome::Unshareable));
        table.land(ticket.flight, of_weight(4), TTL, false, 20);
        assert!(by(&table.arrive(&ask(10), 6, 21).outcome).is_some());
        assert!(by(&table.arrive(&ask(11), 7, 21).outcome).is_none());
    }

    #[test]
    fn a_hot_key_is_refreshed_before_its_end_and_a_cold_one_is_not() {
        let terms = Terms { ttl: SECOND, ..NONE };
        let mut early = 0;
        for _ in 0..50 {
            let mut table = table(|_| ());
            let ticket = lead(&mut table, 1, 1, 0);
            let landed = SECOND / 20;
            table.land(ticket.flight, of_weight(3), terms, false, landed);
            let ask = Ask { early_refresh: 1.0, ..Ask::new(numbered(1)) };
            assert_eq!(table.arrive(&Ask::new(numbered(1)), 2, landed + SECOND - 1).refresh, None, "off");
            // 10,000 ask in each second; the call takes 50 ms.
            let asks = (0..10_000).map(|nth| landed + nth * SECOND / 10_000);
            let refreshed = asks.clone().find(|now| table.arrive(&ask, 3, *now).refresh.is_some());
            let before = refreshed.map_or(0, |now| landed + SECOND - now);
            early += u32::from(before > SECOND / 20);
            assert!(before < SECOND * 9 / 10, "far too early: {before}");
        }
        assert!(early >= 45, "{early} of 50 began early enough for the call to end in time");
    }

    #[test]
    fn replies_that_land_together_expire_apart() {
        let mut table = table(|_| ());
        for key in 0..200 {
            let ticket = lead(&mut table, key, 1 + key, 0);
            table.land(ticket.flight, of_weight(3), Terms { ttl: SECOND, jitter: 0.5, ..TTL }, false, 0);
        }
        let left = |table: &mut Table, now| {
            table.sweep(now);
            table.cached()
        };
        assert_eq!(left(&mut table, SECOND / 2 - 1), 200);
        assert!((60..140).contains(&left(&mut table, SECOND * 3 / 4)));
        assert_eq!(left(&mut table, SECOND), 0);
    }

    #[test]
    fn one_refresh_at_a_time() {
        let mut table = with_reply();
        let ask = Ask { early_refresh: 1e12, ..Ask::new(numbered(1)) };
        let refreshes = (0..100).filter(|_| table.arrive(&ask, 2, 1).refresh.is_some()).count();
        // The call took no time at all, so nothing is refreshed early but in its last moment.
        assert_eq!(refreshes, 0);
        let refreshes = (0..100).filter(|_| table.arrive(&ask, 2, SECOND + 1).refresh.is_some()).count();
        assert_eq!(refreshes, 1);
    }

    #[test]
    fn a_reply_for_its_caller_alone_is_not_kept_and_remembered_for_a_while() {
        for share in [Share::Leader, Share::Nobody] {
            let mut table = table(|_| ());
            let ticket = lead(&mut table, 1, 1, 0);
            table.land(ticket.flight, Reply { share, ..of_weight(3) }, TTL, false, 0);
            answer_all(&mut table, 0);
            assert_eq!(table.cached(), 0);
            let last = table.unshareable_for;
            assert!(matches!(arrive(&mut table, 1, 2, last - 1), Outcome::Unshareable));
            assert!(matches!(arrive(&mut table, 1, 3, last), Outcome::Leads(_)));
        }
    }

    #[test]
    fn a_variant_is_kept_under_its_own_key() {
        let mut table = table(|_| ());
        let ticket = lead(&mut table, 1, 1, 0);
        let reply = Reply { share: Share::Variant(numbered(2)), ..of_weight(3) };
        let landing = table.land(ticket.flight, reply, TTL, false, 10).unwrap();
        assert_eq!(landing.good, 10.into(), "other workers look for it by a key that it does not have");
        assert!(matches!(arrive(&mut table, 2, 2, 11), Outcome::Hit(_)));
        assert!(matches!(arrive(&mut table, 1, 3, 11), Outcome::Leads(_)));
    }

    #[test]
    fn who_arrives_again_waits_for_its_turn_even_if_the_reply_is_there() {
        let mut table = with_reply();
        let ask = Ask { note: 9, ..Ask::new(numbered(1)) };
        assert!(matches!(table.arrive_again(&ask, 2, 1), Outcome::Queued(_)));
        assert_eq!(calls(&mut table)[0].note, 9);
        assert!(matches!(table.arrive_again(&Ask::new(numbered(2)), 3, 1), Outcome::Leads(_)));
        assert!(matches!(table.arrive_again(&Ask::new(numbered(2)), 4, 1), Outcome::Joined(_)));
    }

    #[test]
    fn a_large_reply_is_delivered_but_not_cached() {
        for (payload, cached) in [(5, 1), (6, 0)] {
            let mut table = table(|s| s.max_response_bytes = 10);
            let ticket = lead(&mut table, 1, 1, 0);
            table.land(ticket.flight, of_weight(payload), TTL, false, 0);
            assert_eq!(table.cached(), cached);
            assert_eq!(calls(&mut table).len(), 1);
        }
    }

    #[test]
    fn beyond_max_waiters_one_is_refused_but_hits_are_not() {
        let mut table = table(|s| s.max_waiters = 2);
        let ticket = lead(&mut table, 1, 1, 0);
        table.land(ticket.flight, of_weight(0), TTL, false, 0);
        calls(&mut table);
        assert!(table.collect(ticket).is_some());
        let first = lead(&mut table, 2, 2, 0);
        lead(&mut table, 3, 3, 0);
        assert!(matches!(table.arrive(&Ask::new(numbered(2)), 4, 0).outcome, Outcome::Full));
        assert!(matches!(table.arrive(&Ask::new(numbered(1)), 5, 0).outcome, Outcome::Hit(_)));
        table.leave(first);
        assert!(matches!(table.arrive(&Ask::new(numbered(2)), 6, 0).outcome, Outcome::Joined(_)));
    }

    #[test]
    fn what_passes_has_nothing_to_share() {
        let mut table = table(|s| s.backend_timeout = Duration::from_nanos(1_000));
        let pass = |table: &mut Table, now| table.pass(1, now, || numbered(1));
        let ticket = lead(&mut table, 1, 1, 0);
        assert_eq!(pass(&mut table, 1), None, "in flight");
        assert!(!table.land(ticket.flight, of_weight(3), TTL, false, 50).unwrap().shared);
        assert_eq!(pass(&mut table, 149), None, "cached");
        let sighting = pass(&mut table, 150).unwrap();
        assert_eq!(pass(&mut table, 1_149), None, "passed, and may still be under way");
        table.passed(sighting, 100, 200);
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
                match table.arrive(&Ask::new(numbered(key)), next, model.now).outcome {
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
                    other => prop_assert!(false, "{other:?}"),
                }
            }
            Op::Land { nth, ok } => {
                let mut flights: Vec<_> = model.in_air.iter().map(|(k, f)| (*k, *f)).collect();
                flights.sort_by_key(|(key, _)| *key);
                let Some((key, flight)) = pick(&flights, nth) else { return Ok(()) };
                let (reply, terms) = if ok { (of_weight(1), TTL) } else { (failure(), NONE) };
                prop_assert!(table.land(flight, reply, terms, !ok, model.now).is_some());
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
            prop_assert!(table.land(flight, of_weight(1), TTL, false, model.now).is_some());
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
        let mut table = table(|s| s.max_fanout_bytes = BODY);
        let ticket = lead(&mut table, 1, 1, 0);
        table.land(ticket.flight, of_weight(1), Terms { ttl: 3_600 * SECOND, ..TTL }, false, 0);
        assert_eq!(calls(&mut table).len(), 1);
        let Outcome::Queued(second) = table.arrive(&Ask::new(numbered(1)), 2, 0).outcome else {
            panic!("there was room")
        };
        assert!(calls(&mut table).is_empty() && !table.has_calls());
        let later = crate::budget::LAPSE * 1_000_000_000;
        table.lapse(later);
        assert!(table.has_calls());
        let mut calls = Vec::new();
        table.next_calls(portion(32), later, &mut calls);
        assert_eq!(calls.first().map(|call| call.ticket), Some(second));
    }
}
