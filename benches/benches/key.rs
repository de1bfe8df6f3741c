//! What deriving a key costs, by the size of the body and the number of key headers.

mod common;

use criterion::{Criterion, criterion_group, criterion_main};

fn key(c: &mut Criterion) {
    common::measure(c, |spec| spec.group == "key");
}

criterion_group!(benches, key);
criterion_main!(benches);
