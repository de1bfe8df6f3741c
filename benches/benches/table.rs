//! What the table costs on each path: hit, join, lead and land, fan-out, hang-up.

use collapser_benches::{key, reply};
use collapser_engine::flights::{Collected, FlightId, Portion, Ticket};
use collapser_engine::settings::Settings;
use collapser_engine::table::{Outcome, Table};
use criterion::{BatchSize, BenchmarkId, Criterion, criterion_group, criterion_main};
use std::hint::black_box;
use std::time::Duration;

fn table() -> Table {
    Table::new(&Settings {
        cache_duration: Duration::from_secs(3_600),
        max_waiters: 10_000_000,
        ..Settings::for_cluster("backend")
    })
}

fn ticket(outcome: Outcome) -> Ticket {
    match outcome {
        Outcome::Joined(ticket) | Outcome::Leads(ticket) => ticket,
        other => panic!("neither joined nor leads: {other:?}"),
    }
}

/// A table with one flight and so many waiters, and their tickets.
fn waiting(waiters: u32) -> (Table, Vec<Ticket>) {
    let mut table = table();
    let tickets = (1..=waiters).map(|waiter| ticket(table.arrive(key(0), waiter, 0))).collect();
    (table, tickets)
}

fn land(table: &mut Table, flight: FlightId) {
    table.land(flight, reply(10), 1);
}

const BATCH: Portion = Portion { calls: 32, bytes: usize::MAX };

fn pass_on(table: &mut Table, collected: &Collected) {
    table.passed_on(collected.reply.body.len(), collected.charged);
}

/// A called waiter takes its reply, and Envoy passes it on.
fn answer(table: &mut Table, ticket: Ticket) {
    if let Some(collected) = table.collect(ticket) {
        pass_on(table, &collected);
    }
}

fn hit(c: &mut Criterion) {
    let mut group = c.benchmark_group("hit");
    for entries in [1, 10_000] {
        let mut table = table();
        for n in 0..entries {
            let flight = ticket(table.arrive(key(n), 1, 0)).flight;
            land(&mut table, flight);
        }
        let mut n = 0;
        group.bench_function(BenchmarkId::from_parameter(entries), |b| {
            b.iter(|| {
                n = (n + 7_919) % entries;
                let Outcome::Hit(hit) = table.arrive(key(n), 1, 2) else { panic!("no hit") };
                pass_on(&mut table, black_box(&hit));
            });
        });
    }
    group.finish();
}

fn join(c: &mut Criterion) {
    let (mut table, _) = waiting(1);
    // Joining and leaving together, so that the flight does not grow without bound.
    c.bench_function("join_and_leave", |b| {
        b.iter(|| {
            let seat = ticket(table.arrive(black_box(key(0)), 2, 1));
            table.leave(seat)
        });
    });
}

fn lead_and_land(c: &mut Criterion) {
    let mut table = table();
    let (mut n, mut calls) = (0, Vec::new());
    c.bench_function("lead_land_collect", |b| {
        b.iter_batched(
            || reply(10),
            |reply| {
                n += 1;
                let seat = ticket(table.arrive(key(n), 1, 0));
                table.land(seat.flight, reply, 1);
                table.next_calls(BATCH, 1, &mut calls);
                answer(&mut table, seat);
            },
            BatchSize::SmallInput,
        );
    });
}

fn fan_out(c: &mut Criterion) {
    let mut group = c.benchmark_group("fan_out");
    for waiters in [10, 10_000] {
        group.bench_function(BenchmarkId::from_parameter(waiters), |b| {
            b.iter_batched(
                || {
                    let (mut table, tickets) = waiting(waiters);
                    land(&mut table, tickets[0].flight);
                    table
                },
                |mut table| {
                    let mut calls = Vec::new();
                    while table.has_calls() {
                        table.next_calls(BATCH, 1, &mut calls);
                        calls.iter().for_each(|call| answer(&mut table, call.ticket));
                    }
                    table
                },
                BatchSize::LargeInput,
            );
        });
    }
    group.finish();
}

fn hang_up(c: &mut Criterion) {
    c.bench_function("hang_up_of_10000", |b| {
        let (mut table, mut tickets) = waiting(10_000);
        let mut n = 0;
        b.iter(|| {
            n = (n + 7_919) % tickets.len();
            table.leave(tickets[n]);
            tickets[n] = ticket(table.arrive(key(0), 1, 1));
        });
    });
}

criterion_group!(benches, hit, join, lead_and_land, fan_out, hang_up);
criterion_main!(benches);
