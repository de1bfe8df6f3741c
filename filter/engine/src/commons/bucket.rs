//! The record of one slot: the flights and replies of all keys that fall into it.
//!
//! A slot is what can be changed at once, by compare-and-swap. Since all that there may be of a
//! key is in one slot, nobody can overlook a flight in another one, and nobody need look into several.

use crate::Nanos;
use crate::key::Key;
use crate::wire::{self, Reader};
use std::borrow::Cow;

/// Flights and replies in a slot. Flights push out replies; a flight that finds only others is not shared. Fewer in tests,
/// where slots are to become full.
pub(super) const ENTRIES: usize = if cfg!(test) { 8 } else { 16 };

/// Changes with the layout.
const VERSION: u8 = 2;

const FLYING: u8 = 1;
const LANDED: u8 = 2;

/// What an entry takes besides queues or reply, rounded up.
const ENTRY_BYTES: usize = 80;

/// A flight in the air.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Flying {
    /// Who has it.
    pub(super) owner: u64,
    /// Which of the owner's flights it is.
    pub(super) serial: u64,
    /// When it will have ended for certain.
    pub(super) deadline: Nanos,
    /// The queues of those who wait for it, the owner not among them.
    pub(super) waiters: Vec<u32>,
}

/// For how long a reply is good.
#[cfg_attr(test, derive(Hash))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Good {
    /// Until then it answers whoever comes.
    pub fresh: Nanos,
    /// Until then it may stand in for one that cannot be had.
    pub kept: Nanos,
}

impl From<Nanos> for Good {
    /// Good for nothing any more when it is no longer fresh.
    fn from(fresh: Nanos) -> Self {
        Self { fresh, kept: fresh }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum State<'a> {
    Flying(Flying),
    Landed { good: Good, reply: Cow<'a, [u8]> },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry<'a> {
    pub(super) key: Key,
    pub(super) realm: u64,
    pub(super) state: State<'a>,
}

impl Entry<'_> {
    fn is_live(&self, now: Nanos) -> bool {
        match &self.state {
            State::Flying(flying) => flying.deadline > now,
            State::Landed { good, .. } => good.kept > now,
        }
    }

    fn reply_len(&self) -> usize {
        match &self.state {
            State::Flying(_) => 0,
            State::Landed { reply, .. } => reply.len(),
        }
    }

    fn len(&self) -> usize {
        match &self.state {
            State::Flying(flying) => ENTRY_BYTES + flying.waiters.len() * 4,
            State::Landed { reply, .. } => ENTRY_BYTES + reply.len(),
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Bucket<'a>(Vec<Entry<'a>>);

impl<'a> Bucket<'a> {
    /// Reads a record. What cannot be read counts as nothing, and is written over in time.
    pub(super) fn read(record: &'a [u8]) -> Self {
        Self::decode(record).unwrap_or_default()
    }

    /// Takes out what there is of a key.
    pub(super) fn take(&mut self, key: &Key, realm: u64) -> Option<State<'a>> {
        let at = self.0.iter().position(|entry| entry.key == *key && entry.realm == realm)?;
        Some(self.0.swap_remove(at).state)
    }

    /// Puts in an entry, for which there must be room.
    pub(super) fn put(&mut self, entry: Entry<'a>) {
        self.0.push(entry);
    }

    /// Makes room for one more entry, whose reply may have so many bytes that `max` is not exceeded by all.
    /// Returns whether there is.
    pub(super) fn make_room(&mut self, reply: usize, max: usize, now: Nanos) -> bool {
        self.0.retain(|entry| entry.is_live(now));
        while self.0.len() >= ENTRIES || self.reply_bytes().saturating_add(reply) > max {
            let Some(at) = self.first_to_expire() else { return self.0.len() < ENTRIES && reply <= max };
            self.0.swap_remove(at);
        }
        true
    }

    fn reply_bytes(&self) -> usize {
        self.0.iter().map(Entry::reply_len).sum()
    }

    fn first_to_expire(&self) -> Option<usize> {
        let expiries = self.0.iter().enumerate().filter_map(|(at, entry)| match entry.state {
            State::Flying(_) => None,
            State::Landed { good, .. } => Some((good, at)),
        });
        expiries.min().map(|(_, at)| at)
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(1 + self.0.iter().map(Entry::len).sum::<usize>());
        out.push(VERSION);
        self.0.iter().for_each(|entry| encode_entry(entry, &mut out));
        out
    }

    pub(super) fn decode(record: &'a [u8]) -> Option<Self> {
        let mut reader = Reader::new(record);
        reader.u8().filter(|version| *version == VERSION)?;
        let mut entries = Vec::with_capacity(ENTRIES);
        while !reader.is_empty() {
            entries.push(decode_entry(&mut reader)?);
        }
        (entries.len() <= ENTRIES).then_some(Self(entries))
    }
}

fn encode_entry(entry: &Entry<'_>, out: &mut Vec<u8>) {
    out.push(if matches!(entry.state, State::Flying(_)) { FLYING } else { LANDED });
    out.extend_from_slice(&entry.key.0);
    out.extend_from_slice(&entry.realm.to_le_bytes());
    match &entry.state {
        State::Flying(flying) => {
            out.extend_from_slice(&flying.owner.to_le_bytes());
            out.extend_from_slice(&flying.serial.to_le_bytes());
            out.extend_from_slice(&flying.deadline.to_le_bytes());
            out.extend_from_slice(&(flying.waiters.len() as u32).to_le_bytes());
            flying.waiters.iter().for_each(|queue| out.extend_from_slice(&queue.to_le_bytes()));
        }
        State::Landed { good, reply } => {
            out.extend_from_slice(&good.fresh.to_le_bytes());
            out.extend_from_slice(&good.kept.to_le_bytes());
            wire::put_bytes(out, reply);
        }
    }
}

fn decode_entry<'a>(reader: &mut Reader<'a>) -> Option<Entry<'a>> {
    let tag = reader.u8()?;
    let (key, realm) = (Key(reader.array()?), reader.u64()?);
    let state = match tag {
        FLYING => State::Flying(Flying {
            owner: reader.u64()?,
            serial: reader.u64()?,
            deadline: reader.u64()?,
            waiters: decode_waiters(reader)?,
        }),
        LANDED => State::Landed {
            good: Good { fresh: reader.u64()?, kept: reader.u64()? },
            reply: Cow::Borrowed(reader.bytes()?),
        },
        _ => return None,
    };
    Some(Entry { key, realm, state })
}

fn decode_waiters(reader: &mut Reader<'_>) -> Option<Vec<u32>> {
    let count = reader.u32()?;
    // Each one is read before the next is believed in, so that a false count takes no memory.
    let mut waiters = Vec::new();
    for _ in 0..count {
        waiters.push(reader.u32()?);
    }
    Some(waiters)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::tests::numbered;
    use crate::testing::{runner, test};
    use proptest::prelude::*;

    fn flying(key: u32, deadline: Nanos) -> Entry<'static> {
        let flying = Flying { owner: 1, serial: 2, deadline, waiters: vec![3] };
        Entry { key: numbered(key), realm: 4, state: State::Flying(flying) }
    }

