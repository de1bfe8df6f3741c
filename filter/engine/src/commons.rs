//! One flight for a key across all workers of the process.
//!
//! Every worker is a VM of its own, with flights and a cache of its own. What workers share is shared data with
//! compare-and-swap, and queues, of which each worker reads one. The commons is what they keep there: who is in
//! the air, who waits for whom, and replies that have landed. It is asked only where a worker's own cache and
//! flights know nothing of a key.
//!
//! # Where things are
//!
//! Shared data cannot be deleted, so there is a fixed set of slots: one is the roster of those who are there, the
//! others are buckets, chosen by the key. A bucket holds a few flights and replies and is changed as a whole: of
//! two who claim the same key at once, one fails to write, and looks again. All that there is of a key is in one
//! bucket, so nobody overlooks a flight and nobody looks into several. A bucket is full only if all in it are
//! flights in the air; one more is then not shared. Whoever prepares keys to that end gains nothing else by it.
//!
//! Slots are made by the first VM, without a condition (see [`crate::lease`]): Envoy configures the main thread's
//! VM before it starts the others. That VM is a member too, but never serves; whoever is alone with it does
//! without the commons, at no cost. For a second after its start nobody is, since Envoy tries the settings in a VM
//! that it throws away.
//!
//! # The life of a flight
//!
//! - A worker [claims](Commons::claim) a key. If nothing is known of it, the worker writes its flight into the
//!   bucket and flies. If another flight is in the air, it adds its queue to that flight's waiters. If a fresh
//!   reply is there, it takes that.
//! - The owner [lands](Commons::land): it puts the reply in the place of the flight if that may be cached and is
//!   small, or else nothing, and sends the reply to the queues of those who waited. Whoever was too late to be
//!   among them finds the reply, or nothing, and claims. Even a reply that is too large for a bucket, or that
//!   may not be cached, thus reaches those who waited for this flight.
//! - A flight that has nothing to give is [given up](Commons::give_up): its waiters are told to claim again.
//!
//! # Who dies
//!
//! A waiter does not rely on being told. On its ticks it looks whether it [is due](Commons::is_due) to claim again:
//! when the owner has left or has not beaten for [`STALE`], when the flight's deadline has passed, and in any
//! case after [`RECHECK`]. It then finds the flight as it was, or the reply, or nothing, or a flight whose owner
//! is dead. That one is taken over, again by compare-and-swap: one of those who try succeeds, and inherits the
//! waiters. So nobody is lost if the owner dies before its call, during it, after it wrote down the reply or
//! halfway through telling the others, nor if it is configured anew. A VM that takes the place of a dead one is
//! another owner.
//!
//! An owner that was only slow, and whose flight has been taken over when it lands, answers those who wait at its
//! own worker and leaves the bucket alone. To be taken for dead costs an upstream call, never a waiter or a
//! wrong answer.
//!
//! # Who is given what
//!
//! A flight is known by its key, its realm (a hash of the settings, since listeners share the slots), its owner
//! and the owner's count. Replies expire by the one monotonic clock of the process. A message may come late, when
//! its receiver waits for a later flight: [`Freshness`] tells for which of those who wait it is good; the others
//! are claimed for again.
//!
//! # What a worker does
//!
//! - At its start: [`Commons::create_slots`], [`Commons::beat`]. On each tick: [`Commons::beat`], then
//!   [`Commons::claim`] for each key whose watch [is due](Commons::is_due).
//! - For a request that would start a flight: [`Commons::claim`], and what the [`Claim`] says.
//! - When a flight with a ticket ends: [`Commons::land`] or [`Commons::give_up`], and the message to each queue.
//! - When its queue has messages: [`Commons::read`] each. A reply answers those it is good for; if anybody is left,
//!   or the flight is gone, it claims again. Messages for keys that it does not watch are dropped.
//! - At its end: [`Commons::give_up`] for each ticket, then [`Commons::end`].
//!
//! # What it costs
//!
//! In accesses to shared data:
//!
//! | what | reads | writes | messages |
//! |---|---|---|---|
//! | alone, or known at this worker | 0 | 0 | 0 |
//! | a reply of another worker | 1 | 0 | 0 |
//! | to fly | 1 | 1 | 0 |
//! | to land | 1 | 1 | 1 for each worker that waits |
//! | to wait | 1 | 1 | 0 |
//! | to look after a flight, once in [`RECHECK`] | 1 | 0 | 0 |
//! | to take over a flight | 2 | 1 | 0 |
//! | to beat, once in [`BEAT`] | 1 | 1 | 0 |
//!
//! A read and a write more whenever somebody else changed the same slot in between, and a read more to learn of
//! one who came since the last beat. A read copies the bucket.
//!
//! All is bounded: members, entries of a bucket, bytes of its replies, waiters of a flight (each worker once).
//! Shared data takes at most [`BUCKETS`] times the bytes given to [`Commons::new`] and 9 KB; what has expired goes
//! when its bucket is next written. Queues hold a copy of a reply for each worker that waits for it, until read.

