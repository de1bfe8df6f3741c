//! Any bytes as a request body, cut anywhere: the verdict never contradicts itself.
#![no_main]

use collapser_engine::framing::{Framing, PREFIX, first_message_len, inspect};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|body: &[u8]| {
    let start = &body[..body.len().min(PREFIX)];
    let verdict = inspect(start, body.len());
    assert_eq!(verdict, inspect(body, body.len()), "five bytes are enough");
    let whole = first_message_len(body);
    match verdict {
        Framing::Empty => assert!(body.is_empty()),
        Framing::Partial => assert!(whole.is_none_or(|len| len > body.len())),
        Framing::One => assert_eq!(whole, Some(body.len())),
        Framing::More => assert!(whole.is_some_and(|len| len < body.len())),
    }
});
