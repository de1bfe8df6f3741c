//! What the table costs on each path: hit, join, lead and complete, fan-out, hang-up, sweep, eviction.

mod common;

use criterion::{Criterion, criterion_group, criterion_main};

fn table(c: &mut Criterion) {
    common::measure(c, |spec| spec.group != "key");
}

criterion_group!(benches, table);
criterion_main!(benches);
