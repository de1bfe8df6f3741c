//! The header that carries a request's key to the load balancer that chooses a replica by it.
//!
//! Replicas that each collapse for themselves make one call a key each. A load balancer in front of them that sends
//! equal keys to the same replica makes it one call in all. It needs the key before it chooses, in a header, since
//! that is what Envoy's hash policies read.

use crate::key::Key;

/// The header. Set by this filter alone: what a client sends under this name is removed.
pub const HEADER: &str = "x-collapser-key";

/// What is said of a list of key headers that has it.
pub(crate) const NAMES_ITSELF: &str =
    "names x-collapser-key, which carries the key itself; allowed: any other";

/// The header's value: the whole key in lower-case hexadecimal, 64 characters.
pub fn value(key: &Key) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digit = |nibble: u8| char::from(DIGITS[usize::from(nibble & 0xf)]);
    key.0.iter().flat_map(|byte| [digit(byte >> 4), digit(*byte)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::test;

    #[test]
    fn the_value_is_the_whole_key() {
        let mut bytes = [0; 32];
        bytes[..3].copy_from_slice(&[0x0f, 0xa0, 0xff]);
        bytes[31] = 1;
        let expected = format!("0fa0ff{}01", "0".repeat(56));
        assert_eq!(value(&Key(bytes)), expected);
    }
}
