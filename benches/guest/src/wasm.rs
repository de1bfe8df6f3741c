//! What the Wasm module exports. The host enters it once for a whole run, so that entering costs nothing that shows.

use crate::{OPERATIONS, Operation};
use std::cell::RefCell;

thread_local! {
    static CHOSEN: RefCell<Option<Box<dyn Operation>>> = const { RefCell::new(None) };
}

fn with_chosen(run: impl FnOnce(&mut dyn Operation)) {
    CHOSEN.with_borrow_mut(|chosen| match chosen {
        Some(operation) => run(operation.as_mut()),
        None => panic!("no operation was chosen"),
    });
}

/// Chooses the operation with this number in [`OPERATIONS`]. What the last one held is freed first.
#[unsafe(no_mangle)]
extern "C" fn choose(number: u32) {
    CHOSEN.set(None);
    CHOSEN.set(Some((OPERATIONS[number as usize].create)()));
}

/// See [`Operation::prepare`].
#[unsafe(no_mangle)]
extern "C" fn prepare(times: u64) {
    with_chosen(|operation| operation.prepare(times));
}

/// See [`Operation::run`].
#[unsafe(no_mangle)]
extern "C" fn run(times: u64) {
    with_chosen(|operation| operation.run(times));
}
