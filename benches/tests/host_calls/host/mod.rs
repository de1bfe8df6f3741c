//! A proxy-wasm host that plays Envoy with one worker, and counts.
//!
//! It follows what Envoy does where a filter can tell: which maps and buffers exist in which callback, that local replies
//! are sent when a callback has returned and come by the filter's own response callbacks, that what one reply sets
//! off runs before the next one, that queue messages come in a turn of the event loop of their own. A function that the module does not
//! export is not called, as Envoy does not. What no test needs is refused by a trap that names it.
//!
//! Sources: proxy-wasm ABI 0.2.1; Envoy's `source/extensions/common/wasm/context.cc` and
//! `source/common/http/utility.cc`; WASI preview 1.

mod imports;
mod wire;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;
use wasmtime::{
    Config, Engine, Func, Instance, Linker, Memory, Module, Result, Store, TypedFunc, Val, bail, ensure,
    format_err,
};
pub use wire::Headers;

/// A request or a response.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Message {
    /// Its headers, in order.
    pub headers: Headers,
    /// Its body.
    pub body: Vec<u8>,
    /// Its trailers, if there are any.
    pub trailers: Option<Headers>,
}

/// What was counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Calls of the host by the module, by name.
    pub calls: BTreeMap<&'static str, u64>,
    /// Entries into the VM, by the name of the export.
    pub entries: BTreeMap<&'static str, u64>,
    /// Wasm instructions, as wasmtime's fuel counts them.
    pub fuel: u64,
}

/// Maps and buffers that a callback may touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    RequestHeaders,
    RequestBody,
    RequestTrailers,
    ResponseHeaders,
    ResponseBody,
    ResponseTrailers,
}

/// The filter's verdict on what it was called for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Continue,
    Pause,
}

/// One request, as Envoy keeps it while it lasts.
#[derive(Debug, Default)]
struct Stream {
    request: Message,
    /// What is on its way to the caller.
    response: Message,
    /// The parts that are before the filter now. What it lets go is out of its reach.
    within_reach: Vec<Part>,
    /// Whether the part before the filter is the last one.
    end_of_stream: bool,
    /// Whether the filter keeps the request from going upstream.
    held: bool,
    /// Whether a response has begun.
    responding: bool,
}

/// What the module has asked for and Envoy does once the callback has returned.
#[derive(Debug)]
enum Action {
    LocalReply { stream: u32, reply: LocalReply },
    ContinueRequest { stream: u32 },
}

#[derive(Debug)]
struct LocalReply {
    status: u32,
    body: Vec<u8>,
    headers: Headers,
    grpc_status: Option<u32>,
}

/// A call that the module has dispatched.
#[derive(Clone, Debug)]
pub struct Flight {
    /// Names it.
    pub token: u32,
    /// The context that the response goes to.
    context: u32,
    /// The cluster.
    pub cluster: String,
    /// What is sent.
    pub request: Message,
    /// Its deadline.
    pub timeout: Duration,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// The caller was answered.
    Answered(Message),
    /// The caller hung up.
    HungUp,
}

/// The host's side of the VM.
#[derive(Default)]
pub struct Host {
    memory: Option<Memory>,
    allocate: Option<(&'static str, TypedFunc<u32, u32>)>,
    counts: Counts,
    /// The context of the running callback, and the one that its calls act on.
    current: u32,
    effective: u32,
    root: u32,
    configuration: Vec<u8>,
    streams: HashMap<u32, Stream>,
    actions: VecDeque<Action>,
    /// Messages that are there, by queue.
    queues: Vec<(String, VecDeque<Vec<u8>>)>,
    /// Queues whose owner is to be told.
    wakeups: VecDeque<u32>,
    /// Nanoseconds. It stands still but for [`Envoy::advance`].
    clock: u64,
    tick_period: u64,
    next_tick: Option<u64>,
    metrics: Vec<(String, i64)>,
    shared: HashMap<Vec<u8>, (Vec<u8>, u32)>,
    random: u8,
    flights: Vec<Flight>,
    next_token: u32,
    /// The response that the running callback is about.
    call_response: Option<Message>,
    /// What was logged at the level of warnings and above.
    complaints: Vec<String>,
}

impl Host {
    fn count(&mut self, call: &'static str) {
        *self.counts.calls.entry(call).or_default() += 1;
    }

