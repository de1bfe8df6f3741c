//! Host calls, as thin as they get.
//!
//! They return what the host said and never panic, and pass header maps as the block they are
//! ([`collapser_engine::pairs`]): no allocation a header.
//!
//! Source: proxy-wasm ABI 0.2.1, "Functions exposed by the host" and "Types".

use std::alloc::{Layout, alloc};
use std::ptr::{null, null_mut};
use std::time::Duration;

/// A buffer of the host.
#[derive(Clone, Copy, Debug)]
pub enum BufferType {
    /// What has come of the request's body and is held.
    RequestBody = 0,
    /// The part of the response's body that passes by.
    ResponseBody = 1,
    /// The body of a dispatched call's response.
    CallResponseBody = 4,
    /// The plugin's configuration.
    PluginConfiguration = 7,
}

/// A header map of the host.
#[derive(Clone, Copy, Debug)]
pub enum MapType {
    /// Of the request.
    RequestHeaders = 0,
    /// Of the response.
    ResponseHeaders = 2,
    /// Of the response; set with its last part, they are created.
    ResponseTrailers = 3,
    /// Of a dispatched call's response.
    CallResponseHeaders = 6,
    /// Of a dispatched call's response.
    CallResponseTrailers = 7,
}

/// A kind of metric.
#[derive(Clone, Copy, Debug)]
pub enum MetricType {
    /// Counts up.
    Counter = 0,
    /// Goes up and down.
    Gauge = 1,
    /// Takes whole numbers.
    Histogram = 2,
}

/// Levels of the log.
const LEVELS: [(log::Level, u32); 4] =
    [(log::Level::Debug, 1), (log::Level::Info, 2), (log::Level::Warn, 3), (log::Level::Error, 4)];
const CRITICAL: u32 = 5;

/// Something the host would not do. Which status it gave makes no difference to any caller here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused;

/// What a host call comes to.
pub type Result<T> = std::result::Result<T, Refused>;

const OK: u32 = 0;

// Statuses are taken as plain numbers: a number that an enum does not know would be undefined
// behaviour.
#[link(wasm_import_module = "env")]
unsafe extern "C" {
    fn proxy_log(level: u32, message: *const u8, size: usize) -> u32;
    fn proxy_http_call(
        cluster: *const u8,
        cluster_size: usize,
        headers: *const u8,
        headers_size: usize,
        body: *const u8,
        body_size: usize,
        trailers: *const u8,
        trailers_size: usize,
        timeout_millis: u32,
        call: *mut u32,
    ) -> u32;
    fn proxy_get_buffer_bytes(
        kind: u32,
        start: usize,
        max: usize,
        data: *mut *mut u8,
        size: *mut usize,
    ) -> u32;
    fn proxy_set_buffer_bytes(kind: u32, start: usize, size: usize, data: *const u8, data_size: usize)
    -> u32;
    fn proxy_get_header_map_pairs(kind: u32, data: *mut *mut u8, size: *mut usize) -> u32;
    fn proxy_set_header_map_pairs(kind: u32, data: *const u8, size: usize) -> u32;
    fn proxy_replace_header_map_value(
        kind: u32,
        name: *const u8,
        name_size: usize,
        value: *const u8,
        value_size: usize,
    ) -> u32;
    fn proxy_add_header_map_value(
        kind: u32,
        name: *const u8,
        name_size: usize,
        value: *const u8,
        value_size: usize,
    ) -> u32;
    fn proxy_remove_header_map_value(kind: u32, name: *const u8, name_size: usize) -> u32;
    fn proxy_set_property(path: *const u8, path_size: usize, value: *const u8, value_size: usize) -> u32;
    fn proxy_get_property(path: *const u8, path_size: usize, data: *mut *mut u8, size: *mut usize) -> u32;
    fn proxy_call_foreign_function(
        name: *const u8,
        name_size: usize,
        argument: *const u8,
        argument_size: usize,
        data: *mut *mut u8,
        size: *mut usize,
    ) -> u32;
    fn proxy_send_local_response(
        status: u32,
        details: *const u8,
        details_size: usize,
        body: *const u8,
        body_size: usize,
        headers: *const u8,
        headers_size: usize,
        grpc_status: i32,
    ) -> u32;
    fn proxy_set_effective_context(context: u32) -> u32;
    fn proxy_continue_stream(kind: u32) -> u32;
    fn proxy_set_tick_period_milliseconds(period: u32) -> u32;
    fn proxy_register_shared_queue(name: *const u8, size: usize, queue: *mut u32) -> u32;
    fn proxy_enqueue_shared_queue(queue: u32, data: *const u8, size: usize) -> u32;
    fn proxy_dequeue_shared_queue(queue: u32, data: *mut *mut u8, size: *mut usize) -> u32;
    fn proxy_get_shared_data(
        key: *const u8,
        key_size: usize,
        data: *mut *mut u8,
        size: *mut usize,
        token: *mut u32,
    ) -> u32;
    fn proxy_set_shared_data(
        key: *const u8,
        key_size: usize,
        data: *const u8,
        size: usize,
        token: u32,
    ) -> u32;
    fn proxy_define_metric(kind: u32, name: *const u8, size: usize, id: *mut u32) -> u32;
    fn proxy_increment_metric(id: u32, by: i64) -> u32;
    fn proxy_record_metric(id: u32, value: u64) -> u32;
}

