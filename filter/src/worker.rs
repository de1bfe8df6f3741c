//! What the root context and the streams of one worker share.

use crate::answer::{self, Note};
use crate::host::{self, MapType};
use crate::http::{Fit, steer};
use crate::metrics::{Levels, Metrics};
use crate::sharing::{Departure, News, Sharing};
use crate::stream::{another_filter_holds, mark_as_passing};
use collapser_engine::budget::Charged;
use collapser_engine::catalog::{Catalog, Method, MethodId};
use collapser_engine::changes::{Changes, Resource};
use collapser_engine::classify::{Bypass, Candidate, Protocol};
use collapser_engine::commons::{self, Claim};
use collapser_engine::deadlines::{self, Deadlines};
use collapser_engine::flights::{Call, Collected, FlightId, Portion, Ticket};
use collapser_engine::grace::{Grace, PATIENCE, Place, Until};
use collapser_engine::grpc::Code;
use collapser_engine::http::freshness;
use collapser_engine::key::{Key, Keyer};
use collapser_engine::life::Terms;
use collapser_engine::outbound;
use collapser_engine::pairs::{self, Pairs};
use collapser_engine::policy::{Policy, PolicyId};
use collapser_engine::reply::{MARKER, Reply, Shape, Share};
use collapser_engine::settings::{Hold, Settings};
use collapser_engine::sightings::Sighting;
use collapser_engine::table::{Arrival, Ask, Outcome, Table};
use collapser_engine::variants::Variants;
use collapser_engine::{Nanos, Waiter, nanos, terms};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

/// Replies sent in one callback. Each is sent when the callback returns, re-enters the VM, and on its way
/// out sends the next one deeper in the stack; about 300 overflow it (measured).
const BATCH: Portion = Portion { calls: 32, bytes: SLICE.bytes };

/// Replies sent between two ticks. All of them may pile up as frames before Envoy writes to a
/// socket, and nothing else is served meanwhile (some 10 ms); then other connections have their turn.
const SLICE: Portion = Portion { calls: 256, bytes: 4 << 20 };

/// Between two slices of a fan-out: the shortest tick there is.
const PACE: Duration = Duration::from_millis(1);

/// The tick when there is nothing to do but housekeeping. Metrics lag by at most this.
const IDLE: Duration = Duration::from_millis(100);

/// An upstream failure this much before the deadline still counts as the deadline's doing: Envoy's
/// timers are that coarse.
const TIMER_SLACK: Duration = Duration::from_millis(10);

/// A request that has arrived whole, from which a flight can be made.
pub struct Request {
    /// Its headers, in the host's form.
    pub headers: Vec<u8>,
    /// Its body; of gRPC, its one message with the framing.
    pub body: Vec<u8>,
    /// Its method, if it is gRPC.
    pub method: Option<MethodId>,
    /// What it speaks.
    pub protocol: Protocol,
    /// What applies to it.
    pub policy: PolicyId,
    /// Its key, without headers that only replies name.
    pub primary: Key,
    /// What it is for, if that can be told to have changed.
    pub resource: Option<Resource>,
}

/// A response as the host hands it out.
pub struct Response {
    /// Its headers; none if the call was aborted.
    pub headers: Vec<u8>,
    /// Its body.
    pub body: Vec<u8>,
    /// Its trailers.
    pub trailers: Vec<u8>,
}

/// A flight whose call is under way.
pub struct Airborne {
    /// Its key.
    pub key: Key,
    /// Its key without headers that only replies name.
    pub primary: Key,
    flight: FlightId,
    method: Option<MethodId>,
    protocol: Protocol,
    /// What applies to it.
    pub policy: PolicyId,
    resource: Option<Resource>,
    /// The headers of a plain HTTP request that led to it.
    pub leader: Vec<u8>,
    /// When the call began.
    pub dispatched: Nanos,
    /// If other workers may wait for it.
    ticket: Option<commons::Ticket>,
}

/// What has become of a waiter since it took its seat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moved {
    /// It has another seat.
    To(Ticket),
    /// It went upstream by itself.
    Away,
}

