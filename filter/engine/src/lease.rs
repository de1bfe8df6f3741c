//! Gives back what a dead VM had added to the gauges.
//!
//! Gauges belong to the whole process and are moved by increments; what a VM had added when it died
//! would stay in them for ever. So every worker keeps its share written down in shared data, which
//! outlives the VM, in a slot that it leases by a heartbeat. A slot whose heartbeat has stopped is taken
//! back by any other worker, which then subtracts that share.
//!
//! Shared data has compare-and-swap but no delete, so there is a fixed set of slots. A worker
//! that was only slow, and finds its slot taken, knows that its share has been subtracted: it takes another
//! slot and starts from nothing.
//!
//! Creating a slot cannot be made conditional on its absence. That is safe because Envoy configures the
//! VM of its main thread, which creates all slots, before it starts those of its workers.

use crate::Nanos;

/// How many slots there are: more than one process has workers, reloads within [`STALE`] included.
pub const SLOTS: u32 = 256;

/// How often a worker renews its lease, in nanoseconds.
pub const BEAT: Nanos = 1_000_000_000;

/// A lease that has not been renewed for so long is over, in nanoseconds.
pub const STALE: Nanos = 5 * BEAT;

/// Slots that a worker looks at on each beat.
const INSPECTED: u32 = 64;

/// How many levels a share has.
pub const LEVELS: usize = 4;

/// What a worker has added to each gauge.
pub type Share = [i64; LEVELS];

/// Shared data with compare-and-swap.
pub trait Shared {
    /// The value of a slot and the token that a conditional [`Self::set`] takes.
    fn get(&self, slot: u32) -> Option<(Vec<u8>, u32)>;
    /// Sets a slot if its token is still this one; 0 sets it in any case. Returns whether it was set.
    fn set(&self, slot: u32, value: &[u8], token: u32) -> bool;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Record {
    /// 0 if the slot is free.
    owner: u64,
    beat: Nanos,
    share: Share,
}

const FREE: Record = Record { owner: 0, beat: 0, share: [0; LEVELS] };

impl Record {
    fn encode(&self) -> Vec<u8> {
        let head = self.owner.to_le_bytes().into_iter().chain(self.beat.to_le_bytes());
        head.chain(self.share.into_iter().flat_map(i64::to_le_bytes)).collect()
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let mut words =
            bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()));
        let mut record = Self { owner: words.next()?, beat: words.next()?, ..FREE };
        for level in &mut record.share {
            *level = words.next()?.cast_signed();
        }
        Some(record)
    }

    fn is_stale(&self, now: Nanos) -> bool {
        self.owner != 0 && now.saturating_sub(self.beat) > STALE
    }
}

/// A worker's lease.
#[derive(Debug)]
pub struct Lease {
    owner: u64,
    slot: Option<u32>,
    written: Share,
    beat: Nanos,
    inspect: u32,
}

/// What the worker has to do with the gauges after [`Lease::keep`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Due {
    /// To be subtracted: the shares of the dead.
    pub subtract: Share,
    /// Whether this worker's own share was subtracted by somebody else, who took it for dead.
    pub start_over: bool,
}

impl Lease {
    /// A lease not yet taken. `owner` tells workers apart: random, and not 0.
    pub fn new(owner: u64) -> Self {
        Self { owner: owner.max(1), slot: None, written: [0; LEVELS], beat: 0, inspect: owner as u32 }
    }

    /// Creates the slots that are not there.
    pub fn create_slots(shared: &impl Shared) {
        for slot in (0..SLOTS).filter(|slot| shared.get(*slot).is_none()) {
            shared.set(slot, &FREE.encode(), 0);
        }
    }

