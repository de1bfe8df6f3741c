//! One request: a small state machine between Envoy's callbacks.

use crate::abi::Action;
use crate::answer::{self, Answer, Note};
use crate::host::{self, BufferType, MapType};
use crate::http::{resource, steer};
use crate::worker::{Request, Worker};
use collapser_engine::affinity;
use collapser_engine::budget::Charged;
use collapser_engine::catalog::{Method, MethodId};
use collapser_engine::changes::Resource;
use collapser_engine::classify::{self, Bypass, Candidate, Protocol};
use collapser_engine::deadlines;
use collapser_engine::flights::{Collected, Ticket};
use collapser_engine::framing::{self, Framing};
use collapser_engine::grace::{Place, Until};
use collapser_engine::key::Key;
use collapser_engine::pairs::Pairs;
use collapser_engine::policy::PolicyId;
use collapser_engine::reply::Reply;
use collapser_engine::settings::{Hold, Mode};
use collapser_engine::sightings::Sighting;
use collapser_engine::table::{Ask, Outcome};
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
    /// The same, and its response is told why.
    Bypassed(Bypass),
    /// It passes, with these headers, and changes something if it succeeds.
    Changing(Vec<u8>, Bypass),
    /// It is held until it is whole.
    Holding(Held),
    /// It was released as an open stream, after a while.
    Released(Released),
    /// It passes, and its reply tells whether the method streams.
    Probing(Probe),
    /// It went upstream by itself, since its method's flights are not shared.
    Alone(Alone),
    /// It waits for a flight.
    Waiting(Ticket, Note),
    /// Its local reply was sent and comes by; the recorded headers go into it.
    Replaying(Answer),
    /// The recorded body and trailers go into the local reply's slot.
    Filling(Rc<Reply>),
}

/// A request that went upstream by itself.
struct Alone {
    policy: PolicyId,
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
    protocol: Protocol,
    policy: PolicyId,
    /// Whether it has something to say to caches.
    steers: bool,
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

/// What the headers of a request make of it.
enum Judged {
    /// It may collapse.
    Collapsible { method: Option<MethodId>, protocol: Protocol, policy: PolicyId, steers: bool },
    /// It passes, to tell whether its method streams.
    Probe(MethodId),
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
    /// The request, which is whole.
    fn request(self, body: Vec<u8>, primary: Key, resource: Option<Resource>) -> Request {
        let Self { headers, method, protocol, policy, .. } = self;
        Request { headers, body, method, protocol, policy, primary, resource }
    }

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
        // One that would have waited for a flight may wait as long as for that, and no longer.
        if reason != Bypass::Unshareable {
            mark_as_passing(false);
        }
        self.worker.metrics.bypassed(reason);
        self.note_outcome(&["bypass:", reason.name()].concat(), None);
        self.state.set(self.passing(reason));
        Action::Continue
    }

    /// How it passes: its response is touched only to tell why.
    fn passing(&self, reason: Bypass) -> State {
        if self.worker.settings.cache_status { State::Bypassed(reason) } else { State::Passing }
    }

    /// Leaves word for access logs.
    fn note_outcome(&self, outcome: &str, key: Option<&Key>) {
        if !self.worker.settings.filter_state {
            return;
        }
        // Refused only if the stream is going away.
        let _ = host::set_property("collapser.outcome", outcome.as_bytes());
        if let Some(key) = key {
            let _ = host::set_property("collapser.key", format!("{key:?}").as_bytes());
        }
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
        if held.protocol == Protocol::Http {
            return self.keep(State::Holding(held), Action::Pause);
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
        match held.protocol {
            Protocol::Grpc => self.decide_grpc(held, size),
            Protocol::Http => self.decide_http(held, size),
        }
    }

    fn decide_grpc(&self, held: Held, size: usize) -> Action {
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
            return self.go_on_with_key(held.method, &self.worker.key(headers, &body, held.policy));
        }
        let now = self.worker.now();
        if let Some(sighting) = self.worker.pass(headers, &body, now, held.method, held.policy) {
            return self.go_alone(sighting, &held, now);
        }
        let ask = self.worker.ask_grpc(headers, &body, held.policy, held.steers);
        self.arrive(&ask, held.request(body, ask.key, None), now)
    }

    /// A request passes that may change something.
    fn pass_change(&self, headers: Vec<u8>, reason: Bypass) -> Action {
        let action = self.pass(reason);
        self.keep(State::Changing(headers, reason), action)
    }

