//! The filter's metrics.
//!
//! Counters and gauges belong to the whole process and are moved by increments. What a request
//! changes is noted here in plain cells and handed to Envoy on the next tick (at most 100 ms later), so
//! that the path of a request makes no host call for them.

use crate::host::{self, MetricType, Result};
use crate::slots::Slots;
use collapser_engine::Nanos;
use collapser_engine::classify::Bypass;
use collapser_engine::grpc::Code;
use collapser_engine::lease::Lease;
use std::cell::{Cell, RefCell};

/// Counts up. Noted now, handed to Envoy by [`Metrics::flush`].
#[derive(Debug)]
pub struct Counter {
    id: u32,
    pending: Cell<i64>,
}

impl Counter {
    fn define(name: &str) -> Result<Self> {
        Ok(Self { id: host::define_metric(MetricType::Counter, name)?, pending: Cell::new(0) })
    }

    /// Adds `count`.
    pub fn add(&self, count: usize) {
        self.pending.set(self.pending.get().saturating_add(count as i64));
    }

    fn flush(&self) {
        let pending = self.pending.take();
        if pending != 0 && host::increment_metric(self.id, pending).is_err() {
            self.pending.set(pending);
        }
    }
}

/// A level that other workers share: only its changes are handed on.
#[derive(Debug)]
pub struct Gauge {
    id: u32,
    reported: Cell<i64>,
}

impl Gauge {
    fn define(name: &str) -> Result<Self> {
        Ok(Self { id: host::define_metric(MetricType::Gauge, name)?, reported: Cell::new(0) })
    }

    /// Makes this worker's share of the gauge `level`.
    fn sync(&self, level: i64) {
        let change = level - self.reported.get();
        if change != 0 && host::increment_metric(self.id, change).is_ok() {
            self.reported.set(level);
        }
    }

    /// Takes the share of a dead worker out of the gauge.
    fn give_back(&self, share: i64) {
        if share != 0 {
            // A gauge that could be defined can be moved.
            let _ = host::increment_metric(self.id, -share);
        }
    }
}

/// The levels of a worker, for the gauges.
#[derive(Clone, Copy, Debug, Default)]
pub struct Levels {
    /// Replies cached.
    pub cached: usize,
    /// Bytes they take.
    pub cached_bytes: usize,
    /// Flights in the air.
    pub in_air: usize,
    /// Requests waiting.
    pub waiting: usize,
}

impl Levels {
    fn share(self) -> [i64; 4] {
        [self.cached, self.cached_bytes, self.in_air, self.waiting].map(|level| level as i64)
    }
}

/// Why callers are answered with stale replies.
const STALE: [&str; 2] = ["error", "revalidate"];

/// Where the leases are.
const LEASES: Slots = Slots("lease");

/// All metrics, by their name without `collapser_`.
#[derive(Debug)]
pub struct Metrics {
    /// `requests_total`: requests that were decided upon.
    pub requests: Counter,
    /// `collapsed_requests_total`: followers.
    pub collapsed: Counter,
    /// `backend_calls_total`: flights.
    pub backend_calls: Counter,
    /// `refreshes_total`: flights that no request led to, begun for those who come later.
    pub refreshes: Counter,
    /// `released_requests_total`: followers whose flight's reply was not for them, and who made a call of their own.
    pub released: Counter,
    /// `cache_hits_total`.
    pub hits: Counter,
    /// `keyed_requests_total`: requests that went on with their key (`mode` is `affinity`).
    pub keyed: Counter,
    /// `refused_requests_total`: turned away at `max_waiters`.
    pub refused: Counter,
    /// `abandoned_requests_total`: callers that left before they were answered.
    pub abandoned: Counter,
    /// `streaming_methods_total`: methods that have shown themselves to stream.
    pub streaming_methods: Counter,
    /// `evictions_total`: replies evicted before their time.
    pub evictions: Counter,
    stale: [Counter; STALE.len()],
    bypassed: [Counter; Bypass::ALL.len()],
    /// By code from 1 on; the last one is for codes beyond those that gRPC defines.
    errors: [Counter; 17],
    backend_latency: u32,
    follower_wait: u32,
    /// In the order of [`Levels::share`].
    gauges: [Gauge; 4],
    lease: RefCell<Lease>,
}

/// Defines one counter for each of `N` labels. `envoy.yaml` turns `name.label.value` into a label.
fn family<const N: usize>(name: impl Fn(usize) -> String) -> Result<[Counter; N]> {
    let counters: Vec<_> = (0..N).map(|n| Counter::define(&name(n))).collect::<Result<_>>()?;
    counters.try_into().map_err(|_| host::Refused)
}

