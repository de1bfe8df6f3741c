//! Header maps in the form in which they cross the host boundary.
//!
//! proxy-wasm passes a whole header map as one block: a count, then the lengths of all names and
//! values, then the bytes, each followed by a NUL (proxy-wasm ABI 0.2.1, "Header map pairs"). The
//! engine reads and keeps that block as it is. A reply is therefore recorded once in the very form
//! in which it is replayed, and replaying it to ten thousand waiters serialises nothing.

/// A borrowed header map.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pairs<'a> {
    /// Of each pair, the lengths of its name and its value, four bytes each.
    lengths: &'a [[u8; 8]],
    /// All names and values.
    bytes: &'a [u8],
}

fn lengths_of([a, b, c, d, e, f, g, h]: [u8; 8]) -> (usize, usize) {
    (u32::from_le_bytes([a, b, c, d]) as usize, u32::from_le_bytes([e, f, g, h]) as usize)
}

/// Whether two byte strings are equal. On Wasm, the comparison of slices is a library's, byte by byte, and this one is
/// several times as fast.
pub fn same(a: &[u8], b: &[u8]) -> bool {
    if a.len() != b.len() {
        return false;
    }
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    let equal = |(a, b): (&[u8; 8], &[u8; 8])| u64::from_ne_bytes(*a) == u64::from_ne_bytes(*b);
    a_rest.iter().zip(b_rest).all(|(a, b)| a == b) && a.iter().zip(b).all(equal)
}

impl<'a> Pairs<'a> {
    /// Reads a block. An empty one is an empty map; a malformed one (lengths that do not fit the
    /// block) is `None`, never a panic.
    pub fn parse(block: &'a [u8]) -> Option<Self> {
        if block.is_empty() {
            return Some(Self::default());
        }
        let (count, rest) = block.split_first_chunk()?;
        let count = u32::from_le_bytes(*count) as usize;
        let (lengths, bytes) = rest.split_at_checked(count.checked_mul(8)?)?;
        let (lengths, _) = lengths.as_chunks();
        let mut end = 0_usize;
        for each in lengths {
            let (name, value) = lengths_of(*each);
            end = end.checked_add(name)?.checked_add(value)?.checked_add(2)?;
        }
        (end <= bytes.len()).then_some(Self { lengths, bytes })
    }

    /// How many pairs there are; a name sent twice counts twice.
    pub fn len(&self) -> usize {
        self.lengths.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.lengths.is_empty()
    }

    /// All pairs in order.
    pub fn iter(&self) -> Iter<'a> {
        Iter { lengths: self.lengths.iter(), bytes: self.bytes }
    }

    /// All values of `name` (lower case, as Envoy keeps names) in the order sent.
    pub fn all<'n>(&self, name: &'n [u8]) -> impl Iterator<Item = &'a [u8]> + use<'a, 'n> {
        self.iter().filter(move |(n, _)| same(n, name)).map(|(_, value)| value)
    }

    /// The first value of `name`.
    pub fn first(&self, name: &[u8]) -> Option<&'a [u8]> {
        self.all(name).next()
    }
}

/// Iterator over the pairs of a block.
#[derive(Clone, Debug)]
pub struct Iter<'a> {
    lengths: std::slice::Iter<'a, [u8; 8]>,
    /// From the next name on.
    bytes: &'a [u8],
}

impl<'a> Iterator for Iter<'a> {
    type Item = (&'a [u8], &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let (name_len, value_len) = lengths_of(*self.lengths.next()?);
        // A NUL follows each of the two.
        let (name, rest) = self.bytes.split_at_checked(name_len)?;
        let (value, rest) = rest.get(1..)?.split_at_checked(value_len)?;
        self.bytes = rest.get(1..)?;
        Some((name, value))
    }
}

/// Builds a block.
#[derive(Clone, Debug, Default)]
pub struct PairsBuilder {
    lengths: Vec<(u32, u32)>,
    bytes: Vec<u8>,
}

