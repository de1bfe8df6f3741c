//! The load engine: sends many calls at once or for a while, checks every answer,
//! and compares what was sent with what reached the backend.

mod backend_client;
mod caller;
mod drive;
mod options;
mod tally;

use std::sync::Arc;
use std::time::Duration;

pub use backend_client::BackendClient;
pub use options::{KeyOrder, LoadMode, LoadOptions};
pub use tally::Progress;

use crate::report::Report;
use caller::Caller;
pub(crate) use drive::Calls;
pub(crate) use options::parse_http_uri;
pub(crate) use tally::{Outcome, Subject, Tally};

/// How often progress is told.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// Runs one load and reports on it. An error means that it could not be run: bad
/// options, nothing at the target, a backend whose counters cannot be read. Calls
/// that fail are no error here but part of the report.
///
/// `on_progress` is called about ten times a second.
pub async fn run(options: LoadOptions, on_progress: impl FnMut(Progress)) -> anyhow::Result<Report> {
    options.validate()?;
    let backend = match &options.backend_url {
        Some(url) => Some(BackendClient::new(url)?),
        None => None,
    };
    let caller = Arc::new(Caller::connect(&options).await?);
    if let (Some(backend), true) = (&backend, options.reset_backend) {
        backend.reset().await?;
    }
    let before = compute_calls(backend.as_ref()).await?;

    let tally = Arc::new(Tally::new(&options.mode)?);
    let elapsed = drive_with_progress(&options.mode, &caller, &tally, on_progress).await?;

    let after = compute_calls(backend.as_ref()).await?;
    // Lower than before means that somebody reset the counters in between.
    let backend_calls = before.zip(after).and_then(|(before, after)| after.checked_sub(before));
    let subject = Subject { target: &options.target, connections: options.connections, keys: options.keys };
    Ok(tally.report(subject, elapsed, backend_calls))
}

/// Makes all calls, and tells meanwhile how far they are. Returns how long that took.
pub(crate) async fn drive_with_progress<C: Calls>(
    mode: &LoadMode,
    caller: &Arc<C>,
    tally: &Arc<Tally>,
    mut on_progress: impl FnMut(Progress),
) -> anyhow::Result<Duration> {
    let mut drive = std::pin::pin!(drive::drive(mode, caller, tally));
    let mut ticks = tokio::time::interval(PROGRESS_INTERVAL);
    let elapsed = loop {
        tokio::select! {
            elapsed = &mut drive => break elapsed?,
            _ = ticks.tick() => on_progress(tally.progress()),
        }
    };
    on_progress(tally.progress());
    Ok(elapsed)
}

async fn compute_calls(backend: Option<&BackendClient>) -> anyhow::Result<Option<u64>> {
    match backend {
        Some(backend) => Ok(Some(backend.counts().await?.compute)),
        None => Ok(None),
    }
}