    /// Writes down `share`, which the gauges are about to hold, and renews the lease if it is time. On each beat, it
    /// also takes back some leases of the dead.
    pub fn keep(&mut self, share: Share, now: Nanos, shared: &impl Shared) -> Due {
        let mut due = Due::default();
        let is_time = self.slot.is_none() || now.saturating_sub(self.beat) >= BEAT;
        if share == self.written && !is_time {
            return due;
        }
        if !self.write(share, now, shared) {
            due.start_over = self.written != [0; LEVELS];
            self.slot = None;
            self.written = [0; LEVELS];
            self.take_slot(share, now, shared);
        }
        if is_time {
            self.beat = now;
            self.take_back(now, shared, &mut due.subtract);
        }
        due
    }

    /// Frees the slot; the worker's share is to be taken out of the gauges.
    pub fn end(&mut self, shared: &impl Shared) {
        if let Some(slot) = self.slot.take()
            && let Some((_, token)) = self.own(slot, shared)
        {
            shared.set(slot, &FREE.encode(), token);
        }
    }

    fn own(&self, slot: u32, shared: &impl Shared) -> Option<(Record, u32)> {
        let (bytes, token) = shared.get(slot)?;
        let record = Record::decode(&bytes)?;
        (record.owner == self.owner).then_some((record, token))
    }

    fn write(&mut self, share: Share, now: Nanos, shared: &impl Shared) -> bool {
        let Some((slot, (_, token))) = self.slot.and_then(|slot| Some((slot, self.own(slot, shared)?)))
        else {
            return false;
        };
        let record = Record { owner: self.owner, beat: now, share };
        let written = shared.set(slot, &record.encode(), token);
        if written {
            self.written = share;
        }
        written
    }

    fn take_slot(&mut self, share: Share, now: Nanos, shared: &impl Shared) {
        let start = self.owner as u32 % SLOTS;
        for slot in (start..SLOTS).chain(0..start) {
            let Some((bytes, token)) = shared.get(slot) else { continue };
            if Record::decode(&bytes).is_some_and(|record| record.owner != 0) {
                continue;
            }
            let record = Record { owner: self.owner, beat: now, share };
            if shared.set(slot, &record.encode(), token) {
                self.slot = Some(slot);
                self.written = share;
                return;
            }
        }
    }

