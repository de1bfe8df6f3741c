//! The operations and their list.

use crate::{body, header_name, key, reply, request_headers};
use collapser_engine::flights::{Call, Collected, Portion, Ticket};
use collapser_engine::key::{self as keys, Key};
use collapser_engine::life::Terms;
use collapser_engine::pairs::Pairs;
use collapser_engine::reply::Reply;
use collapser_engine::settings::Settings;
use collapser_engine::table::{Ask, Outcome, Table};
use collapser_engine::{Nanos, Waiter};
use std::hint::black_box;

/// Something whose speed is measured.
pub trait Operation {
    /// Gets ready to be run so many times. What this takes is not measured.
    fn prepare(&mut self, _times: u64) {}

    /// Runs so many times.
    fn run(&mut self, times: u64);
}

/// An operation and how to measure it.
pub struct Spec {
    /// What is done.
    pub group: &'static str,
    /// With how much.
    pub variant: &'static str,
    /// How often it can be run after one preparation.
    pub most: u64,
    /// How much is done in one run: waiters answered, entries dropped.
    pub parts: u64,
    /// Bytes that one run reads.
    pub bytes: u64,
    /// The nanoseconds that one run must not exceed natively.
    pub must: Option<f64>,
    /// Whether it is measured as Wasm too.
    pub wasm: bool,
    /// Makes it.
    pub create: fn() -> Box<dyn Operation>,
}

impl Spec {
    const fn new(group: &'static str, variant: &'static str, create: fn() -> Box<dyn Operation>) -> Self {
        Self { group, variant, most: u64::MAX, parts: 1, bytes: 0, must: None, wasm: false, create }
    }

    const fn most(self, most: u64) -> Self {
        Self { most, ..self }
    }

    const fn parts(self, parts: u64) -> Self {
        Self { parts, ..self }
    }

    const fn bytes(self, bytes: u64) -> Self {
        Self { bytes, ..self }
    }

    const fn must(self, must: f64) -> Self {
        Self { must: Some(must), ..self }
    }

    const fn wasm(self) -> Self {
        Self { wasm: true, ..self }
    }

    /// Its name, as `group/variant`.
    pub fn name(&self) -> String {
        format!("{}/{}", self.group, self.variant)
    }
}

/// All operations. The Wasm module knows them by their place.
pub const OPERATIONS: &[Spec] = &[
    Spec::new("key", "64 B, no header", || derive(64, 0)).bytes(64).wasm(),
    Spec::new("key", "64 B, 2 headers", || derive(64, 2)).bytes(64).wasm(),
    Spec::new("key", "64 B, 8 headers", || derive(64, 8)).bytes(64).wasm(),
    Spec::new("key", "1 KiB, no header", || derive(1 << 10, 0)).bytes(1 << 10).wasm(),
    Spec::new("key", "1 KiB, 2 headers", || derive(1 << 10, 2)).bytes(1 << 10).wasm(),
    Spec::new("key", "1 KiB, 8 headers", || derive(1 << 10, 8)).bytes(1 << 10).wasm(),
    Spec::new("key", "64 KiB, no header", || derive(64 << 10, 0)).bytes(64 << 10).wasm(),
    Spec::new("key", "64 KiB, 2 headers", || derive(64 << 10, 2)).bytes(64 << 10).wasm(),
    Spec::new("key", "64 KiB, 8 headers", || derive(64 << 10, 8)).bytes(64 << 10).wasm(),
    Spec::new("hit", "1 entry", || Box::new(Hit::new(1))).must(45.0).wasm(),
    Spec::new("hit", "10,000 entries", || Box::new(Hit::new(10_000))).wasm(),
    Spec::new("join", "one flight", || Box::new(Join::new())).most(Join::MOST).must(40.0).wasm(),
    Spec::new("join and leave", "one flight", || Box::new(JoinAndLeave::new())).wasm(),
    Spec::new("lead and complete", "one waiter", || Box::new(Lead::new(0)))
        .most(Lead::MOST)
        .must(600.0)
        .wasm(),
    Spec::new("fan-out", "10 waiters", || Box::new(FanOut::new(10))).most(500).parts(10).wasm(),
    Spec::new("fan-out", "10,000 waiters", || Box::new(FanOut::new(10_000))).most(4).parts(10_000).wasm(),
    Spec::new("hang-up", "one of 10,000 waiters", || Box::new(HangUp::new())).most(HangUp::MOST).wasm(),
    Spec::new("sweep", "10,000 entries", || Box::new(Sweep::new(10_000))).most(1).parts(10_000).wasm(),
    Spec::new("sweep", "1,000,000 entries", || Box::new(Sweep::new(1_000_000))).most(1).parts(1_000_000),
    Spec::new("sweep", "nothing due of 10,000", || Box::new(Idle::new(10_000))),
    Spec::new("evict", "10,000 entries, churn", || Box::new(Lead::new(10_000))).most(Lead::MOST).wasm(),
];