/// The state of one worker.
pub struct Worker {
    /// The settings, fixed for the life of this context.
    pub settings: Settings,
    /// The metrics.
    pub metrics: Metrics,
    /// The reply to those who find no place to wait.
    pub full: Rc<Reply>,
    /// The same for plain HTTP.
    pub http_full: Rc<Reply>,
    /// The reply to those who want nothing but what is there, when nothing is.
    pub missing: Rc<Reply>,
    /// What other workers are told of a reply that is for its leader alone.
    for_nobody: Reply,
    /// The reply when the filter chain lacks the body slot.
    pub no_slot: Rc<Reply>,
    /// The headers with which a local reply asks for a body slot.
    pub marker: Box<[u8]>,
    /// What replies have told of variants.
    pub variants: RefCell<Variants>,
    /// What requests have changed.
    pub changes: RefCell<Changes>,
    root: u32,
    queue: u32,
    /// Whether a wake-up is on its way.
    woken: Cell<bool>,
    /// One for each list of key headers.
    keyers: Vec<RefCell<Keyer>>,
    /// Which of them is whose, by the policy's index.
    keyer_of: Vec<usize>,
    /// Waiters that are not where they were.
    moved: RefCell<HashMap<Waiter, Moved>>,
    table: RefCell<Table>,
    catalog: RefCell<Catalog>,
    grace: RefCell<Grace>,
    airborne: RefCell<HashMap<u32, Airborne>>,
    alone: RefCell<Deadlines>,
    sharing: Option<Sharing>,
    /// What may still be sent before the next tick.
    slice: Cell<Portion>,
    /// Kept between batches, so that a batch allocates nothing.
    calls: RefCell<Vec<Call>>,
    grpc_timeout: String,
    /// Whether requests are known to be held until they are whole. `None` is not known yet.
    holds: Cell<Option<bool>>,
    /// When the clock was last looked at.
    seen: Cell<Nanos>,
    next_tick: Cell<Nanos>,
    next_sweep: Cell<Nanos>,
}

impl Worker {
    /// The state of the worker whose root context is `root`.
    ///
    /// # Errors
    /// If the host refuses a metric or the queue.
    pub fn new(root: u32, settings: Settings) -> host::Result<Self> {
        let (keyers, keyer_of) = keyers(&settings);
        let full = format!("collapser: {} requests wait already (max_waiters)", settings.max_waiters);
        let no_slot = "collapser: the body slot (a Lua filter) is missing after this filter in http_filters";
        let name = random();
        // A queue belongs to whoever registered its name last, so every root context takes a
        // name of its own.
        let queue = host::register_queue(&format!("collapser/{name:016x}"))?;
        let worker = Self {
            metrics: Metrics::define(name)?,
            full: Rc::new(Reply::failure(Code::RESOURCE_EXHAUSTED, &full)),
            http_full: Rc::new(Reply::http_failure(503, &format!("{full}\n"))),
            missing: Rc::new(Reply::http_failure(504, "collapser: no reply is cached (only-if-cached)\n")),
            no_slot: Rc::new(Reply::failure(Code::INTERNAL, no_slot)),
            for_nobody: Reply::for_nobody(),
            marker: pairs::block(&[(MARKER, "1")]),
            variants: RefCell::default(),
            changes: RefCell::default(),
            root,
            queue,
            woken: Cell::new(false),
            keyers,
            keyer_of,
            moved: RefCell::default(),
            table: RefCell::new(Table::new(&settings)),
            catalog: RefCell::new(Catalog::new(settings.methods.clone(), settings.pass_after)),
            grace: RefCell::new(Grace::new(nanos(settings.stream_grace))),
            airborne: RefCell::default(),
            alone: RefCell::new(Deadlines::new(nanos(settings.backend_timeout))),
            sharing: Sharing::new(name, queue, &settings),
            slice: Cell::new(SLICE),
            calls: RefCell::default(),
            grpc_timeout: outbound::grpc_timeout(settings.backend_timeout),
            holds: Cell::new((settings.hold == Hold::Headers).then_some(true)),
            seen: Cell::new(host::now()),
            next_tick: Cell::new(Nanos::MAX),
            next_sweep: Cell::new(0),
            settings,
        };
        let now = worker.now();
        if let Some(sharing) = &worker.sharing {
            sharing.beat(now);
        }
        worker.tick_at(now + nanos(IDLE), now);
        Ok(worker)
    }

    /// The monotonic clock.
    pub fn now(&self) -> Nanos {
        let now = host::now();
        self.seen.set(now);
        now
    }

    /// The time when last looked at, which saves looking: at most a tick ago. That is good enough for the patience with a
    /// request that has just begun, unless that is short.
    pub fn about_now(&self) -> Nanos {
        let patience = nanos(self.settings.stream_grace).saturating_mul(PATIENCE);
        if patience >= 10 * nanos(IDLE) { self.seen.get() } else { self.now() }
    }

    // --- What streams ask for ---

    /// Judges a method by what is known of it.
    pub fn judge(&self, path: &[u8]) -> Method {
        self.catalog.borrow_mut().judge(path)
    }

    /// A call has proven its method to stream.
    pub fn streams(&self, method: Option<MethodId>) {
        let mut catalog = self.catalog.borrow_mut();
        if catalog.streams(method) {
            self.metrics.streaming_methods.add(1);
            let path = String::from_utf8_lossy(catalog.path(method));
            log::info!("collapser: {path} streams; its calls pass untouched from now on");
        }
    }

