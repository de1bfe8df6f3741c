//! The functions that Envoy calls, and the contexts that the calls are for.
//!
//! Source: proxy-wasm ABI 0.2.1, "Functions exposed by the Wasm module". They are written out here, rather than
//! taken from the SDK's dispatcher, for what that costs:
//!
//! - Envoy may call the module from within a host call: what a reply overflows is reset at once, and the stream's
//!   end comes while the reply is still being set. The SDK holds a borrow meanwhile, panics, and takes Envoy down
//!   with it. Here no borrow is held over a host call that may end a stream; a context is taken out of its table by
//!   reference count first.
//! - Envoy enters the VM for every function that the module exports. The SDK exports all there are; here are those
//!   that something is done in. A request has three entries less.
//! - The SDK files a dispatched call under the context whose callback is running, and drops the response if that is
//!   gone. Envoy itself says which context it is for, so a flight can leave at once.

use crate::host;
use crate::root::Root;
use crate::stream::Stream;
use collapser_engine::Waiter;
use std::cell::RefCell;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::rc::Rc;

/// What a callback tells Envoy to do with what it was called for.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Pass it on.
    Continue = 0,
    /// Keep it.
    Pause = 1,
}

/// What Envoy names as a root's parent. A stream's parent is its root.
const NO_PARENT: u32 = 0;

thread_local! {
    static CONTEXTS: Contexts = const {
        Contexts {
            roots: RefCell::new(Table::with_hasher(BuildHasherDefault::new())),
            streams: RefCell::new(Table::with_hasher(BuildHasherDefault::new())),
        }
    };
}

type Table<T> = HashMap<u32, Rc<T>, BuildHasherDefault<IdHasher>>;

/// Contexts are numbered one after the other; nobody outside chooses the numbers.
#[derive(Default)]
struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u32(u32::from(*byte)));
    }

    fn write_u32(&mut self, id: u32) {
        // 2^64 divided by the golden ratio spreads consecutive numbers (Knuth, "Sorting and Searching", 6.4).
        self.0 = (self.0 ^ u64::from(id)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

struct Contexts {
    roots: RefCell<Table<Root>>,
    streams: RefCell<Table<Stream>>,
}

impl Contexts {
    fn root(&self, id: u32) -> Option<Rc<Root>> {
        self.roots.borrow().get(&id).map(Rc::clone)
    }

    fn stream(&self, id: u32) -> Option<Rc<Stream>> {
        self.streams.borrow().get(&id).map(Rc::clone)
    }

    fn create(&self, id: u32, parent: u32) {
        if parent == NO_PARENT {
            self.roots.borrow_mut().insert(id, Rc::new(Root::new(id)));
        } else if let Some(worker) = self.root(parent).and_then(|root| root.worker()) {
            // Without settings there is no worker, and Envoy creates no stream.
            self.streams.borrow_mut().insert(id, Rc::new(Stream::new(id, worker)));
        }
    }

    /// The context has nothing more to do. It is not heard of again.
    fn end(&self, id: u32) {
        let stream = self.streams.borrow_mut().remove(&id);
        if let Some(stream) = stream {
            return stream.on_done();
        }
        let root = self.roots.borrow_mut().remove(&id);
        if let Some(root) = root {
            root.on_done();
        }
    }
}

fn with_root<T>(id: u32, otherwise: T, run: impl FnOnce(&Root) -> T) -> T {
    CONTEXTS.with(|contexts| contexts.root(id)).map_or(otherwise, |root| run(&root))
}

fn with_stream(id: Waiter, run: impl FnOnce(&Stream) -> Action) -> Action {
    CONTEXTS.with(|contexts| contexts.stream(id)).map_or(Action::Continue, |stream| run(&stream))
}

/// Marks the ABI that this module speaks.
#[unsafe(no_mangle)]
extern "C" fn proxy_abi_version_0_2_1() {}

unsafe extern "C" {
    // Provided by the linker: runs what must run before anything else.
    fn __wasm_call_ctors();
}

#[unsafe(no_mangle)]
extern "C" fn _initialize() {
    // SAFETY: Envoy calls this once, before all else.
    unsafe { __wasm_call_ctors() };
    host::set_up_log();
}

/// Memory for something that Envoy hands over; [`host`] takes it as a vector of just this size.
#[unsafe(no_mangle)]
extern "C" fn proxy_on_memory_allocate(size: usize) -> *mut u8 {
    host::allocate(size)
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_context_create(id: u32, parent: u32) {
    CONTEXTS.with(|contexts| contexts.create(id, parent));
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_vm_start(_id: u32, _size: usize) -> bool {
    true
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_configure(id: u32, size: usize) -> bool {
    with_root(id, false, |root| root.on_configure(size))
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_tick(id: u32) {
    with_root(id, (), Root::on_tick);
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_queue_ready(id: u32, _queue: u32) {
    with_root(id, (), Root::on_queue_ready);
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_http_call_response(
    id: u32,
    call: u32,
    _headers: usize,
    body: usize,
    _trailers: usize,
) {
    with_root(id, (), |root| root.on_http_call_response(call, body));
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_request_headers(id: u32, _count: usize, end_of_stream: bool) -> Action {
    with_stream(id, |stream| stream.on_request_headers(end_of_stream))
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_request_body(id: u32, size: usize, end_of_stream: bool) -> Action {
    with_stream(id, |stream| stream.on_request_body(size, end_of_stream))
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_request_trailers(id: u32, _count: usize) -> Action {
    with_stream(id, Stream::on_request_trailers)
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_response_headers(id: u32, _count: usize, end_of_stream: bool) -> Action {
    with_stream(id, |stream| stream.on_response_headers(end_of_stream))
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_response_body(id: u32, size: usize, end_of_stream: bool) -> Action {
    with_stream(id, |stream| stream.on_response_body(size, end_of_stream))
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_done(id: u32) -> bool {
    CONTEXTS.with(|contexts| contexts.end(id));
    true
}
