//! Plain HTTP: what may be shared, for how long, and what happens when the backend fails.

mod gateway;

mod bursts;
mod conditions;
mod fidelity;
mod freshness;
mod passing;
mod sharing;
mod stale;
mod told;
mod variants;