    /// Whether the effective request, which is whole by now, was kept from going upstream. Another filter is asked to
    /// hold requests; once one was, all are.
    pub fn is_held(&self) -> bool {
        if self.holds.get() == Some(true) {
            return true;
        }
        let holds = another_filter_holds();
        if self.holds.replace(Some(holds)).is_none() && !holds {
            log::error!(
                "collapser: hold is \"filter\", but no filter after this one holds requests (the Lua filter's envoy_on_request is missing); nothing is collapsed"
            );
        }
        holds
    }

    /// Has a request released upstream if it does not go on for too long.
    pub fn enter_grace(&self, waiter: Waiter, method: Option<MethodId>, until: Until, now: Nanos) -> Place {
        let mut grace = self.grace.borrow_mut();
        let place = grace.enter(waiter, method, until, now);
        if let Some(due) = grace.next_deadline().filter(|due| *due < self.next_tick.get()) {
            self.tick_at(due, now);
        }
        place
    }

    /// Takes a request out of the grace; returns `false` if it has been released.
    pub fn leave_grace(&self, place: Place) -> bool {
        self.grace.borrow_mut().leave(place)
    }

    /// What applies to a request.
    pub fn policy_of(&self, candidate: &Candidate<'_>) -> PolicyId {
        let policies = &self.settings.policies;
        match candidate.protocol {
            Protocol::Grpc if policies.has_rules() => policies.grpc(candidate.path),
            Protocol::Grpc => PolicyId::default(),
            Protocol::Http => policies.http(candidate.path),
        }
    }

    /// The policy of this name.
    pub fn policy(&self, id: PolicyId) -> &Policy {
        self.settings.policies.get(id)
    }

    /// What derives the keys of requests to which this policy applies.
    pub fn keyer(&self, policy: PolicyId) -> &RefCell<Keyer> {
        let place = self.keyer_of.get(policy.index()).copied().unwrap_or_default();
        // There is one at least.
        &self.keyers[place.min(self.keyers.len() - 1)]
    }

    /// The key of a gRPC request.
    pub fn key(&self, headers: Pairs<'_>, body: &[u8], policy: PolicyId) -> Key {
        self.keyer(policy).borrow_mut().key(headers, body)
    }

    /// Whether a request that has arrived whole goes upstream by itself: nobody has shared its method's last flights, nor
    /// has anybody asked for the same.
    pub fn pass(
        &self,
        headers: Pairs<'_>,
        body: &[u8],
        now: Nanos,
        method: Option<MethodId>,
        policy: PolicyId,
    ) -> Option<Sighting> {
        if !self.catalog.borrow_mut().came_whole(method) {
            return None;
        }
        let tag = self.keyer(policy).borrow_mut().tag(headers, body);
        let sighting = self.table.borrow_mut().pass(tag, now, || self.key(headers, body, policy));
        if sighting.is_none() {
            self.catalog.borrow_mut().shared(method);
        }
        sighting
    }

    /// A request goes upstream by itself.
    pub fn depart_alone(&self, waiter: Waiter, now: Nanos) -> deadlines::Place {
        let mut alone = self.alone.borrow_mut();
        let place = alone.enter(waiter, now);
        if let Some(due) = alone.next_deadline().filter(|due| *due < self.next_tick.get()) {
            self.tick_at(due, now);
        }
        place
    }

    /// The answer to a request that went upstream by itself begins.
    pub fn answered_alone(&self, place: deadlines::Place) {
        self.alone.borrow_mut().leave(place);
    }

    /// One call of the method is to tell whether it streams.
    pub fn may_stream(&self, method: Option<MethodId>) {
        self.catalog.borrow_mut().suspect(method);
    }

    /// A request that went upstream by itself is over.
    pub fn passed(&self, sighting: Sighting, place: deadlines::Place, policy: PolicyId) {
        self.alone.borrow_mut().leave(place);
        self.table.borrow_mut().passed(sighting, nanos(self.policy(policy).ttl), self.now());
    }

    /// A request has arrived whole, and goes on with its key.
    pub fn keyed(&self, method: Option<MethodId>) {
        self.catalog.borrow_mut().came_whole(method);
        self.metrics.requests.add(1);
        self.metrics.keyed.add(1);
    }

    /// What a gRPC request asks for; `steers` says that it has something to say to caches.
    pub fn ask_grpc(&self, headers: Pairs<'_>, body: &[u8], policy: PolicyId, steers: bool) -> Ask {
        let key = self.key(headers, body, policy);
        let mut ask = Ask { early_refresh: self.policy(policy).early_refresh, ..Ask::new(key) };
        if steers {
            steer(&mut ask, headers);
            ask.only_if_cached = false;
        }
        ask
    }