mod bucket;
#[cfg(test)]
mod courses;
mod message;
#[cfg(test)]
mod model;
mod roster;
#[cfg(test)]
mod tests;

pub use crate::lease::Shared;
pub use bucket::Good;
pub use message::{Freshness, Message};
pub use roster::{BEAT, STALE};

use crate::Nanos;
use crate::changes::Resource;
use crate::key::Key;
use crate::reply::Reply;
use crate::table::Ask;
use bucket::{Bucket, Entry, Flying, State};
use roster::Membership;
use std::borrow::Cow;

/// The name of the slots, with the number of their layout, so that another version of the filter has slots of its own.
pub const NAME: &str = "commons/2";

/// Buckets for flights and replies.
pub const BUCKETS: u32 = 1024;

/// Slots in all, numbered from 0.
pub const SLOTS: u32 = 1 + BUCKETS;

/// The slot of the roster.
const ROSTER: u32 = 0;

/// The most bytes of replies in a bucket: each look at it copies them.
const MAX_BUCKET_BYTES: usize = 64 << 10;

/// After so long a waiter looks after its flight in any case, in nanoseconds.
pub const RECHECK: Nanos = 1_000_000_000;

/// How often a slot is tried that others change at the same time.
const TRIES: u32 = 16;

/// The bytes of replies that a bucket may have, for a cache of so many in all; 0 means no limit.
pub fn bucket_bytes(max_cache_bytes: usize) -> usize {
    match max_cache_bytes {
        0 => MAX_BUCKET_BYTES,
        limit => (limit / BUCKETS as usize).min(MAX_BUCKET_BYTES),
    }
}

/// The right to fly for all, to be handed back by [`Commons::land`] or [`Commons::give_up`].
#[cfg_attr(test, derive(Clone, Hash))]
#[derive(Debug, PartialEq, Eq)]
#[must_use = "others wait for this flight until it lands or is given up"]
pub struct Ticket {
    key: Key,
    serial: u64,
}

/// A flight of another worker that this one waits for.
#[cfg_attr(test, derive(Hash))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Watch {
    owner: u64,
    deadline: Nanos,
    checked: Nanos,
}

/// What the one who claims does next.
#[derive(Debug, PartialEq, Eq)]
pub enum Claim {
    /// Make the upstream call, and keep the ticket until it has ended.
    Fly(Ticket),
    /// The same; and keep this reply, which will not do now, in case that the call fails.
    Replace {
        /// As above.
        ticket: Ticket,
        /// The reply.
        stale: Reply,
    },
    /// Wait for a [`Message`] on the own queue, and keep the request: claim again when told to, and when the watch
    /// [is due](Commons::is_due). The watch replaces an earlier one for the key.
    Wait(Watch),
    /// Answer with this reply, which may be cached until `expires`.
    Take {
        /// The reply.
        reply: Reply,
        /// Until when it is fresh; later than now.
        expires: Nanos,
    },
    /// Make the upstream call for this worker alone; there is nothing to be handed back.
    Unshared,
}

/// A worker's part in the commons.
#[cfg_attr(test, derive(Clone, Hash))]
#[derive(Debug)]
pub struct Commons {
    me: Membership,
    serial: u64,
    max_bytes: usize,
}

impl Commons {
    /// Makes the slots that are not there. To be called before anything else.
    pub fn create_slots(shared: &impl Shared) {
        // They are made in order: with the last one, all are there.
        if shared.get(SLOTS - 1).is_some() {
            return;
        }
        let (roster, bucket) = (roster::empty(), Bucket::default().encode());
        for slot in (0..SLOTS).filter(|slot| shared.get(*slot).is_none()) {
            shared.set(slot, if slot == ROSTER { &roster } else { &bucket }, 0);
        }
    }

    /// The part of a worker that is not there yet. `owner` tells it from all others: random, and not 0. `realm` is
    /// the same for those among whom any reply may be shared. `queue` is where others leave messages for it. A
    /// bucket holds replies of `max_bytes` in all, see [`bucket_bytes`].
    pub fn new(owner: u64, realm: u64, queue: u32, max_bytes: usize) -> Self {
        Self { me: Membership::new(owner, realm, queue), serial: 0, max_bytes }
    }