// Source: WASI preview 1, `clock_time_get`.
#[link(wasm_import_module = "wasi_snapshot_preview1")]
unsafe extern "C" {
    fn clock_time_get(clock: u32, precision: u64, nanos: *mut u64) -> u16;
}

fn check(status: u32) -> Result<()> {
    if status == OK { Ok(()) } else { Err(Refused) }
}

/// Memory that the host fills and hands over; null if there is none to be had, or none asked for.
pub fn allocate(size: usize) -> *mut u8 {
    match Layout::array::<u8>(size) {
        // SAFETY: the layout is not empty.
        Ok(layout) if size > 0 => unsafe { alloc(layout) },
        _ => null_mut(),
    }
}

/// Takes over a block that the host wrote into this VM's memory.
///
/// # Safety
/// `data` must be null, or `size` bytes from [`allocate`].
unsafe fn take(data: *mut u8, size: usize) -> Vec<u8> {
    if data.is_null() {
        return Vec::new();
    }
    // SAFETY: a vector of bytes with this capacity is allocated in just the way in which `allocate` does it.
    unsafe { Vec::from_raw_parts(data, size, size) }
}

struct Log;

impl log::Log for Log {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        let level = LEVELS.iter().find(|(level, _)| *level == record.level());
        write_log(level.map_or(0, |(_, level)| *level), &record.args().to_string());
    }

    fn flush(&self) {}
}

fn write_log(level: u32, message: &str) {
    // SAFETY: the message is read during the call only. A host that does not log is nobody's fault here.
    let _ = unsafe { proxy_log(level, message.as_ptr(), message.len()) };
}

/// Has this module's log, and a panic's last words, written to Envoy's. Envoy's own level of the `wasm` logger decides
/// what is kept; this only drops the noise.
pub fn set_up_log() {
    std::panic::set_hook(Box::new(|panic| write_log(CRITICAL, &panic.to_string())));
    // Refused only if it is set already.
    let _ = log::set_logger(&Log).map(|()| log::set_max_level(log::LevelFilter::Info));
}

/// Dispatches a call; [`crate::abi`] gets its response, under the context that is effective now. Returns the call's
/// number. `timeout` is a millisecond at least.
pub fn http_call(cluster: &str, headers: &[u8], body: &[u8], timeout: Duration) -> Result<u32> {
    let (mut call, millis) = (0, u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX));
    // No trailers: an empty map, which is a count of none.
    let trailers = [0_u8; 4];
    // SAFETY: the host reads all of them during the call only; the out-pointer is valid.
    check(unsafe {
        proxy_http_call(
            cluster.as_ptr(),
            cluster.len(),
            headers.as_ptr(),
            headers.len(),
            body.as_ptr(),
            body.len(),
            trailers.as_ptr(),
            trailers.len(),
            millis,
            &mut call,
        )
    })?;
    Ok(call)
}