    /// Looks up a request that has arrived whole.
    pub fn arrive(&self, ask: &Ask, waiter: Waiter, now: Nanos, request: Request) -> Outcome {
        let Arrival { outcome, refresh } = self.table.borrow_mut().arrive(ask, waiter, now);
        if matches!(outcome, Outcome::Hit(_) | Outcome::Queued(_) | Outcome::Joined(_)) {
            self.catalog.borrow_mut().shared(request.method);
        }
        if matches!(outcome, Outcome::Unshareable) {
            // It is counted as what passes.
            return outcome;
        }
        self.metrics.requests.add(1);
        match &outcome {
            Outcome::Hit(_) => self.metrics.hits.add(1),
            Outcome::Queued(_) => {
                self.metrics.hits.add(1);
                self.wake();
            }
            Outcome::Joined(_) => self.metrics.collapsed.add(1),
            Outcome::Full | Outcome::Missing => self.metrics.refused.add(1),
            Outcome::Leads(_) | Outcome::Unshareable => (),
        }
        let led = match &outcome {
            Outcome::Leads(ticket) => Some(ticket.flight),
            _ => refresh,
        };
        if let Some(flight) = led {
            let is_refresh = refresh.is_some();
            let ask = Ask { anew: ask.anew || is_refresh, ..*ask };
            self.depart(Departure { ask, flight, since: now, request, is_refresh }, now);
            // What follows in this callback may be the stream's again. It is there.
            if is_refresh || self.settings.filter_state {
                let _ = host::set_effective_context(waiter);
            }
        }
        outcome
    }

    /// A called waiter takes its reply.
    pub fn collect(&self, waiter: Waiter, ticket: Ticket) -> Option<Collected> {
        let ticket = self.seat(waiter, ticket)?;
        self.table.borrow_mut().collect(ticket)
    }

    /// Where a waiter is that took this seat; `None` if it went upstream by itself.
    fn seat(&self, waiter: Waiter, ticket: Ticket) -> Option<Ticket> {
        let moved = self.moved.borrow();
        if moved.is_empty() {
            return Some(ticket);
        }
        match moved.get(&waiter) {
            Some(Moved::To(ticket)) => Some(*ticket),
            Some(Moved::Away) => None,
            None => Some(ticket),
        }
    }

    /// A waiter whose stream has ended is nowhere.
    pub fn forget(&self, waiter: Waiter) {
        let mut moved = self.moved.borrow_mut();
        if !moved.is_empty() {
            moved.remove(&waiter);
        }
    }

    /// Whether one that took a seat went upstream by itself.
    pub fn is_released(&self, waiter: Waiter) -> bool {
        self.moved.borrow().get(&waiter) == Some(&Moved::Away)
    }

    /// Envoy has passed on a reply of so many bytes to its caller, or given it up.
    pub fn passed_on(&self, bytes: usize, charged: Charged) {
        if bytes > 0 && self.table.borrow_mut().passed_on(bytes, charged) {
            self.wake();
        }
    }

    /// A waiter is gone.
    pub fn leave(&self, waiter: Waiter, ticket: Ticket) {
        let Some(ticket) = self.seat(waiter, ticket) else { return };
        if self.table.borrow_mut().leave(ticket) {
            self.metrics.abandoned.add(1);
            if self.table.borrow().has_calls() {
                self.wake();
            }
        }
    }

    /// Has the root context called soon, by a message to its own queue.
    fn wake(&self) {
        if !self.woken.replace(true) && host::send(self.queue, &[]).is_err() {
            // The next tick does the same work, a little later.
            self.woken.set(false);
        }
    }

    // --- What the root context is called for ---

    /// The wake-up has come.
    pub fn on_wake(&self) {
        host::drain(self.queue, |message| self.on_message(message));
        self.woken.set(false);
        let Portion { calls, bytes } = self.slice.get();
        self.fan_out(Portion { calls: if bytes == 0 { 0 } else { calls.min(BATCH.calls) }, bytes });
    }

    /// Time has passed.
    pub fn on_tick(&self) {
        let now = self.now();
        self.postpone_if_late(now);
        if let Some(sharing) = &self.sharing {
            sharing.beat(now);
            sharing.due(now).into_iter().for_each(|departure| self.depart(departure, now));
        }
        self.table.borrow_mut().lapse(now);
        self.slice.set(SLICE);
        self.fan_out(BATCH);
        self.release_due(now);
        self.end_late(now);
        if now >= self.next_sweep.get() {
            self.table.borrow_mut().sweep(now);
            self.next_sweep.set(now.saturating_add(nanos(self.settings.cleanup_interval)));
        }
        self.metrics.flush(self.levels(), now);
        self.schedule(now);
    }

