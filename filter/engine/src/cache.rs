//! Replies kept for a short time: until their life ends, with least-recently-used eviction by entries and by bytes.
//!
//! Entries live in one vector and are threaded on two intrusive lists, one by use and one by
//! expiry, so that a hit, an insertion, an eviction and the drop of an expired entry are all O(1)
//! and a hit allocates nothing. The list by expiry is kept in order on insertion, from the back: with one
//! TTL for all, that is one comparison.

use crate::Nanos;
use crate::key::Key;
use crate::reply::Reply;
use hashbrown::HashTable;
use std::rc::Rc;

const NIL: u32 = u32::MAX;

/// Seeds a hash table, so that nobody can prepare keys that share a bucket.
#[derive(Clone, Copy, Debug)]
pub struct Seed(u64);

impl Seed {
    /// A seed from the target's own entropy (constant where the target has none).
    pub fn random() -> Self {
        use std::hash::{BuildHasher, Hasher};
        Self(std::hash::RandomState::new().build_hasher().finish())
    }

    /// The table hash of a key. The key is already a strong hash; folding in the seed is enough.
    pub fn hash(self, key: &Key) -> u64 {
        let (a, b) = key.halves();
        let product = u128::from(a ^ self.0) * u128::from(b ^ self.0.rotate_left(32) | 1);
        (product as u64) ^ ((product >> 64) as u64)
    }
}

#[derive(Clone, Copy, Debug)]
struct Link {
    prev: u32,
    next: u32,
}

const BY_USE: usize = 0;
const BY_EXPIRY: usize = 1;

#[derive(Debug)]
struct Entry {
    key: Key,
    reply: Rc<Reply>,
    expires: Nanos,
    /// Not before then is it fetched anew.
    retry: Nanos,
    weight: usize,
    links: [Link; 2],
}

/// A reply that is kept.
#[derive(Clone, Copy, Debug)]
pub struct Found<'a> {
    /// The reply, fresh or stale: its [`Life`](crate::life::Life) tells.
    pub reply: &'a Rc<Reply>,
    /// Not before then should it be fetched anew, since that failed a moment ago.
    pub retry: Nanos,
}

/// What an insertion did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inserted {
    /// The reply is kept; so many others were evicted for it.
    Kept {
        /// Entries evicted to make room.
        evicted: usize,
    },
    /// The reply alone is larger than the cache may be.
    TooLarge,
}

/// The cache of one worker.
#[derive(Debug)]
pub struct Cache {
    seed: Seed,
    index: HashTable<u32>,
    slots: Vec<Option<Entry>>,
    vacant: Vec<u32>,
    heads: [u32; 2],
    tails: [u32; 2],
    bytes: usize,
    max_entries: usize,
    max_bytes: usize,
}

impl Cache {
    /// An empty cache that keeps at most `max_entries` replies of at most `max_bytes` in all;
    /// 0 means no limit.
    pub fn new(max_entries: usize, max_bytes: usize) -> Self {
        let or_unlimited = |limit| if limit == 0 { usize::MAX } else { limit };
        Self {
            seed: Seed::random(),
            index: HashTable::new(),
            slots: Vec::new(),
            vacant: Vec::new(),
            heads: [NIL; 2],
            tails: [NIL; 2],
            bytes: 0,
            max_entries: or_unlimited(max_entries),
            max_bytes: or_unlimited(max_bytes),
        }
    }

    /// How many replies are kept, expired ones not yet dropped included.
    pub fn len(&self) -> usize {
        self.index.len()
    }

