//! What the courses in [`super::courses`] do not show: who is alone, what it costs, and rare ends.

use super::*;
use crate::key::tests::numbered;
use crate::life::{Life, Terms};
use crate::reply::tests::of_weight;
use crate::testing::test;
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};

/// Shared data as the host has it, with a count of accesses.
#[derive(Default)]
struct Memory {
    slots: RefCell<HashMap<u32, (Vec<u8>, u32)>>,
    last_token: Cell<u32>,
    reads: Cell<usize>,
    writes: Cell<usize>,
    /// Whether somebody else changes every slot between a read and a write.
    is_busy: Cell<bool>,
}

impl Shared for Memory {
    fn get(&self, slot: u32) -> Option<(Vec<u8>, u32)> {
        self.reads.set(self.reads.get() + 1);
        self.slots.borrow().get(&slot).cloned()
    }

    fn set(&self, slot: u32, value: &[u8], token: u32) -> bool {
        self.writes.set(self.writes.get() + 1);
        let mut slots = self.slots.borrow_mut();
        let current = slots.get(&slot).map(|(_, current)| *current);
        let is_changed = self.is_busy.get() || current.is_some_and(|current| current != token);
        if token != 0 && is_changed {
            return false;
        }
        self.last_token.set(self.last_token.get() + 1);
        slots.insert(slot, (value.to_vec(), self.last_token.get()));
        true
    }
}

impl Memory {
    fn new() -> Self {
        let memory = Self::default();
        Commons::create_slots(&memory);
        memory
    }

    /// Reads and writes since the last time.
    fn accesses(&self) -> (usize, usize) {
        (self.reads.take(), self.writes.take())
    }
}

const REALM: u64 = 5;
const NOW: Nanos = 10 * STALE;
const LATER: Nanos = 100 * STALE;

/// So many members of one realm, with queues from 1 on, which know each other.
fn members(count: u32, memory: &Memory) -> Vec<Commons> {
    let mut members: Vec<_> =
        (1..=count).map(|n| Commons::new(u64::from(n), REALM, n, bucket_bytes(0))).collect();
    for now in [NOW - BEAT, NOW] {
        members.iter_mut().for_each(|member| member.beat(now, memory));
    }
    memory.accesses();
    members
}

fn fly(commons: &mut Commons, key: u32, now: Nanos, memory: &Memory) -> Ticket {
    match commons.claim(&numbered(key), false, now, LATER, memory) {
        Claim::Fly(ticket) => ticket,
        other => panic!("{other:?}"),
    }
}

