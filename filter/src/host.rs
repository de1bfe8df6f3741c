//! Host calls, as thin as they get.
//!
//! The SDK's own wrappers panic on any status they do not expect, and a panic kills the VM with every
//! request in it. They also turn header maps into vectors of strings and back, an allocation
//! a header. These return what the host said and pass header maps as the block they are
//! ([`collapser_engine::pairs`]).
//!
//! Source: proxy-wasm ABI 0.2.1, "Functions exposed by the host".

use proxy_wasm::types::{BufferType, MapType, MetricType, Status};
use std::ptr::{null, null_mut};

/// Something the host would not do. Which status it gave makes no difference to any caller here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused;

/// What a host call comes to.
pub type Result<T> = std::result::Result<T, Refused>;

const OK: u32 = Status::Ok as u32;

// Statuses are taken as plain numbers: a number that an enum does not know would be undefined
// behaviour.
#[link(wasm_import_module = "env")]
unsafe extern "C" {
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

/// Takes over a block that the host wrote into this VM's memory.
///
/// # Safety
/// `data` must be null, or `size` bytes that the host allocated through the SDK's allocator.
unsafe fn take(data: *mut u8, size: usize) -> Vec<u8> {
    if data.is_null() {
        return Vec::new();
    }
    // SAFETY: the SDK's `proxy_on_memory_allocate` hands out exactly such a vector of `size` bytes.
    unsafe { Vec::from_raw_parts(data, size, size) }
}

/// The monotonic clock, in nanoseconds. All VMs of a process read the same one.
pub fn now() -> u64 {
    const MONOTONIC: u32 = 1;
    let mut nanos = 0;
    // SAFETY: the out-pointer is valid. Envoy has this clock; if it had not, time would stand still.
    let _ = unsafe { clock_time_get(MONOTONIC, 1, &mut nanos) };
    nanos
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

/// Answers the effective stream with status 200 and no body. Envoy sends it when this callback
/// returns, not at once.
pub fn send_local_response(headers: &[u8]) -> Result<()> {
    // SAFETY: the host copies what it needs during the call.
    check(unsafe {
        proxy_send_local_response(200, null(), 0, null(), 0, headers.as_ptr(), headers.len(), -1)
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

/// Puts an empty message into a queue, which wakes its owner.
pub fn wake(queue: u32) -> Result<()> {
    // SAFETY: the message has no bytes.
    check(unsafe { proxy_enqueue_shared_queue(queue, null(), 0) })
}

/// Empties a queue.
pub fn drain(queue: u32) {
    loop {
        let (mut data, mut size) = (null_mut(), 0);
        // SAFETY: as in `buffer`; the block is freed at once.
        unsafe {
            if proxy_dequeue_shared_queue(queue, &mut data, &mut size) != OK {
                return;
            }
            drop(take(data, size));
        }
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