    /// A dispatched call has ended; `read` reads its response.
    pub fn on_call_response(&self, token: u32, read: impl FnOnce() -> Response) {
        let Some(call) = self.airborne.borrow_mut().remove(&token) else { return };
        let Response { headers, body, trailers } = read();
        let now = self.now();
        let reply = match call.protocol {
            Protocol::Grpc => self.in_size(Reply::record(&headers, body, &trailers)),
            Protocol::Http => self.record_http(&call, &headers, body, &trailers),
        };
        if self.is_late(&reply, now.saturating_sub(call.dispatched)) {
            self.catalog.borrow_mut().suspect(call.method);
            let late = self.late_reply(call.protocol);
            self.land(call, late, None, now);
        } else {
            if reply.streamed {
                self.streams(call.method);
            }
            self.land(call, reply, Some(&headers), now);
        }
        // At least one batch, whatever is left of the slice: a flight with few waiters does not wait.
        self.fan_out(BATCH);
    }

    /// Gives back what this worker has added to the gauges that all share.
    pub fn on_done(&self) {
        let now = self.now();
        if let Some(sharing) = &self.sharing {
            for call in self.airborne.take().into_values() {
                call.ticket.into_iter().for_each(|ticket| sharing.give_up(&call.key, ticket, now));
            }
            // They would have been answered by other workers.
            self.metrics.collapsed.add(sharing.watched());
            sharing.end();
        }
        self.metrics.end(now);
    }

    /// What one is told that departed by itself then, if its deadline is over.
    pub fn late_by_now(&self, method: Option<MethodId>, departed: Nanos) -> Option<Reply> {
        let took = self.now().saturating_sub(departed);
        (took >= nanos(self.settings.backend_timeout)).then(|| {
            self.catalog.borrow_mut().suspect(method);
            self.late_reply(Protocol::Grpc)
        })
    }

    /// Ends some of the requests that went upstream by themselves and whose deadline is over.
    fn end_late(&self, now: Nanos) {
        if self.alone.borrow().next_deadline().is_none_or(|due| due > now) {
            return;
        }
        for _ in 0..BATCH.calls {
            let Some(waiter) = self.alone.borrow_mut().next_due(now) else { break };
            // Refused only if the stream is going away.
            let sent =
                host::set_effective_context(waiter).and_then(|()| host::send_local_response(200, &[], &[]));
            if sent.is_ok() {
                self.metrics.failed(Code::DEADLINE_EXCEEDED);
            }
        }
        let _ = host::set_effective_context(self.root);
    }

    /// Envoy reports a timeout as UNAVAILABLE; only the clock tells. Where Envoy names its timer, that may have run
    /// from well before the call was dispatched: from the time at which a busy event loop last looked at the clock.
    fn is_late(&self, reply: &Reply, took: Nanos) -> bool {
        let limit = self.settings.backend_timeout;
        let least = if reply.is_envoys_timeout() { limit / 2 } else { limit.saturating_sub(TIMER_SLACK) };
        let is_timeout = match reply.shape {
            Shape::Http => reply.status == 504,
            _ => reply.code == Code::UNAVAILABLE,
        };
        is_timeout && took >= nanos(least)
    }

    fn late_reply(&self, protocol: Protocol) -> Reply {
        let limit = collapser_engine::duration::format(self.settings.backend_timeout);
        match protocol {
            Protocol::Grpc => Reply::failure(
                Code::DEADLINE_EXCEEDED,
                &format!(
                    "collapser: no answer within {limit} (backend_timeout); if the method streams, exclude it (methods)"
                ),
            ),
            Protocol::Http => Reply::http_failure(
                504,
                &format!(
                    "collapser: no answer within {limit} (backend_timeout); if this takes longer, exclude it (rules)\n"
                ),
            ),
        }
    }

    /// A reply for which Envoy has no buffer would fail without a word that says why.
    fn in_size(&self, reply: Reply) -> Reply {
        let (size, most) = (reply.body.len(), self.settings.max_replay_bytes);
        if size <= most {
            return reply;
        }
        let message = format!("collapser: the reply has {size} bytes, more than {most} (max_replay_bytes)");
        Reply::failure(Code::RESOURCE_EXHAUSTED, &message)
    }

