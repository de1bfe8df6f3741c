//! Typical requests, keys and replies.

use collapser_engine::key::Key;
use collapser_engine::pairs;
use collapser_engine::reply::Reply;

/// The headers of a typical gRPC request with `extra` headers more, as the host hands them out.
pub fn request_headers(extra: usize) -> Box<[u8]> {
    let mut headers = pairs::PairsBuilder::default();
    for (name, value) in [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/collapser.demo.v1.Demo/Compute"),
        (":authority", "demo.default.svc.cluster.local:50052"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        ("user-agent", "grpc-go/1.70.0"),
        ("grpc-accept-encoding", "gzip"),
        ("x-request-id", "f1c2a9a0-5f0e-4a3c-9b93-3a1f0d3a4c11"),
    ] {
        headers.push(name.as_bytes(), value.as_bytes());
    }
    for n in 0..extra {
        headers.push(header_name(n).as_bytes(), b"Bearer 0123456789abcdef0123456789abcdef");
    }
    headers.build()
}

/// The name of the `n`th extra header.
pub fn header_name(n: usize) -> String {
    format!("x-key-header-{n}")
}

/// A body of one message of `size` bytes.
pub fn body(size: usize) -> Vec<u8> {
    let mut body = vec![0];
    body.extend_from_slice(&(size as u32).to_be_bytes());
    body.resize(body.len() + size, b'm');
    body
}

/// A key that looks like a hash and differs from every other `number`'s.
pub fn key(number: u64) -> Key {
    let mut bytes = [0; 32];
    let mut state = number;
    for part in bytes.chunks_exact_mut(8) {
        // SplitMix64: spreads counters over all bits.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        part.copy_from_slice(&(mixed ^ (mixed >> 31)).to_le_bytes());
    }
    Key(bytes)
}

/// A successful reply of one message of `size` bytes.
pub fn reply(size: usize) -> Reply {
    let headers = pairs::block(&[(":status", "200"), ("content-type", "application/grpc")]);
    Reply::record(&headers, body(size), &pairs::block(&[("grpc-status", "0")]))
}
