//! Header maps in the form in which they cross the host boundary.
//!
//! proxy-wasm passes a whole header map as one block: a count, then the lengths of all names and
//! values, then the bytes, each followed by a NUL (proxy-wasm ABI 0.2.1, "Header map pairs"). The
//! engine reads and keeps that block as it is. A reply is therefore recorded once in the very form
//! in which it is replayed, and replaying it to ten thousand waiters serialises nothing.

/// A borrowed header map.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pairs<'a> {
    block: &'a [u8],
    count: usize,
}

fn u32_at(block: &[u8], at: usize) -> Option<usize> {
    let bytes = block.get(at..at.checked_add(4)?)?;
    usize::try_from(u32::from_le_bytes(bytes.try_into().ok()?)).ok()
}

impl<'a> Pairs<'a> {
    /// Reads a block. An empty one is an empty map; a malformed one (lengths that do not fit the
    /// block) is `None`, never a panic.
    pub fn parse(block: &'a [u8]) -> Option<Self> {
        if block.is_empty() {
            return Some(Self::default());
        }
        let count = u32_at(block, 0)?;
        let mut end = count.checked_mul(8)?.checked_add(4)?;
        if end > block.len() {
            return None;
        }
        for n in 0..count {
            let name = u32_at(block, 4 + n * 8)?;
            let value = u32_at(block, 8 + n * 8)?;
            end = end.checked_add(name)?.checked_add(value)?.checked_add(2)?;
        }
        (end <= block.len()).then_some(Self { block, count })
    }

    /// How many pairs there are; a name sent twice counts twice.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// All pairs in order.
    pub fn iter(&self) -> Iter<'a> {
        Iter { pairs: *self, index: 0, at: 4 + self.count * 8 }
    }

    /// All values of `name` (lower case, as Envoy keeps names) in the order sent.
    pub fn all<'n>(&self, name: &'n [u8]) -> impl Iterator<Item = &'a [u8]> + use<'a, 'n> {
        self.iter().filter(move |(n, _)| *n == name).map(|(_, value)| value)
    }

    /// The first value of `name`.
    pub fn first(&self, name: &[u8]) -> Option<&'a [u8]> {
        self.all(name).next()
    }
}

/// Iterator over the pairs of a block.
#[derive(Clone, Debug)]
pub struct Iter<'a> {
    pairs: Pairs<'a>,
    index: usize,
    at: usize,
}

impl<'a> Iterator for Iter<'a> {
    type Item = (&'a [u8], &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        if self.index >= self.pairs.count {
            return None;
        }
        let block = self.pairs.block;
        let name_len = u32_at(block, 4 + self.index * 8)?;
        let value_len = u32_at(block, 8 + self.index * 8)?;
        let name = block.get(self.at..self.at + name_len)?;
        let value_at = self.at + name_len + 1;
        let value = block.get(value_at..value_at + value_len)?;
        self.at = value_at + value_len + 1;
        self.index += 1;
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
