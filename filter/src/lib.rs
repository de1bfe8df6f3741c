//! Collapser's proxy-wasm layer: it translates between Envoy and the host-free engine.
//!
//! - `root`: one root context a worker; settings, ticks, flights' replies.
//! - `stream`: one context a request; a small state machine.
//! - `worker`: what the two share: table, departures, fan-out, pacing.
//! - `metrics` and `host`: metrics, and the host calls themselves.
//!
//! A request is answered by a *local reply*. Envoy makes every local reply to a gRPC request
//! trailers-only, without a body. So the filter sends one that carries a marker header; a Lua filter
//! that stands behind this one in the chain, and therefore before it on the way back, gives such a
//! reply a one-byte body (the *body slot*), and this filter then puts the recorded headers, message and
//! trailers in their places. See the README, "How it works inside Envoy".

mod host;
mod metrics;
mod root;
mod stream;
mod worker;

/// What Envoy calls first.
mod entry {
    // The SDK's macro exports an undocumented function.
    #![allow(missing_docs)]

    proxy_wasm::main! {{
        // Envoy's own level of the `wasm` logger decides what is written; this only drops the noise.
        proxy_wasm::set_log_level(proxy_wasm::types::LogLevel::Info);
        proxy_wasm::set_root_context(|id| Box::new(crate::root::Root::new(id)));
    }}
}
