//! An allocator that counts. A program makes it its own with `#[global_allocator]`.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static COUNT: Cell<Count> = const { Cell::new(Count { allocations: 0, bytes: 0 }) };
}

/// What a thread has allocated. Growing a block counts as an allocation of what it grows by; freeing counts nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Allocations.
    pub allocations: u64,
    /// Bytes asked for.
    pub bytes: u64,
}

fn note(bytes: usize) {
    // A thread that ends may allocate after its counters are gone.
    let _ = COUNT.try_with(|count| {
        let Count { allocations, bytes: before } = count.get();
        count.set(Count { allocations: allocations + 1, bytes: before + bytes as u64 });
    });
}

/// The system's allocator, counted.
#[derive(Debug)]
pub struct Counting;

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        // SAFETY: the caller's own promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(size.saturating_sub(layout.size()));
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

/// What `work` allocates on this thread.
pub fn counted(work: impl FnOnce()) -> Count {
    let before = COUNT.get();
    work();
    let after = COUNT.get();
    Count { allocations: after.allocations - before.allocations, bytes: after.bytes - before.bytes }
}