    /// This worker's call has ended. `response` has the headers as they came, unless the filter has made the reply.
    fn land(&self, call: Airborne, mut reply: Reply, response: Option<&[u8]>, now: Nanos) {
        let (code, failed) = (reply.code, self.has_failed(&reply));
        let (mut terms, steers) = match call.protocol {
            Protocol::Grpc => self.grpc_terms(&call, &mut reply, failed),
            Protocol::Http => (self.http_terms(&call, &mut reply, response, failed, now), true),
        };
        let changed = self.last_change(call.resource);
        if call.dispatched < changed {
            // It may tell of what was before.
            terms.ttl = 0;
        }
        self.table.borrow_mut().changed(&call.key, changed);
        let (streamed, is_private) = (reply.streamed, reply.share == Share::Leader);
        let landing = self.table.borrow_mut().land(call.flight, reply, terms, failed, now);
        let Some(landing) = landing else { return };
        if let (Some(sharing), Some(ticket)) = (&self.sharing, call.ticket) {
            // Nobody but the leader gets to see it; what stands in for it is for all.
            let is_private = is_private && landing.reply.share == Share::Leader;
            let told = if is_private { &self.for_nobody } else { &*landing.reply };
            sharing.land(&landing.key, ticket, told, landing.good, now);
        }
        // What fails, streams or says for how long it is good tells nothing about whether answers are asked for again.
        if !landing.shared && code == Code::OK && !streamed && !steers {
            self.catalog.borrow_mut().unshared(call.method);
        }
        self.metrics.flight_ended(now.saturating_sub(landing.started), code);
        self.metrics.evictions.add(landing.evicted);
    }

    /// Whether a reply counts as a failure, for which a stale one may stand in.
    fn has_failed(&self, reply: &Reply) -> bool {
        let statuses = &self.settings.stale_statuses;
        match reply.shape {
            Shape::Http => statuses.contains_http(reply.status),
            _ => statuses.contains_grpc(reply.code.0),
        }
    }

    /// The terms for a gRPC reply, and whether its backend has said for how long it is good.
    fn grpc_terms(&self, call: &Airborne, reply: &mut Reply, failed: bool) -> (Terms, bool) {
        let Some(headers) = Pairs::parse(&reply.headers) else { return (Terms::default(), false) };
        let verdict = freshness::judge_grpc(headers);
        let policy = self.policy(call.policy);
        let (share, terms) = terms::of_grpc(reply, &verdict, policy, self.settings.cache_errors, failed);
        reply.share = share;
        (terms, verdict.ttl.is_some())
    }

    /// Another worker's reply ends a flight of this one.
    fn land_shared(&self, departure: &Departure, reply: Reply, now: Nanos) {
        self.catalog.borrow_mut().shared(departure.request.method);
        if reply.streamed {
            self.streams(departure.request.method);
        }
        let failed = self.has_failed(&reply);
        self.table.borrow_mut().changed(&departure.ask.key, self.last_change(departure.request.resource));
        let landing = self.table.borrow_mut().land_as_it_is(departure.flight, reply, failed, now);
        self.metrics.evictions.add(landing.map_or(0, |landing| landing.evicted));
        self.wake();
    }

    /// Another worker has something to say.
    fn on_message(&self, message: &[u8]) {
        let news = self.sharing.as_ref().and_then(|sharing| sharing.read(message));
        match news {
            Some(News::Reply { departure, reply }) => {
                self.metrics.collapsed.add(usize::from(!departure.is_refresh));
                self.land_shared(&departure, reply, self.now());
            }
            Some(News::Gone(departure)) => self.depart(departure, self.now()),
            Some(News::Changed(resource)) => self.changes.borrow_mut().record(resource, self.now()),
            None => (),
        }
    }

    /// When what a request is for has last changed.
    pub fn last_change(&self, resource: Option<Resource>) -> Nanos {
        resource.map_or(0, |resource| self.changes.borrow().last(resource))
    }

    /// A request has changed a resource: what is kept of it is no answer any more, here and at other workers.
    pub fn has_changed(&self, resource: Resource) {
        let now = self.now();
        self.changes.borrow_mut().record(resource, now);
        if let Some(sharing) = &self.sharing {
            sharing.changed(resource, now);
        }
    }

    /// Gets a flight its reply: by a call, or from another worker.
    fn depart(&self, mut departure: Departure, now: Nanos) {
        departure.ask.changed = departure.ask.changed.max(self.last_change(departure.request.resource));
        let claim = self.sharing.as_ref().map(|sharing| (sharing, sharing.claim(&departure.ask, now)));
        match claim {
            Some((_, Claim::Fly(ticket))) => self.fly(departure, Some(ticket), now),
            Some((_, Claim::Replace { ticket, stale })) => {
                self.table.borrow_mut().adopt(&departure.ask.key, stale, now);
                self.fly(departure, Some(ticket), now);
            }
            None | Some((_, Claim::Unshared)) => self.fly(departure, None, now),
            Some((sharing, Claim::Wait(watch))) => sharing.watch(watch, departure),
            Some((_, Claim::Take { reply, .. })) => {
                self.metrics.hits.add(usize::from(!departure.is_refresh));
                self.land_shared(&departure, reply, now);
            }
        }
    }

