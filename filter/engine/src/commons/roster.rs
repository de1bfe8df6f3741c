//! Who is there: the workers of the process, known by a heartbeat.
//!
//! All are in one record, so that one look shows a worker everybody. A member that has not beaten for
//! [`STALE`] counts as dead. That may be wrong, since a busy event loop stalls: it costs an
//! upstream call that need not have been, and nothing else.
//!
//! A worker that was itself late does not judge others for a while: if the whole process stood still,
//! all the others look dead to the first that goes on.

use super::{ROSTER, TRIES};
use crate::Nanos;
use crate::lease::Shared;
use crate::wire::Reader;

/// How often a member beats, in nanoseconds.
pub const BEAT: Nanos = 100_000_000;

/// A member that has not beaten for longer counts as dead, in nanoseconds.
pub const STALE: Nanos = 10 * BEAT;

/// A member that has not beaten for so long beats before it does anything else, and for so long does not judge others.
const LATE: Nanos = STALE / 2;

/// Members there may be; those beyond collapse for themselves.
pub(super) const MEMBERS: usize = 256;

/// Changes with the layout.
const VERSION: u8 = 1;

/// A worker that shares its flights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Member {
    owner: u64,
    realm: u64,
    queue: u32,
    /// Whether it has ever asked for a flight. The main thread's VM never does.
    serves: bool,
    beat: Nanos,
}

impl Member {
    fn is_stale(&self, now: Nanos) -> bool {
        now.saturating_sub(self.beat) > STALE
    }

    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.owner.to_le_bytes());
        out.extend_from_slice(&self.realm.to_le_bytes());
        out.extend_from_slice(&self.queue.to_le_bytes());
        out.push(u8::from(self.serves));
        out.extend_from_slice(&self.beat.to_le_bytes());
    }

    fn decode(reader: &mut Reader<'_>) -> Option<Self> {
        Some(Self {
            owner: reader.u64()?,
            realm: reader.u64()?,
            queue: reader.u32()?,
            serves: reader.u8()? != 0,
            beat: reader.u64()?,
        })
    }
}

/// What an encoded member takes.
const MEMBER_BYTES: usize = 8 + 8 + 4 + 1 + 8;

fn encode(members: &[Member]) -> Vec<u8> {
    let mut out = Vec::with_capacity(1 + members.len() * MEMBER_BYTES);
    out.push(VERSION);
    members.iter().for_each(|member| member.encode(&mut out));
    out
}

fn decode(record: &[u8]) -> Option<Vec<Member>> {
    let mut reader = Reader::new(record);
    reader.u8().filter(|version| *version == VERSION)?;
    let mut members = Vec::with_capacity(MEMBERS.min(record.len() / MEMBER_BYTES));
    while !reader.is_empty() {
        members.push(Member::decode(&mut reader)?);
    }
    (members.len() <= MEMBERS).then_some(members)
}

/// The record of a roster without members.
pub(super) fn empty() -> Vec<u8> {
    encode(&[])
}

#[cfg(test)]
pub(super) fn is_sound(record: &[u8]) -> bool {
    decode(record).is_some()
}

/// A worker's own place in the roster, and what it last saw there.
#[cfg_attr(test, derive(Clone, Hash))]
#[derive(Debug)]
pub(super) struct Membership {
    pub(super) owner: u64,
    pub(super) realm: u64,
    pub(super) queue: u32,
    serves: bool,
    is_member: bool,
    beaten: Nanos,
    judge_from: Nanos,
    seen: Vec<Member>,
    seen_at: Nanos,
    alone: bool,
}

impl Membership {
    pub(super) fn new(owner: u64, realm: u64, queue: u32) -> Self {
        Self {
            owner: owner.max(1),
            realm,
            queue,
            serves: false,
            is_member: false,
            beaten: 0,
            judge_from: 0,
            seen: Vec::new(),
            seen_at: 0,
            alone: true,
        }
    }

    /// Whether nobody else could have a flight for this worker. One other member that never asks for flights is the main
    /// thread's VM.
    pub(super) fn is_alone(&self) -> bool {
        self.alone
    }