    /// The context that calls act on.
    fn acting(&self) -> u32 {
        if self.effective != 0 { self.effective } else { self.current }
    }
}

/// Envoy's root contexts are numbered from 1 like all others.
const ROOT: u32 = 1;

/// Fuel that no test uses up.
const FUEL: u64 = 1 << 60;

/// The cluster that there is.
const CLUSTER: &str = "backend";

/// Longer than anything waits, in virtual time.
const PATIENCE: Duration = Duration::from_secs(60);

/// One worker with the module in it.
pub struct Envoy {
    store: Store<Host>,
    instance: Instance,
    exports: HashMap<&'static str, Option<Func>>,
    next_context: u32,
    ends: HashMap<u32, End>,
}

/// An engine that counts instructions.
pub fn engine() -> Result<Engine> {
    Engine::new(Config::new().consume_fuel(true))
}

impl Envoy {
    /// Loads the module and hands it its configuration.
    pub fn start(module: &Module, configuration: &str) -> Result<Self> {
        let mut linker = Linker::new(module.engine());
        imports::define(&mut linker)?;
        linker.define_unknown_imports_as_traps(module)?;
        let host = Host {
            root: ROOT,
            configuration: configuration.as_bytes().to_vec(),
            clock: 1_000_000_000,
            ..Host::default()
        };
        let mut store = Store::new(module.engine(), host);
        store.set_fuel(FUEL)?;
        let instance = linker.instantiate(&mut store, module)?;
        let memory = instance.get_memory(&mut store, "memory");
        store.data_mut().memory = Some(memory.ok_or_else(|| format_err!("the module exports no memory"))?);
        for name in ["proxy_on_memory_allocate", "malloc"] {
            if let Ok(allocate) = instance.get_typed_func(&mut store, name) {
                store.data_mut().allocate = Some((name, allocate));
                break;
            }
        }
        ensure!(store.data().allocate.is_some(), "the module exports nothing that allocates");
        let mut envoy =
            Self { store, instance, exports: HashMap::new(), next_context: ROOT + 1, ends: HashMap::new() };
        ensure!(envoy.has("proxy_abi_version_0_2_1"), "the module does not speak proxy-wasm 0.2.1");
        // A reactor has the first, a command the second.
        let begin = if envoy.has("_initialize") { "_initialize" } else { "_start" };
        envoy.enter(begin, &[])?;
        envoy.enter("proxy_on_context_create", &[ROOT, 0])?;
        ensure!(envoy.enter("proxy_on_vm_start", &[ROOT, 0])? != Some(0), "the module did not start");
        let size = configuration.len() as u32;
        let complaints = |envoy: &Self| envoy.store.data().complaints.join("; ");
        if envoy.enter("proxy_on_configure", &[ROOT, size])? == Some(0) {
            bail!("the module refused its configuration: {}", complaints(&envoy));
        }
        Ok(envoy)
    }

    /// What was counted until now.
    pub fn counts(&self) -> Counts {
        let fuel = FUEL - self.store.get_fuel().unwrap_or(FUEL);
        Counts { fuel, ..self.store.data().counts.clone() }
    }

    /// A metric's value, in a histogram the sum of what was recorded.
    pub fn metric(&self, name: &str) -> Option<i64> {
        self.store.data().metrics.iter().find(|(known, _)| known == name).map(|(_, value)| *value)
    }

    /// The calls that are under way.
    pub fn flights(&self) -> &[Flight] {
        &self.store.data().flights
    }

    /// What the module has complained of in its log.
    pub fn complaints(&self) -> &[String] {
        &self.store.data().complaints
    }

    /// Whether the request has gone upstream as it is.
    pub fn went_upstream(&self, stream: u32) -> bool {
        self.store.data().streams.get(&stream).is_some_and(|stream| !stream.held && !stream.responding)
    }

    /// How the request ended, if it has.
    pub fn end(&self, stream: u32) -> Option<&End> {
        self.ends.get(&stream)
    }

    /// A request comes: its headers, then its body if it has one, in one piece.
    pub fn request(&mut self, request: Message) -> Result<u32> {
        let id = self.next_context;
        self.next_context += 1;
        let (headers, size) = (request.headers.len() as u32, request.body.len() as u32);
        self.store.data_mut().streams.insert(id, Stream { request, ..Stream::default() });
        self.enter("proxy_on_context_create", &[id, ROOT])?;
        let has_body = size > 0;
        let last = u32::from(!has_body);
        let verdict =
            self.show(id, Part::RequestHeaders, !has_body, "proxy_on_request_headers", &[id, headers, last])?;
        self.hold(id, verdict);
        if has_body && self.is_open(id) {
            let verdict = self.show(id, Part::RequestBody, true, "proxy_on_request_body", &[id, size, 1])?;
            self.hold(id, verdict);
        }
        Ok(id)
    }

    /// The upstream answers a request that has gone there as it was.
    pub fn upstream_answers(&mut self, stream: u32, response: Message) -> Result<()> {
        ensure!(self.went_upstream(stream), "the request is not upstream");
        self.respond(stream, response)
    }

