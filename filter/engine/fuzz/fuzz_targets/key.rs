//! Any two header blocks and bodies: equal key material exactly if all that is keyed is equal.
#![no_main]

use collapser_engine::key::{Sink, material};
use collapser_engine::pairs::Pairs;
use libfuzzer_sys::fuzz_target;

struct Bytes(Vec<u8>);

impl Sink for Bytes {
    fn put(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }
}

const KEYED: [&[u8]; 6] = [b":path", b"content-type", b"grpc-encoding", b"grpc-accept-encoding", b"a", b"b"];

fn meaning<'a>(headers: Pairs<'a>, body: &'a [u8]) -> (Vec<Vec<&'a [u8]>>, &'a [u8]) {
    (KEYED.iter().map(|name| headers.all(name).collect()).collect(), body)
}

fn written(headers: Pairs<'_>, body: &[u8]) -> Vec<u8> {
    let mut bytes = Bytes(Vec::new());
    material(&mut bytes, headers, body, &["a".to_string(), "b".to_string()]);
    bytes.0
}

fuzz_target!(|parts: (&[u8], &[u8], &[u8], &[u8])| {
    let (block, body, other_block, other_body) = parts;
    let (Some(headers), Some(others)) = (Pairs::parse(block), Pairs::parse(other_block)) else { return };
    let same = meaning(headers, body) == meaning(others, other_body);
    assert_eq!(same, written(headers, body) == written(others, other_body));
});