    fn take_back(&mut self, now: Nanos, shared: &impl Shared, subtract: &mut Share) {
        for _ in 0..INSPECTED {
            self.inspect = self.inspect.wrapping_add(1);
            let slot = self.inspect % SLOTS;
            let Some((bytes, token)) = shared.get(slot) else { continue };
            let Some(record) = Record::decode(&bytes).filter(|record| record.is_stale(now)) else { continue };
            // Only one of several who see it succeeds.
            if shared.set(slot, &FREE.encode(), token) {
                subtract.iter_mut().zip(record.share).for_each(|(sum, level)| *sum += level);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{runner, test};
    use proptest::prelude::*;
    use std::cell::RefCell;
    use std::collections::HashMap;

    /// Shared data as the host has it.
    #[derive(Default)]
    struct Memory {
        slots: RefCell<HashMap<u32, (Vec<u8>, u32)>>,
    }

    impl Shared for Memory {
        fn get(&self, slot: u32) -> Option<(Vec<u8>, u32)> {
            self.slots.borrow().get(&slot).cloned()
        }

        fn set(&self, slot: u32, value: &[u8], token: u32) -> bool {
            let mut slots = self.slots.borrow_mut();
            let next = slots.values().map(|(_, token)| *token).max().unwrap_or(0) + 1;
            match slots.get(&slot) {
                Some((_, current)) if token != 0 && *current != token => false,
                _ => {
                    slots.insert(slot, (value.to_vec(), next));
                    true
                }
            }
        }
    }

    struct Worker {
        lease: Lease,
        level: i64,
        reported: i64,
        alive: bool,
    }

    /// As the metrics do it: the share is written down first, then the gauge is moved.
    fn flush(worker: &mut Worker, gauge: &mut i64, now: Nanos, shared: &Memory) {
        let due = worker.lease.keep([worker.level, 0, 0, 0], now, shared);
        *gauge -= due.subtract[0];
        if due.start_over {
            worker.reported = 0;
        }
        *gauge += worker.level - worker.reported;
        worker.reported = worker.level;
    }

    #[derive(Clone, Debug)]
    enum Op {
        Start,
        Level(usize, i64),
        Die(usize),
        Stall(usize),
        Wait(Nanos),
    }

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let op = prop_oneof![
            2 => Just(Op::Start),
            5 => (any::<usize>(), 0i64..100).prop_map(|(n, level)| Op::Level(n, level)),
            1 => any::<usize>().prop_map(Op::Die),
            1 => any::<usize>().prop_map(Op::Stall),
            2 => (0..3 * BEAT).prop_map(Op::Wait),
        ];
        prop::collection::vec(op, 0..60)
    }

    /// All that live flush once; a stalled one may be left out for a while.
    fn beat(workers: &mut [Worker], but: Option<usize>, gauge: &mut i64, now: Nanos, shared: &Memory) {
        for (n, worker) in workers.iter_mut().enumerate() {
            if worker.alive && Some(n) != but {
                flush(worker, gauge, now, shared);
            }
        }
    }

    #[test]
    fn whatever_dies_or_stalls_the_gauge_is_right_in_the_end() {
        runner(if cfg!(target_arch = "wasm32") { 50 } else { 500 })
            .run(&ops(), |ops| {
                let shared = Memory::default();
                Lease::create_slots(&shared);
                let (mut workers, mut gauge, mut now) = (Vec::<Worker>::new(), 0, 1);
                for (n, op) in ops.into_iter().enumerate() {
                    let count = workers.len().max(1);
                    match op {
                        Op::Start => {
                            let lease = Lease::new(1 + (n as u64) * 7);
                            workers.push(Worker { lease, level: 0, reported: 0, alive: true });
                        }
                        Op::Level(n, level) => {
                            workers.iter_mut().skip(n % count).take(1).for_each(|w| w.level = level)
                        }
                        Op::Die(n) => {
                            workers.iter_mut().skip(n % count).take(1).for_each(|w| w.alive = false)
                        }
                        Op::Stall(n) => {
                            for _ in 0..20 {
                                now += BEAT;
                                beat(&mut workers, Some(n % count), &mut gauge, now, &shared);
                            }
                        }
                        Op::Wait(by) => now += by,
                    }
                    beat(&mut workers, None, &mut gauge, now, &shared);
                }
                let lease = Lease::new(u64::MAX);
                workers.push(Worker { lease, level: 0, reported: 0, alive: true });
                for _ in 0..20 {
                    now += BEAT;
                    beat(&mut workers, None, &mut gauge, now, &shared);
                }
                let living: i64 = workers.iter().filter(|w| w.alive).map(|w| w.level).sum();
                prop_assert_eq!(gauge, living);
                Ok(())
            })
            .unwrap();
    }

    #[test]
    fn a_lease_that_ends_leaves_its_slot_to_others() {
        let shared = Memory::default();
        Lease::create_slots(&shared);
        for n in 0..SLOTS * 3 {
            let mut lease = Lease::new(u64::from(n) + 1);
            assert_eq!(lease.keep([1, 2, 3, 4], 10, &shared), Due::default());
            assert!(lease.slot.is_some());
            lease.end(&shared);
        }
    }

    #[test]
    fn nothing_is_written_when_nothing_changed() {
        let shared = Memory::default();
        Lease::create_slots(&shared);
        let mut lease = Lease::new(1);
        lease.keep([1, 0, 0, 0], 10, &shared);
        let before = shared.slots.borrow().clone();
        lease.keep([1, 0, 0, 0], 10 + BEAT - 1, &shared);
        assert_eq!(*shared.slots.borrow(), before);
    }

    #[test]
    fn odd_records_are_read_without_a_panic() {
        assert_eq!(Record::decode(&[1; 47]), None);
        let record = Record { owner: 7, beat: 9, share: [-1, 2, -3, 4] };
        assert_eq!(Record::decode(&record.encode()), Some(record));
    }
}