    /// The response to a flight comes.
    pub fn land(&mut self, token: u32, response: Message) -> Result<()> {
        let host = self.store.data_mut();
        let Some(at) = host.flights.iter().position(|flight| flight.token == token) else {
            bail!("there is no flight {token}");
        };
        let context = host.flights.remove(at).context;
        let sizes = [&Some(response.headers.clone()), &response.trailers]
            .map(|headers| headers.as_ref().map_or(0, Headers::len) as u32);
        let arguments = [context, token, sizes[0], response.body.len() as u32, sizes[1]];
        host.call_response = Some(response);
        // The response is within reach of the callback alone, not of what the replies set off.
        let result = self.call("proxy_on_http_call_response", &arguments);
        self.store.data_mut().call_response = None;
        result?;
        self.act()
    }

    /// A caller goes away.
    pub fn hang_up(&mut self, stream: u32) -> Result<()> {
        ensure!(self.is_open(stream), "there is no such request");
        self.finish(stream, End::HungUp)
    }

    /// The event loop turns until nothing is left that is due now.
    pub fn turn(&mut self) -> Result<()> {
        while let Some(queue) = self.store.data_mut().wakeups.pop_front() {
            self.enter("proxy_on_queue_ready", &[ROOT, queue])?;
        }
        Ok(())
    }

    /// Time passes; ticks come when they are due.
    pub fn advance(&mut self, by: Duration) -> Result<()> {
        let until = self.store.data().clock + by.as_nanos() as u64;
        self.turn()?;
        while let Some(at) = self.store.data().next_tick.filter(|at| *at <= until) {
            self.tick(at)?;
        }
        self.store.data_mut().clock = until;
        Ok(())
    }

    /// Time passes from tick to tick until all requests have ended.
    pub fn settle(&mut self) -> Result<()> {
        let start = self.store.data().clock;
        self.turn()?;
        while !self.store.data().streams.is_empty() {
            let Some(at) = self.store.data().next_tick else { bail!("requests wait and no tick will come") };
            ensure!(at - start < PATIENCE.as_nanos() as u64, "requests wait for ever");
            self.tick(at)?;
        }
        Ok(())
    }

    fn tick(&mut self, at: u64) -> Result<()> {
        let host = self.store.data_mut();
        host.clock = host.clock.max(at);
        host.next_tick = None;
        self.enter("proxy_on_tick", &[ROOT])?;
        let host = self.store.data_mut();
        if host.tick_period > 0 {
            host.next_tick = Some(host.clock + host.tick_period);
        }
        self.turn()
    }

    // --- Streams ---

    fn is_open(&self, stream: u32) -> bool {
        self.store.data().streams.contains_key(&stream)
    }

    fn stream(&mut self, id: u32) -> Result<&mut Stream> {
        self.store.data_mut().streams.get_mut(&id).ok_or_else(|| format_err!("request {id} is gone"))
    }

    /// Puts a part of a message before the filter.
    fn show(
        &mut self,
        id: u32,
        part: Part,
        last: bool,
        callback: &'static str,
        arguments: &[u32],
    ) -> Result<Verdict> {
        let stream = self.stream(id)?;
        stream.within_reach.push(part);
        stream.end_of_stream = last;
        let verdict = match self.call(callback, arguments)? {
            None | Some(0) => Verdict::Continue,
            Some(1) => Verdict::Pause,
            Some(other) => bail!("{callback} returned {other}"),
        };
        if verdict == Verdict::Continue {
            self.stream(id)?.within_reach.retain(|within| *within != part);
        }
        self.act()?;
        Ok(verdict)
    }

    fn hold(&mut self, id: u32, verdict: Verdict) {
        if let Some(stream) = self.store.data_mut().streams.get_mut(&id) {
            stream.held = verdict == Verdict::Pause;
        }
    }

    /// Envoy's own part of a local reply (`Utility::sendLocalReply`).
    fn send_local_reply(&mut self, id: u32, reply: LocalReply) -> Result<()> {
        let Ok(stream) = self.stream(id) else { return Ok(()) };
        if stream.responding {
            return Ok(());
        }
        let is_grpc = stream.request.headers.first("content-type").is_some_and(|value| {
            value
                .strip_prefix(b"application/grpc")
                .is_some_and(|rest| matches!(rest.first(), None | Some(b'+')))
        });
        let mut headers = Headers::default();
        headers.add(b":status", reply.status.to_string().as_bytes());
        reply.headers.iter().for_each(|(name, value)| headers.add(name, value));
        let mut body = reply.body;
        if is_grpc {
            headers.replace(b":status", b"200");
            headers.replace(b"content-type", b"application/grpc");
            if headers.first("grpc-status").is_none_or(<[u8]>::is_empty) {
                // What stands for HTTP 200 is UNKNOWN.
                let status = reply.grpc_status.unwrap_or(2);
                headers.replace(b"grpc-status", status.to_string().as_bytes());
            }
            if !body.is_empty() {
                headers.replace(b"grpc-message", &std::mem::take(&mut body));
            }
            headers.remove(b"content-length");
        } else if body.is_empty() {
            headers.remove(b"content-length");
            headers.remove(b"content-type");
        } else {
            headers.replace(b"content-length", body.len().to_string().as_bytes());
            if headers.first("content-type").is_none() {
                headers.add(b"content-type", b"text/plain");
            }
        }
        self.respond(id, Message { headers, body, trailers: None })
    }