    /// The response to a request that may change something passes by.
    fn notice_change(&self, request: &[u8], reason: Bypass) -> Action {
        let response = host::header_map(MapType::ResponseHeaders);
        if let Some((request, response)) = Pairs::parse(request).zip(Pairs::parse(&response)) {
            self.worker.notice_change(request, response);
        }
        self.tell_bypass(reason);
        Action::Continue
    }

    fn decide_http(&self, held: Held, size: usize) -> Action {
        // Without a body, nothing has gone on that another filter should have held.
        if size > 0 && !self.worker.is_held() {
            return self.pass(Bypass::NotHeld);
        }
        let body = if size > 0 { host::buffer(BufferType::RequestBody, 0, size) } else { Vec::new() };
        let Some(headers) = Pairs::parse(&held.headers) else { return self.pass(Bypass::Malformed) };
        let now = self.worker.now();
        let (mut ask, primary) = self.worker.ask_http(headers, &body, held.policy, now);
        if held.steers {
            steer(&mut ask, headers);
        }
        let resource = resource(headers);
        ask.changed = self.worker.last_change(resource);
        self.arrive(&ask, held.request(body, primary, resource), now)
    }

    fn arrive(&self, ask: &Ask, request: Request, now: Nanos) -> Action {
        let (note, protocol) = (Note(ask.note), request.protocol);
        // Only who is answered at once and may have the reply already is looked at again.
        let again = if note.has(Note::CONDITIONAL) { request.headers.clone() } else { Vec::new() };
        match self.worker.arrive(ask, self.id, now, request) {
            Outcome::Hit(hit) => self.answer_hit(&hit, note, again, &ask.key, now),
            Outcome::Full if protocol == Protocol::Grpc => self.refuse(&self.worker.full),
            Outcome::Full => self.refuse(&self.worker.http_full),
            Outcome::Missing => self.refuse(&self.worker.missing),
            Outcome::Unshareable => return self.pass(Bypass::Unshareable),
            Outcome::Queued(ticket) => self.wait_for(ticket, note, "hit", &ask.key),
            Outcome::Joined(ticket) => self.wait_for(ticket, note, "follower", &ask.key),
            Outcome::Leads(ticket) => self.wait_for(ticket, note, "leader", &ask.key),
        }
        Action::Pause
    }

    fn wait_for(&self, ticket: Ticket, note: Note, outcome: &str, key: &Key) {
        self.note_outcome(outcome, Some(key));
        self.state.set(State::Waiting(ticket, note));
    }

    fn answer_hit(&self, hit: &Collected, note: Note, request: Vec<u8>, key: &Key, now: Nanos) {
        self.held.set((hit.reply.body.len(), hit.charged));
        let answer = Answer::new(hit, note, || request).at(now);
        self.note_outcome(answer.outcome(), Some(key));
        self.answer(answer);
    }

    fn refuse(&self, reply: &Rc<Reply>) {
        self.note_outcome("refused", None);
        self.answer(Answer::own(reply));
    }