impl PairsBuilder {
    /// A builder with room for so many pairs of ordinary length.
    pub fn with_capacity(pairs: usize) -> Self {
        Self { lengths: Vec::with_capacity(pairs), bytes: Vec::with_capacity(pairs * 32) }
    }

    /// Adds a pair at the end; a name already there is added once more. Pairs beyond 4 GiB cannot
    /// be expressed and are left out.
    pub fn push(&mut self, name: &[u8], value: &[u8]) -> &mut Self {
        let (Ok(name_len), Ok(value_len)) = (u32::try_from(name.len()), u32::try_from(value.len())) else {
            return self;
        };
        self.lengths.push((name_len, value_len));
        self.bytes.extend_from_slice(name);
        self.bytes.push(0);
        self.bytes.extend_from_slice(value);
        self.bytes.push(0);
        self
    }

    /// Whether nothing was added.
    pub fn is_empty(&self) -> bool {
        self.lengths.is_empty()
    }

    /// The finished block.
    pub fn build(&self) -> Box<[u8]> {
        let mut block = Vec::with_capacity(4 + self.lengths.len() * 8 + self.bytes.len());
        block.extend_from_slice(&(self.lengths.len() as u32).to_le_bytes());
        for (name, value) in &self.lengths {
            block.extend_from_slice(&name.to_le_bytes());
            block.extend_from_slice(&value.to_le_bytes());
        }
        block.extend_from_slice(&self.bytes);
        block.into_boxed_slice()
    }
}

/// The block of `pairs`.
pub fn block(pairs: &[(&str, &str)]) -> Box<[u8]> {
    let mut builder = PairsBuilder::default();
    for (name, value) in pairs {
        builder.push(name.as_bytes(), value.as_bytes());
    }
    builder.build()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{runner, test};
    use proptest::prelude::*;

    #[test]
    fn empty_block_is_an_empty_map() {
        let pairs = Pairs::parse(&[]).unwrap();
        assert!(pairs.is_empty());
        assert_eq!(pairs.iter().count(), 0);
    }

    #[test]
    fn keeps_order_and_repeated_names() {
        let block = block(&[("a", "1"), ("b", ""), ("a", "2")]);
        let pairs = Pairs::parse(&block).unwrap();
        assert_eq!(pairs.len(), 3);
        assert_eq!(pairs.all(b"a").collect::<Vec<_>>(), [b"1", b"2"]);
        assert_eq!(pairs.first(b"b"), Some(&b""[..]));
        assert_eq!(pairs.first(b"c"), None);
    }

    #[test]
    fn has_the_bytes_the_abi_asks_for() {
        assert_eq!(&*block(&[("ab", "c")]), b"\x01\0\0\0\x02\0\0\0\x01\0\0\0ab\0c\0");
    }

    #[test]
    fn what_is_built_is_what_is_read() {
        let pair = (prop::collection::vec(any::<u8>(), 0..9), prop::collection::vec(any::<u8>(), 0..9));
        runner(256)
            .run(&prop::collection::vec(pair, 0..9), |list| {
                let mut builder = PairsBuilder::default();
                for (name, value) in &list {
                    builder.push(name, value);
                }
                let block = builder.build();
                let read: Vec<_> =
                    Pairs::parse(&block).unwrap().iter().map(|(n, v)| (n.to_vec(), v.to_vec())).collect();
                prop_assert_eq!(read, list);
                Ok(())
            })
            .unwrap();
    }

    #[test]
    fn malformed_blocks_are_refused_without_a_panic() {
        runner(2048)
            .run(&prop::collection::vec(any::<u8>(), 0..64), |bytes| {
                if let Some(pairs) = Pairs::parse(&bytes) {
                    prop_assert_eq!(pairs.iter().count(), pairs.len());
                }
                Ok(())
            })
            .unwrap();
        let mut cut = block(&[("name", "value")]).to_vec();
        cut.pop();
        assert!(Pairs::parse(&cut).is_none());
        assert!(Pairs::parse(&[255, 255, 255, 255]).is_none());
    }
}