/// The filter's own batch.
const BATCH: Portion = Portion { calls: 32, bytes: usize::MAX };

/// Long after anything here expires.
const LATER: Nanos = Nanos::MAX / 2;

/// A table without limits, or with one on entries.
fn table(max_cache_entries: usize) -> Table {
    Table::new(&Settings {
        max_cache_entries,
        max_cache_bytes: 0,
        max_waiters: 10_000_000,
        ..Settings::for_cluster("backend")
    })
}

/// Kept long enough for all that is measured.
const TERMS: Terms = Terms { age: 0, ttl: 3_600_000_000_000, revalidate: 0, error: 0, jitter: 0.0 };

fn ticket(outcome: Outcome) -> Ticket {
    match outcome {
        Outcome::Joined(ticket) | Outcome::Leads(ticket) => ticket,
        other => panic!("neither joined nor leads: {other:?}"),
    }
}

fn pass_on(table: &mut Table, collected: &Collected) {
    table.passed_on(collected.reply.body.len(), collected.charged);
}

/// A called waiter takes its reply, and Envoy passes it on.
fn answer(table: &mut Table, ticket: Ticket) {
    match table.collect(ticket) {
        Some(collected) => pass_on(table, black_box(&collected)),
        None => panic!("there is nothing to collect"),
    }
}

/// A flight comes and goes, and its only waiter with it.
fn complete(table: &mut Table, key: Key, reply: Reply, calls: &mut Vec<Call>) {
    let seat = ticket(table.arrive(&Ask::new(black_box(key)), 1, 0).outcome);
    table.land(seat.flight, reply, TERMS, false, 1);
    table.next_calls(BATCH, 1, calls);
    answer(table, seat);
}

/// Fills the cache with `entries`; returns their keys.
fn fill(table: &mut Table, entries: usize) -> Vec<Key> {
    let (keys, mut calls) = ((0..entries as u64).map(key).collect::<Vec<_>>(), Vec::new());
    keys.iter().for_each(|key| complete(table, *key, reply(10), &mut calls));
    keys
}

/// A request's headers are read and its key is derived, as on arrival.
struct Derive {
    block: Box<[u8]>,
    body: Vec<u8>,
    names: Vec<String>,
}

fn derive(size: usize, key_headers: usize) -> Box<dyn Operation> {
    Box::new(Derive {
        block: request_headers(key_headers),
        body: body(size),
        names: (0..key_headers).map(header_name).collect(),
    })
}

impl Operation for Derive {
    fn run(&mut self, times: u64) {
        for _ in 0..times {
            let headers = Pairs::parse(black_box(&self.block)).unwrap_or_default();
            black_box(keys::derive(headers, black_box(&self.body), &self.names));
        }
    }
}

/// A request is answered from the cache, and Envoy passes the reply on.
struct Hit {
    table: Table,
    keys: Vec<Key>,
    next: usize,
}

impl Hit {
    fn new(entries: usize) -> Self {
        let mut table = table(0);
        let keys = fill(&mut table, entries);
        Self { table, keys, next: 0 }
    }
}

impl Operation for Hit {
    fn run(&mut self, times: u64) {
        for _ in 0..times {
            // A prime, so that all entries have their turn and neighbours none after the other.
            self.next = (self.next + 7_919) % self.keys.len();
            match self.table.arrive(&Ask::new(black_box(self.keys[self.next])), 1, 2).outcome {
                Outcome::Hit(hit) => pass_on(&mut self.table, black_box(&hit)),
                other => panic!("no hit: {other:?}"),
            }
        }
    }
}

/// A table with one flight and so many waiters, and their tickets.
fn waiting(waiters: Waiter) -> (Table, Vec<Ticket>) {
    let mut table = table(0);
    let tickets =
        (1..=waiters).map(|waiter| ticket(table.arrive(&Ask::new(key(0)), waiter, 0).outcome)).collect();
    (table, tickets)
}

/// Requests join a flight that has had as many waiters before.
struct Join {
    table: Table,
    key: Key,
    joined: Vec<Ticket>,
}

impl Join {
    const MOST: u64 = 1_000;

    fn new() -> Self {
        let (table, mut tickets) = waiting(1 + Self::MOST as Waiter);
        Self { table, key: key(0), joined: tickets.split_off(1) }
    }
}

impl Operation for Join {
    fn prepare(&mut self, _times: u64) {
        for ticket in self.joined.drain(..) {
            self.table.leave(ticket);
        }
    }

    fn run(&mut self, times: u64) {
        for waiter in 0..times {
            self.joined.push(ticket(
                self.table.arrive(&Ask::new(black_box(self.key)), 2 + waiter as Waiter, 1).outcome,
            ));
        }
    }
}

