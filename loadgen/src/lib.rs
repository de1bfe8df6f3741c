//! Load generator, demo backend and sidecar for Collapser, as a library, so that the
//! programs and the end-to-end tests run the same code.

pub mod affinity_sim;
pub mod args;
pub mod backend;
pub mod fleet;
pub mod http_ask;
pub mod http_backend;
pub mod http_load;
pub mod load;
pub mod payload;
pub mod progress;
pub mod proto;
pub mod report;
pub mod sidecar;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// The largest gRPC message that the demo backend and its clients take, in bytes.
pub const MAX_MESSAGE_BYTES: usize = 64 * 1024 * 1024;

/// Locks, also after a panic elsewhere: what these locks hold is only ever counted up.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
