//! Any text as a duration or a size: what is read is written and read back the same.
#![no_main]

use collapser_engine::{bytesize, duration};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Some(read) = duration::parse(text) {
        assert_eq!(duration::parse(&duration::format(read)), Some(read));
    }
    if let Some(read) = bytesize::parse(text) {
        assert_eq!(bytesize::parse(&read.to_string()), Some(read));
    }
});
