//! The form in which workers leave records for each other: numbers are little-endian, and what has no fixed length
//! comes behind its length.
//!
//! What is read may be anything: another version of the filter may have written it. A reader therefore
//! never panics, and takes no more memory than the record itself has.

/// Reads a record from its front.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn new(record: &'a [u8]) -> Self {
        Self(record)
    }

    /// Whether all has been read.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All that is left.
    pub(crate) fn rest(self) -> &'a [u8] {
        self.0
    }

    /// The next `N` bytes.
    pub(crate) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (array, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*array)
    }

    pub(crate) fn u8(&mut self) -> Option<u8> {
        self.array().map(u8::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// Bytes behind their length.
    pub(crate) fn bytes(&mut self) -> Option<&'a [u8]> {
        let len = usize::try_from(self.u32()?).ok()?;
        let (bytes, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(bytes)
    }
}

/// Writes bytes behind their length. Nothing here comes near 4 GiB; what did would not be read again.
pub(crate) fn put_bytes(record: &mut Vec<u8>, bytes: &[u8]) {
    record.extend_from_slice(&u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes());
    record.extend_from_slice(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::test;

    #[test]
    fn what_was_written_is_read() {
        let mut record = vec![7];
        record.extend_from_slice(&8_u32.to_le_bytes());
        record.extend_from_slice(&9_u64.to_le_bytes());
        put_bytes(&mut record, b"ab");
        record.push(1);
        let mut reader = Reader::new(&record);
        assert_eq!((reader.u8(), reader.u32(), reader.u64()), (Some(7), Some(8), Some(9)));
        assert_eq!(reader.bytes(), Some(&b"ab"[..]));
        assert_eq!(reader.rest(), [1]);
        assert!(!reader.is_empty());
    }

    #[test]
    fn what_is_cut_short_is_not_read() {
        assert_eq!(Reader::new(&[0; 3]).u32(), None);
        assert_eq!(Reader::new(&[2, 0, 0, 0, 1]).bytes(), None);
        assert_eq!(Reader::new(&[255; 9]).bytes(), None);
    }
}
