//! What the backend knows about its calls, and the settings that can change while
//! it runs.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::{HeaderMap, Uri};
use serde::{Deserialize, Serialize};
use tonic::metadata::MetadataMap;

use super::{BackendOptions, Failure};
use crate::lock;

/// Keys beyond these are counted, but not one by one: a long run with ever new keys must end.
const MAX_TRACKED_KEYS: usize = 100_000;

/// How many keys `/calls` lists.
const MAX_LISTED_KEYS: usize = 100;

/// How many requests are remembered.
const MAX_RECENT: usize = 64;

/// The backend's counters, as `GET /calls` shows them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallCounts {
    /// Compute calls that arrived.
    pub compute: u64,
    /// Different keys among them, up to 100,000.
    pub keys: u64,
    /// Compute calls that have not ended.
    pub in_flight: u64,
    /// Streaming calls that arrived.
    pub streams: StreamCounts,
    /// Compute calls by key, for the 100 keys called most.
    pub per_key: BTreeMap<String, u64>,
}

/// Streaming calls that arrived, by method.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamCounts {
    /// Server streaming.
    pub count: u64,
    /// Client streaming.
    pub sum: u64,
    /// Bidirectional.
    pub echo: u64,
}

/// A Compute request as it arrived.
#[derive(Clone, Debug)]
pub struct SeenRequest {
    /// Path, and scheme and authority where the client sent them.
    pub uri: Uri,
    /// All headers, repeated ones included; no pseudo headers.
    pub headers: HeaderMap,
}

/// Shared by everything that serves one backend.
pub(super) struct State {
    compute: AtomicU64,
    in_flight: AtomicU64,
    pub(super) count: AtomicU64,
    pub(super) sum: AtomicU64,
    pub(super) echo: AtomicU64,
    per_key: Mutex<HashMap<String, u64>>,
    recent: Mutex<VecDeque<SeenRequest>>,
    latency_nanos: AtomicU64,
    failure: Mutex<Option<Failure>>,
    pub(super) payload_bytes: u32,
    pub(super) initial: MetadataMap,
    pub(super) trailing: MetadataMap,
}

impl State {
    pub(super) fn new(options: &BackendOptions, initial: MetadataMap, trailing: MetadataMap) -> Self {
        let state = Self {
            compute: AtomicU64::new(0),
            in_flight: AtomicU64::new(0),
            count: AtomicU64::new(0),
            sum: AtomicU64::new(0),
            echo: AtomicU64::new(0),
            per_key: Mutex::default(),
            recent: Mutex::default(),
            latency_nanos: AtomicU64::new(0),
            failure: Mutex::new(options.failure.clone()),
            payload_bytes: options.payload_bytes,
            initial,
            trailing,
        };
        state.set_latency(options.latency);
        state
    }

    /// Counts a Compute call; it is in flight for as long as the result lives.
    pub(super) fn begin(self: &Arc<Self>, key: &str) -> Call {
        let serial = self.compute.fetch_add(1, Relaxed) + 1;
        self.in_flight.fetch_add(1, Relaxed);
        let mut per_key = lock(&self.per_key);
        if let Some(calls) = per_key.get_mut(key) {
            *calls += 1;
        } else if per_key.len() < MAX_TRACKED_KEYS {
            per_key.insert(key.to_owned(), 1);
        }
        drop(per_key);
        Call { state: Arc::clone(self), serial }
    }

    pub(super) fn remember(&self, seen: SeenRequest) {
        let mut recent = lock(&self.recent);
        if recent.len() == MAX_RECENT {
            recent.pop_front();
        }
        recent.push_back(seen);
    }

    pub(super) fn latency(&self) -> Duration {
        Duration::from_nanos(self.latency_nanos.load(Relaxed))
    }

    pub(super) fn set_latency(&self, latency: Duration) {
        let nanos = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        self.latency_nanos.store(nanos, Relaxed);
    }

