//! What the root context and the streams of one worker share.

use crate::host;
use crate::metrics::{Levels, Metrics};
use crate::sharing::{Departure, News, Sharing};
use crate::stream::{another_filter_holds, mark_as_passing};
use collapser_engine::budget::Charged;
use collapser_engine::catalog::{Catalog, Method, MethodId};
use collapser_engine::classify::Bypass;
use collapser_engine::commons::{self, Claim};
use collapser_engine::deadlines::{self, Deadlines};
use collapser_engine::flights::{Call, Collected, FlightId, Portion, Ticket};
use collapser_engine::grace::{Grace, PATIENCE, Place, Until};
use collapser_engine::grpc::Code;
use collapser_engine::key::{Key, Keyer};
use collapser_engine::outbound;
use collapser_engine::pairs::{self, Pairs};
use collapser_engine::reply::{MARKER, Reply, Shape};
use collapser_engine::settings::{Hold, Settings};
use collapser_engine::sightings::Sighting;
use collapser_engine::table::{Outcome, Table};
use collapser_engine::{Nanos, Waiter, nanos};
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
    /// Its one message, with the framing.
    pub body: Vec<u8>,
    /// Its method.
    pub method: Option<MethodId>,
}

/// A flight whose call is under way.
struct Airborne {
    key: Key,
    flight: FlightId,
    method: Option<MethodId>,
    dispatched: Nanos,
    /// If other workers may wait for it.
    ticket: Option<commons::Ticket>,
}

