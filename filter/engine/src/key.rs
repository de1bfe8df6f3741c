//! The key: what makes two requests interchangeable.
//!
//! SHA-256 over material that is unambiguous by construction: a version tag, then every part with
//! its length before it, every header with the number of its values before them. Absent (no value)
//! and empty (one value of length 0) therefore differ, as do `a`,`b` and `ab`. Two requests have the
//! same material only if all parts are equal.
//!
//! Parts, in order: `:path`, `content-type`, `grpc-encoding`, `grpc-accept-encoding` (a reply
//! compressed for one caller must not reach one that cannot read it), then for each key header its
//! name and **all** its values in order, then the body. Of plain HTTP requests the first parts are another version tag,
//! the method, `:scheme`, `:authority`, `:path` and the headers by which a server negotiates (RFC 9110, section 12.5).

use crate::memo::Memo;
use crate::pairs::{Pairs, same};
use sha2::{Digest, Sha256};

/// Changes whenever the material's layout does.
const VERSION: &[u8] = b"collapser/1";

/// The same for plain HTTP. No gRPC key begins like this, since its path begins with a slash.
const HTTP_VERSION: &[u8] = b"collapser/http/1";

/// Headers that are in every key.
const FIXED: [&[u8]; 4] = [b":path", b"content-type", b"grpc-encoding", b"grpc-accept-encoding"];

/// Headers that are in every key of a plain HTTP request.
const HTTP_FIXED: [&[u8]; 8] = [
    b":scheme",
    b":authority",
    b":path",
    b"accept",
    b"accept-charset",
    b"accept-encoding",
    b"accept-language",
    b"content-type",
];

/// A SHA-256 key.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key(pub [u8; 32]);

impl Key {
    /// Two halves of the first 16 bytes, for hash tables.
    pub(crate) fn halves(&self) -> (u64, u64) {
        let half =
            |at: usize| self.0[at..at + 8].iter().rev().fold(0, |acc, byte| acc << 8 | u64::from(*byte));
        (half(0), half(8))
    }
}

