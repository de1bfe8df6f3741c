//! Keys of requests that came lately, found by comparing the requests themselves.
//!
//! Requests repeat: that is what this project is for. Telling that one is, byte for byte, the same as one before costs
//! a small part of hashing it anew with SHA-256. Only what has come twice is kept, so that requests that never repeat cost
//! nothing but a look. Memory is bounded.

use crate::key::Key;
use crate::pairs::same;
use std::hash::{BuildHasher, Hasher, RandomState};

/// Places; each holds one request.
const PLACES: usize = 1_024;

/// Larger key material is hashed anew each time.
const MOST: usize = 64 << 10;

/// Bytes of key material kept. Beyond it, all is forgotten.
const MOST_IN_ALL: usize = 4 << 20;

#[derive(Debug)]
struct Known {
    tag: u64,
    head: Box<[u8]>,
    body: Box<[u8]>,
    key: Key,
}

#[derive(Debug, Default)]
struct Place {
    /// The last one that was not known.
    seen: u64,
    known: Option<Known>,
}

/// Requests and their keys.
#[derive(Debug)]
pub struct Memo {
    /// Seeds the tags, so that nobody can prepare requests that share a place.
    hasher: RandomState,
    places: Vec<Place>,
    bytes: usize,
}

impl Default for Memo {
    fn default() -> Self {
        let places = std::iter::repeat_with(Place::default).take(PLACES).collect();
        Self { hasher: RandomState::new(), places, bytes: 0 }
    }
}

impl Memo {
    /// The key of the material `head` and `body`, which `derive` works out if it is not known.
    pub fn key(&mut self, head: &[u8], body: &[u8], derive: impl FnOnce() -> Key) -> Key {
        let size = head.len().saturating_add(body.len());
        let tag = self.tag(head, body);
        let Some(place) = self.places.get_mut(tag as usize % PLACES).filter(|_| size <= MOST) else {
            return derive();
        };
        if let Some(known) = place.known.as_ref().filter(|known| known.is(tag, head, body)) {
            return known.key;
        }
        let key = derive();
        if place.seen != tag {
            place.seen = tag;
            return key;
        }
        let known = Known { tag, head: head.into(), body: body.into(), key };
        let dropped = place.known.replace(known).map_or(0, |known| known.size());
        self.bytes = self.bytes - dropped + size;
        if self.bytes > MOST_IN_ALL {
            self.places.iter_mut().for_each(|place| place.known = None);
            self.bytes = 0;
        }
        key
    }

    /// A number by which requests can be told apart, but for few.
    pub fn tag(&self, head: &[u8], body: &[u8]) -> u64 {
        let mut hasher = self.hasher.build_hasher();
        hasher.write(head);
        hasher.write(body);
        hasher.finish()
    }
}

impl Known {
    fn is(&self, tag: u64, head: &[u8], body: &[u8]) -> bool {
        self.tag == tag && same(&self.head, head) && same(&self.body, body)
    }

    fn size(&self) -> usize {
        self.head.len() + self.body.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::tests::numbered;
    use crate::testing::test;

    fn ask(memo: &mut Memo, head: &[u8], body: &[u8], key: u32) -> (Key, bool) {
        let mut derived = false;
        let key = memo.key(head, body, || {
            derived = true;
            numbered(key)
        });
        (key, derived)
    }

    #[test]
    fn what_has_come_twice_is_known() {
        let mut memo = Memo::default();
        assert_eq!(ask(&mut memo, b"h", b"b", 1), (numbered(1), true));
        assert_eq!(ask(&mut memo, b"h", b"b", 1), (numbered(1), true));
        assert_eq!(ask(&mut memo, b"h", b"b", 9), (numbered(1), false));
    }

    #[test]
    fn the_same_bytes_split_elsewhere_are_something_else() {
        let mut memo = Memo::default();
        for _ in 0..2 {
            ask(&mut memo, b"ab", b"c", 1);
        }
        assert_eq!(ask(&mut memo, b"a", b"bc", 2), (numbered(2), true));
    }

    #[test]
    fn equal_tags_do_not_make_requests_equal() {
        let mut memo = Memo::default();
        for _ in 0..2 {
            ask(&mut memo, b"h", b"b", 1);
        }
        let known = memo.places.iter_mut().find_map(|place| place.known.as_mut()).unwrap();
        known.body = b"x".as_slice().into();
        assert_eq!(ask(&mut memo, b"h", b"b", 2), (numbered(2), true));
    }

    #[test]
    fn large_requests_are_not_kept() {
        let mut memo = Memo::default();
        for (size, derived) in [(MOST - 1, false), (MOST, true)] {
            let body = vec![0; size];
            for _ in 0..2 {
                ask(&mut memo, b"h", &body, 1);
            }
            assert_eq!(ask(&mut memo, b"h", &body, 1).1, derived);
        }
    }

    #[test]
    fn memory_is_bounded() {
        let mut memo = Memo::default();
        for number in 0..1_000_u32 {
            let mut body = vec![0; 32 << 10];
            body[..4].copy_from_slice(&number.to_le_bytes());
            for _ in 0..2 {
                ask(&mut memo, b"h", &body, number);
            }
            let kept =
                memo.places.iter().filter_map(|place| place.known.as_ref()).map(Known::size).sum::<usize>();
            assert_eq!(memo.bytes, kept);
            assert!(memo.bytes <= MOST_IN_ALL);
        }
        assert!(memo.bytes > 0);
    }
}