    /// Whether there is nobody to share with, as far as is known.
    pub fn alone(&self) -> bool {
        self.me.is_alone()
    }

    /// Tells the others that this worker lives, and learns who else does. To be called at once, and then on each tick:
    /// before its time, it does nothing.
    pub fn beat(&mut self, now: Nanos, shared: &impl Shared) {
        self.me.beat(now, shared);
    }

    /// Leaves. Flights not given up before are taken over by others.
    pub fn end(&mut self, shared: &impl Shared) {
        self.me.end(shared);
    }

    /// A key is needed of which this worker has neither reply nor flight, or for which it waits already. `deadline` is
    /// when a flight begun now will have ended for certain: its timeout, and then some, or its waiters would take over
    /// what is just being landed. `anew` says that a reply that is there will not do.
    pub fn claim(
        &mut self,
        key: &Key,
        anew: bool,
        now: Nanos,
        deadline: Nanos,
        shared: &impl Shared,
    ) -> Claim {
        self.me.show_up(now, shared);
        if self.alone() {
            return Claim::Unshared;
        }
        for _ in 0..TRIES {
            let Some((record, token)) = shared.get(slot_of(key)) else { break };
            let (claim, change) = self.decide(Bucket::read(&record), key, anew, now, deadline, shared);
            if change.is_none_or(|record| shared.set(slot_of(key), &record, token)) {
                return claim;
            }
        }
        Claim::Unshared
    }

    /// The same for one who asks: a reply that does not suit will not do either.
    pub fn claim_for(&mut self, ask: &Ask, now: Nanos, deadline: Nanos, shared: &impl Shared) -> Claim {
        match self.claim(&ask.key, ask.anew, now, deadline, shared) {
            Claim::Take { reply, .. } if !ask.accepts(&reply.life, now) => {
                self.claim(&ask.key, true, now, deadline, shared)
            }
            claim => claim,
        }
    }

    /// What is to be done by what the bucket says, and what the bucket has to be changed to first.
    fn decide(
        &mut self,
        mut bucket: Bucket<'_>,
        key: &Key,
        anew: bool,
        now: Nanos,
        deadline: Nanos,
        shared: &impl Shared,
    ) -> (Claim, Option<Vec<u8>>) {
        let (mut waiters, mut stale) = (Vec::new(), None);
        match bucket.take(key, self.me.realm) {
            Some(State::Landed { good, reply }) if good.kept > now => match Reply::decode(&reply) {
                Some(reply) if good.fresh > now && !anew => {
                    return (Claim::Take { reply, expires: good.fresh }, None);
                }
                reply => stale = reply,
            },
            Some(State::Flying(flying)) if self.is_in_air(&flying, now, shared) => {
                return self.wait(bucket, key, flying, now);
            }
            Some(State::Flying(flying)) => waiters = flying.waiters,
            _ => (),
        }
        if !bucket.make_room(0, usize::MAX, now) {
            return (Claim::Unshared, None);
        }
        waiters.retain(|queue| *queue != self.me.queue);
        self.serial += 1;
        let flying = Flying { owner: self.me.owner, serial: self.serial, deadline, waiters };
        bucket.put(self.entry(key, State::Flying(flying)));
        let ticket = Ticket { key: *key, serial: self.serial };
        let claim = match stale {
            Some(stale) => Claim::Replace { ticket, stale },
            None => Claim::Fly(ticket),
        };
        (claim, Some(bucket.encode()))
    }

    /// Whether somebody else's flight is worth waiting for. One of this worker's own is not: it claims only what it
    /// no longer has.
    fn is_in_air(&mut self, flying: &Flying, now: Nanos, shared: &impl Shared) -> bool {
        let is_own = flying.owner == self.me.owner;
        !is_own && flying.deadline > now && !self.me.is_dead(flying.owner, now, shared)
    }

    fn wait(
        &self,
        mut bucket: Bucket<'_>,
        key: &Key,
        mut flying: Flying,
        now: Nanos,
    ) -> (Claim, Option<Vec<u8>>) {
        let watch = Watch { owner: flying.owner, deadline: flying.deadline, checked: now };
        if flying.waiters.contains(&self.me.queue) {
            return (Claim::Wait(watch), None);
        }
        if flying.waiters.len() >= roster::MEMBERS {
            return (Claim::Unshared, None);
        }
        flying.waiters.push(self.me.queue);
        bucket.put(self.entry(key, State::Flying(flying)));
        (Claim::Wait(watch), Some(bucket.encode()))
    }

