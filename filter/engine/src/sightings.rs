//! Requests that passed alone, remembered for as long as their answer could have been shared.
//!
//! A method of which nobody ever asks the same twice gains nothing from flights, so its requests pass untouched. They
//! leave a mark here, by which the second request for a key is told from the first. Marks may get lost to others in
//! their place; then one more call goes upstream. Memory is fixed.

use crate::Nanos;

/// Places for marks, 16 bytes each. At 30,000 calls a second that each last for 100 ms, one in ten is taken.
const PLACES: usize = 32_768;

/// The mark of a request, to be renewed when its call ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sighting(u64);

#[derive(Clone, Copy, Debug, Default)]
struct Mark {
    sighting: Sighting,
    until: Nanos,
}

/// The marks of one worker.
#[derive(Debug, Default)]
pub struct Sightings {
    /// Empty before the first.
    marks: Vec<Mark>,
}

impl Sightings {
    /// A request has come whose call ends by `until` at the latest. Returns `None` if another one with this `tag` has its
    /// mark here that is still good.
    pub fn first(&mut self, tag: u64, now: Nanos, until: Nanos) -> Option<Sighting> {
        if self.marks.is_empty() {
            self.marks.resize(PLACES, Mark::default());
        }
        let sighting = Sighting(tag);
        let mark = self.marks.get_mut(sighting.place())?;
        if mark.sighting == sighting && now < mark.until {
            return None;
        }
        *mark = Mark { sighting, until };
        Some(sighting)
    }

    /// The call has ended; its answer would have been good until `until`.
    pub fn ended(&mut self, sighting: Sighting, until: Nanos) {
        if let Some(mark) = self.marks.get_mut(sighting.place()).filter(|mark| mark.sighting == sighting) {
            mark.until = until;
        }
    }
}

impl Sighting {
    fn place(self) -> usize {
        self.0 as usize % PLACES
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::test;

    #[test]
    fn the_second_is_told_from_the_first_while_the_call_lasts_and_for_the_ttl() {
        let mut sightings = Sightings::default();
        let mark = sightings.first(7, 0, 1_000).unwrap();
        assert_eq!(sightings.first(7, 999, 2_000), None);
        sightings.ended(mark, 300);
        assert_eq!(sightings.first(7, 299, 2_000), None);
        assert!(sightings.first(7, 300, 2_000).is_some());
    }

    #[test]
    fn one_whose_end_never_comes_is_forgotten() {
        let mut sightings = Sightings::default();
        sightings.first(7, 0, 1_000);
        assert!(sightings.first(7, 1_000, 2_000).is_some());
    }

    #[test]
    fn keys_are_told_apart_and_a_lost_mark_is_not_ended() {
        let mut sightings = Sightings::default();
        let same_place = 7 + PLACES as u64;
        let mark = sightings.first(7, 0, 1_000).unwrap();
        assert!(sightings.first(8, 0, 1_000).is_some());
        assert!(sightings.first(same_place, 0, 1_000).is_some());
        sightings.ended(mark, 10);
        assert_eq!(sightings.first(same_place, 11, 1_000), None, "its mark was another's");
        assert!(sightings.first(7, 0, 1_000).is_some(), "lost");
    }

    #[test]
    fn memory_is_fixed() {
        let mut sightings = Sightings::default();
        for number in 0..100_000_u64 {
            sightings.first(number.wrapping_mul(0x9e37_79b9_7f4a_7c15), 0, 1);
        }
        assert_eq!(sightings.marks.len(), PLACES);
    }
}
