//! What each path of the engine allocates, counted by the allocator itself.
//!
//! The counts are of the thread that runs the test.

// Counting needs threads and an allocator of its own, which Wasm's test runner does not have.
#![cfg(not(target_arch = "wasm32"))]

use collapser_engine::cache::Seed;
use collapser_engine::flights::{Collected, Portion, Ticket};
use collapser_engine::grace::{Grace, Until};
use collapser_engine::key::Key;
use collapser_engine::life::Terms;
use collapser_engine::pairs::{self, Pairs};
use collapser_engine::reply::Reply;
use collapser_engine::settings::Settings;
use collapser_engine::table::{Ask, Outcome, Table};
use collapser_engine::{framing, key};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::hint::black_box;

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
        // SAFETY: the caller's own promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations(work: impl FnOnce()) -> usize {
    let before = COUNT.get();
    work();
    COUNT.get() - before
}

fn key_of(number: u8) -> Key {
    Key([number; 32])
}

fn reply() -> Reply {
    let headers = pairs::block(&[(":status", "200"), ("content-type", "application/grpc")]);
    Reply::record(&headers, b"\0\0\0\0\x01a".to_vec(), &pairs::block(&[("grpc-status", "0")]))
}

/// Kept long enough for all that is measured.
const TERMS: Terms = Terms { age: 0, ttl: 3_600_000_000_000, revalidate: 0, error: 0, jitter: 0.0 };

fn ticket(outcome: Outcome) -> Ticket {
    match outcome {
        Outcome::Joined(ticket) | Outcome::Leads(ticket) => ticket,
        other => panic!("{other:?}"),
    }
}

const BATCH: Portion = Portion { calls: 32, bytes: usize::MAX };

fn pass_on(table: &mut Table, collected: &Collected) {
    table.passed_on(collected.reply.body.len(), collected.charged);
}

/// A table in which a flight has come and gone, so that its memory is there.
fn warm_table() -> Table {
    let (mut table, mut calls) = (Table::new(&Settings::for_cluster("c")), Vec::new());
    let tickets: Vec<_> =
        (1..=100).map(|waiter| ticket(table.arrive(&Ask::new(key_of(9)), waiter, 0).outcome)).collect();
    table.land(tickets[0].flight, reply(), TERMS, false, 0);
    table.next_calls(Portion { calls: 100, bytes: usize::MAX }, 1, &mut calls);
    for ticket in tickets {
        table.collect(ticket);
    }
    table
}

#[test]
fn followers_and_hits_allocate_nothing() {
    let mut table = warm_table();
    let mut calls = Vec::with_capacity(32);
    let leader = ticket(table.arrive(&Ask::new(key_of(1)), 1, 0).outcome);

    let mut tickets = Vec::with_capacity(99);
    let join = allocations(|| {
        (2..=100)
            .for_each(|waiter| tickets.push(ticket(table.arrive(&Ask::new(key_of(1)), waiter, 1).outcome)))
    });
    assert_eq!(join, 0, "joining");

    let gone = tickets.pop().unwrap();
    assert_eq!(allocations(|| assert!(table.leave(gone))), 0, "leaving");

    table.land(leader.flight, reply(), TERMS, false, 2);
    let fan_out = allocations(|| {
        while table.has_calls() {
            table.next_calls(BATCH, 1, &mut calls);
            for call in &calls {
                let collected = table.collect(call.ticket).unwrap();
                pass_on(&mut table, &collected);
            }
        }
    });
    assert_eq!(fan_out, 0, "fan-out");

    let hit = allocations(|| {
        for _ in 0..100 {
            let Outcome::Hit(hit) = table.arrive(&Ask::new(key_of(1)), 7, 3).outcome else {
                panic!("no hit")
            };
            pass_on(&mut table, &hit);
        }
    });
    assert_eq!(hit, 0, "hits");
}

#[test]
fn reading_and_hashing_a_request_allocates_nothing() {
    let block = pairs::block(&[(":path", "/a.B/C"), ("content-type", "application/grpc"), ("cookie", "x")]);
    let names = ["authorization".to_string(), "cookie".to_string()];
    let body = b"\0\0\0\0\x01a";
    let count = allocations(|| {
        let headers = Pairs::parse(&block).unwrap();
        black_box(framing::inspect(body, body.len()));
        black_box(key::derive(headers, body, &names));
        black_box(Seed::random());
    });
    assert_eq!(count, 0);
}

#[test]
fn the_grace_queue_allocates_nothing_once_it_has_grown() {
    let mut grace = Grace::new(10);
    let mut round = |now| {
        let places: [_; 8] =
            std::array::from_fn(|n| grace.enter(1 + n as u32, None, Until::EndOfStream, now));
        places.into_iter().for_each(|place| assert!(grace.leave(place)));
    };
    round(0);
    assert_eq!(allocations(|| round(1)), 0);
}

/// Not a limit that matters, but it should not creep up unseen.
#[test]
fn a_leader_allocates_little() {
    let mut table = warm_table();
    let mut calls = Vec::with_capacity(32);
    let recorded = reply();
    let count = allocations(|| {
        let leader = ticket(table.arrive(&Ask::new(key_of(2)), 1, 0).outcome);
        table.land(leader.flight, recorded, TERMS, false, 1);
        table.next_calls(BATCH, 1, &mut calls);
        assert!(table.collect(leader).is_some());
    });
    assert!(count <= 4, "{count}");
}