    /// Whether none is kept.
    pub fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    /// The bytes they take, see [`Reply::weight`].
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The reply for `key` if it is kept at `now`; it becomes the most recently used. An expired
    /// one is dropped on the way.
    pub fn get(&mut self, key: &Key, now: Nanos) -> Option<Found<'_>> {
        let slot = self.find(key)?;
        if self.entry(slot)?.expires <= now {
            self.remove(slot);
            return None;
        }
        if self.heads[BY_USE] != slot {
            self.unlink(BY_USE, slot);
            self.link_after(BY_USE, slot, NIL);
        }
        self.entry(slot).map(|entry| Found { reply: &entry.reply, retry: entry.retry })
    }

    /// Has the reply for `key`, if there is one, not be fetched anew before `retry`.
    pub fn postpone(&mut self, key: &Key, retry: Nanos) {
        let slot = self.find(key).unwrap_or(NIL);
        if let Some(entry) = self.entry_mut(slot) {
            entry.retry = retry;
        }
    }

    /// Drops the reply for `key`, if there is one and `is_void` says so of it.
    pub fn forget_if(&mut self, key: &Key, is_void: impl FnOnce(&Reply) -> bool) {
        let slot = self.find(key).unwrap_or(NIL);
        if self.entry(slot).is_some_and(|entry| is_void(&entry.reply)) {
            self.remove(slot);
        }
    }

    /// Keeps `reply` until `expires`, in place of any earlier one for `key`.
    pub fn insert(&mut self, key: Key, reply: Rc<Reply>, expires: Nanos) -> Inserted {
        if let Some(slot) = self.find(&key) {
            self.remove(slot);
        }
        let weight = reply.weight();
        if weight > self.max_bytes {
            return Inserted::TooLarge;
        }
        let mut evicted = 0;
        while self.len() >= self.max_entries || self.bytes > self.max_bytes - weight {
            self.remove(self.tails[BY_USE]);
            evicted += 1;
        }
        let links = [Link { prev: NIL, next: NIL }; 2];
        let slot = self.occupy(Entry { key, reply, expires, retry: 0, weight, links });
        self.bytes += weight;
        self.link_after(BY_USE, slot, NIL);
        self.link_after(BY_EXPIRY, slot, self.last_expiring_by(expires));
        let (seed, slots) = (self.seed, &self.slots);
        self.index.insert_unique(seed.hash(&key), slot, |slot| hash_of(seed, slots, *slot));
        Inserted::Kept { evicted }
    }

    /// Drops all replies that have expired at `now`; returns how many.
    pub fn sweep(&mut self, now: Nanos) -> usize {
        let before = self.len();
        while self.entry(self.heads[BY_EXPIRY]).is_some_and(|entry| entry.expires <= now) {
            self.remove(self.heads[BY_EXPIRY]);
        }
        before - self.len()
    }

    fn entry(&self, slot: u32) -> Option<&Entry> {
        self.slots.get(slot as usize)?.as_ref()
    }

    fn entry_mut(&mut self, slot: u32) -> Option<&mut Entry> {
        self.slots.get_mut(slot as usize)?.as_mut()
    }

    fn find(&self, key: &Key) -> Option<u32> {
        let same = |slot: &u32| self.entry(*slot).is_some_and(|entry| entry.key == *key);
        self.index.find(self.seed.hash(key), same).copied()
    }

    fn occupy(&mut self, entry: Entry) -> u32 {
        if let Some(slot) = self.vacant.pop() {
            self.slots[slot as usize] = Some(entry);
            return slot;
        }
        self.slots.push(Some(entry));
        (self.slots.len() - 1) as u32
    }

    fn remove(&mut self, slot: u32) {
        self.unlink(BY_USE, slot);
        self.unlink(BY_EXPIRY, slot);
        let Some(entry) = self.slots.get_mut(slot as usize).and_then(Option::take) else { return };
        if let Ok(found) = self.index.find_entry(self.seed.hash(&entry.key), |other| *other == slot) {
            found.remove();
        }
        self.bytes -= entry.weight;
        self.vacant.push(slot);
    }

    /// The last entry, in order of expiry, that expires no later than `expires`.
    fn last_expiring_by(&self, expires: Nanos) -> u32 {
        let mut slot = self.tails[BY_EXPIRY];
        while let Some(entry) = self.entry(slot) {
            if entry.expires <= expires {
                break;
            }
            slot = entry.links[BY_EXPIRY].prev;
        }
        slot
    }

    /// Threads `slot` on `list` behind `prev`, or at the front if that is [`NIL`].
    fn link_after(&mut self, list: usize, slot: u32, prev: u32) {
        let next = match self.entry_mut(prev) {
            Some(entry) => std::mem::replace(&mut entry.links[list].next, slot),
            None => std::mem::replace(&mut self.heads[list], slot),
        };
        match self.entry_mut(next) {
            Some(entry) => entry.links[list].prev = slot,
            None => self.tails[list] = slot,
        }
        if let Some(entry) = self.entry_mut(slot) {
            entry.links[list] = Link { prev, next };
        }
    }

    fn unlink(&mut self, list: usize, slot: u32) {
        let Some(Link { prev, next }) = self.entry(slot).map(|entry| entry.links[list]) else { return };
        match self.entry_mut(prev) {
            Some(entry) => entry.links[list].next = next,
            None => self.heads[list] = next,
        }
        match self.entry_mut(next) {
            Some(entry) => entry.links[list].prev = prev,
            None => self.tails[list] = prev,
        }
    }
}

