//! gRPC message framing: where one message ends.
//!
//! A message is a compressed-flag byte, a big-endian 32-bit length and that many bytes (gRPC over
//! HTTP/2, "Length-Prefixed-Message"). The engine never looks inside a message; it only needs to
//! know whether a body holds exactly one.

/// Bytes before a message: flag and length.
pub const PREFIX: usize = 5;

/// What a body holds so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// Nothing at all.
    Empty,
    /// The start of a first message.
    Partial,
    /// One whole message and nothing after it.
    One,
    /// One whole message and at least a byte more: the call streams.
    More,
}

/// How long the first message is with its prefix, in bytes, as told by the first bytes of a body.
/// `None` until the whole prefix is there. On a 32-bit target a length that does not fit saturates.
pub fn first_message_len(start: &[u8]) -> Option<usize> {
    let length: [u8; 4] = start.get(1..PREFIX)?.try_into().ok()?;
    let length = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
    Some(length.saturating_add(PREFIX))
}

/// Judges a body of `size` bytes of which `start` are the first ones (five are enough).
pub fn inspect(start: &[u8], size: usize) -> Framing {
    if size == 0 {
        return Framing::Empty;
    }
    match first_message_len(start) {
        None => Framing::Partial,
        Some(len) if size < len => Framing::Partial,
        Some(len) if size == len => Framing::One,
        Some(_) => Framing::More,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{runner, test};
    use proptest::prelude::*;

    #[test]
    fn tells_the_four_cases_apart() {
        assert_eq!(inspect(b"", 0), Framing::Empty);
        assert_eq!(inspect(b"\0\0\0", 3), Framing::Partial);
        assert_eq!(inspect(b"\0\0\0\0\x02a", 6), Framing::Partial);
        assert_eq!(inspect(b"\0\0\0\0\x02ab", 7), Framing::One);
        assert_eq!(inspect(b"\0\0\0\0\x00", 5), Framing::One);
        assert_eq!(inspect(b"\0\0\0\0\x00\0", 6), Framing::More);
        assert_eq!(inspect(b"\x01\xff\xff\xff\xff", 5), Framing::Partial);
    }

    #[test]
    fn every_prefix_of_one_message_is_partial() {
        let message = (any::<bool>(), prop::collection::vec(any::<u8>(), 0..300));
        runner(128)
            .run(&message, |(flag, payload)| {
                let mut body = vec![u8::from(flag)];
                body.extend_from_slice(&(payload.len() as u32).to_be_bytes());
                body.extend_from_slice(&payload);
                for cut in 1..body.len() {
                    prop_assert_eq!(inspect(&body[..cut.min(PREFIX)], cut), Framing::Partial);
                }
                prop_assert_eq!(inspect(&body[..PREFIX], body.len()), Framing::One);
                prop_assert_eq!(inspect(&body[..PREFIX], body.len() + 1), Framing::More);
                Ok(())
            })
            .unwrap();
    }
}