impl std::fmt::Debug for Key {
    /// The first eight bytes in hexadecimal: enough to tell keys apart in a log.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().take(8).try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Takes key material. Implemented by the hash and, in tests, by a plain vector.
pub trait Sink {
    /// Takes the next bytes.
    fn put(&mut self, bytes: &[u8]);
}

impl Sink for Sha256 {
    fn put(&mut self, bytes: &[u8]) {
        Digest::update(self, bytes);
    }
}

/// Writes a length in seven bits a byte, the lowest first, the last one without the high bit (LEB128). Most are one byte,
/// and each block of 64 that need not be hashed saves more than all else that is done with the key.
pub(crate) fn put_len(sink: &mut impl Sink, len: usize) {
    let (mut bytes, mut used, mut rest) = ([0_u8; 10], 0, len as u64);
    loop {
        let (low, more) = ((rest & 0x7f) as u8, rest > 0x7f);
        if let Some(byte) = bytes.get_mut(used) {
            *byte = if more { low | 0x80 } else { low };
        }
        used += 1;
        rest >>= 7;
        if !more {
            break;
        }
    }
    sink.put(bytes.get(..used).unwrap_or_default());
}

/// Writes a part with its length before it.
pub(crate) fn put_part(sink: &mut impl Sink, part: &[u8]) {
    put_len(sink, part.len());
    sink.put(part);
}

/// Which of the names are there, a bit each. Most are not, and need not be looked for again. Beyond 64 names, what is not
/// known to be absent counts as there.
fn present(headers: Pairs<'_>, fixed_names: &[&[u8]], key_headers: &[String]) -> u64 {
    let mut present = 0;
    for (header, _) in headers.iter() {
        let fixed = fixed_names.iter().position(|name| same(name, header));
        let at = fixed.or_else(|| {
            let at = key_headers.iter().position(|name| same(name.as_bytes(), header));
            at.map(|at| at + fixed_names.len())
        });
        present |= at.map_or(0, |at| 1_u64.checked_shl(at as u32).unwrap_or(0));
    }
    present
}

fn put_header(sink: &mut impl Sink, headers: Pairs<'_>, name: &[u8], is_there: bool) {
    if !is_there {
        return put_len(sink, 0);
    }
    put_len(sink, headers.all(name).count());
    for value in headers.all(name) {
        put_part(sink, value);
    }
}

/// Writes the key material of a request into `sink`. `key_headers` are lower-case names without
/// repetition, in a fixed order.
pub fn material(sink: &mut impl Sink, headers: Pairs<'_>, body: &[u8], key_headers: &[String]) {
    put_head(sink, headers, body.len(), key_headers);
    sink.put(body);
}

/// All of the material but the body itself, which comes last.
fn put_head(sink: &mut impl Sink, headers: Pairs<'_>, body_len: usize, key_headers: &[String]) {
    put_part(sink, VERSION);
    put_headers(sink, headers, FIXED, key_headers);
    put_len(sink, body_len);
}

/// The same for a plain HTTP request, as if its method were `method`.
fn put_http_head(
    sink: &mut impl Sink,
    method: &[u8],
    headers: Pairs<'_>,
    body_len: usize,
    key_headers: &[String],
) {
    put_part(sink, HTTP_VERSION);
    put_part(sink, method);
    put_headers(sink, headers, HTTP_FIXED, key_headers);
    put_len(sink, body_len);
}

fn put_headers<const N: usize>(
    sink: &mut impl Sink,
    headers: Pairs<'_>,
    fixed: [&[u8]; N],
    key_headers: &[String],
) {
    let present = present(headers, &fixed, key_headers);
    let is_there = |at: usize| at >= 64 || present & 1 << at != 0;
    for (at, name) in fixed.into_iter().enumerate() {
        put_header(sink, headers, name, is_there(at));
    }
    put_len(sink, key_headers.len());
    for (at, name) in (N..).zip(key_headers) {
        put_part(sink, name.as_bytes());
        put_header(sink, headers, name.as_bytes(), is_there(at));
    }
}

/// The key of a request.
pub fn derive(headers: Pairs<'_>, body: &[u8], key_headers: &[String]) -> Key {
    let mut hash = Sha256::new();
    material(&mut hash, headers, body, key_headers);
    Key(hash.finalize().into())
}

/// Derives keys, and need not hash what came before.
#[derive(Debug)]
pub struct Keyer {
    key_headers: Vec<String>,
    memo: Memo,
    /// Kept, so that a key allocates nothing.
    head: Vec<u8>,
}

impl Sink for Vec<u8> {
    fn put(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }
}

impl Keyer {
    /// A keyer with these key headers, see [`material`].
    pub fn new(key_headers: Vec<String>) -> Self {
        Self { key_headers, memo: Memo::default(), head: Vec::new() }
    }

    /// A number that is the same for requests with the same key. Others may share it, but hardly any do. Far cheaper than a
    /// key, and another one in each worker.
    pub fn tag(&mut self, headers: Pairs<'_>, body: &[u8]) -> u64 {
        self.put_head(headers, body);
        self.memo.tag(&self.head, body)
    }

    fn put_head(&mut self, headers: Pairs<'_>, body: &[u8]) {
        self.head.clear();
        put_head(&mut self.head, headers, body.len(), &self.key_headers);
    }

    /// The key of a request, which is always that of [`derive()`].
    pub fn key(&mut self, headers: Pairs<'_>, body: &[u8]) -> Key {
        self.put_head(headers, body);
        self.key_of_head(body)
    }

    /// The key of a plain HTTP request, as if its method were `method`.
    pub fn http_key(&mut self, method: &[u8], headers: Pairs<'_>, body: &[u8]) -> Key {
        self.head.clear();
        put_http_head(&mut self.head, method, headers, body.len(), &self.key_headers);
        self.key_of_head(body)
    }

    /// Whether a header is in the key of each plain HTTP request.
    pub fn has_in_http(&self, name: &[u8]) -> bool {
        HTTP_FIXED.contains(&name) || self.key_headers.iter().any(|header| header.as_bytes() == name)
    }

