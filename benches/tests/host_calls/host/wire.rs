//! Header maps, as Envoy keeps them and as they cross the boundary to the VM. On purpose not the engine's own code for
//! that: the two check each other.

use std::fmt;

/// A header map.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Headers(Vec<(Vec<u8>, Vec<u8>)>);

/// Headers that Envoy keeps in a place of their own, once. More of them become one value with commas.
const INLINE: [&[u8]; 6] =
    [b":status", b"content-type", b"content-length", b"grpc-status", b"grpc-message", b"te"];

impl Headers {
    /// These, in this order.
    pub fn new(pairs: &[(&str, &str)]) -> Self {
        Self(
            pairs.iter().map(|(name, value)| (name.as_bytes().to_vec(), value.as_bytes().to_vec())).collect(),
        )
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// All, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.0.iter().map(|(name, value)| (name.as_slice(), value.as_slice()))
    }

    /// The first value of `name`.
    pub fn first(&self, name: &str) -> Option<&[u8]> {
        self.iter().find(|(known, _)| *known == name.as_bytes()).map(|(_, value)| value)
    }

    /// Adds a header, in lower case as Envoy does.
    pub fn add(&mut self, name: &[u8], value: &[u8]) {
        let name = name.to_ascii_lowercase();
        if INLINE.contains(&name.as_slice())
            && let Some((_, known)) = self.0.iter_mut().find(|(known, _)| *known == name)
        {
            known.push(b',');
            known.extend_from_slice(value);
            return;
        }
        self.0.push((name, value.to_vec()));
    }

    /// Removes all values of `name`.
    pub fn remove(&mut self, name: &[u8]) {
        self.0.retain(|(known, _)| !known.eq_ignore_ascii_case(name));
    }

    /// Makes `value` the only one of `name`.
    pub fn replace(&mut self, name: &[u8], value: &[u8]) {
        match self.0.iter_mut().find(|(known, _)| known.eq_ignore_ascii_case(name)) {
            Some((_, known)) => *known = value.to_vec(),
            None => self.add(name, value),
        }
    }

    /// As they cross the boundary: a count, all lengths, then all bytes, each followed by a NUL.
    pub fn serialize(&self) -> Vec<u8> {
        if self.0.is_empty() {
            return Vec::new();
        }
        let number = |n: usize| (n as u32).to_le_bytes();
        let mut block = number(self.0.len()).to_vec();
        for (name, value) in &self.0 {
            block.extend(number(name.len()));
            block.extend(number(value.len()));
        }
        for part in self.0.iter().flat_map(|(name, value)| [name, value]) {
            block.extend_from_slice(part);
            block.push(0);
        }
        block
    }

    /// Reads what [`Self::serialize`] writes.
    pub fn parse(block: &[u8]) -> Option<Self> {
        let mut headers = Self::default();
        if block.is_empty() {
            return Some(headers);
        }
        let number = |at: usize| {
            let bytes: [u8; 4] = block.get(at..at + 4)?.try_into().ok()?;
            usize::try_from(u32::from_le_bytes(bytes)).ok()
        };
        let count = number(0)?;
        let mut at = 4 + count * 8;
        let mut take = |size: usize| {
            let part = block.get(at..at + size)?;
            // The NUL is there for those who read C strings; without it something is wrong.
            (*block.get(at + size)? == 0).then_some(())?;
            at += size + 1;
            Some(part)
        };
        for n in 0..count {
            let (name, value) = (take(number(4 + n * 8)?)?, take(number(8 + n * 8)?)?);
            headers.add(name, value);
        }
        (at == block.len()).then_some(headers)
    }
}

impl fmt::Debug for Headers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map()
            .entries(self.iter().map(|(n, v)| (n.escape_ascii().to_string(), v.escape_ascii().to_string())))
            .finish()
    }
}