    /// Whether it is time to claim again a key that this worker waits for. Costs no access to shared data.
    pub fn is_due(&self, watch: &Watch, now: Nanos) -> bool {
        now >= watch.deadline
            || now.saturating_sub(watch.checked) >= RECHECK
            || self.me.seems_dead(watch.owner)
    }

    /// The flight has ended with a reply that is `good` for others for so long; not after now means to nobody
    /// who does not wait yet. Returns the queues to which [`Self::reply_message`] is to be sent.
    pub fn land(
        &mut self,
        ticket: Ticket,
        reply: &Reply,
        good: impl Into<Good>,
        now: Nanos,
        shared: &impl Shared,
    ) -> Vec<u32> {
        let good = good.into();
        if good.kept <= now || reply.encoded_len() > self.max_bytes {
            return self.take_out(&ticket, None, now, shared);
        }
        let mut bytes = Vec::new();
        reply.encode(&mut bytes);
        self.take_out(&ticket, Some((&bytes, good)), now, shared)
    }

    /// The flight has ended without anything that could be given to others. Returns the queues to which
    /// [`Self::gone_message`] is to be sent.
    pub fn give_up(&mut self, ticket: Ticket, now: Nanos, shared: &impl Shared) -> Vec<u32> {
        self.take_out(&ticket, None, now, shared)
    }

    /// Puts a reply in the place of a flight, or nothing. Returns the queues of those who waited.
    fn take_out(
        &mut self,
        ticket: &Ticket,
        reply: Option<(&[u8], Good)>,
        now: Nanos,
        shared: &impl Shared,
    ) -> Vec<u32> {
        let slot = slot_of(&ticket.key);
        let mut waiters = Vec::new();
        for attempt in 1..=TRIES {
            let Some((record, token)) = shared.get(slot) else { return Vec::new() };
            let mut bucket = Bucket::read(&record);
            match bucket.take(&ticket.key, self.me.realm) {
                Some(State::Flying(flying)) if self.is_own(&flying, ticket) => waiters = flying.waiters,
                // Somebody has taken it over.
                _ => return Vec::new(),
            }
            // If others change the slot again and again, all that is theirs goes: they claim again. A flight that
            // stayed there though it has ended would be worse.
            let is_last = attempt == TRIES;
            if is_last {
                bucket = Bucket::default();
            }
            self.publish(&mut bucket, &ticket.key, reply, now);
            if shared.set(slot, &bucket.encode(), if is_last { 0 } else { token }) {
                break;
            }
        }
        self.me.keep_read(&mut waiters, now, shared);
        waiters
    }

    fn publish<'a>(&self, bucket: &mut Bucket<'a>, key: &Key, reply: Option<(&'a [u8], Good)>, now: Nanos) {
        if let Some((reply, good)) = reply
            && bucket.make_room(reply.len(), self.max_bytes, now)
        {
            bucket.put(self.entry(key, State::Landed { good, reply: Cow::Borrowed(reply) }));
        }
    }

    fn is_own(&self, flying: &Flying, ticket: &Ticket) -> bool {
        flying.owner == self.me.owner && flying.serial == ticket.serial
    }

    fn entry<'a>(&self, key: &Key, state: State<'a>) -> Entry<'a> {
        Entry { key: *key, realm: self.me.realm, state }
    }

    /// The queues of all others who may keep replies of this one's, to which [`Self::changed_message`] is to be sent.
    pub fn others(&mut self, now: Nanos, shared: &impl Shared) -> Vec<u32> {
        self.me.others(now, shared)
    }

    /// The message that tells others of a change.
    pub fn changed_message(&self, resource: Resource) -> Vec<u8> {
        message::changed(resource, self.me.realm)
    }

    /// The message with a reply for those who wait for `key`.
    pub fn reply_message(&self, key: &Key, freshness: Freshness, reply: &Reply) -> Vec<u8> {
        message::reply(key, self.me.realm, freshness, reply)
    }

    /// The message that tells those who wait for `key` to claim again.
    pub fn gone_message(&self, key: &Key) -> Vec<u8> {
        message::gone(key, self.me.realm)
    }

    /// Reads a message from the own queue. `None` is not meant for this worker's realm, or no message at all.
    pub fn read(&self, message: &[u8]) -> Option<Message> {
        message::read(message, self.me.realm)
    }
}

fn slot_of(key: &Key) -> u32 {
    1 + (key.halves().0 % u64::from(BUCKETS)) as u32
}
