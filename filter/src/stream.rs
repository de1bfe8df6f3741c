//! One request: a small state machine between Envoy's callbacks.

use crate::abi::Action;
use crate::host::{self, BufferType, MapType};
use crate::worker::{Request, Worker};
use collapser_engine::affinity;
use collapser_engine::budget::Charged;
use collapser_engine::catalog::{Method, MethodId};
use collapser_engine::classify::{self, Bypass};
use collapser_engine::deadlines;
use collapser_engine::flights::Ticket;
use collapser_engine::framing::{self, Framing};
use collapser_engine::grace::{Place, Until};
use collapser_engine::key::Key;
use collapser_engine::pairs::Pairs;
use collapser_engine::reply::{Reply, Shape};
use collapser_engine::settings::{Hold, Mode};
use collapser_engine::sightings::Sighting;
use collapser_engine::table::Outcome;
use collapser_engine::{Nanos, Waiter};
use std::cell::Cell;
use std::rc::Rc;

/// A request that was released.
struct Released {
    /// `None` once nothing more can be learned from it.
    method: Option<MethodId>,
    /// Whether the next part of its body needs a push. In some Envoys (seen with 1.36.4, 1.37.0 and 1.39.0, gone in
    /// 1.39.3) the first part after a release is put into the buffer of what was held, and stays there unless
    /// the request is resumed once more (envoyproxy/envoy issue 46841). Elsewhere that does nothing.
    needs_push: bool,
}

/// The header that marks a request that passes untouched; routes match on it and remove it.
const PASSING: &str = "x-collapser-pass";

/// The header that asks a filter further on to hold the request until it is whole. That filter removes it, and says by
/// dynamic metadata that it does so.
const HOLD: &str = "x-collapser-hold";

/// Where a request stands.
#[derive(Default)]
enum State {
    /// Untouched from here on; also before its headers and after its answer.
    #[default]
    Passing,
    /// It is held until it is whole.
    Holding(Held),
    /// It was released as an open stream, after a while.
    Released(Released),
    /// It passes, and its reply tells whether the method streams.
    Probing(Probe),
    /// It went upstream by itself, since its method's flights are not shared.
    Alone(Alone),
    /// It waits for a flight.
    Waiting(Ticket),
    /// Its local reply was sent and comes by; the recorded headers go into it.
    Replaying(Rc<Reply>),
    /// The recorded body and trailers go into the local reply's slot.
    Filling(Rc<Reply>),
}

/// A request that went upstream by itself.
struct Alone {
    sighting: Sighting,
    place: deadlines::Place,
    method: Option<MethodId>,
    departed: Nanos,
    /// Whether a part of its reply's body has come.
    begun: bool,
}

/// A request of which not everything has come.
struct Held {
    headers: Vec<u8>,
    method: Option<MethodId>,
    /// Its place among those that are released after a while.
    grace: Option<Place>,
    /// Whether any part of the body has come.
    begun: bool,
}

/// Lets routes tell a request that passes from one that is held: a held one may be given a limit on how long it
/// waits, in case the VM that holds it dies, and one that passes may be silent for as long as it likes.
///
/// Routes can tell those that stay open from those that had only to be looked at. The former may be resumed once more
/// ([`Released::needs_push`]), which sends again what the router keeps where it may retry.
pub fn mark_as_passing(is_open: bool) {
    // Refused only if the stream is going away; and without such a route in the configuration, both do nothing.
    let _ = host::set_header(MapType::RequestHeaders, PASSING, if is_open { "open" } else { "1" });
    let _ = host::clear_route_cache();
}

/// Whether a filter further on has said that it holds the effective request. By now its headers are out of reach, since
/// this filter let them go on.
pub fn another_filter_holds() -> bool {
    host::has_property(&["metadata", "filter_metadata", "collapser", "held"])
}

/// Removes a key that the client sent: a request that passes must have none, and one that does not has its own.
fn drop_key(headers: Option<Pairs<'_>>) {
    if headers.is_none_or(|headers| headers.first(affinity::HEADER.as_bytes()).is_some()) {
        // Refused only if the stream is going away.
        let _ = host::remove_header(MapType::RequestHeaders, affinity::HEADER);
    }
}

/// What has come of a probe's reply.
struct Probe {
    method: MethodId,
    /// How long the first message is, once known.
    first: Option<usize>,
    /// Bytes so far.
    seen: usize,
}

