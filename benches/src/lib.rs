//! What the benchmarks share.

pub mod alloc;

pub use collapser_bench_guest::{OPERATIONS, Operation, Spec};
pub use collapser_bench_guest::{body, header_name, key, reply, request_headers};
