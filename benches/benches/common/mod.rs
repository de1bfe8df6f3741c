//! Hands operations to Criterion.

use collapser_benches::{OPERATIONS, Operation, Spec};
use criterion::{BenchmarkId, Criterion, SamplingMode, Throughput};
use std::time::{Duration, Instant};

/// Measures all operations that are `wanted`.
pub fn measure(c: &mut Criterion, wanted: impl Fn(&Spec) -> bool) {
    for spec in OPERATIONS.iter().filter(|spec| wanted(spec)) {
        let mut group = c.benchmark_group(spec.group);
        group.warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
        if spec.most == 1 {
            // Preparing takes far longer than running.
            group.warm_up_time(Duration::from_millis(1)).measurement_time(Duration::from_millis(100));
            group.sample_size(10).sampling_mode(SamplingMode::Flat);
        }
        if spec.bytes > 0 {
            group.throughput(Throughput::Bytes(spec.bytes));
        } else if spec.parts > 1 {
            group.throughput(Throughput::Elements(spec.parts));
        }
        // Made only if it is measured: some hold much memory.
        let mut operation = None;
        group.bench_function(BenchmarkId::from_parameter(spec.variant), |b| {
            let operation = operation.get_or_insert_with(spec.create);
            b.iter_custom(|times| run(operation.as_mut(), spec, times));
        });
        group.finish();
    }
}

/// Runs it so many times, in as many turns as that takes, and returns how long it ran.
fn run(operation: &mut dyn Operation, spec: &Spec, times: u64) -> Duration {
    let (mut left, mut took) = (times, Duration::ZERO);
    while left > 0 {
        let turn = left.min(spec.most);
        operation.prepare(turn);
        let start = Instant::now();
        operation.run(turn);
        took += start.elapsed();
        left -= turn;
    }
    took
}
