//! Collapser's proxy-wasm layer: it translates between Envoy and the host-free engine.
//!
//! - `abi`: the functions that Envoy calls, and the contexts they are for.
//! - `root`: one root context a worker; settings, ticks, flights' replies.
//! - `stream`: one context a request; a small state machine.
//! - `answer`: the way of a reply through its stream.
//! - `worker`: what the two share: table, departures, fan-out, pacing.
//! - `http`: what a worker does for plain HTTP, and whom a reply suits.
//! - `sharing`: flights that all workers of the process share.
//! - `slots`: fixed places in Envoy's shared data.
//! - `metrics` and `host`: metrics, and the host calls themselves.
//!
//! A request is answered by a *local reply*. Envoy makes every local reply to a gRPC request
//! trailers-only, without a body. So the filter sends one that carries a marker header; a Lua filter
//! that stands behind this one in the chain, and therefore before it on the way back, gives such a
//! reply an empty body (the *body slot*), and this filter then puts the recorded headers, message and
//! trailers in their places. See the README, "How it works inside Envoy".

mod abi;
mod answer;
mod host;
mod http;
mod metrics;
mod root;
mod sharing;
mod slots;
mod stream;
mod worker;
