//! End-to-end tests: the shipped configuration in a real Envoy, real HTTP/2 on both sides.
//!
//! `make test-e2e` runs them; `ENVOY=/path/to/envoy make test-e2e` with another Envoy.

mod frames;
mod raw;
mod rig;

mod bypass;
mod collapse;
mod deadlines;
mod drain;
mod exposure;
mod failures;
mod fidelity;
mod freshness;
mod grpcio;
mod hangups;
mod hold;
mod http;
mod limits;
mod reconfigure;
mod settings;
mod tenants;
mod tls;
mod unshared;
mod upstreams;
mod vm;
mod workers;
