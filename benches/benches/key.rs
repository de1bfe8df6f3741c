//! What deriving a key costs, by the size of the body and the number of key headers.

use collapser_benches::{body, header_name, request_headers};
use collapser_engine::key;
use collapser_engine::pairs::Pairs;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;

fn derive(c: &mut Criterion) {
    let mut group = c.benchmark_group("key");
    for key_headers in [0, 2, 8] {
        let block = request_headers(key_headers);
        let names: Vec<String> = (0..key_headers).map(header_name).collect();
        for size in [64, 1 << 10, 64 << 10] {
            let body = body(size);
            group.throughput(Throughput::Bytes(size as u64));
            group.bench_function(BenchmarkId::new(format!("{key_headers}_headers"), size), |b| {
                b.iter(|| {
                    // As on arrival: the block is read, then hashed.
                    let headers = Pairs::parse(black_box(&block)).unwrap_or_default();
                    key::derive(headers, black_box(&body), &names)
                });
            });
        }
    }
    group.finish();
}

criterion_group!(benches, derive);
criterion_main!(benches);