    /// Beats if it is time.
    pub(super) fn beat(&mut self, now: Nanos, shared: &impl Shared) {
        let since = now.saturating_sub(self.beaten);
        if self.is_member && since < BEAT {
            return;
        }
        if self.is_member && since > LATE {
            self.judge_from = now.saturating_add(LATE);
        }
        for _ in 0..TRIES {
            let Some((record, token)) = shared.get(ROSTER) else { return };
            let mut members = decode(&record).unwrap_or_default();
            let judges = now >= self.judge_from;
            members.retain(|member| member.owner != self.owner && !(judges && member.is_stale(now)));
            let has_place = members.len() < MEMBERS;
            if has_place {
                members.push(self.member(now));
            }
            if shared.set(ROSTER, &encode(&members), token) {
                self.is_member = has_place;
                self.beaten = now;
                return self.see(members, now);
            }
        }
    }

    /// Sees to it that others know of this worker before it has a flight or waits for one.
    pub(super) fn show_up(&mut self, now: Nanos, shared: &impl Shared) {
        self.serves = true;
        if self.is_member && now.saturating_sub(self.beaten) > LATE {
            self.beat(now, shared);
        }
    }

    /// Leaves.
    pub(super) fn end(&mut self, shared: &impl Shared) {
        self.is_member = false;
        self.alone = true;
        for _ in 0..TRIES {
            let Some((record, token)) = shared.get(ROSTER) else { return };
            let mut members = decode(&record).unwrap_or_default();
            members.retain(|member| member.owner != self.owner);
            if shared.set(ROSTER, &encode(&members), token) {
                return;
            }
        }
    }

    /// Whether a member seems to be dead by what was last seen; it may also be new.
    pub(super) fn seems_dead(&self, owner: u64) -> bool {
        !self.living().any(|member| member.owner == owner)
    }

    /// Whether a member is dead. Looks again before it says so.
    pub(super) fn is_dead(&mut self, owner: u64, now: Nanos, shared: &impl Shared) -> bool {
        if !self.seems_dead(owner) {
            return false;
        }
        self.look(now, shared);
        self.seems_dead(owner)
    }

    /// The queues of the others with whom this one shares replies.
    pub(super) fn others(&mut self, now: Nanos, shared: &impl Shared) -> Vec<u32> {
        self.look(now, shared);
        let others = self.living().filter(|member| member.owner != self.owner && member.realm == self.realm);
        others.map(|member| member.queue).collect()
    }

    /// Takes the queues that nobody reads any more out of `queues`: what is put there is never freed.
    pub(super) fn keep_read(&mut self, queues: &mut Vec<u32>, now: Nanos, shared: &impl Shared) {
        if queues.iter().all(|queue| self.is_read(*queue)) {
            return;
        }
        self.look(now, shared);
        queues.retain(|queue| self.is_read(*queue));
    }

    fn is_read(&self, queue: u32) -> bool {
        self.living().any(|member| member.queue == queue)
    }

    /// All that were seen and not judged dead.
    fn living(&self) -> impl Iterator<Item = &Member> {
        let judges = self.seen_at >= self.judge_from;
        self.seen.iter().filter(move |member| !(judges && member.is_stale(self.seen_at)))
    }

    /// When it last told others that it lives.
    #[cfg(test)]
    pub(super) fn last_beat(&self) -> Option<Nanos> {
        self.is_member.then_some(self.beaten)
    }

    fn member(&self, beat: Nanos) -> Member {
        Member { owner: self.owner, realm: self.realm, queue: self.queue, serves: self.serves, beat }
    }

    fn look(&mut self, now: Nanos, shared: &impl Shared) {
        if let Some(members) = shared.get(ROSTER).and_then(|(record, _)| decode(&record)) {
            self.see(members, now);
        }
    }

    fn see(&mut self, members: Vec<Member>, now: Nanos) {
        self.seen = members;
        self.seen_at = now;
        let peers = || self.living().filter(|other| other.owner != self.owner && other.realm == self.realm);
        self.alone = !self.is_member || (peers().count() <= 1 && !peers().any(|other| other.serves));
    }
}