    /// Lets the request go upstream as it is, with the deadline that its flight would have.
    fn go_alone(&self, sighting: Sighting, held: &Held, departed: Nanos) -> Action {
        self.worker.metrics.bypassed(Bypass::Unshared);
        self.note_outcome("bypass:unshared", None);
        let place = self.worker.depart_alone(self.id, departed);
        let (policy, method) = (held.policy, held.method);
        let alone = Alone { policy, sighting, place, method, departed, begun: false };
        self.keep(State::Alone(alone), Action::Continue)
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

    fn answer(&self, answer: Answer) {
        let (reply, send) = (Rc::clone(&answer.reply), answer.sender());
        self.state.set(State::Replaying(answer));
        // Refused only if the stream has been answered already; then it needs none from here.
        let _ = send(&reply, &self.worker);
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
    fn replay_headers(&self, answer: Answer, end_of_stream: bool) -> Action {
        if answer.is_stale() {
            self.worker.metrics.answered_stale(answer.is_for_error());
        }
        let has_slot = !answer.needs_slot() || !end_of_stream;
        let shown = answer.headers(self.worker.settings.cache_status, || self.worker.now());
        let headers = if has_slot { &shown } else { &*self.worker.no_slot.headers };
        // Refused only if the stream is going away.
        let _ = host::set_header_map(MapType::ResponseHeaders, headers);
        drop(shown);
        let is_over = end_of_stream || !answer.needs_slot();
        self.state.set(if is_over { State::Passing } else { State::Filling(answer.reply) });
        Action::Continue
    }

    /// A waiter's response passes by.
    fn collect(&self, ticket: Ticket, note: Note, end_of_stream: bool) -> Action {
        if let Some(collected) = self.worker.collect(self.id, ticket) {
            self.held.set((collected.reply.body.len(), collected.charged));
            let answer = Answer::new(&collected, note, || host::header_map(MapType::RequestHeaders));
            // What it waited for may have come from another worker, or be stale.
            self.note_outcome(answer.outcome(), None);
            return self.replay_headers(answer, end_of_stream);
        }
        if self.worker.is_released(self.id) {
            self.note_outcome("released", None);
            self.tell_bypass(Bypass::Unshareable);
        } else {
            // Somebody else answers: Envoy itself, at a deadline for one.
            self.worker.leave(self.id, ticket);
        }
        Action::Continue
    }

    /// Says in a response that passes by why it does.
    fn tell_bypass(&self, reason: Bypass) {
        if self.worker.settings.cache_status {
            answer::tell_bypass(reason);
        }
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
        let judged = pairs.ok_or(Bypass::Malformed).and_then(|pairs| {
            let candidate = classify::classify(pairs, end_of_stream, &self.worker.settings)?;
            self.judge(&candidate)
        });
        let (method, protocol, policy, steers) = match judged {
            Ok(Judged::Collapsible { method, protocol, policy, steers }) => {
                (method, protocol, policy, steers)
            }
            Ok(Judged::Probe(method)) => {
                self.pass(Bypass::Probe);
                self.state.set(State::Probing(Probe { method, first: None, seen: 0 }));
                return Action::Continue;
            }
            Err(reason) => {
                let may_change = pairs.is_some_and(|pairs| self.worker.may_change(pairs));
                return match may_change && reason == Bypass::HttpMethod {
                    true => self.pass_change(headers, reason),
                    false => self.pass(reason),
                };
            }
        };
        let mut held = Held { headers, protocol, policy, steers, method, grace: None, begun: false };
        if protocol == Protocol::Grpc {
            // A stream whose backend speaks first may never send a message on its own account.
            self.wait(&mut held, Until::Message, self.worker.about_now());
        } else if end_of_stream {
            return self.decide(held, 0);
        }
        self.state.set(State::Holding(held));
        self.hold_headers()
    }

    /// Judges a candidate by what the settings say of its path, and by what is known of its method.
    fn judge(&self, candidate: &Candidate<'_>) -> Result<Judged, Bypass> {
        let policy = self.worker.policy_of(candidate);
        if !self.worker.policy(policy).collapse {
            return Err(Bypass::Rule);
        }
        let Candidate { protocol, path, steers } = *candidate;
        let method = match protocol {
            Protocol::Http => None,
            Protocol::Grpc => match self.worker.judge(path) {
                Method::Collapsible(method) => method,
                Method::Excluded => return Err(Bypass::Method),
                Method::Streams => return Err(Bypass::Streaming),
                Method::Probe(method) => return Ok(Judged::Probe(method)),
            },
        };
        Ok(Judged::Collapsible { method, protocol, policy, steers })
    }

    /// A part of the request's body has come: `size` bytes are there in all.
    pub fn on_request_body(&self, size: usize, end_of_stream: bool) -> Action {
        match self.state.take() {
            State::Passing => Action::Continue,
            state @ (State::Bypassed(_) | State::Changing(..)) => self.keep(state, Action::Continue),
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
            state => self.keep(state, Action::Continue),
        }
    }

    /// A response's headers pass by, whoever made it.
    pub fn on_response_headers(&self, end_of_stream: bool) -> Action {
        match self.state.take() {
            State::Replaying(answer) => self.replay_headers(answer, end_of_stream),
            State::Waiting(ticket, note) => self.collect(ticket, note, end_of_stream),
            State::Changing(request, reason) => self.notice_change(&request, reason),
            State::Bypassed(reason) => {
                self.tell_bypass(reason);
                Action::Continue
            }
            State::Holding(mut held) => {
                if held.grace.take().is_some_and(|place| !self.worker.leave_grace(place)) {
                    self.state.set(State::Released(held.released()));
                }
                Action::Continue
            }
            State::Alone(alone) => {
                self.tell_bypass(Bypass::Unshared);
                self.check_deadline(alone, end_of_stream)
            }
            State::Released(released) => {
                self.tell_bypass(Bypass::Streaming);
                self.keep(State::Released(released), Action::Continue)
            }
            State::Probing(probe) => {
                self.tell_bypass(Bypass::Probe);
                self.keep(State::Probing(probe), Action::Continue)
            }
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
            State::Waiting(ticket, _) => self.worker.leave(self.id, ticket),
            State::Alone(alone) => self.worker.passed(alone.sighting, alone.place, alone.policy),
            State::Holding(Held { grace: Some(place), .. }) => drop(self.worker.leave_grace(place)),
            _ => (),
        }
        self.worker.forget(self.id);
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