fn wait(commons: &mut Commons, key: u32, now: Nanos, memory: &Memory) -> Watch {
    match commons.claim(&numbered(key), false, now, LATER, memory) {
        Claim::Wait(watch) => watch,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_reply_that_is_too_old_for_one_who_asks_is_left_where_it_is() {
    let memory = Memory::new();
    let mut all = members(3, &memory);
    let ticket = fly(&mut all[0], 1, NOW, &memory);
    let life = Life::new(Terms { ttl: 10, ..Terms::default() }, 0, NOW);
    let reply = Reply { life, ..of_weight(3) };
    all[0].land(ticket, &reply, life.fresh, NOW, &memory);
    let mut claim = |max_age| {
        let ask = Ask { max_age, ..Ask::new(numbered(1)) };
        all[1].claim_for(&ask, NOW + 5, LATER, &memory)
    };
    for enough in [None, Some(5)] {
        assert!(matches!(claim(enough), Claim::Take { .. }), "{enough:?}");
    }
    assert!(matches!(claim(Some(4)), Claim::Replace { .. }));
}

#[test]
fn it_costs_what_it_is_said_to_cost() {
    let memory = Memory::new();
    let mut all = members(4, &memory);
    let ticket = fly(&mut all[0], 1, NOW, &memory);
    assert_eq!(memory.accesses(), (1, 1), "to fly");
    let watch = wait(&mut all[1], 1, NOW, &memory);
    assert_eq!(memory.accesses(), (1, 1), "to wait");
    assert!(!all[1].is_due(&watch, NOW + RECHECK - 1) && all[1].is_due(&watch, NOW + RECHECK));
    assert_eq!(memory.accesses(), (0, 0), "to see whether a claim is due");
    wait(&mut all[1], 1, NOW, &memory);
    assert_eq!(memory.accesses(), (1, 0), "to look after a flight");
    assert_eq!(all[0].land(ticket, &of_weight(3), NOW + 5, NOW, &memory), [2]);
    assert_eq!(memory.accesses(), (1, 1), "to land");
    let taken = all[2].claim(&numbered(1), false, NOW + 4, LATER, &memory);
    assert_eq!(taken, Claim::Take { reply: of_weight(3), expires: NOW + 5 });
    assert_eq!(memory.accesses(), (1, 0), "a reply of another worker");
    all[0].beat(NOW + BEAT - 1, &memory);
    assert_eq!(memory.accesses(), (0, 0), "before it is time to beat");
    all[0].beat(NOW + BEAT, &memory);
    assert_eq!(memory.accesses(), (1, 1), "to beat");
    let _ticket = fly(&mut all[0], 1, NOW + BEAT, &memory);
    all[0].end(&memory);
    all[1].beat(NOW + 2 * BEAT, &memory);
    memory.accesses();
    let _ticket = fly(&mut all[1], 1, NOW + 2 * BEAT, &memory);
    assert_eq!(memory.accesses(), (2, 1), "to take over a flight");
}

#[test]
fn one_worker_and_the_main_thread_do_without() {
    let memory = Memory::new();
    let mut all = members(2, &memory);
    let mut other_realm = Commons::new(9, REALM + 1, 9, 0);
    other_realm.beat(NOW, &memory);
    all[1].beat(NOW + BEAT, &memory);
    memory.accesses();
    assert_eq!(all[1].claim(&numbered(1), false, NOW + BEAT, LATER, &memory), Claim::Unshared);
    assert_eq!(memory.accesses(), (0, 0));
    let mut third = Commons::new(3, REALM, 3, 0);
    third.beat(NOW + BEAT, &memory);
    assert!(!third.alone());
    all[1].beat(NOW + 2 * BEAT, &memory);
    assert!(!all[1].alone());
}

#[test]
fn two_workers_share_even_if_the_main_thread_stands_still() {
    let memory = Memory::new();
    let mut all = members(3, &memory);
    let mut now = NOW;
    for _ in 0..20 {
        now += BEAT;
        let _ = all[1].claim(&numbered(1), false, now, now + 1, &memory);
        let _ = all[2].claim(&numbered(2), false, now, now + 1, &memory);
        all[1].beat(now, &memory);
        all[2].beat(now, &memory);
    }
    assert!(!all[1].alone() && !all[2].alone());
    all[2].end(&memory);
    all[1].beat(now + BEAT, &memory);
    assert!(all[1].alone());
}

#[test]
fn one_that_is_no_member_does_without() {
    let memory = Memory::new();
    let mut all = members(3, &memory);
    assert!(Commons::new(4, REALM, 4, 0).alone());
    all[2].end(&memory);
    assert!(all[2].alone());
    let mut many = members(roster::MEMBERS as u32 + 10, &memory);
    assert!(many.last().is_some_and(Commons::alone) && !many[0].alone());
    for member in &mut many[..20] {
        member.end(&memory);
    }
    let last = many.last_mut().unwrap();
    last.beat(NOW + BEAT, &memory);
    assert!(!last.alone());
}

#[test]
fn the_dead_leave_their_places_to_others() {
    let memory = Memory::new();
    let mut now = NOW;
    for n in 1..=4 * roster::MEMBERS as u32 {
        let mut member = Commons::new(u64::from(n), REALM, n, 0);
        member.beat(now, &memory);
        now += STALE / 100;
    }
    let mut last = Commons::new(u64::MAX, REALM, 0, 0);
    last.beat(now, &memory);
    assert!(!last.alone());
}

#[test]
fn one_that_stood_still_shows_up_before_it_flies() {
    let memory = Memory::new();
    let mut all = members(4, &memory);
    let mut now = NOW;
    for _ in 0..20 {
        now += BEAT;
        all[1..].iter_mut().for_each(|member| member.beat(now, &memory));
    }
    memory.accesses();
    let _ticket = fly(&mut all[0], 1, now, &memory);
    assert_eq!(memory.accesses(), (2, 2));
    wait(&mut all[1], 1, now, &memory);
}

#[test]
fn nobody_dies_of_a_pause_of_the_whole_process() {
    let memory = Memory::new();
    let mut all = members(3, &memory);
    let ticket = fly(&mut all[0], 1, NOW, &memory);
    let first = wait(&mut all[1], 1, NOW, &memory);
    let after = NOW + 3 * STALE;
    wait(&mut all[1], 1, after, &memory);
    all[1].beat(after + BEAT, &memory);
    let again = wait(&mut all[1], 1, after + BEAT, &memory);
    assert_eq!((first.owner, again.owner), (1, 1));
    all[0].beat(after + BEAT, &memory);
    assert_eq!(all[0].land(ticket, &of_weight(0), 0, after + BEAT, &memory), [2]);
}

#[test]
fn one_that_takes_over_inherits_the_waiters_but_not_itself() {
    let memory = Memory::new();
    let mut all = members(4, &memory);
    let _lost = fly(&mut all[0], 1, NOW, &memory);
    wait(&mut all[1], 1, NOW, &memory);
    let watch = wait(&mut all[2], 1, NOW, &memory);
    all[0].end(&memory);
    let now = NOW + BEAT;
    all[1..].iter_mut().for_each(|member| member.beat(now, &memory));
    assert!(all[2].is_due(&watch, now));
    let ticket = fly(&mut all[2], 1, now, &memory);
    assert_eq!(all[2].land(ticket, &of_weight(0), 0, now, &memory), [2]);
}

#[test]
fn nothing_is_sent_to_a_queue_that_nobody_reads() {
    let memory = Memory::new();
    let mut all = members(4, &memory);
    let ticket = fly(&mut all[0], 1, NOW, &memory);
    wait(&mut all[1], 1, NOW, &memory);
    let mut late = Commons::new(7, REALM, 7, 0);
    late.beat(NOW, &memory);
    wait(&mut late, 1, NOW, &memory);
    all[1].end(&memory);
    assert_eq!(all[0].give_up(ticket, NOW, &memory), [7]);
}

#[test]
fn a_slot_that_always_changes_holds_up_nobody() {
    let memory = Memory::new();
    let mut all = members(3, &memory);
    let ticket = fly(&mut all[0], 1, NOW, &memory);
    wait(&mut all[1], 1, NOW, &memory);
    memory.is_busy.set(true);
    assert_eq!(all[2].claim(&numbered(1), false, NOW, LATER, &memory), Claim::Unshared);
    assert_eq!(all[0].land(ticket, &of_weight(0), NOW + 5, NOW, &memory), [2]);
    assert!(matches!(all[2].claim(&numbered(1), false, NOW, LATER, &memory), Claim::Take { .. }));
    all[0].beat(NOW + BEAT, &memory);
    all[0].end(&memory);
}

#[test]
fn an_overdue_flight_is_taken_over_and_its_owner_then_leaves_it_alone() {
    let memory = Memory::new();
    let mut all = members(3, &memory);
    let key = numbered(1);
    let Claim::Fly(late) = all[0].claim(&key, false, NOW, NOW + 5, &memory) else { panic!("nobody flew") };
    let watch = wait(&mut all[1], 1, NOW + 4, &memory);
    assert!(!all[1].is_due(&watch, NOW + 4) && all[1].is_due(&watch, NOW + 5));
    let ticket = fly(&mut all[1], 1, NOW + 5, &memory);
    assert!(all[0].land(late, &of_weight(9), NOW + 50, NOW + 6, &memory).is_empty());
    wait(&mut all[2], 1, NOW + 6, &memory);
    assert_eq!(all[1].land(ticket, &of_weight(0), NOW + 50, NOW + 7, &memory), [3]);
}

#[test]
fn a_worker_that_lost_its_flight_flies_again_and_the_first_no_longer_counts() {
    let memory = Memory::new();
    let mut all = members(3, &memory);
    let first = fly(&mut all[0], 1, NOW, &memory);
    let second = fly(&mut all[0], 1, NOW, &memory);
    wait(&mut all[1], 1, NOW, &memory);
    assert!(all[0].give_up(first, NOW, &memory).is_empty());
    assert_eq!(all[0].give_up(second, NOW, &memory), [2]);
}

#[test]
fn without_slots_or_with_garbage_in_them_everybody_flies() {
    let nothing = Memory::default();
    let mut lonely = Commons::new(1, REALM, 1, 0);
    lonely.beat(NOW, &nothing);
    assert_eq!(lonely.claim(&numbered(1), false, NOW, LATER, &nothing), Claim::Unshared);
    let memory = Memory::new();
    let mut all = members(3, &memory);
    let mut now = NOW;
    for garbage in [&b""[..], b"\xff\xff", b"\x01\x01"] {
        (0..SLOTS).for_each(|slot| assert!(memory.set(slot, garbage, 0)));
        let ticket = fly(&mut all[0], 1, now, &memory);
        assert!(all[0].give_up(ticket, now, &memory).is_empty());
        for _ in 0..2 {
            now += BEAT;
            all.iter_mut().for_each(|member| member.beat(now, &memory));
        }
    }
}

#[test]
fn a_reply_that_is_not_kept_takes_no_room_but_reaches_those_who_wait() {
    let memory = Memory::new();
    let mut all = members(3, &memory);
    for (reply, expires) in [(of_weight(0), NOW), (of_weight(64 << 10), LATER)] {
        let ticket = fly(&mut all[0], 1, NOW, &memory);
        wait(&mut all[1], 1, NOW, &memory);
        assert_eq!(all[0].land(ticket, &reply, expires, NOW, &memory), [2]);
        assert_eq!(memory.get(slot_of(&numbered(1))).map(|(record, _)| record.len()), Some(1));
    }
}

#[test]
fn slots_are_made_once() {
    let memory = Memory::new();
    assert_eq!(memory.accesses(), (1 + SLOTS as usize, SLOTS as usize));
    Commons::create_slots(&memory);
    assert_eq!(memory.accesses(), (1, 0));
}

#[test]
fn keys_are_spread_over_all_buckets() {
    let slots: HashSet<_> = (0..4 * BUCKETS).map(|key| slot_of(&numbered(key))).collect();
    assert_eq!(slots, (1..SLOTS).collect());
}

#[test]
fn a_bucket_has_its_part_of_the_cache() {
    assert_eq!(bucket_bytes(0), 64 << 10);
    assert_eq!(bucket_bytes(1 << 20), 1 << 10);
    assert_eq!(bucket_bytes(usize::MAX), 64 << 10);
}

#[test]
fn who_wants_it_anew_flies_though_a_reply_is_there_but_joins_a_flight() {
    let memory = Memory::new();
    let mut all = members(3, &memory);
    let ticket = fly(&mut all[0], 1, NOW, &memory);
    all[0].land(ticket, &of_weight(1), LATER, NOW, &memory);
    let claim = all[1].claim(&numbered(1), true, NOW, LATER, &memory);
    assert!(matches!(claim, Claim::Replace { .. }), "{claim:?}");
    assert!(matches!(all[2].claim(&numbered(1), true, NOW, LATER, &memory), Claim::Wait(_)));
    assert!(matches!(all[0].claim(&numbered(1), false, NOW, LATER, &memory), Claim::Wait(_)));
}

#[test]
fn a_stale_reply_goes_to_the_one_who_replaces_it_and_back_if_that_fails() {
    let memory = Memory::new();
    let mut all = members(3, &memory);
    let ticket = fly(&mut all[0], 1, NOW, &memory);
    let good = Good { fresh: NOW + 5, kept: NOW + 50 };
    all[0].land(ticket, &of_weight(3), good, NOW, &memory);
    for round in [NOW + 5, NOW + 20] {
        let claim = all[1].claim(&numbered(1), false, round, LATER, &memory);
        let Claim::Replace { ticket, stale } = claim else { panic!("{claim:?}") };
        assert_eq!(stale, of_weight(3));
        assert!(matches!(all[2].claim(&numbered(1), false, round, LATER, &memory), Claim::Wait(_)));
        assert_eq!(all[1].land(ticket, &stale, good, round + 1, &memory), [3]);
    }
    let claim = all[2].claim(&numbered(1), false, NOW + 50, LATER, &memory);
    assert!(matches!(claim, Claim::Fly(_)), "its time is over: {claim:?}");
}
