//! Reliability tests: the shipped configuration under hang-ups, floods, large fan-outs and readers that stall.
//!
//! `make test-reliability` runs them, one at a time, since each fills the machine. `RELIABILITY_SCALE=10 make
//! test-reliability` makes the loads ten times as large. Each prints what it measured.

// Both are shared with the end-to-end tests, which use all of them.
#[allow(dead_code)]
#[path = "../e2e/raw.rs"]
mod raw;
#[allow(dead_code)]
#[path = "../e2e/rig.rs"]
mod rig;

mod callers;
mod gate;
mod health;
mod slow;

mod fanout;
mod flood;
mod hangups;
mod memory;
mod overload;
mod readers;
mod soak;