    fn landed(key: u32, expires: Nanos, len: usize) -> Entry<'static> {
        let state = State::Landed { good: expires.into(), reply: Cow::Owned(vec![key as u8; len]) };
        Entry { key: numbered(key), realm: 4, state }
    }

    fn entries() -> impl Strategy<Value = Entry<'static>> {
        let flying = (any::<(u64, u64, u64)>(), prop::collection::vec(any::<u32>(), 0..5)).prop_map(
            |((owner, serial, deadline), waiters)| State::Flying(Flying { owner, serial, deadline, waiters }),
        );
        let landed = (any::<(u64, u64)>(), prop::collection::vec(any::<u8>(), 0..20)).prop_map(
            |((fresh, kept), reply)| State::Landed { good: Good { fresh, kept }, reply: Cow::Owned(reply) },
        );
        (any::<[u8; 32]>(), any::<u64>(), prop_oneof![flying, landed]).prop_map(|(key, realm, state)| Entry {
            key: Key(key),
            realm,
            state,
        })
    }

    #[test]
    fn what_was_written_is_read_and_changes_do_no_harm() {
        let buckets = prop::collection::vec(entries(), 0..=ENTRIES);
        let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4);
        runner(if cfg!(target_arch = "wasm32") { 200 } else { 2_000 })
            .run(&(buckets, changes), |(entries, changes)| {
                let bucket = Bucket(entries);
                let mut record = bucket.encode();
                prop_assert!(Bucket::decode(&record).as_ref() == Some(&bucket));
                for (at, byte) in changes {
                    let at = at.index(record.len());
                    record[at] = byte;
                }
                if let Some(read) = Bucket::decode(&record) {
                    prop_assert_eq!(read.encode(), record);
                }
                Ok(())
            })
            .unwrap();
        assert_eq!(Bucket::read(&[]), Bucket::default());
        assert_eq!(Bucket::decode(&[VERSION + 1]), None);
    }

    #[test]
    fn the_same_key_of_another_realm_is_another() {
        let mut bucket = Bucket(vec![landed(1, 10, 1)]);
        assert_eq!(bucket.take(&numbered(1), 5), None);
        assert_eq!(bucket.take(&numbered(2), 4), None);
        assert!(bucket.take(&numbered(1), 4).is_some());
        assert_eq!(bucket, Bucket::default());
    }

    #[test]
    fn flights_push_out_replies_but_not_each_other() {
        let mut bucket = Bucket((0..7).map(|key| flying(key, 10)).collect());
        bucket.put(landed(7, 10, 1));
        assert!(bucket.make_room(0, 100, 5));
        bucket.put(flying(8, 10));
        assert!(!bucket.make_room(0, 100, 5));
        assert!(bucket.make_room(0, 100, 10), "all are over");
        assert_eq!(bucket, Bucket::default());
    }

    #[test]
    fn what_is_stale_stays_while_it_is_kept_and_goes_before_what_is_fresh() {
        let good = Good { fresh: 10, kept: 50 };
        let stale =
            Entry { state: State::Landed { good, reply: Cow::Owned(vec![0; 40]) }, ..landed(1, 0, 0) };
        let mut bucket = Bucket(vec![stale.clone(), landed(2, 30, 40)]);
        assert!(bucket.make_room(0, 100, 20));
        assert_eq!(bucket.0.len(), 2);
        assert!(bucket.make_room(40, 100, 20));
        assert_eq!(bucket.0, [landed(2, 30, 40)]);
        let mut bucket = Bucket(vec![stale]);
        assert!(bucket.make_room(0, 100, 50) && bucket.0.is_empty());
    }

    #[test]
    fn replies_stay_within_their_limit_and_the_first_to_expire_go_first() {
        let mut bucket = Bucket(vec![landed(1, 30, 40), landed(2, 20, 40), flying(3, 10)]);
        assert!(bucket.make_room(20, 100, 0));
        assert_eq!(bucket.0.len(), 3);
        assert!(bucket.make_room(21, 100, 0));
        assert_eq!(bucket.0, [landed(1, 30, 40), flying(3, 10)]);
        assert!(!bucket.make_room(101, 100, 0));
    }
}
