//! Tests of key affinity: the front of `envoy/affinity.yaml` in a real Envoy, before several replicas.
//!
//! `make test-affinity` runs them.

// Both are shared with the end-to-end tests, which use all of them.
#[allow(dead_code)]
#[path = "../e2e/raw.rs"]
mod raw;
#[allow(dead_code)]
#[path = "../e2e/rig.rs"]
mod rig;

mod front;

mod burst;
mod header;
mod key;
mod loss;
mod pass;
mod settings;
mod spread;
