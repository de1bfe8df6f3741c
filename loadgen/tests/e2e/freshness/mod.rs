//! How long a gRPC reply answers whom: what backends, callers and settings say of it, and what is told of it.

mod scene;

mod access_log;
mod callers;
mod hot;
mod jitter;
mod outage;
mod revalidate;
mod rules;
mod sharing;
mod stale;
mod status;
