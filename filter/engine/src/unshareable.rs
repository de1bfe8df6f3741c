//! Keys whose reply could not be shared the last time.
//!
//! A reply that is for one caller only (`private`, a cookie) has made all others wait for nothing. The next ones for its
//! key do not wait, for a while. Memory is fixed; a mark that is lost to another costs one more wait.

use crate::Nanos;
use crate::key::Key;

/// Places for marks, 24 bytes each.
const PLACES: usize = 4_096;

#[derive(Clone, Copy, Debug, Default)]
struct Mark {
    halves: (u64, u64),
    until: Nanos,
}

/// The marks of one worker.
#[derive(Debug, Default)]
pub struct Unshareable {
    /// Empty before the first.
    marks: Vec<Mark>,
}

impl Unshareable {
    /// Remembers a key until then.
    pub fn remember(&mut self, key: &Key, until: Nanos) {
        if self.marks.is_empty() {
            self.marks.resize(PLACES, Mark::default());
        }
        let halves = key.halves();
        if let Some(mark) = self.marks.get_mut(place(halves)) {
            *mark = Mark { halves, until };
        }
    }

    /// Whether a key is remembered.
    pub fn knows(&self, key: &Key, now: Nanos) -> bool {
        let halves = key.halves();
        self.marks.get(place(halves)).is_some_and(|mark| mark.halves == halves && now < mark.until)
    }
}

fn place(halves: (u64, u64)) -> usize {
    halves.1 as usize % PLACES
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::tests::numbered;
    use crate::testing::test;

    #[test]
    fn a_key_is_remembered_for_its_time() {
        let mut unshareable = Unshareable::default();
        assert!(!unshareable.knows(&Key([0; 32]), 0), "nothing yet, not even what looks like an empty mark");
        unshareable.remember(&numbered(1), 100);
        assert!(unshareable.knows(&numbered(1), 99));
        assert!(!unshareable.knows(&numbered(1), 100));
        assert!(!unshareable.knows(&numbered(2), 0), "the same place, another key");
    }

    #[test]
    fn memory_is_fixed() {
        let mut unshareable = Unshareable::default();
        for number in 0..100_000_u64 {
            let mut key = [0; 32];
            key[8..16].copy_from_slice(&number.to_le_bytes());
            unshareable.remember(&Key(key), 1);
        }
        assert_eq!(unshareable.marks.len(), PLACES);
    }
}
