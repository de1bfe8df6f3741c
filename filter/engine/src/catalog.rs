//! What is known of each gRPC method: whether the settings allow it, and what kind its calls have
//! shown it to be.
//!
//! The filter has no schema, and unary and streaming calls look alike on arrival. So it learns:
//! a call that came whole suggests a unary method, and one that had to be released as an open stream
//! takes that back. A second message, or a reply before the request's end, proves a streaming
//! method for good. In the same way it learns whether anybody asks for the same twice: a method whose last flights all
//! had one caller each, and whose replies nobody asked for again, has its requests pass until one repeats.

use crate::methods::Methods;
use std::collections::HashMap;
use std::num::NonZeroU32;
use std::rc::Rc;

/// Methods that are remembered. Beyond it (somebody makes up paths) calls are judged by the settings
/// alone.
const MOST: usize = 4_096;

/// Names a remembered method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MethodId(NonZeroU32);

impl MethodId {
    #[cfg(test)]
    pub(crate) const FIRST: Self = Self(NonZeroU32::MIN);

    fn new(place: usize) -> Option<Self> {
        NonZeroU32::new(u32::try_from(place + 1).ok()?).map(Self)
    }

    fn place(self) -> usize {
        self.0.get() as usize - 1
    }
}

#[derive(Clone, Debug)]
struct Known {
    path: Rc<[u8]>,
    allowed: bool,
    unary: bool,
    streams: bool,
    /// Whether the next call is to tell if the method streams.
    suspect: bool,
    /// Its last flights, in a row, that nobody shared.
    unshared: usize,
}

/// What to do with a call of a method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// It may collapse. Without an id, nothing can be learned of it.
    Collapsible(Option<MethodId>),
    /// The settings, or what the filter knows of gRPC's own services, exclude it.
    Excluded,
    /// It has shown itself to stream.
    Streams,
    /// It may stream: this one call passes, and its reply tells.
    Probe(MethodId),
}

/// The methods that one worker has seen.
#[derive(Debug, Default)]
pub struct Catalog {
    patterns: Methods,
    by_path: HashMap<Rc<[u8]>, MethodId>,
    known: Vec<Known>,
    pass_after: usize,
}

impl Catalog {
    /// An empty catalog, for settings that allow `patterns`. After `pass_after` flights in a row that nobody shared, a
    /// method's requests pass; 0 is never.
    pub fn new(patterns: Methods, pass_after: usize) -> Self {
        Self { patterns, pass_after, ..Self::default() }
    }

    /// Judges a call by its path.
    pub fn judge(&mut self, path: &[u8]) -> Method {
        let Some(id) = self.by_path.get(path).copied() else { return self.add(path) };
        match self.known.get_mut(id.place()) {
            Some(Known { allowed: false, .. }) => Method::Excluded,
            Some(Known { streams: true, .. }) => Method::Streams,
            Some(known) if known.suspect => {
                known.suspect = false;
                Method::Probe(id)
            }
            _ => Method::Collapsible(Some(id)),
        }
    }

    /// A call came whole: one message, then END_STREAM. Returns whether nobody has shared the method's last flights.
    pub fn came_whole(&mut self, id: Option<MethodId>) -> bool {
        let most = self.pass_after;
        self.get_mut(id).is_some_and(|known| {
            known.unary = true;
            most > 0 && known.unshared >= most
        })
    }

    /// A flight was joined or its reply used again, or one would have been.
    pub fn shared(&mut self, id: Option<MethodId>) {
        if let Some(known) = self.get_mut(id) {
            known.unshared = 0;
        }
    }

    /// A flight has landed that had one caller only.
    pub fn unshared(&mut self, id: Option<MethodId>) {
        if let Some(known) = self.get_mut(id) {
            known.unshared = known.unshared.saturating_add(1);
        }
    }

    /// A call had to be released as an open stream.
    pub fn stayed_open(&mut self, id: Option<MethodId>) {
        if let Some(known) = self.get_mut(id) {
            known.unary = false;
        }
    }

    /// A call has met its deadline, or its reply came in parts. Either the backend is slow or the reply large, or it
    /// streams without an end in sight, of which Envoy shows nothing. One call passes to find out; the others go on
    /// collapsing, since a slow backend needs that most.
    pub fn suspect(&mut self, id: Option<MethodId>) {
        if let Some(known) = self.get_mut(id) {
            known.suspect = true;
        }
    }

    /// A call has proven the method to stream. Returns whether this is news.
    pub fn streams(&mut self, id: Option<MethodId>) -> bool {
        self.get_mut(id).is_some_and(|known| !std::mem::replace(&mut known.streams, true))
    }