    /// A response comes by the filters, the last one in the chain first.
    fn respond(&mut self, id: u32, response: Message) -> Result<()> {
        let (headers, size) = (response.headers.len() as u32, response.body.len() as u32);
        let has_trailers = response.trailers.is_some();
        let has_body = size > 0 || body_slot(&response);
        let ends_with_headers = !has_body && !has_trailers;
        let stream = self.stream(id)?;
        stream.response = response;
        stream.responding = true;
        let arguments = [id, headers, u32::from(ends_with_headers)];
        let verdict =
            self.show(id, Part::ResponseHeaders, ends_with_headers, "proxy_on_response_headers", &arguments)?;
        ensure!(verdict == Verdict::Continue, "this host does not play a filter that holds response headers");
        if has_body && self.is_open(id) {
            let last = !has_trailers;
            let arguments = [id, size, u32::from(last)];
            let verdict = self.show(id, Part::ResponseBody, last, "proxy_on_response_body", &arguments)?;
            ensure!(verdict == Verdict::Continue || !last, "the filter holds a response for ever");
        }
        if has_trailers && self.is_open(id) {
            let count = self.stream(id)?.response.trailers.as_ref().map_or(0, Headers::len) as u32;
            let verdict =
                self.show(id, Part::ResponseTrailers, true, "proxy_on_response_trailers", &[id, count])?;
            ensure!(verdict == Verdict::Continue, "the filter holds a response for ever");
        }
        let answer = std::mem::take(&mut self.stream(id)?.response);
        self.finish(id, End::Answered(answer))
    }

    fn finish(&mut self, id: u32, end: End) -> Result<()> {
        self.enter("proxy_on_log", &[id])?;
        let done = self.enter("proxy_on_done", &[id])?;
        ensure!(done != Some(0), "this host does not play a filter that is not done when a request is");
        self.enter("proxy_on_delete", &[id])?;
        self.store.data_mut().streams.remove(&id);
        self.ends.insert(id, end);
        Ok(())
    }

    // --- The VM ---

    fn has(&mut self, name: &'static str) -> bool {
        self.export(name).is_some()
    }

    fn export(&mut self, name: &'static str) -> Option<Func> {
        let (instance, store) = (self.instance, &mut self.store);
        *self.exports.entry(name).or_insert_with(|| instance.get_func(store, name))
    }

    /// Calls a function of the module, if it has it, and does what was asked for meanwhile.
    fn enter(&mut self, name: &'static str, arguments: &[u32]) -> Result<Option<u32>> {
        let result = self.call(name, arguments)?;
        self.act()?;
        Ok(result)
    }

    fn call(&mut self, name: &'static str, arguments: &[u32]) -> Result<Option<u32>> {
        let Some(function) = self.export(name) else { return Ok(None) };
        let host = self.store.data_mut();
        *host.counts.entries.entry(name).or_default() += 1;
        host.current = arguments.first().copied().unwrap_or(0);
        host.effective = 0;
        let arguments: Vec<Val> = arguments.iter().map(|argument| Val::I32(*argument as i32)).collect();
        let mut results = vec![Val::I32(0); function.ty(&self.store).results().len()];
        let outcome = function.call(&mut self.store, &arguments, &mut results);
        let host = self.store.data_mut();
        (host.current, host.effective) = (0, 0);
        outcome.map_err(|error| format_err!("{name}: {error:?}"))?;
        Ok(results.first().and_then(Val::i32).map(|result| result as u32))
    }

    /// Does what the module has asked for. Each may enter the VM again, and what is asked for there is done on the
    /// way out of it, before the rest here: Envoy works in this order.
    fn act(&mut self) -> Result<()> {
        while let Some(action) = self.store.data_mut().actions.pop_front() {
            match action {
                Action::LocalReply { stream, reply } => self.send_local_reply(stream, reply)?,
                Action::ContinueRequest { stream } => self.hold(stream, Verdict::Continue),
            }
        }
        Ok(())
    }
}

/// The Lua filter of `envoy/envoy.yaml` that this host plays; a test holds the two together.
pub const BODY_SLOT: &str = r#"
                  function envoy_on_response(handle)
                    if handle:headers():get("x-collapser-slot") then
                      handle:body(true)
                    end
                  end
"#;

/// What [`BODY_SLOT`] does: a body, though an empty one, comes after the headers. Returns whether it does.
fn body_slot(response: &Message) -> bool {
    response.headers.first("x-collapser-slot").is_some()
}