impl Metrics {
    /// Defines them all, so that each is there, at zero, from the start. `owner` tells this worker from all others.
    pub fn define(owner: u64) -> Result<Self> {
        Lease::create_slots(&LEASES);
        let histogram = |name| host::define_metric(MetricType::Histogram, name);
        Ok(Self {
            requests: Counter::define("collapser_requests_total")?,
            collapsed: Counter::define("collapser_collapsed_requests_total")?,
            backend_calls: Counter::define("collapser_backend_calls_total")?,
            refreshes: Counter::define("collapser_refreshes_total")?,
            released: Counter::define("collapser_released_requests_total")?,
            hits: Counter::define("collapser_cache_hits_total")?,
            keyed: Counter::define("collapser_keyed_requests_total")?,
            refused: Counter::define("collapser_refused_requests_total")?,
            abandoned: Counter::define("collapser_abandoned_requests_total")?,
            streaming_methods: Counter::define("collapser_streaming_methods_total")?,
            evictions: Counter::define("collapser_evictions_total")?,
            stale: family(|n| format!("collapser_stale_answers_total.reason.{}", STALE[n]))?,
            bypassed: family(|n| {
                format!("collapser_bypassed_requests_total.reason.{}", Bypass::ALL[n].name())
            })?,
            errors: family(|n| match n {
                16 => "collapser_errors_total.code.other".to_string(),
                n => format!("collapser_errors_total.code.{}", n + 1),
            })?,
            backend_latency: histogram("collapser_backend_latency_microseconds")?,
            follower_wait: histogram("collapser_follower_wait_microseconds")?,
            gauges: [
                Gauge::define("collapser_cached_results")?,
                Gauge::define("collapser_cached_bytes")?,
                Gauge::define("collapser_inflight_requests")?,
                Gauge::define("collapser_waiting_requests")?,
            ],
            lease: RefCell::new(Lease::new(owner)),
        })
    }

    /// A request passes untouched.
    pub fn bypassed(&self, reason: Bypass) {
        self.requests.add(1);
        if let Some(counter) = self.bypassed.get(reason.index()) {
            counter.add(1);
        }
    }

    /// A caller was answered with a stale reply, because a flight failed or while one is under way.
    pub fn answered_stale(&self, for_error: bool) {
        let [error, revalidate] = &self.stale;
        (if for_error { error } else { revalidate }).add(1);
    }

    /// A flight ended after so many nanoseconds, with this status.
    pub fn flight_ended(&self, nanos: u64, code: Code) {
        // A histogram that the host will not take is no reason to fail a request.
        let _ = host::record_metric(self.backend_latency, nanos / 1_000);
        self.failed(code);
    }

    /// A call ended with this status, which may be success.
    pub fn failed(&self, code: Code) {
        let Some(index) = (code.0 as usize).checked_sub(1) else { return };
        if let Some(counter) = self.errors.get(index).or(self.errors.last()) {
            counter.add(1);
        }
    }

    /// A follower was answered after so many nanoseconds.
    pub fn follower_waited(&self, nanos: u64) {
        // As above.
        let _ = host::record_metric(self.follower_wait, nanos / 1_000);
    }

    /// Hands everything noted since the last time to Envoy.
    pub fn flush(&self, levels: Levels, now: Nanos) {
        let single = [
            &self.requests,
            &self.collapsed,
            &self.backend_calls,
            &self.refreshes,
            &self.released,
            &self.hits,
            &self.keyed,
            &self.refused,
            &self.abandoned,
            &self.streaming_methods,
            &self.evictions,
        ];
        single
            .into_iter()
            .chain(&self.stale)
            .chain(&self.bypassed)
            .chain(&self.errors)
            .for_each(Counter::flush);
        let due = self.lease.borrow_mut().keep(levels.share(), now, &LEASES);
        for ((gauge, level), subtract) in self.gauges.iter().zip(levels.share()).zip(due.subtract) {
            if due.start_over {
                gauge.reported.set(0);
            }
            gauge.sync(level);
            gauge.give_back(subtract);
        }
    }

    /// Takes this worker's share out of the gauges, and ends its lease.
    pub fn end(&self, now: Nanos) {
        self.flush(Levels::default(), now);
        self.lease.borrow_mut().end(&LEASES);
    }
}
