//! Runs h2load, for loads that send one and the same request.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use tempfile::TempDir;

use crate::client::Load;
use crate::wire;

/// Ends a run in which an answer never comes.
const PATIENCE: &str = "30s";

/// A place for h2load's request and log.
pub struct H2load {
    dir: TempDir,
    request: PathBuf,
}

/// One run.
pub struct Run<'a> {
    /// Where to.
    pub addr: SocketAddr,
    /// Over so many connections.
    pub connections: usize,
    /// With so many streams each.
    pub streams: usize,
    /// The request's content type.
    pub content_type: &'a str,
    /// Further headers.
    pub headers: &'a http::HeaderMap,
    /// How many calls.
    pub calls: u64,
    /// Size of a reply's message.
    pub reply_bytes: usize,
}

impl H2load {
    /// Finds h2load.
    pub fn find() -> anyhow::Result<Self> {
        let found = Command::new("h2load").arg("--version").stdout(Stdio::null()).status();
        ensure!(found.is_ok(), "h2load is missing; on Debian: apt-get install nghttp2-client");
        let dir = tempfile::Builder::new().prefix("collapser-bench-").tempdir()?;
        let request = dir.path().join("request");
        fs::write(&request, wire::request(0))?;
        Ok(Self { dir, request })
    }

    /// Runs it, with one thread. Anything but a right answer is an error.
    pub fn run(&self, run: &Run) -> anyhow::Result<Load> {
        let log = self.dir.path().join("log");
        // It appends.
        let _ = fs::remove_file(&log);
        let mut command = Command::new("h2load");
        command
            .args(["-t", "1", "-n", &run.calls.to_string()])
            .args(["-c", &run.connections.to_string(), "-m", &run.streams.to_string()])
            .args(["-N", PATIENCE, "-w", "30", "-W", "30", "-d"])
            .arg(&self.request)
            .args(["-H", &format!("content-type: {}", run.content_type), "-H", "te: trailers"])
            .args(["-H", "user-agent: collapser-bench", "--log-file"])
            .arg(&log);
        for (name, value) in run.headers {
            command.args(["-H", &format!("{name}: {}", value.to_str()?)]);
        }
        let output = command.arg(format!("http://{}{}", run.addr, wire::PATH)).output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        let all = run.calls;
        let right = output.status.success()
            && text.contains(&format!("{all} done, {all} succeeded, 0 failed, 0 errored, 0 timeout"))
            && text.contains(&format!("status codes: {all} 2xx, 0 3xx, 0 4xx, 0 5xx"))
            // A failed call has no message.
            && text.contains(&format!("({}) data", all * wire::framed(run.reply_bytes) as u64));
        ensure!(
            right,
            "h2load sent {all} calls, and not all had the right answer:\n{text}{}",
            String::from_utf8_lossy(&output.stderr)
        );
        let log = fs::read_to_string(&log).context("h2load wrote no log")?;
        load(&log).context("h2load's log has an unknown form")
    }
}

/// Reads the log: when each call began, its status, and how long it took, in microseconds.
fn load(log: &str) -> Option<Load> {
    let mut latencies = Vec::new();
    let (mut first, mut last) = (u64::MAX, 0);
    for line in log.lines() {
        let mut columns = line.split('\t');
        let began: u64 = columns.next()?.parse().ok()?;
        let took: u32 = columns.nth(1)?.parse().ok()?;
        latencies.push(took);
        first = first.min(began);
        last = last.max(began + u64::from(took));
    }
    Some(Load { elapsed: Duration::from_micros(last.checked_sub(first)?), latencies })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_is_understood() {
        let load = load("1000\t200\t50\n1010\t200\t140\n").unwrap();
        assert_eq!(load.elapsed, Duration::from_micros(150));
        assert_eq!(load.latencies, [50, 140]);
        assert!(super::load("nonsense").is_none());
    }
}
