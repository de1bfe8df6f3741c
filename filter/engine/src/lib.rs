//! The host-free engine of Collapser.
//!
//! Everything here is plain data and arithmetic: it knows nothing of proxy-wasm, takes the clock as
//! an argument and never performs I/O, so that the same code is tested natively, on 32-bit Wasm and
//! under benchmarks. Data flows one way:
//!
//! ```text
//! classify → framing → key → table (cache, flights) → reply → terms → fan-out
//! ```
//!
//! Nothing in this crate panics on input that traffic can reach: a panic would kill the Wasm VM and
//! every request in it.

pub mod affinity;
pub mod budget;
pub mod bytesize;
pub mod cache;
pub mod cache_status;
pub mod catalog;
pub mod changes;
pub mod classify;
pub mod commons;
pub mod deadlines;
pub mod duration;
pub mod flights;
pub mod framing;
pub mod grace;
pub mod grpc;
pub mod http;
pub mod key;
pub mod lease;
pub mod life;
pub mod memo;
pub mod methods;
pub mod outbound;
pub mod pairs;
pub mod policy;
pub mod random;
pub mod reply;
pub mod rules;
pub mod settings;
pub mod sightings;
pub mod table;
pub mod terms;
pub mod unshareable;
mod values;
pub mod variants;
mod wire;

/// A point in time, in nanoseconds of some monotonic clock. The engine only ever compares and
/// subtracts these; where the clock starts does not matter.
pub type Nanos = u64;

/// One waiting request, named by the proxy-wasm context id of its stream. Never 0: the host counts
/// from 1, and the engine uses 0 for an empty seat.
pub type Waiter = u32;

/// Converts a duration to [`Nanos`], saturating (584 years).
pub fn nanos(duration: std::time::Duration) -> Nanos {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod testing {
    //! What every test module needs: one `#[test]` that runs natively and under Node on wasm32.
    #[cfg(not(target_arch = "wasm32"))]
    pub use core::prelude::v1::test;
    #[cfg(target_arch = "wasm32")]
    pub use wasm_bindgen_test::wasm_bindgen_test as test;

    use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

    /// A property runner. Natively it explores anew each time; on wasm32 there is no entropy or file
    /// system to rely on, so it walks one fixed sequence.
    pub fn runner(cases: u32) -> TestRunner {
        let config = Config { cases, failure_persistence: None, ..Config::default() };
        if cfg!(target_arch = "wasm32") {
            let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
            TestRunner::new_with_rng(config, rng)
        } else {
            TestRunner::new(config)
        }
    }
}