/// The monotonic clock, in nanoseconds. All VMs of a process read the same one.
pub fn now() -> u64 {
    const MONOTONIC: u32 = 1;
    let mut nanos = 0;
    // SAFETY: the out-pointer is valid. Envoy has this clock; if it had not, time would stand still.
    let _ = unsafe { clock_time_get(MONOTONIC, 1, &mut nanos) };
    nanos
}

/// The wall clock, in seconds since the Unix epoch.
pub fn wall_seconds() -> u64 {
    const REALTIME: u32 = 0;
    let mut nanos = 0;
    // SAFETY: the out-pointer is valid.
    let _ = unsafe { clock_time_get(REALTIME, 1, &mut nanos) };
    nanos / 1_000_000_000
}

/// Up to `max` bytes of a buffer from `start` on; empty if there is no such buffer.
pub fn buffer(kind: BufferType, start: usize, max: usize) -> Vec<u8> {
    let (mut data, mut size) = (null_mut(), 0);
    // SAFETY: both out-pointers are valid; the host either leaves them or hands over a block.
    unsafe {
        if proxy_get_buffer_bytes(kind as u32, start, max, &mut data, &mut size) != OK {
            return Vec::new();
        }
        take(data, size)
    }
}

/// Replaces the first `size` bytes of a buffer.
pub fn set_buffer(kind: BufferType, size: usize, bytes: &[u8]) -> Result<()> {
    // SAFETY: the host reads `bytes` during the call only.
    check(unsafe { proxy_set_buffer_bytes(kind as u32, 0, size, bytes.as_ptr(), bytes.len()) })
}

/// A header map as a block; empty if there is none.
pub fn header_map(kind: MapType) -> Vec<u8> {
    let (mut data, mut size) = (null_mut(), 0);
    // SAFETY: as in `buffer`.
    unsafe {
        if proxy_get_header_map_pairs(kind as u32, &mut data, &mut size) != OK {
            return Vec::new();
        }
        take(data, size)
    }
}

/// Replaces a whole header map.
pub fn set_header_map(kind: MapType, block: &[u8]) -> Result<()> {
    // SAFETY: the host reads `block` during the call only.
    check(unsafe { proxy_set_header_map_pairs(kind as u32, block.as_ptr(), block.len()) })
}

/// Sets one header to one value.
pub fn set_header(kind: MapType, name: &str, value: &str) -> Result<()> {
    // SAFETY: name and value are read during the call only.
    check(unsafe {
        proxy_replace_header_map_value(kind as u32, name.as_ptr(), name.len(), value.as_ptr(), value.len())
    })
}

/// Adds a header, behind others of its name.
pub fn add_header(kind: MapType, name: &str, value: &str) -> Result<()> {
    // SAFETY: as in `set_header`.
    check(unsafe {
        proxy_add_header_map_value(kind as u32, name.as_ptr(), name.len(), value.as_ptr(), value.len())
    })
}

/// Removes a header with all its values; one that is not there is no error.
pub fn remove_header(kind: MapType, name: &str) -> Result<()> {
    // SAFETY: the name is read during the call only.
    check(unsafe { proxy_remove_header_map_value(kind as u32, name.as_ptr(), name.len()) })
}

/// Has Envoy choose the route of the effective stream anew, by its headers as they are now.
pub fn clear_route_cache() -> Result<()> {
    const NAME: &str = "clear_route_cache";
    let (mut data, mut size) = (null_mut(), 0);
    // SAFETY: as in `buffer`; the function takes and returns nothing.
    unsafe {
        let status = proxy_call_foreign_function(NAME.as_ptr(), NAME.len(), null(), 0, &mut data, &mut size);
        drop(take(data, size));
        check(status)
    }
}

/// Whether the effective context has a property (Envoy docs, "Attributes").
pub fn has_property(path: &[&str]) -> bool {
    let path = path.join("\0");
    let (mut data, mut size) = (null_mut(), 0);
    // SAFETY: as in `buffer`; the block is freed at once.
    unsafe {
        let status = proxy_get_property(path.as_ptr(), path.len(), &mut data, &mut size);
        drop(take(data, size));
        status == OK
    }
}