    /// Sends a flight off. The root context does it, which outlives all callers: a call dispatched by a stream dies with
    /// the stream.
    fn fly(&self, departure: Departure, ticket: Option<commons::Ticket>, now: Nanos) {
        self.metrics.backend_calls.add(1);
        self.metrics.refreshes.add(usize::from(departure.is_refresh));
        let Departure { ask: Ask { key, .. }, flight, request, .. } = departure;
        let token = self.dispatch(&request);
        let Request { method, protocol, policy, primary, resource, headers: leader, .. } = request;
        let dispatched = now;
        let call =
            Airborne { key, primary, flight, method, protocol, policy, resource, leader, dispatched, ticket };
        if let Ok(token) = token {
            self.airborne.borrow_mut().insert(token, call);
            return;
        }
        let cluster = &self.settings.cluster;
        let message = format!(
            "collapser: Envoy refused the call to cluster \"{cluster}\": it does not exist, has no host, or its circuit breaker is open"
        );
        let refused = match protocol {
            Protocol::Grpc => Reply::failure(Code::UNAVAILABLE, &message),
            Protocol::Http => Reply::http_failure(503, &format!("{message}\n")),
        };
        self.land(call, refused, None, now);
        self.wake();
    }

    fn dispatch(&self, request: &Request) -> host::Result<u32> {
        let leader = Pairs::parse(&request.headers).ok_or(host::Refused)?;
        let headers = match request.protocol {
            Protocol::Grpc => outbound::headers(leader, &self.grpc_timeout),
            Protocol::Http => outbound::http_headers(leader),
        };
        host::set_effective_context(self.root)?;
        host::http_call(&self.settings.cluster, &headers, &request.body, self.settings.backend_timeout)
    }

    /// Answers a portion of the waiters and sees to it that the next batch follows.
    fn fan_out(&self, portion: Portion) {
        if portion.calls == 0 || !self.table.borrow().has_calls() {
            return self.follow_up();
        }
        let (now, mut calls) = (self.now(), self.calls.take());
        self.table.borrow_mut().next_calls(portion, now, &mut calls);
        if !calls.is_empty() {
            calls.iter().for_each(|call| self.answer(call, now));
            // Whatever follows in this callback is the root's again. The root itself is always there.
            let _ = host::set_effective_context(self.root);
            self.use_up(&calls);
        }
        self.calls.replace(calls);
        self.follow_up();
    }

    /// Takes what was sent off the slice.
    fn use_up(&self, calls: &[Call]) {
        let Portion { calls: left, bytes } = self.slice.get();
        let sent = calls.iter().fold(0_usize, |sum, call| sum.saturating_add(call.bytes));
        self.slice
            .set(Portion { calls: left.saturating_sub(calls.len()), bytes: bytes.saturating_sub(sent) });
    }

    /// Sees to it that those who are still to be called will be.
    fn follow_up(&self) {
        if !self.table.borrow().has_calls() {
            return;
        }
        let Portion { calls, bytes } = self.slice.get();
        if calls > 0 && bytes > 0 {
            self.wake();
        } else {
            self.tick_soon();
        }
    }

    fn answer(&self, call: &Call, now: Nanos) {
        let reply = self.table.borrow().reply(call.ticket).map(Rc::clone);
        let sent = host::set_effective_context(call.waiter)
            .and_then(|()| reply.ok_or(host::Refused))
            .and_then(|reply| self.answer_with(call, &reply, now));
        if sent.is_err() {
            // The caller vanished without a word.
            self.leave(call.waiter, call.ticket);
        }
    }

    /// Answers the effective stream, which is a called waiter, with its flight's reply if that is for it.
    fn answer_with(&self, call: &Call, reply: &Reply, now: Nanos) -> host::Result<()> {
        match self.fit(call, reply, now) {
            Fit::Answer => {
                let note = Note(call.note);
                let has_it =
                    answer::is_not_modified(reply, note, || host::header_map(MapType::RequestHeaders));
                answer::send(reply, note, has_it, self)?;
                if !call.leader {
                    self.metrics.follower_waited(now.saturating_sub(call.joined));
                }
                Ok(())
            }
            Fit::Release => self.release(call),
            Fit::Again(key) => self.arrive_again(call, key, now),
        }
    }

    /// The effective stream, a called waiter, makes a call of its own. It is not marked as passing: what limits how long
    /// it waits goes on doing so.
    fn release(&self, call: &Call) -> host::Result<()> {
        self.unseat(call, Moved::Away);
        self.metrics.released.add(1);
        host::resume_request()
    }