impl Probe {
    /// More has come: `size` bytes. Returns whether it is more than one message.
    fn watch(&mut self, size: usize) -> bool {
        if self.seen == 0 {
            let start = host::buffer(BufferType::ResponseBody, 0, framing::PREFIX);
            self.first = framing::first_message_len(&start);
        }
        self.seen = self.seen.saturating_add(size);
        self.first.is_some_and(|first| self.seen > first)
    }
}

impl Held {
    fn released(&self) -> Released {
        Released { method: self.method, needs_push: self.begun }
    }
}

/// The context of one request.
pub struct Stream {
    id: Waiter,
    worker: Rc<Worker>,
    /// Taken out by each callback, and put back as it leaves it.
    state: Cell<State>,
    /// Bytes of the reply that Envoy holds for this stream, and when they were charged, see [`Worker::passed_on`].
    held: Cell<(usize, Charged)>,
}

impl Stream {
    /// A request that has just begun.
    pub fn new(id: Waiter, worker: Rc<Worker>) -> Self {
        Self { id, worker, state: Cell::default(), held: Cell::default() }
    }

    fn pass(&self, reason: Bypass) -> Action {
        mark_as_passing(false);
        self.worker.metrics.bypassed(reason);
        self.state.set(State::Passing);
        Action::Continue
    }

    fn pass_stream(&self, method: Option<MethodId>) -> Action {
        self.worker.streams(method);
        self.pass(Bypass::Streaming)
    }

    /// More of the body of a released request has come.
    fn go_on(&self, released: Released, end_of_stream: bool) -> Action {
        if released.needs_push {
            // Refused only if the stream is going away.
            let _ = host::resume_request();
        }
        if !end_of_stream {
            self.state.set(State::Released(Released { needs_push: false, ..released }));
        }
        Action::Continue
    }

    /// Has the request released if it stays as it is for too long. What another filter holds, that filter releases.
    fn wait(&self, held: &mut Held, until: Until, now: Nanos) {
        if self.worker.settings.hold == Hold::Headers {
            held.grace = Some(self.worker.enter_grace(self.id, held.method, until, now));
        }
    }

    /// Holds the headers, or asks for that.
    fn hold_headers(&self) -> Action {
        match self.worker.settings.hold {
            Hold::Headers => Action::Pause,
            Hold::Filter => {
                // Refused only if the stream is going away.
                let _ = host::set_header(MapType::RequestHeaders, HOLD, "1");
                Action::Continue
            }
        }
    }

    /// More of the body has come: `size` bytes are there in all.
    fn hold(&self, mut held: Held, size: usize, end_of_stream: bool) -> Action {
        if held.grace.take().is_some_and(|place| !self.worker.leave_grace(place)) {
            // Released by the tick, and counted there.
            return self.go_on(held.released(), end_of_stream);
        }
        if size > self.worker.settings.max_request_bytes {
            return self.pass(Bypass::TooLarge);
        }
        if end_of_stream {
            return self.decide(held, size);
        }
        let start = host::buffer(BufferType::RequestBody, 0, framing::PREFIX);
        match framing::inspect(&start, size) {
            Framing::More => return self.pass_stream(held.method),
            Framing::One => self.wait(&mut held, Until::EndOfStream, self.worker.now()),
            Framing::Empty => self.wait(&mut held, Until::Message, self.worker.now()),
            // The rest of the message is on its way.
            Framing::Partial => match framing::first_message_len(&start) {
                Some(len) if len > self.worker.settings.max_request_bytes => {
                    return self.pass(Bypass::TooLarge);
                }
                _ => (),
            },
        }
        held.begun = true;
        self.state.set(State::Holding(held));
        Action::Pause
    }

