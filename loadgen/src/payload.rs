//! Reply payloads that follow from the key alone, so that a client can tell
//! whether an answer is the one it asked for.

use bytes::Bytes;

/// The first `len` bytes of the payload that belongs to `key`. A longer payload
/// starts with the shorter ones.
pub fn payload_for(key: &str, len: usize) -> Bytes {
    let mut payload: Vec<u8> = Vec::with_capacity(len + 8);
    let mut words = words(key);
    while payload.len() < len {
        payload.extend_from_slice(&words.next_word());
    }
    payload.truncate(len);
    payload.into()
}

/// Whether `payload` is [`payload_for`] that key and its own length, without
/// building the expected one.
pub fn payload_matches(key: &str, payload: &[u8]) -> bool {
    let mut words = words(key);
    payload.chunks(8).all(|chunk| chunk == &words.next_word()[..chunk.len()])
}

/// SplitMix64, seeded with the key: cheap, and no two keys look alike.
struct Words(u64);

impl Words {
    fn next_word(&mut self) -> [u8; 8] {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (word ^ (word >> 31)).to_le_bytes()
    }
}

fn words(key: &str) -> Words {
    // FNV-1a.
    let seed = key.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    Words(seed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn has_the_length_asked_for() {
        for len in [0, 1, 7, 8, 9, 1000] {
            assert_eq!(payload_for("key", len).len(), len);
        }
    }

    #[test]
    fn depends_on_the_key_alone() {
        assert_eq!(payload_for("a", 64), payload_for("a", 64));
        assert_eq!(payload_for("a", 64)[..10], payload_for("a", 10)[..]);
        assert_ne!(payload_for("a", 64), payload_for("b", 64));
    }

    #[test]
    fn is_recognised() {
        for len in [0, 3, 8, 129] {
            let payload = payload_for("key", len);
            assert!(payload_matches("key", &payload));
            assert_eq!(payload_matches("yek", &payload), len == 0);
        }
        let mut broken = payload_for("key", 100).to_vec();
        broken[99] ^= 1;
        assert!(!payload_matches("key", &broken));
    }
}