    /// The effective stream, a called waiter, asks again with another key.
    fn arrive_again(&self, call: &Call, key: Key, now: Nanos) -> host::Result<()> {
        let request = self.request_again().ok_or(host::Refused)?;
        let mut ask = Ask { note: call.note, ..Ask::new(key) };
        if let Some(headers) = Pairs::parse(&request.headers).filter(|_| self.settings.caller_control) {
            steer(&mut ask, headers);
            // It has waited for a flight already.
            ask.only_if_cached = false;
        }
        ask.changed = self.last_change(request.resource);
        let outcome = self.table.borrow_mut().arrive_again(&ask, call.waiter, now);
        match outcome {
            Outcome::Queued(ticket) | Outcome::Joined(ticket) => self.unseat(call, Moved::To(ticket)),
            Outcome::Leads(ticket) => {
                self.unseat(call, Moved::To(ticket));
                let (flight, is_refresh) = (ticket.flight, false);
                self.depart(Departure { ask, flight, since: now, request, is_refresh }, now);
            }
            _ => return self.release(call),
        }
        Ok(())
    }

    /// A called waiter gives up its seat, but is still there.
    fn unseat(&self, call: &Call, moved: Moved) {
        self.moved.borrow_mut().insert(call.waiter, moved);
        self.table.borrow_mut().leave(call.ticket);
    }

    /// A tick that comes late tells that the event loop was busy and that callers' messages may lie
    /// unread. They get until the next tick, before which the loop reads them.
    fn postpone_if_late(&self, now: Nanos) {
        let late = now.saturating_sub(self.next_tick.get());
        if late > nanos(self.settings.stream_grace) / 4 {
            self.grace.borrow_mut().postpone(late + nanos(PACE));
        }
    }

    /// Releases the requests whose grace is over.
    fn release_due(&self, now: Nanos) {
        loop {
            let is_unary = |method| self.catalog.borrow().is_unary(method);
            let Some((waiter, method)) = self.grace.borrow_mut().next_due(now, is_unary) else { break };
            self.catalog.borrow_mut().stayed_open(method);
            if host::set_effective_context(waiter).is_err() {
                continue;
            }
            mark_as_passing(true);
            if host::resume_request().is_ok() {
                self.metrics.bypassed(Bypass::Streaming);
            }
        }
        let _ = host::set_effective_context(self.root);
    }

    fn levels(&self) -> Levels {
        let table = self.table.borrow();
        Levels {
            cached: table.cached(),
            cached_bytes: table.cached_bytes(),
            // What another worker has in the air counts there.
            in_air: table.in_air().saturating_sub(self.sharing.as_ref().map_or(0, Sharing::watched)),
            waiting: table.waiting(),
        }
    }

    // --- Ticks ---

    /// Sets the next tick to when there is something to do.
    fn schedule(&self, now: Nanos) {
        let mut next = now.saturating_add(nanos(IDLE));
        if self.table.borrow().has_calls() {
            next = now.saturating_add(nanos(PACE));
        }
        for due in [self.grace.borrow().next_deadline(), self.alone.borrow().next_deadline()] {
            next = next.min(due.unwrap_or(Nanos::MAX));
        }
        self.tick_at(next, now);
    }

    fn tick_soon(&self) {
        let now = self.now();
        let soon = now.saturating_add(nanos(PACE));
        if soon < self.next_tick.get() {
            self.tick_at(soon, now);
        }
    }

    /// Sets the tick to `at`, rounded up to the millisecond.
    fn tick_at(&self, at: Nanos, now: Nanos) {
        let millis = at.saturating_sub(now).div_ceil(1_000_000).max(1);
        if host::set_tick_period(u32::try_from(millis).unwrap_or(u32::MAX)).is_ok() {
            self.next_tick.set(now.saturating_add(millis * 1_000_000));
        }
    }
}

fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::hash::RandomState::new().build_hasher().finish()
}

/// What derives keys, one for each list of key headers, and which of them is whose, by the policy's index.
fn keyers(settings: &Settings) -> (Vec<RefCell<Keyer>>, Vec<usize>) {
    let mut lists: Vec<&[String]> = Vec::new();
    let mut keyer_of = Vec::new();
    for (_, policy) in settings.policies.all() {
        let found = lists.iter().position(|list| *list == policy.key_headers);
        keyer_of.push(found.unwrap_or_else(|| {
            lists.push(&policy.key_headers);
            lists.len() - 1
        }));
    }
    let keyers = lists.into_iter().map(|list| RefCell::new(Keyer::new(list.to_vec()))).collect();
    (keyers, keyer_of)
}