    /// The request is whole.
    fn decide(&self, held: Held, size: usize) -> Action {
        let body = host::buffer(BufferType::RequestBody, 0, size);
        match framing::inspect(&body, body.len()) {
            Framing::One => (),
            Framing::More => return self.pass_stream(held.method),
            Framing::Empty | Framing::Partial => return self.pass(Bypass::Malformed),
        }
        if !self.worker.is_held() {
            return self.pass(Bypass::NotHeld);
        }
        let Some(headers) = Pairs::parse(&held.headers) else { return self.pass(Bypass::Malformed) };
        if self.worker.settings.mode == Mode::Affinity {
            return self.go_on_with_key(held.method, &self.worker.key(headers, &body));
        }
        let now = self.worker.now();
        if let Some(sighting) = self.worker.pass(headers, &body, now, held.method) {
            return self.go_alone(sighting, held.method, now);
        }
        let key = self.worker.key(headers, &body);
        let request = Request { headers: held.headers, body, method: held.method };
        match self.worker.arrive(key, self.id, now, request) {
            Outcome::Hit(hit) => {
                self.held.set((hit.reply.body.len(), hit.charged));
                self.answer(hit.reply);
            }
            Outcome::Full => self.answer(Rc::clone(&self.worker.full)),
            Outcome::Queued(ticket) | Outcome::Joined(ticket) | Outcome::Leads(ticket) => {
                self.state.set(State::Waiting(ticket));
            }
        }
        Action::Pause
    }

    /// Lets the request go upstream as it is, with the deadline that its flight would have.
    fn go_alone(&self, sighting: Sighting, method: Option<MethodId>, departed: Nanos) -> Action {
        self.worker.metrics.bypassed(Bypass::Unshared);
        let place = self.worker.depart_alone(self.id, departed);
        self.keep(State::Alone(Alone { sighting, place, method, departed, begun: false }), Action::Continue)
    }

    /// The answer begins, so the deadline is kept. Without a body, it may be the worker's word that it is over.
    fn check_deadline(&self, alone: Alone, end_of_stream: bool) -> Action {
        self.worker.answered_alone(alone.place);
        if end_of_stream && let Some(late) = self.worker.late_by_now(alone.method, alone.departed) {
            // Refused only if the stream is going away.
            let _ = host::set_header_map(MapType::ResponseHeaders, &late.headers);
        }
        self.keep(State::Alone(alone), Action::Continue)
    }

    /// The request goes on, and the router chooses its replica by the key.
    fn go_on_with_key(&self, method: Option<MethodId>, key: &Key) -> Action {
        self.worker.keyed(method);
        // Refused only if the stream is going away. Routes may tell by the header that the request is held no more.
        let _ = host::set_header(MapType::RequestHeaders, affinity::HEADER, &affinity::value(key));
        let _ = host::clear_route_cache();
        self.state.set(State::Passing);
        Action::Continue
    }

    fn answer(&self, reply: Rc<Reply>) {
        let shape = reply.shape;
        self.state.set(State::Replaying(reply));
        // Refused only if the stream has been answered already; then it needs none from here.
        let _ = self.worker.send(shape);
    }

    fn keep(&self, state: State, action: Action) -> Action {
        self.state.set(state);
        action
    }

    /// Puts the recorded body and trailers into the local reply that passes by, whose body has `size` bytes. Where Envoy
    /// has no buffer for it, the stream is reset at once, and its end comes from within these calls.
    fn replay_body(&self, reply: &Reply, size: usize) -> Action {
        // Both are refused only if the stream is going away.
        let _ = host::set_buffer(BufferType::ResponseBody, size, &reply.body);
        let _ = host::set_header_map(MapType::ResponseTrailers, &reply.trailers);
        Action::Continue
    }

    /// Puts the recorded headers into the local reply that passes by.
    fn replay_headers(&self, reply: Rc<Reply>, end_of_stream: bool) -> Action {
        let has_slot = reply.shape == Shape::TrailersOnly || !end_of_stream;
        let headers = if has_slot { &reply.headers } else { &self.worker.no_slot.headers };
        // Refused only if the stream is going away.
        let _ = host::set_header_map(MapType::ResponseHeaders, headers);
        self.state.set(if end_of_stream { State::Passing } else { State::Filling(reply) });
        Action::Continue
    }

    // --- What Envoy calls for ---

    /// The request's headers have come.
    pub fn on_request_headers(&self, end_of_stream: bool) -> Action {
        let headers = host::header_map(MapType::RequestHeaders);
        #[cfg(feature = "trap")]
        trap_if_asked(&headers);
        let pairs = Pairs::parse(&headers);
        if self.worker.settings.mode == Mode::Affinity {
            drop_key(pairs);
        }
        let judged =
            pairs.ok_or(Bypass::Malformed).and_then(|pairs| classify::classify(pairs, end_of_stream));
        let method = match judged.map(|path| self.worker.judge(path)) {
            Ok(Method::Collapsible(method)) => method,
            Ok(Method::Excluded) => return self.pass(Bypass::Method),
            Ok(Method::Streams) => return self.pass(Bypass::Streaming),
            Ok(Method::Probe(method)) => {
                self.pass(Bypass::Probe);
                self.state.set(State::Probing(Probe { method, first: None, seen: 0 }));
                return Action::Continue;
            }
            Err(reason) => return self.pass(reason),
        };
        // A stream whose backend speaks first may never send a message on its own account.
        let mut held = Held { headers, method, grace: None, begun: false };
        self.wait(&mut held, Until::Message, self.worker.about_now());
        self.state.set(State::Holding(held));
        self.hold_headers()
    }

