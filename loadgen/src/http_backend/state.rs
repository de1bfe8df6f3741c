//! What the backend knows about requests for its pages, and what can change while it runs.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, Uri, Version};
use serde::{Deserialize, Serialize};

use super::Ask;
use crate::lock;

/// Pages beyond these are counted, but not one by one.
const MAX_TRACKED_PAGES: usize = 100_000;

/// How many pages `/calls` lists.
const MAX_LISTED_PAGES: usize = 100;

/// How many requests are remembered.
const MAX_RECENT: usize = 64;

/// The backend's counters, as `GET /calls` shows them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageCounts {
    /// Requests for pages that arrived.
    pub calls: u64,
    /// Different pages among them, by path and query, up to 100,000.
    pub pages: u64,
    /// Requests that have not been answered.
    pub in_flight: u64,
    /// Requests by path and query, for the 100 pages asked for most.
    pub per_page: BTreeMap<String, u64>,
}

/// A request for a page as it arrived.
#[derive(Clone, Debug)]
pub struct SeenPage {
    /// The method.
    pub method: Method,
    /// The version of HTTP.
    pub version: Version,
    /// Path and query, and scheme and authority where the client sent them.
    pub uri: Uri,
    /// All headers, repeated ones included; no pseudo headers.
    pub headers: HeaderMap,
    /// The body.
    pub body: Bytes,
}

/// Shared by all connections of one backend.
pub(super) struct State {
    calls: AtomicU64,
    in_flight: AtomicU64,
    per_page: Mutex<HashMap<String, u64>>,
    recent: Mutex<VecDeque<SeenPage>>,
    latency: Mutex<Duration>,
    answer: Mutex<Option<Ask>>,
}

impl State {
    pub(super) fn new(latency: Duration) -> Self {
        Self {
            calls: AtomicU64::new(0),
            in_flight: AtomicU64::new(0),
            per_page: Mutex::default(),
            recent: Mutex::default(),
            latency: Mutex::new(latency),
            answer: Mutex::default(),
        }
    }

    /// Counts a request; it is in flight for as long as the result lives.
    pub(super) fn begin(self: &Arc<Self>, page: &str) -> Call {
        let serial = self.calls.fetch_add(1, Relaxed) + 1;
        self.in_flight.fetch_add(1, Relaxed);
        let mut per_page = lock(&self.per_page);
        if let Some(calls) = per_page.get_mut(page) {
            *calls += 1;
        } else if per_page.len() < MAX_TRACKED_PAGES {
            per_page.insert(page.to_owned(), 1);
        }
        drop(per_page);
        Call { state: Arc::clone(self), serial }
    }

    pub(super) fn remember(&self, seen: SeenPage) {
        let mut recent = lock(&self.recent);
        if recent.len() == MAX_RECENT {
            recent.pop_front();
        }
        recent.push_back(seen);
    }

    pub(super) fn latency(&self) -> Duration {
        *lock(&self.latency)
    }

    pub(super) fn set_latency(&self, latency: Duration) {
        *lock(&self.latency) = latency;
    }

    /// What every page answers, whatever its URL asks.
    pub(super) fn answer(&self) -> Option<Ask> {
        lock(&self.answer).clone()
    }

    pub(super) fn set_answer(&self, answer: Option<Ask>) {
        *lock(&self.answer) = answer;
    }

    pub(super) fn calls(&self) -> u64 {
        self.calls.load(Relaxed)
    }

    pub(super) fn in_flight(&self) -> u64 {
        self.in_flight.load(Relaxed)
    }

    pub(super) fn calls_by_page(&self) -> HashMap<String, u64> {
        lock(&self.per_page).clone()
    }

    pub(super) fn recent(&self) -> Vec<SeenPage> {
        lock(&self.recent).iter().cloned().collect()
    }

    pub(super) fn counts(&self) -> PageCounts {
        let mut pages: Vec<(String, u64)> = self.calls_by_page().into_iter().collect();
        let different = pages.len() as u64;
        pages.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        pages.truncate(MAX_LISTED_PAGES);
        PageCounts {
            calls: self.calls(),
            pages: different,
            in_flight: self.in_flight(),
            per_page: pages.into_iter().collect(),
        }
    }

    pub(super) fn reset(&self) {
        self.calls.store(0, Relaxed);
        lock(&self.per_page).clear();
        lock(&self.recent).clear();
    }
}

/// A query in flight, also when its caller hangs up half-way.
pub(super) struct Call {
    state: Arc<State>,
    /// Which query this is, from 1.
    pub(super) serial: u64,
}

impl Drop for Call {
    fn drop(&mut self) {
        self.state.in_flight.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_queries_and_pages() {
        let state = Arc::new(State::new(Duration::ZERO));
        let first = state.begin("/page/a");
        let second = state.begin("/page/a");
        assert_eq!((first.serial, second.serial), (1, 2));
        drop(first);
        drop(state.begin("/page/b"));
        let counts = state.counts();
        assert_eq!((counts.calls, counts.pages, counts.in_flight), (3, 2, 1));
        assert_eq!(counts.per_page["/page/a"], 2);
        state.reset();
        assert_eq!((state.calls(), state.in_flight()), (0, 1));
    }
}
