//! Any bytes as an upstream response: whatever is recorded can be replayed.
#![no_main]

use collapser_engine::pairs::Pairs;
use collapser_engine::reply::{Reply, Shape};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|parts: (&[u8], &[u8], &[u8])| {
    let (headers, trailers, body) = parts;
    let reply = Reply::record(headers, body.to_vec(), trailers);
    let headers = Pairs::parse(&reply.headers).expect("headers can be read");
    let trailers = Pairs::parse(&reply.trailers).expect("trailers can be read");
    assert!(headers.first(b":status").is_some());
    match reply.shape {
        Shape::TrailersOnly => assert!(headers.first(b"grpc-status").is_some() && reply.body.is_empty()),
        Shape::Full => assert!(trailers.first(b"grpc-status").is_some()),
        Shape::Http => unreachable!("recorded as gRPC"),
    }
});
