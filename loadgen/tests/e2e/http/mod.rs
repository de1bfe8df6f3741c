//! Plain HTTP: what may be shared, for how long, and what happens when the backend fails.

mod gateway;

mod conditions;
mod fidelity;
mod passing;
mod sharing;
mod variants;
