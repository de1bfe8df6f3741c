//! Messages: valid ones of the demo service, written by hand, since they are made by the million.
//!
//! A request is `ComputeRequest { key }` with a key of eight characters, which makes ten bytes. A reply of ten bytes is
//! `ComputeReply { key }`, the very same bytes; a larger one has a payload too.

use bytes::{BufMut as _, Bytes, BytesMut};

/// The method that is called.
pub const PATH: &str = "/collapser.demo.v1.Demo/Compute";

/// What gRPC is, to Envoy.
pub const GRPC: &str = "application/grpc";

/// What is as long but is not: Envoy takes the body from every local reply to a gRPC request, and so from its own
/// `direct_response`.
pub const NOT_GRPC: &str = "application/data";

/// The name of the `n`th header that a request can have besides.
pub fn header_name(n: usize) -> String {
    format!("x-key-header-{n}")
}

/// gRPC's prefix of a message.
const PREFIX: usize = 5;

/// The smallest message: tag, length and key.
pub const SMALLEST: usize = 10;

/// A request for key `number`, as it goes over the wire.
pub fn request(number: u32) -> Bytes {
    let mut frame = BytesMut::with_capacity(PREFIX + SMALLEST);
    put_prefix(&mut frame, SMALLEST);
    put_key(&mut frame, number);
    frame.freeze()
}

/// The reply of `size` bytes to a request, without the prefix of five bytes.
///
/// # Panics
/// If no reply has that size: less than ten bytes, or a few just above.
pub fn reply(request: &[u8], size: usize) -> Bytes {
    let mut frame = BytesMut::with_capacity(PREFIX + size);
    put_prefix(&mut frame, size);
    frame.put_slice(&request[PREFIX..PREFIX + SMALLEST]);
    let rest = size - SMALLEST;
    if rest > 0 {
        // Field 3, bytes. The length of the length decides what is left.
        let length = (1..=5).find(|length| (rest - 1 - length) < 1 << (7 * length)).unwrap_or(5);
        let payload = rest - 1 - length;
        frame.put_u8(0x1a);
        for n in 0..length {
            let more = if n + 1 < length { 0x80 } else { 0 };
            frame.put_u8((payload >> (7 * n)) as u8 & 0x7f | more);
        }
        frame.put_bytes(b'x', payload);
    }
    frame.freeze()
}

/// Length of a reply of `size` bytes with its prefix.
pub fn framed(size: usize) -> usize {
    PREFIX + size
}

/// Whether what begins with `head` and is `len` bytes long answers `request` with `size` bytes.
pub fn answers(head: &[u8], len: usize, request: &[u8], size: usize) -> bool {
    let end = PREFIX + SMALLEST;
    len == framed(size) && head.len() >= end && head[PREFIX..end] == request[PREFIX..end]
}

fn put_prefix(frame: &mut BytesMut, len: usize) {
    frame.put_u8(0);
    frame.put_u32(len as u32);
}

fn put_key(frame: &mut BytesMut, number: u32) {
    frame.put_slice(&[0x0a, 8]);
    for shift in (0..32).step_by(4).rev() {
        frame.put_u8(b"0123456789abcdef"[(number >> shift) as usize & 0xf]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_has_the_size_asked_for_and_the_key() {
        let request = request(0xdead_beef);
        assert_eq!(request.len(), framed(SMALLEST));
        for size in [10, 100, 10 * 1024, 1024 * 1024] {
            let reply = reply(&request, size);
            assert_eq!(reply.len(), framed(size));
            assert!(answers(&reply, reply.len(), &request, size));
            assert!(!answers(&reply, reply.len(), &super::request(1), size));
        }
    }

    #[test]
    fn they_are_messages_of_the_demo_service() {
        use collapser_loadgen::proto::{ComputeReply, ComputeRequest};
        use prost::Message as _;
        let asked = request(0x12ab);
        assert_eq!(ComputeRequest::decode(&asked[PREFIX..]).unwrap().key, "000012ab");
        let reply = ComputeReply::decode(&reply(&asked, 10 * 1024)[PREFIX..]).unwrap();
        assert_eq!(reply.key, "000012ab");
        assert!(reply.payload.iter().all(|byte| *byte == b'x') && reply.payload.len() > 10_000);
    }
}