/// The state of one worker.
pub struct Worker {
    /// The settings, fixed for the life of this context.
    pub settings: Settings,
    /// The metrics.
    pub metrics: Metrics,
    /// The reply to those who find no place to wait.
    pub full: Rc<Reply>,
    /// The reply when the filter chain lacks the body slot.
    pub no_slot: Rc<Reply>,
    root: u32,
    queue: u32,
    /// Whether a wake-up is on its way.
    woken: Cell<bool>,
    keyer: RefCell<Keyer>,
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
    marker: Box<[u8]>,
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
        let full = format!("collapser: {} requests wait already (max_waiters)", settings.max_waiters);
        let no_slot = "collapser: the body slot (a Lua filter) is missing after this filter in http_filters";
        let name = random();
        // A queue belongs to whoever registered its name last, so every root context takes a
        // name of its own.
        let queue = host::register_queue(&format!("collapser/{name:016x}"))?;
        let worker = Self {
            metrics: Metrics::define(name)?,
            full: Rc::new(Reply::failure(Code::RESOURCE_EXHAUSTED, &full)),
            no_slot: Rc::new(Reply::failure(Code::INTERNAL, no_slot)),
            root,
            queue,
            woken: Cell::new(false),
            keyer: RefCell::new(Keyer::new(settings.key_headers.clone())),
            table: RefCell::new(Table::new(&settings)),
            catalog: RefCell::new(Catalog::new(settings.methods.clone(), settings.pass_after)),
            grace: RefCell::new(Grace::new(nanos(settings.stream_grace))),
            airborne: RefCell::default(),
            alone: RefCell::new(Deadlines::new(nanos(settings.backend_timeout))),
            sharing: Sharing::new(name, queue, &settings),
            slice: Cell::new(SLICE),
            calls: RefCell::default(),
            marker: pairs::block(&[(MARKER, "1")]),
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

    /// The key of a request.
    pub fn key(&self, headers: Pairs<'_>, body: &[u8]) -> Key {
        self.keyer.borrow_mut().key(headers, body)
    }

    /// Whether a request that has arrived whole goes upstream by itself: nobody has shared its method's last flights, nor
    /// has anybody asked for the same.
    pub fn pass(
        &self,
        headers: Pairs<'_>,
        body: &[u8],
        now: Nanos,
        method: Option<MethodId>,
    ) -> Option<Sighting> {
        if !self.catalog.borrow_mut().came_whole(method) {
            return None;
        }
        let tag = self.keyer.borrow_mut().tag(headers, body);
        let sighting = self.table.borrow_mut().pass(tag, now, || self.key(headers, body));
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
    pub fn passed(&self, sighting: Sighting, place: deadlines::Place) {
        self.alone.borrow_mut().leave(place);
        self.table.borrow_mut().passed(sighting, self.now());
    }

    /// A request has arrived whole, and goes on with its key.
    pub fn keyed(&self, method: Option<MethodId>) {
        self.catalog.borrow_mut().came_whole(method);
        self.metrics.requests.add(1);
        self.metrics.keyed.add(1);
    }

    /// Looks up a request that has arrived whole. For a leader, what follows in this callback is the root's.
    pub fn arrive(&self, key: Key, waiter: Waiter, now: Nanos, request: Request) -> Outcome {
        let outcome = self.table.borrow_mut().arrive(key, waiter, now);
        self.metrics.requests.add(1);
        if matches!(outcome, Outcome::Hit(_) | Outcome::Queued(_) | Outcome::Joined(_)) {
            self.catalog.borrow_mut().shared(request.method);
        }
        match &outcome {
            Outcome::Hit(_) => self.metrics.hits.add(1),
            Outcome::Queued(_) => {
                self.metrics.hits.add(1);
                self.wake();
            }
            Outcome::Joined(_) => self.metrics.collapsed.add(1),
            Outcome::Full => self.metrics.refused.add(1),
            Outcome::Leads(ticket) => {
                self.depart(Departure { key, flight: ticket.flight, since: now, request }, now);
            }
        }
        outcome
    }

    /// A called waiter takes its reply.
    pub fn collect(&self, ticket: Ticket) -> Option<Collected> {
        self.table.borrow_mut().collect(ticket)
    }

    /// Envoy has passed on a reply of so many bytes to its caller, or given it up.
    pub fn passed_on(&self, bytes: usize, charged: Charged) {
        if bytes > 0 && self.table.borrow_mut().passed_on(bytes, charged) {
            self.wake();
        }
    }

    /// A waiter is gone.
    pub fn leave(&self, ticket: Ticket) {
        if self.table.borrow_mut().leave(ticket) {
            self.metrics.abandoned.add(1);
            if self.table.borrow().has_calls() {
                self.wake();
            }
        }
    }

    /// Sends the local reply of the effective stream, which its callbacks then fill in.
    pub fn send(&self, shape: Shape) -> host::Result<()> {
        match shape {
            Shape::Full => host::send_local_response(&self.marker),
            Shape::TrailersOnly => host::send_local_response(&[]),
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

    /// A dispatched call has ended; `record` reads its response.
    pub fn on_call_response(&self, token: u32, record: impl FnOnce() -> Reply) {
        let Some(call) = self.airborne.borrow_mut().remove(&token) else { return };
        let (method, dispatched) = (call.method, call.dispatched);
        let mut reply = self.in_size(record());
        let now = self.now();
        if self.is_late(&reply, now.saturating_sub(dispatched)) {
            self.catalog.borrow_mut().suspect(method);
            reply = self.late_reply();
        }
        if reply.streamed {
            self.streams(method);
        }
        self.land(call, reply, now);
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
            self.late_reply()
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
            if host::set_effective_context(waiter).and_then(|()| self.send(Shape::TrailersOnly)).is_ok() {
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
        reply.code == Code::UNAVAILABLE && took >= nanos(least)
    }

    fn late_reply(&self) -> Reply {
        let limit = collapser_engine::duration::format(self.settings.backend_timeout);
        let message = format!(
            "collapser: no answer within {limit} (backend_timeout); if the method streams, exclude it (methods)"
        );
        Reply::failure(Code::DEADLINE_EXCEEDED, &message)
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

    /// This worker's call has ended.
    fn land(&self, call: Airborne, reply: Reply, now: Nanos) {
        let code = reply.code;
        let landing = self.table.borrow_mut().land(call.flight, reply, now);
        let Some(landing) = landing else { return };
        if let (Some(sharing), Some(ticket)) = (&self.sharing, call.ticket) {
            sharing.land(&landing.key, ticket, &landing.reply, landing.expires, now);
        }
        // What fails or streams tells nothing about whether answers are asked for again.
        if !landing.shared && code == Code::OK && !landing.reply.streamed {
            self.catalog.borrow_mut().unshared(call.method);
        }
        self.metrics.flight_ended(now.saturating_sub(landing.started), code);
        self.metrics.evictions.add(landing.evicted);
    }

    /// Another worker's reply ends a flight of this one.
    fn land_shared(&self, departure: &Departure, reply: Reply, expires: Nanos, now: Nanos) {
        self.catalog.borrow_mut().shared(departure.request.method);
        if reply.streamed {
            self.streams(departure.request.method);
        }
        let landing = self.table.borrow_mut().land_until(departure.flight, reply, now, expires);
        self.metrics.evictions.add(landing.map_or(0, |landing| landing.evicted));
        self.wake();
    }

    /// Another worker has something to say.
    fn on_message(&self, message: &[u8]) {
        let news = self.sharing.as_ref().and_then(|sharing| sharing.read(message));
        match news {
            Some(News::Reply { departure, reply, expires }) => {
                self.metrics.collapsed.add(1);
                self.land_shared(&departure, reply, expires, self.now());
            }
            Some(News::Gone(departure)) => self.depart(departure, self.now()),
            None => (),
        }
    }

    /// Gets a flight its reply: by a call, or from another worker.
    fn depart(&self, departure: Departure, now: Nanos) {
        let claim = self.sharing.as_ref().map(|sharing| (sharing, sharing.claim(&departure.key, now)));
        match claim {
            Some((_, Claim::Fly(ticket))) => self.fly(&departure, Some(ticket), now),
            None | Some((_, Claim::Unshared)) => self.fly(&departure, None, now),
            Some((sharing, Claim::Wait(watch))) => sharing.watch(watch, departure),
            Some((_, Claim::Take { reply, expires })) => {
                self.metrics.hits.add(1);
                self.land_shared(&departure, reply, expires, now);
            }
        }
    }

    /// Sends a flight off. The root context does it, which outlives all callers: a call dispatched by a stream dies with
    /// the stream.
    fn fly(&self, departure: &Departure, ticket: Option<commons::Ticket>, now: Nanos) {
        self.metrics.backend_calls.add(1);
        let Departure { key, flight, request, .. } = departure;
        let call = Airborne { key: *key, flight: *flight, method: request.method, dispatched: now, ticket };
        if let Ok(token) = self.dispatch(request) {
            self.airborne.borrow_mut().insert(token, call);
            return;
        }
        let cluster = &self.settings.cluster;
        let message = format!(
            "collapser: Envoy refused the call to cluster \"{cluster}\": it does not exist, has no host, or its circuit breaker is open"
        );
        self.land(call, Reply::failure(Code::UNAVAILABLE, &message), now);
        self.wake();
    }

    fn dispatch(&self, request: &Request) -> host::Result<u32> {
        let leader = Pairs::parse(&request.headers).ok_or(host::Refused)?;
        let headers = outbound::headers(leader, &self.grpc_timeout);
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
        let sent = host::set_effective_context(call.waiter).and_then(|()| self.send(call.shape));
        if sent.is_err() {
            // The caller vanished without a word.
            self.leave(call.ticket);
        } else if !call.leader {
            self.metrics.follower_waited(now.saturating_sub(call.joined));
        }
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
