//! Resources that have been changed, so that replies from before no longer answer for them.
//!
//! A request with a method that is not safe, if it succeeds, makes what is kept for its URI invalid (RFC 9111, section
//! 4.4). What is kept for a URI lies under many keys, so it is not looked for: the time of the change is remembered, and
//! replies whose call began before are passed over. Memory is fixed; two resources may share a place, and then a
//! change of one costs a call for the other.

use crate::Nanos;
use std::hash::{DefaultHasher, Hasher};

/// Places for times of change, 8 bytes each.
const PLACES: usize = 16_384;

/// A resource, by a number that is the same in all workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resource(pub u64);

impl Resource {
    /// The resource of an authority and a path with its query.
    pub fn of(authority: &[u8], path: &[u8]) -> Self {
        let mut hasher = DefaultHasher::new();
        hasher.write(authority);
        hasher.write_u8(0);
        hasher.write(path);
        Self(hasher.finish())
    }

    fn place(self) -> usize {
        self.0 as usize % PLACES
    }
}

/// The changes that one worker knows of.
#[derive(Debug, Default)]
pub struct Changes {
    /// Empty before the first.
    times: Vec<Nanos>,
}

impl Changes {
    /// Whether none is known.
    pub fn is_empty(&self) -> bool {
        self.times.is_empty()
    }

    /// A resource has changed.
    pub fn record(&mut self, resource: Resource, now: Nanos) {
        if self.times.is_empty() {
            self.times.resize(PLACES, 0);
        }
        if let Some(time) = self.times.get_mut(resource.place()) {
            *time = now.max(*time);
        }
    }

    /// When a resource was last changed; 0 is never.
    pub fn last(&self, resource: Resource) -> Nanos {
        self.times.get(resource.place()).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::test;

    #[test]
    fn the_last_change_counts() {
        let (mut changes, page) = (Changes::default(), Resource::of(b"shop", b"/a?b"));
        assert!(changes.is_empty());
        assert_eq!(changes.last(page), 0);
        changes.record(page, 7);
        changes.record(page, 5);
        assert_eq!(changes.last(page), 7);
        assert!(!changes.is_empty());
    }

    #[test]
    fn resources_are_told_apart() {
        let page = Resource::of(b"shop", b"/a");
        for other in
            [Resource::of(b"shop", b"/b"), Resource::of(b"sho", b"p/a"), Resource::of(b"", b"shop/a")]
        {
            assert_ne!(page, other);
        }
        // The same in every VM, whatever it is seeded with.
        assert_eq!(Resource::of(b"shop", b"/a"), page);
    }
}