/// Sets a property of the effective stream, which Envoy keeps as filter state under `wasm.` and this name.
pub fn set_property(name: &str, value: &[u8]) -> Result<()> {
    // SAFETY: name and value are read during the call only.
    check(unsafe { proxy_set_property(name.as_ptr(), name.len(), value.as_ptr(), value.len()) })
}

/// Answers the effective stream. Envoy sends it when this callback returns, not at once. The reply to a gRPC request
/// has no body, whatever is given.
pub fn send_local_response(status: u16, headers: &[u8], body: &[u8]) -> Result<()> {
    // SAFETY: the host copies what it needs during the call.
    check(unsafe {
        proxy_send_local_response(
            u32::from(status),
            null(),
            0,
            body.as_ptr(),
            body.len(),
            headers.as_ptr(),
            headers.len(),
            -1,
        )
    })
}

/// Makes the following calls act on another context. Refused if that context is gone.
pub fn set_effective_context(context: u32) -> Result<()> {
    // SAFETY: takes a number.
    check(unsafe { proxy_set_effective_context(context) })
}

/// Lets a paused request of the effective stream go on.
pub fn resume_request() -> Result<()> {
    // 0 is the stream type "HTTP request". SAFETY: takes a number.
    check(unsafe { proxy_continue_stream(0) })
}

/// Has the root's tick called every `millis` from now on; 0 stops it.
pub fn set_tick_period(millis: u32) -> Result<()> {
    // SAFETY: takes a number.
    check(unsafe { proxy_set_tick_period_milliseconds(millis) })
}

/// Creates a queue, or takes over one of that name.
pub fn register_queue(name: &str) -> Result<u32> {
    let mut queue = 0;
    // SAFETY: the name is read during the call; the out-pointer is valid.
    check(unsafe { proxy_register_shared_queue(name.as_ptr(), name.len(), &mut queue) })?;
    Ok(queue)
}

/// Puts a message into a queue, which wakes its owner.
pub fn send(queue: u32, message: &[u8]) -> Result<()> {
    // SAFETY: the message is read during the call only.
    check(unsafe { proxy_enqueue_shared_queue(queue, message.as_ptr(), message.len()) })
}

/// Empties a queue.
pub fn drain(queue: u32, mut read: impl FnMut(&[u8])) {
    loop {
        let (mut data, mut size) = (null_mut(), 0);
        // SAFETY: as in `buffer`.
        let message = unsafe {
            if proxy_dequeue_shared_queue(queue, &mut data, &mut size) != OK {
                return;
            }
            take(data, size)
        };
        read(&message);
    }
}

/// A value of the shared data and its compare-and-swap token.
pub fn shared_data(key: &str) -> Option<(Vec<u8>, u32)> {
    let (mut data, mut size, mut token) = (null_mut(), 0, 0);
    // SAFETY: as in `buffer`.
    unsafe {
        if proxy_get_shared_data(key.as_ptr(), key.len(), &mut data, &mut size, &mut token) != OK {
            return None;
        }
        Some((take(data, size), token))
    }
}

/// Sets a value of the shared data if its token is still this one; 0 sets it in any case.
pub fn set_shared_data(key: &str, value: &[u8], token: u32) -> Result<()> {
    // SAFETY: key and value are read during the call only.
    check(unsafe { proxy_set_shared_data(key.as_ptr(), key.len(), value.as_ptr(), value.len(), token) })
}

/// Defines a metric, or finds one of that name.
pub fn define_metric(kind: MetricType, name: &str) -> Result<u32> {
    let mut id = 0;
    // SAFETY: the name is read during the call; the out-pointer is valid.
    check(unsafe { proxy_define_metric(kind as u32, name.as_ptr(), name.len(), &mut id) })?;
    Ok(id)
}

/// Moves a counter or gauge.
pub fn increment_metric(id: u32, by: i64) -> Result<()> {
    // SAFETY: takes numbers.
    check(unsafe { proxy_increment_metric(id, by) })
}

/// Records a value in a histogram.
pub fn record_metric(id: u32, value: u64) -> Result<()> {
    // SAFETY: takes numbers.
    check(unsafe { proxy_record_metric(id, value) })
}