    /// The path of a method; empty if it is not remembered.
    pub fn path(&self, id: Option<MethodId>) -> &[u8] {
        id.and_then(|id| self.known.get(id.place())).map_or(&[], |known| &known.path)
    }

    /// Whether the method's last call came whole.
    pub fn is_unary(&self, id: MethodId) -> bool {
        self.known.get(id.place()).is_some_and(|known| known.unary)
    }

    fn add(&mut self, path: &[u8]) -> Method {
        let allowed = self.patterns.allow(path);
        let mut id = None;
        if self.known.len() < MOST
            && let Some(new) = MethodId::new(self.known.len())
        {
            let path: Rc<[u8]> = path.into();
            self.known.push(Known {
                path: Rc::clone(&path),
                allowed,
                unary: false,
                streams: false,
                suspect: false,
                unshared: 0,
            });
            self.by_path.insert(path, new);
            id = Some(new);
        }
        if allowed { Method::Collapsible(id) } else { Method::Excluded }
    }

    fn get_mut(&mut self, id: Option<MethodId>) -> Option<&mut Known> {
        self.known.get_mut(id?.place())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::test;

    fn id(catalog: &mut Catalog, path: &str) -> Option<MethodId> {
        match catalog.judge(path.as_bytes()) {
            Method::Collapsible(id) => id,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn follows_the_settings() {
        let mut catalog = Catalog::new(Methods::parse(&["!/a.B/C"]).unwrap(), 0);
        for _ in 0..2 {
            assert_eq!(catalog.judge(b"/a.B/C"), Method::Excluded);
            assert!(id(&mut catalog, "/a.B/D").is_some());
        }
    }

    #[test]
    fn learns_and_unlearns_that_a_method_is_unary() {
        let mut catalog = Catalog::default();
        let method = id(&mut catalog, "/a.B/C");
        assert!(!catalog.is_unary(method.unwrap()));
        catalog.came_whole(method);
        assert!(catalog.is_unary(method.unwrap()));
        catalog.stayed_open(method);
        assert!(!catalog.is_unary(method.unwrap()));
    }

    #[test]
    fn a_second_message_is_proof_for_good() {
        let mut catalog = Catalog::default();
        let method = id(&mut catalog, "/a.B/C");
        assert_eq!(catalog.path(method), b"/a.B/C");
        assert!(catalog.streams(method));
        assert!(!catalog.streams(method), "no news any more");
        catalog.came_whole(method);
        assert_eq!(catalog.judge(b"/a.B/C"), Method::Streams);
    }

    #[test]
    fn after_a_timeout_one_call_is_a_probe() {
        let mut catalog = Catalog::default();
        let method = id(&mut catalog, "/a.B/C");
        catalog.suspect(method);
        assert_eq!(catalog.judge(b"/a.B/C"), Method::Probe(method.unwrap()));
        assert_eq!(catalog.judge(b"/a.B/C"), Method::Collapsible(method));
        catalog.suspect(method);
        catalog.streams(method);
        assert_eq!(catalog.judge(b"/a.B/C"), Method::Streams);
    }

    #[test]
    fn a_method_passes_after_so_many_flights_that_nobody_shared() {
        for (pass_after, passes) in [(3, true), (0, false)] {
            let mut catalog = Catalog::new(Methods::default(), pass_after);
            let (method, other) = (id(&mut catalog, "/a.B/C"), id(&mut catalog, "/a.B/D"));
            for _ in 0..2 {
                catalog.unshared(method);
            }
            catalog.shared(method);
            for _ in 0..3 {
                assert!(!catalog.came_whole(method));
                catalog.unshared(method);
            }
            assert_eq!(catalog.came_whole(method), passes);
            assert!(!catalog.came_whole(other));
            catalog.shared(method);
            assert!(!catalog.came_whole(method));
        }
        assert!(!Catalog::new(Methods::default(), 1).came_whole(None));
    }

    #[test]
    fn made_up_paths_do_not_fill_memory() {
        let mut catalog = Catalog::new(Methods::parse(&["!/no.No/No"]).unwrap(), 0);
        for n in 0..MOST {
            assert!(id(&mut catalog, &format!("/a.B/{n}")).is_some());
        }
        assert_eq!(id(&mut catalog, "/a.B/another"), None);
        assert_eq!(catalog.judge(b"/no.No/No"), Method::Excluded);
        assert!(!catalog.streams(None));
        assert_eq!(catalog.known.len(), MOST);
        assert!(id(&mut catalog, "/a.B/7").is_some());
    }
}