/// A request joins a flight and hangs up.
struct JoinAndLeave {
    table: Table,
    key: Key,
}

impl JoinAndLeave {
    fn new() -> Self {
        Self { table: waiting(1).0, key: key(0) }
    }
}

impl Operation for JoinAndLeave {
    fn run(&mut self, times: u64) {
        for _ in 0..times {
            let seat = ticket(self.table.arrive(&Ask::new(black_box(self.key)), 2, 1).outcome);
            black_box(self.table.leave(seat));
        }
    }
}

/// A request starts a flight, its reply comes, is cached, and answers the request. With a full cache, each evicts another.
struct Lead {
    table: Table,
    full: bool,
    next: u64,
    ready: Vec<(Key, Reply)>,
    calls: Vec<Call>,
}

impl Lead {
    const MOST: u64 = 1_000;

    fn new(max_cache_entries: usize) -> Self {
        let mut table = table(max_cache_entries);
        // As many entries as one run adds, so that no run finds tables that have yet to grow.
        let keys = fill(&mut table, max_cache_entries.max(Self::MOST as usize));
        Self {
            table,
            full: max_cache_entries > 0,
            next: keys.len() as u64,
            ready: Vec::new(),
            calls: Vec::with_capacity(BATCH.calls),
        }
    }
}

impl Operation for Lead {
    fn prepare(&mut self, times: u64) {
        if !self.full {
            self.table.sweep(LATER);
        }
        let first = self.next;
        self.next += times;
        self.ready = (first..self.next).map(|number| (key(number), reply(10))).collect();
    }

    fn run(&mut self, times: u64) {
        for _ in 0..times {
            let Some((key, reply)) = self.ready.pop() else { panic!("not prepared") };
            complete(&mut self.table, key, reply, &mut self.calls);
        }
    }
}

/// A flight that has landed answers all its waiters.
struct FanOut {
    waiters: Waiter,
    tables: Vec<Table>,
    calls: Vec<Call>,
}

impl FanOut {
    fn new(waiters: Waiter) -> Self {
        Self { waiters, tables: Vec::new(), calls: Vec::with_capacity(BATCH.calls) }
    }
}

impl Operation for FanOut {
    fn prepare(&mut self, times: u64) {
        self.tables.clear();
        for _ in 0..times {
            let (mut table, tickets) = waiting(self.waiters);
            // The table has seen a flight end before.
            complete(&mut table, key(1), reply(10), &mut self.calls);
            table.land(tickets[0].flight, reply(10), TERMS, false, 1);
            self.tables.push(table);
        }
    }

    fn run(&mut self, times: u64) {
        for table in self.tables.iter_mut().take(times as usize) {
            while table.has_calls() {
                table.next_calls(BATCH, 1, &mut self.calls);
                self.calls.iter().for_each(|call| answer(table, call.ticket));
            }
        }
    }
}

/// Waiters of one flight hang up, in no order.
struct HangUp {
    table: Table,
    tickets: Vec<Ticket>,
    gone: usize,
}

impl HangUp {
    const WAITERS: Waiter = 10_000;
    const MOST: u64 = 5_000;

    fn new() -> Self {
        let (table, tickets) = waiting(Self::WAITERS);
        Self { table, tickets, gone: 0 }
    }

    fn nth(&self, n: usize) -> usize {
        n * 7_919 % self.tickets.len()
    }
}

impl Operation for HangUp {
    fn prepare(&mut self, _times: u64) {
        for n in (0..self.gone).map(|n| self.nth(n)).collect::<Vec<_>>() {
            self.tickets[n] = ticket(self.table.arrive(&Ask::new(key(0)), 1, 1).outcome);
        }
        self.gone = 0;
    }

    fn run(&mut self, times: u64) {
        for n in 0..times as usize {
            assert!(self.table.leave(black_box(self.tickets[self.nth(n)])));
        }
        self.gone = times as usize;
    }
}

/// All entries have expired and are dropped.
struct Sweep {
    table: Table,
    entries: usize,
}

impl Sweep {
    fn new(entries: usize) -> Self {
        Self { table: table(0), entries }
    }
}

impl Operation for Sweep {
    fn prepare(&mut self, _times: u64) {
        self.table.sweep(LATER);
        fill(&mut self.table, self.entries);
    }

    fn run(&mut self, _times: u64) {
        assert_eq!(self.table.sweep(LATER), self.entries);
    }
}

/// The sweep comes by and no entry has expired.
struct Idle {
    table: Table,
}

impl Idle {
    fn new(entries: usize) -> Self {
        let mut table = table(0);
        fill(&mut table, entries);
        Self { table }
    }
}

impl Operation for Idle {
    fn run(&mut self, times: u64) {
        for _ in 0..times {
            black_box(self.table.sweep(black_box(2)));
        }
    }
}
