//! Which headers tell the variants of a resource apart (`vary`; RFC 9111, section 4.1).
//!
//! A key cannot hold headers that only the reply names. Once a reply has named some, the requests for its key are told
//! apart by them before they wait, so that nobody joins a flight whose reply will not do.

use crate::Nanos;
use crate::key::Key;
use std::collections::HashMap;
use std::rc::Rc;

/// Keys that are remembered. Beyond it all are forgotten; each costs one wait to learn anew.
const MOST: usize = 10_000;

/// Names of headers, in lower case, sorted.
pub type Names = Rc<[Box<[u8]>]>;

/// What one worker knows of variants.
#[derive(Debug, Default)]
pub struct Variants {
    known: HashMap<Key, (Names, Nanos)>,
}

impl Variants {
    /// The headers that tell variants of `primary` apart, if any do.
    pub fn names(&self, primary: &Key, now: Nanos) -> Option<Names> {
        if self.known.is_empty() {
            return None;
        }
        let (names, until) = self.known.get(primary)?;
        (now < *until).then(|| Rc::clone(names))
    }

    /// Whether variants of `primary` are told apart, by these headers and perhaps more.
    pub fn cover(&self, primary: &Key, names: &[Box<[u8]>], now: Nanos) -> bool {
        self.names(primary, now).is_some_and(|known| names.iter().all(|name| known.contains(name)))
    }

    /// A reply for `primary` has named these; none is an answer too.
    pub fn learn(&mut self, primary: Key, names: Vec<Box<[u8]>>, until: Nanos) {
        if names.is_empty() {
            self.known.remove(&primary);
            return;
        }
        if self.known.len() >= MOST && !self.known.contains_key(&primary) {
            self.known.clear();
        }
        self.known.insert(primary, (names.into(), until));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::tests::numbered;
    use crate::testing::test;

    fn names(names: &[&str]) -> Vec<Box<[u8]>> {
        names.iter().map(|name| name.as_bytes().into()).collect()
    }

    #[test]
    fn the_last_reply_counts_for_its_time() {
        let mut variants = Variants::default();
        assert!(variants.names(&numbered(1), 0).is_none());
        variants.learn(numbered(1), names(&["a"]), 10);
        variants.learn(numbered(1), names(&["b", "c"]), 10);
        assert_eq!(&*variants.names(&numbered(1), 9).unwrap(), names(&["b", "c"]));
        assert!(variants.names(&numbered(1), 10).is_none());
        assert!(variants.names(&numbered(2), 0).is_none());
        variants.learn(numbered(1), names(&[]), 10);
        assert!(variants.names(&numbered(1), 0).is_none());
    }

    #[test]
    fn what_is_known_may_cover_more() {
        let mut variants = Variants::default();
        assert!(!variants.cover(&numbered(1), &names(&[]), 0), "there are none");
        variants.learn(numbered(1), names(&["a", "b"]), 10);
        for (list, expected) in [(&[][..], true), (&["b"], true), (&["a", "b"], true), (&["a", "c"], false)] {
            assert_eq!(variants.cover(&numbered(1), &names(list), 9), expected, "{list:?}");
        }
        assert!(!variants.cover(&numbered(1), &names(&["a"]), 10));
    }

    #[test]
    fn memory_is_bounded() {
        let mut variants = Variants::default();
        for number in 0..3 * MOST as u32 {
            variants.learn(numbered(number), names(&["a"]), 10);
            assert!(variants.known.len() <= MOST);
        }
    }
}
