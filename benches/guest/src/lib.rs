//! The engine's operations, as benchmarks run them.
//!
//! One list for all: Criterion measures it natively, and `summary` measures it natively and as Wasm and counts
//! allocations. Built as a Wasm module, this crate exports `choose`, `prepare` and `run`.

mod fixtures;
mod operations;
#[cfg(target_arch = "wasm32")]
mod wasm;

pub use fixtures::{body, header_name, key, reply, request_headers};
pub use operations::{OPERATIONS, Operation, Spec};