    fn key_of_head(&mut self, body: &[u8]) -> Key {
        let head = &self.head;
        self.memo.key(head, body, || {
            let mut hash = Sha256::new();
            Digest::update(&mut hash, head);
            Digest::update(&mut hash, body);
            Key(hash.finalize().into())
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::pairs::PairsBuilder;
    use crate::testing::{runner, test};
    use proptest::prelude::*;

    /// A key that differs from every other `number`'s, without hashing.
    pub(crate) fn numbered(number: u32) -> Key {
        let mut bytes = [0; 32];
        bytes[..4].copy_from_slice(&number.to_le_bytes());
        Key(bytes)
    }

    type Headers = Vec<(String, Vec<u8>)>;

    fn block(headers: &Headers) -> Box<[u8]> {
        let mut builder = PairsBuilder::default();
        for (name, value) in headers {
            builder.push(name.as_bytes(), value);
        }
        builder.build()
    }

    /// What the key is meant to tell apart: for each keyed name its values in order, and the body.
    fn meaning(headers: &Headers, body: &[u8], names: &[String]) -> (Vec<Vec<Vec<u8>>>, Vec<u8>) {
        let keyed = FIXED.iter().map(|n| n.to_vec()).chain(names.iter().map(|n| n.as_bytes().to_vec()));
        let values = keyed
            .map(|name| {
                headers.iter().filter(|(n, _)| n.as_bytes() == name).map(|(_, v)| v.clone()).collect()
            })
            .collect();
        (values, body.to_vec())
    }

    fn material_of(headers: &Headers, body: &[u8], names: &[String]) -> Vec<u8> {
        let block = block(headers);
        let mut out = Vec::new();
        material(&mut out, Pairs::parse(&block).unwrap(), body, names);
        out
    }

    fn headers() -> impl Strategy<Value = Headers> {
        // Few names and tiny alphabets, with NUL and separators, so that near collisions are common.
        let name = prop::sample::select(vec![
            ":path",
            "content-type",
            "grpc-encoding",
            "grpc-accept-encoding",
            "authorization",
            "x",
            "other",
        ]);
        let value = prop::collection::vec(prop::sample::select(vec![0u8, 1, b'a', b',', b';']), 0..3);
        prop::collection::vec((name.prop_map(String::from), value), 0..5)
    }

    #[test]
    fn material_is_equal_exactly_when_the_meaning_is() {
        let names = vec!["authorization".to_string(), "x".to_string()];
        let body = || prop::collection::vec(prop::sample::select(vec![0u8, 1, b'a']), 0..3);
        runner(if cfg!(target_arch = "wasm32") { 2_000 } else { 20_000 })
            .run(&((headers(), body()), (headers(), body())), |((h1, b1), (h2, b2))| {
                let same_meaning = meaning(&h1, &b1, &names) == meaning(&h2, &b2, &names);
                let same_material = material_of(&h1, &b1, &names) == material_of(&h2, &b2, &names);
                prop_assert_eq!(same_meaning, same_material);
                Ok(())
            })
            .unwrap();
    }

    #[test]
    fn no_material_is_a_prefix_of_another() {
        let names = vec!["x".to_string()];
        runner(2_000)
            .run(&(headers(), headers()), |(h1, h2)| {
                let (m1, m2) = (material_of(&h1, b"", &names), material_of(&h2, b"a", &names));
                prop_assert!(!m2.starts_with(&m1) && !m1.starts_with(&m2));
                Ok(())
            })
            .unwrap();
    }

    #[test]
    fn a_keyer_derives_the_same_keys_however_often() {
        let names = vec!["x".to_string()];
        let keyer = std::cell::RefCell::new(Keyer::new(names.clone()));
        runner(2_000)
            .run(&(headers(), prop::collection::vec(0u8..2, 0..3)), |(headers, body)| {
                let block = block(&headers);
                let headers = Pairs::parse(&block).unwrap();
                for _ in 0..3 {
                    let tag = keyer.borrow_mut().tag(headers, &body);
                    prop_assert_eq!(keyer.borrow_mut().tag(headers, &body), tag);
                    let key = keyer.borrow_mut().key(headers, &body);
                    prop_assert_eq!(key, derive(headers, &body, &names));
                }
                Ok(())
            })
            .unwrap();
    }

    #[test]
    fn each_part_of_an_http_request_counts_and_nothing_else_does() {
        let all = [
            (":scheme", "https"),
            (":authority", "shop"),
            (":path", "/a?b"),
            ("accept", "text/html"),
            ("accept-encoding", "gzip"),
            ("accept-language", "de"),
            ("x", "1"),
        ];
        let mut keyer = Keyer::new(vec!["x".to_string()]);
        let mut of = |method: &str, pairs: &[(&str, &str)], body: &[u8]| {
            keyer.http_key(method.as_bytes(), Pairs::parse(&crate::pairs::block(pairs)).unwrap(), body)
        };
        let mut keys = std::collections::HashSet::from([of("GET", &all, b""), of("HEAD", &all, b"")]);
        keys.insert(of("GET", &all, b"a"));
        for at in 0..all.len() {
            let mut changed = all;
            changed[at].1 = "other";
            keys.insert(of("GET", &changed, b""));
            changed[at].0 = "y";
            keys.insert(of("GET", &changed, b""));
        }
        assert_eq!(keys.len(), 3 + 2 * all.len());
        let mut more = all.to_vec();
        more.extend([(":method", "HEAD"), ("user-agent", "u"), ("if-none-match", "*")]);
        assert_eq!(of("GET", &all, b""), of("GET", &more, b""));
        let grpc = key(&all, b"", &["x"]);
        assert!(!keys.contains(&grpc));
    }

    fn key(pairs: &[(&str, &str)], body: &[u8], names: &[&str]) -> Key {
        let names: Vec<String> = names.iter().map(|n| n.to_string()).collect();
        derive(Pairs::parse(&crate::pairs::block(pairs)).unwrap(), body, &names)
    }

    #[test]
    fn each_of_a_hundred_key_headers_counts() {
        let names: Vec<String> = (0..100).map(|n| format!("x{n:03}")).collect();
        let of =
            |pairs: &[(&str, &str)]| derive(Pairs::parse(&crate::pairs::block(pairs)).unwrap(), b"", &names);
        let all: std::collections::HashSet<_> = names.iter().map(|name| of(&[(name, "")])).collect();
        assert_eq!(all.len(), 100);
        assert!(!all.contains(&of(&[])));
    }

    #[test]
    fn the_second_value_counts() {
        let names = ["x-tenant-id"];
        let one = key(&[("x-tenant-id", "a"), ("x-tenant-id", "b")], b"", &names);
        assert_ne!(one, key(&[("x-tenant-id", "a"), ("x-tenant-id", "c")], b"", &names));
        assert_ne!(one, key(&[("x-tenant-id", "b"), ("x-tenant-id", "a")], b"", &names));
        assert_ne!(one, key(&[("x-tenant-id", "a")], b"", &names));
        assert_ne!(one, key(&[("x-tenant-id", "a,b")], b"", &names));
    }

    #[test]
    fn absent_differs_from_empty() {
        assert_ne!(key(&[], b"", &["x"]), key(&[("x", "")], b"", &["x"]));
    }

    #[test]
    fn headers_outside_the_key_do_not_matter() {
        assert_eq!(key(&[("traceparent", "1")], b"m", &["x"]), key(&[("traceparent", "2")], b"m", &["x"]));
    }

    #[test]
    fn the_key_is_the_same_on_every_target() {
        let key = key(
            &[(":path", "/a.B/C"), ("content-type", "application/grpc"), ("x", "1")],
            b"\0\0\0\0\0",
            &["x"],
        );
        assert_eq!(format!("{key:?}"), GOLDEN);
    }

    /// Worked out by hand from the layout above with another SHA-256; if the layout changes, so must
    /// [`VERSION`].
    const GOLDEN: &str = "1829ec7c27118c5d";
}
