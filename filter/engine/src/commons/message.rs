//! What workers put into each other's queues. A message without bytes is none of these: with it, a worker wakes itself.

use crate::Nanos;
use crate::changes::Resource;
use crate::key::Key;
use crate::reply::Reply;
use crate::wire::Reader;

/// Changes with the layout.
const VERSION: u8 = 2;

const REPLY: u8 = 1;
const GONE: u8 = 2;
const CHANGED: u8 = 3;

/// A message of another worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// The flight for this key has landed.
    Reply {
        /// Its key.
        key: Key,
        /// For whom the reply is good, and until when.
        freshness: Freshness,
        /// The reply.
        reply: Reply,
    },
    /// This resource has been changed.
    Changed(Resource),
    /// The flight for this key is gone: those who wait for it claim again.
    Gone {
        /// Its key.
        key: Key,
    },
}

/// For whom a reply is good.
#[cfg_attr(test, derive(Hash))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Freshness {
    /// When it came from upstream.
    pub landed: Nanos,
    /// Until when it may be given to those who come later; not after [`Self::landed`] if it may not be cached.
    pub expires: Nanos,
}

impl Freshness {
    /// Whether one who came at `joined` may be given it: it came after them, or is still fresh for them.
    pub fn is_good_for(&self, joined: Nanos) -> bool {
        joined <= self.landed || joined < self.expires
    }
}

pub(super) fn reply(key: &Key, realm: u64, freshness: Freshness, reply: &Reply) -> Vec<u8> {
    let mut out = Vec::with_capacity(2 + 32 + 3 * 8 + reply.encoded_len());
    put_head(&mut out, REPLY, key, realm);
    out.extend_from_slice(&freshness.landed.to_le_bytes());
    out.extend_from_slice(&freshness.expires.to_le_bytes());
    reply.encode(&mut out);
    out
}

pub(super) fn gone(key: &Key, realm: u64) -> Vec<u8> {
    let mut out = Vec::with_capacity(2 + 32 + 8);
    put_head(&mut out, GONE, key, realm);
    out
}

pub(super) fn changed(resource: Resource, realm: u64) -> Vec<u8> {
    let mut out = Vec::with_capacity(2 + 32 + 2 * 8);
    put_head(&mut out, CHANGED, &Key([0; 32]), realm);
    out.extend_from_slice(&resource.0.to_le_bytes());
    out
}

fn put_head(out: &mut Vec<u8>, kind: u8, key: &Key, realm: u64) {
    out.extend_from_slice(&[VERSION, kind]);
    out.extend_from_slice(&key.0);
    out.extend_from_slice(&realm.to_le_bytes());
}

/// Reads a message of this realm.
pub(super) fn read(bytes: &[u8], realm: u64) -> Option<Message> {
    let mut reader = Reader::new(bytes);
    reader.u8().filter(|version| *version == VERSION)?;
    let kind = reader.u8()?;
    let key = Key(reader.array()?);
    reader.u64().filter(|of| *of == realm)?;
    match kind {
        REPLY => {
            let freshness = Freshness { landed: reader.u64()?, expires: reader.u64()? };
            Some(Message::Reply { key, freshness, reply: Reply::decode(reader.rest())? })
        }
        CHANGED => {
            let resource = Resource(reader.u64()?);
            reader.is_empty().then_some(Message::Changed(resource))
        }
        GONE => reader.is_empty().then_some(Message::Gone { key }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::tests::numbered;
    use crate::reply::tests::of_weight;
    use crate::testing::test;

    const FRESHNESS: Freshness = Freshness { landed: 5, expires: 9 };

    #[test]
    fn a_message_is_read_in_its_realm_only() {
        let sent = reply(&numbered(1), 2, FRESHNESS, &of_weight(3));
        let message = Message::Reply { key: numbered(1), freshness: FRESHNESS, reply: of_weight(3) };
        assert_eq!(read(&sent, 2), Some(message));
        assert_eq!(read(&sent, 3), None);
        let sent = gone(&numbered(1), 2);
        assert_eq!(read(&sent, 2), Some(Message::Gone { key: numbered(1) }));
        assert_eq!(read(&sent, 3), None);
    }

    #[test]
    fn what_is_no_message_is_not_read() {
        for sent in [reply(&numbered(1), 2, FRESHNESS, &of_weight(3)), gone(&numbered(1), 2)] {
            for len in 0..sent.len() {
                assert_eq!(read(&sent[..len], 2), None, "{len}");
            }
            for at in [0, 1] {
                let mut odd = sent.clone();
                odd[at] = 9;
                assert_eq!(read(&odd, 2), None);
            }
        }
    }

    #[test]
    fn a_reply_is_good_for_those_it_came_after_and_while_it_is_fresh() {
        assert!(FRESHNESS.is_good_for(8) && !FRESHNESS.is_good_for(9));
        let not_cached = Freshness { landed: 5, expires: 0 };
        assert!(not_cached.is_good_for(5) && !not_cached.is_good_for(6));
    }
}