    /// A part of the request's body has come: `size` bytes are there in all.
    pub fn on_request_body(&self, size: usize, end_of_stream: bool) -> Action {
        match self.state.take() {
            State::Passing => Action::Continue,
            State::Released(released) => self.go_on(released, end_of_stream),
            State::Holding(held) => self.hold(held, size, end_of_stream),
            state @ (State::Probing(_) | State::Alone(_)) => self.keep(state, Action::Continue),
            // The request was whole; nothing more can come that matters.
            state => self.keep(state, Action::Pause),
        }
    }

    /// The request's trailers have come.
    pub fn on_request_trailers(&self) -> Action {
        match self.state.take() {
            State::Holding(Held { grace: Some(place), .. }) if !self.worker.leave_grace(place) => {
                Action::Continue
            }
            State::Holding(_) => self.pass(Bypass::Malformed),
            _ => Action::Continue,
        }
    }

    /// A response's headers pass by, whoever made it.
    pub fn on_response_headers(&self, end_of_stream: bool) -> Action {
        match self.state.take() {
            State::Replaying(reply) => self.replay_headers(reply, end_of_stream),
            State::Waiting(ticket) => match self.worker.collect(ticket) {
                Some(collected) => {
                    self.held.set((collected.reply.body.len(), collected.charged));
                    self.replay_headers(collected.reply, end_of_stream)
                }
                // Somebody else answers: Envoy itself, at a deadline for one.
                None => {
                    self.worker.leave(ticket);
                    Action::Continue
                }
            },
            State::Holding(mut held) => {
                if held.grace.take().is_some_and(|place| !self.worker.leave_grace(place)) {
                    self.state.set(State::Released(held.released()));
                }
                Action::Continue
            }
            State::Alone(alone) => self.check_deadline(alone, end_of_stream),
            state @ (State::Released(_) | State::Probing(_)) => self.keep(state, Action::Continue),
            State::Passing | State::Filling(_) => Action::Continue,
        }
    }

    /// A part of a response's body passes by: `size` bytes.
    pub fn on_response_body(&self, size: usize, end_of_stream: bool) -> Action {
        match self.state.take() {
            State::Filling(reply) if end_of_stream => self.replay_body(&reply, size),
            state @ State::Filling(_) => self.keep(state, Action::Pause),
            State::Released(mut released) => {
                if size > 0 {
                    // A message before the request has ended: no unary method does that.
                    self.worker.streams(released.method.take());
                }
                self.keep(State::Released(released), Action::Continue)
            }
            State::Probing(mut probe) => {
                if probe.watch(size) {
                    self.worker.streams(Some(probe.method));
                    return Action::Continue;
                }
                self.keep(State::Probing(probe), Action::Continue)
            }
            State::Alone(alone) => {
                if alone.begun {
                    // A large message, or a second one. Another call is to tell.
                    self.worker.may_stream(alone.method);
                }
                self.keep(State::Alone(Alone { begun: true, ..alone }), Action::Continue)
            }
            state => self.keep(state, Action::Continue),
        }
    }

    /// The stream has ended, one way or another.
    pub fn on_done(&self) {
        match self.state.take() {
            State::Waiting(ticket) => self.worker.leave(ticket),
            State::Alone(alone) => self.worker.passed(alone.sighting, alone.place),
            State::Holding(Held { grace: Some(place), .. }) => drop(self.worker.leave_grace(place)),
            _ => (),
        }
        let (bytes, charged) = self.held.take();
        self.worker.passed_on(bytes, charged);
    }
}

/// Stands in for a fault in the filter.
#[cfg(feature = "trap")]
fn trap_if_asked(headers: &[u8]) {
    if Pairs::parse(headers).is_some_and(|pairs| pairs.first(b"x-collapser-trap").is_some()) {
        panic!("asked to trap");
    }
}