fn hash_of(seed: Seed, slots: &[Option<Entry>], slot: u32) -> u64 {
    slots.get(slot as usize).and_then(Option::as_ref).map_or(0, |entry| seed.hash(&entry.key))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::tests::numbered;
    use crate::reply::tests::of_weight;
    use crate::testing::{runner, test};
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Op {
        Get(u32),
        Insert { key: u32, extra: usize, ttl: Nanos },
        Sweep,
        Wait(Nanos),
    }

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let op = prop_oneof![
            4 => (0u32..8).prop_map(Op::Get),
            4 => (0u32..8, 0usize..60, 1u64..20).prop_map(|(key, extra, ttl)| Op::Insert { key, extra, ttl }),
            1 => Just(Op::Sweep),
            2 => (0u64..8).prop_map(Op::Wait),
        ];
        prop::collection::vec(op, 0..120)
    }

    /// The same rules in the plainest form: most recently used first.
    struct Model {
        entries: Vec<(u32, usize, Nanos)>,
        max_entries: usize,
        max_bytes: usize,
    }

    impl Model {
        fn bytes(&self) -> usize {
            self.entries.iter().map(|(_, weight, _)| weight).sum()
        }

        fn get(&mut self, key: u32, now: Nanos) -> Option<usize> {
            let at = self.entries.iter().position(|(k, _, _)| *k == key)?;
            let entry = self.entries.remove(at);
            if entry.2 <= now {
                return None;
            }
            self.entries.insert(0, entry);
            Some(entry.1)
        }

        fn insert(&mut self, key: u32, weight: usize, expires: Nanos) -> Inserted {
            self.entries.retain(|(k, _, _)| *k != key);
            if weight > self.max_bytes {
                return Inserted::TooLarge;
            }
            let mut evicted = 0;
            while self.entries.len() + 1 > self.max_entries || self.bytes() + weight > self.max_bytes {
                self.entries.pop();
                evicted += 1;
            }
            self.entries.insert(0, (key, weight, expires));
            Inserted::Kept { evicted }
        }
    }

    #[test]
    fn behaves_as_the_model() {
        let base = of_weight(0).weight();
        let limits = (1usize..6, 1usize..6);
        runner(if cfg!(target_arch = "wasm32") { 300 } else { 3_000 })
            .run(&(ops(), limits), |(ops, (max_entries, in_bytes))| {
                let max_bytes = in_bytes * (base + 20);
                let mut cache = Cache::new(max_entries, max_bytes);
                let mut model = Model { entries: Vec::new(), max_entries, max_bytes };
                let mut now = 0;
                for op in ops {
                    match op {
                        Op::Wait(by) => now += by,
                        Op::Get(key) => {
                            let got = cache.get(&numbered(key), now).map(|found| found.reply.weight());
                            prop_assert_eq!(got, model.get(key, now));
                        }
                        Op::Insert { key, extra, ttl } => {
                            let reply = Rc::new(of_weight(extra));
                            let weight = reply.weight();
                            let did = cache.insert(numbered(key), reply, now + ttl);
                            prop_assert_eq!(did, model.insert(key, weight, now + ttl));
                        }
                        Op::Sweep => {
                            let before = model.entries.len();
                            model.entries.retain(|(_, _, expires)| *expires > now);
                            prop_assert_eq!(cache.sweep(now), before - model.entries.len());
                        }
                    }
                    prop_assert_eq!(cache.len(), model.entries.len());
                    prop_assert_eq!(cache.bytes(), model.bytes());
                    prop_assert!(cache.len() <= max_entries && cache.bytes() <= max_bytes);
                }
                Ok(())
            })
            .unwrap();
    }

    #[test]
    fn zero_means_unlimited() {
        let mut cache = Cache::new(0, 0);
        for key in 0..1_000 {
            assert_eq!(
                cache.insert(numbered(key), Rc::new(of_weight(1_000)), 1),
                Inserted::Kept { evicted: 0 }
            );
        }
        assert_eq!(cache.len(), 1_000);
        assert_eq!(cache.sweep(1), 1_000);
        assert!(cache.is_empty() && cache.bytes() == 0);
    }

    #[test]
    fn a_reply_is_fresh_until_its_last_nanosecond() {
        let mut cache = Cache::new(0, 0);
        cache.insert(numbered(1), Rc::new(of_weight(0)), 100);
        assert!(cache.get(&numbered(1), 99).is_some());
        assert!(cache.get(&numbered(1), 100).is_none());
        assert!(cache.is_empty());
    }

    #[test]
    fn a_reply_that_could_not_be_fetched_says_when_to_try_again() {
        let mut cache = Cache::new(0, 0);
        cache.postpone(&numbered(1), 50);
        cache.insert(numbered(1), Rc::new(of_weight(0)), 100);
        assert_eq!(cache.get(&numbered(1), 1).unwrap().retry, 0);
        cache.postpone(&numbered(1), 50);
        assert_eq!(cache.get(&numbered(1), 1).unwrap().retry, 50);
        cache.insert(numbered(1), Rc::new(of_weight(0)), 100);
        assert_eq!(cache.get(&numbered(1), 1).unwrap().retry, 0, "it is another one");
    }

    #[test]
    fn a_reply_is_forgotten_if_it_is_void() {
        let mut cache = Cache::new(0, 0);
        cache.forget_if(&numbered(1), |_| true);
        cache.insert(numbered(1), Rc::new(of_weight(0)), 100);
        cache.forget_if(&numbered(1), |_| false);
        cache.forget_if(&numbered(2), |_| true);
        assert_eq!(cache.len(), 1);
        cache.forget_if(&numbered(1), |_| true);
        assert!(cache.is_empty() && cache.bytes() == 0);
    }

    #[test]
    fn seeds_spread_keys_that_share_a_prefix() {
        let seed = Seed::random();
        let buckets: std::collections::HashSet<_> =
            (0..1_000).map(|n| seed.hash(&numbered(n)) % 4_096).collect();
        assert!(buckets.len() > 700, "{}", buckets.len());
    }
}