    /// The failure that befalls a call now, if one does.
    pub(super) fn failure(&self) -> Option<Failure> {
        let failure = lock(&self.failure);
        failure.as_ref().filter(|failure| rand::random::<f64>() < failure.ratio).cloned()
    }

    pub(super) fn set_failure(&self, failure: Option<Failure>) {
        *lock(&self.failure) = failure;
    }

    pub(super) fn calls(&self) -> u64 {
        self.compute.load(Relaxed)
    }

    pub(super) fn in_flight(&self) -> u64 {
        self.in_flight.load(Relaxed)
    }

    pub(super) fn calls_by_key(&self) -> HashMap<String, u64> {
        lock(&self.per_key).clone()
    }

    pub(super) fn streams(&self) -> StreamCounts {
        StreamCounts {
            count: self.count.load(Relaxed),
            sum: self.sum.load(Relaxed),
            echo: self.echo.load(Relaxed),
        }
    }

    pub(super) fn recent_requests(&self) -> Vec<SeenRequest> {
        lock(&self.recent).iter().cloned().collect()
    }

    pub(super) fn counts(&self) -> CallCounts {
        let mut keys: Vec<(String, u64)> = self.calls_by_key().into_iter().collect();
        let different = keys.len() as u64;
        keys.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        keys.truncate(MAX_LISTED_KEYS);
        CallCounts {
            compute: self.calls(),
            keys: different,
            in_flight: self.in_flight(),
            streams: self.streams(),
            per_key: keys.into_iter().collect(),
        }
    }

    pub(super) fn reset(&self) {
        for counter in [&self.compute, &self.count, &self.sum, &self.echo] {
            counter.store(0, Relaxed);
        }
        lock(&self.per_key).clear();
        lock(&self.recent).clear();
    }
}

/// A Compute call in flight, also when its caller hangs up half-way.
pub(super) struct Call {
    state: Arc<State>,
    /// Which call this is, from 1.
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

    fn state() -> Arc<State> {
        let options = BackendOptions::default();
        Arc::new(State::new(&options, MetadataMap::new(), MetadataMap::new()))
    }

    #[test]
    fn counts_calls_and_keys() {
        let state = state();
        let first = state.begin("a");
        let second = state.begin("a");
        assert_eq!((first.serial, second.serial), (1, 2));
        drop(first);
        drop(state.begin("b"));

        let counts = state.counts();
        assert_eq!((counts.compute, counts.keys, counts.in_flight), (3, 2, 1));
        assert_eq!(counts.per_key["a"], 2);

        state.reset();
        assert_eq!((state.calls(), state.in_flight()), (0, 1));
        assert_eq!(state.begin("a").serial, 1);
    }

    #[test]
    fn lists_the_keys_called_most() {
        let state = state();
        for key in 0..500 {
            state.begin(&format!("key-{key}"));
        }
        state.begin("key-499");
        let counts = state.counts();
        assert_eq!((counts.keys, counts.per_key.len()), (500, MAX_LISTED_KEYS));
        assert_eq!(counts.per_key["key-499"], 2);
    }

    #[test]
    fn fails_as_often_as_told() {
        let state = state();
        assert_eq!(state.failure(), None);
        let mut failure = Failure::always(tonic::Code::Internal, "no");
        state.set_failure(Some(failure.clone()));
        assert_eq!(state.failure().as_ref(), Some(&failure));
        failure.ratio = 0.0;
        state.set_failure(Some(failure));
        assert_eq!(state.failure(), None);
    }

    #[test]
    fn remembers_a_bounded_number_of_requests() {
        let state = state();
        for number in 0..100 {
            state.remember(SeenRequest {
                uri: format!("/{number}").parse().unwrap(),
                headers: HeaderMap::new(),
            });
        }
        let recent = state.recent_requests();
        assert_eq!(recent.len(), MAX_RECENT);
        assert_eq!(recent[MAX_RECENT - 1].uri.path(), "/99");
    }
}
