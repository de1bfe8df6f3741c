//! The recorded reply of an upstream call, ready to be replayed.
//!
//! Recording is where whatever the upstream sent becomes something that a gRPC caller can be
//! given: hop-by-hop headers go, a response that is no gRPC becomes a gRPC error, a response
//! without a status gets one. A plain HTTP caller is given what came, an `age` and a `content-length` aside, which are
//! the answer's own. Replaying then copies nothing inside the filter.

use crate::framing::{self, Framing};
use crate::grpc::{self, Code};
use crate::key::Key;
use crate::life::Life;
use crate::pairs::{Pairs, PairsBuilder};
use crate::wire::{self, Reader};

/// What an entry costs besides its bytes: links, index and bookkeeping, rounded up.
const OVERHEAD: usize = 256;

/// The header with which the filter asks for a body slot, see the proxy-wasm layer. A backend that
/// sends it must not be able to trigger that.
pub const MARKER: &str = "x-collapser-slot";

/// Response headers that belong to one hop (RFC 9110, section 7.6.1), or that Envoy sets itself.
const HOP_BY_HOP: [&[u8]; 8] = [
    b"connection",
    b"keep-alive",
    b"proxy-connection",
    b"transfer-encoding",
    b"upgrade",
    b"content-length",
    b"x-envoy-upstream-service-time",
    MARKER.as_bytes(),
];

/// How the response looks on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Headers only, with the status among them (gRPC over HTTP/2, "Trailers-Only").
    TrailersOnly,
    /// Headers, perhaps a body, and trailers with the status.
    Full,
    /// Plain HTTP: headers, perhaps a body, perhaps trailers.
    Http,
}

/// Who may be given a reply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Share {
    /// Whoever asks the same.
    #[default]
    Anyone,
    /// Whoever's request has this key, which holds headers that the reply's `vary` names too.
    Variant(Key),
    /// The one who made the call. Everybody else makes their own.
    Leader,
    /// Nobody here: the one who made the call is at another worker.
    Nobody,
}

/// What an encoded reply has besides headers, body, trailers and a variant's key, in bytes: flags, code, life and three
/// lengths.
const ENCODED_HEAD: usize = 1 + 4 + Life::ENCODED + 3 * 4;

/// Flag of an encoded reply: its shape is [`Shape::Full`].
const FULL: u8 = 1;

/// Flag of an encoded reply: it is [`Reply::streamed`].
const STREAMED: u8 = 2;

/// Flag of an encoded reply: its shape is [`Shape::Http`].
const HTTP: u8 = 4;

/// Flag of an encoded reply: it is a variant, whose key follows.
const VARIANT: u8 = 8;

/// Flag of an encoded reply: it is for nobody here.
const NOBODY: u8 = 16;

/// A reply as it is replayed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// Headers with `:status`, in the host's form.
    pub headers: Box<[u8]>,
    /// Message bytes, framing included.
    pub body: Vec<u8>,
    /// Trailers in the host's form; empty for [`Shape::TrailersOnly`].
    pub trailers: Box<[u8]>,
    /// Whether there is a body and trailers to replay.
    pub shape: Shape,
    /// The gRPC status; of a plain HTTP reply, that which a gRPC client would make of it, and OK up to status 399.
    pub code: Code,
    /// The HTTP status.
    pub status: u16,
    /// Whether the body held more than one message, which tells that the method streams.
    pub streamed: bool,
    /// Who may be given it.
    pub share: Share,
    /// Until when.
    pub life: Life,
}

impl Reply {
    /// A failure that the filter itself reports.
    pub fn failure(code: Code, message: &str) -> Self {
        let mut headers = PairsBuilder::default();
        headers.push(b":status", b"200").push(b"content-type", b"application/grpc");
        push_status(&mut headers, code, message);
        Self::without_body(headers.build(), code)
    }

    fn without_body(headers: Box<[u8]>, code: Code) -> Self {
        Self {
            headers,
            body: Vec::new(),
            trailers: Box::default(),
            shape: Shape::TrailersOnly,
            code,
            status: 200,
            streamed: false,
            share: Share::Anyone,
            life: Life::default(),
        }
    }

    /// A plain HTTP failure that the filter itself reports.
    pub fn http_failure(status: u16, message: &str) -> Self {
        let mut headers = PairsBuilder::default();
        headers.push(b":status", status.to_string().as_bytes()).push(b"content-type", b"text/plain");
        headers.push(b"cache-control", b"no-store");
        Self::http(headers, status, message.as_bytes().to_vec(), Box::default())
    }

    /// Word for another worker that a reply is not for those who wait there.
    pub fn for_nobody() -> Self {
        Self { share: Share::Nobody, ..Self::without_body(Box::default(), Code::OK) }
    }

    /// Records an upstream response to a plain HTTP request other than HEAD: header blocks as the host hands them out, and
    /// the body.
    pub fn record_http(headers: &[u8], body: Vec<u8>, trailers: &[u8]) -> Self {
        let (Some(headers), Some(trailers)) = (Pairs::parse(headers), Pairs::parse(trailers)) else {
            return Self::http_failure(502, "collapser: unreadable headers in the upstream's response\n");
        };
        let Some(status) = http_status(headers) else { return Self::http_failure(502, ABORTED) };
        let mut kept = PairsBuilder::with_capacity(headers.len() + 1);
        let named = |name: &[u8]| connection_names(headers).any(|named| named.eq_ignore_ascii_case(name));
        // Its age is told anew to each who is given it.
        let stays = |name: &[u8]| !is_hop_by_hop(name) && name != b"age" && !named(name);
        headers.iter().filter(|(name, _)| stays(name)).for_each(|(name, value)| {
            kept.push(name, value);
        });
        Self::http(kept, status, body, endtoend(trailers).build())
    }

    fn http(mut headers: PairsBuilder, status: u16, body: Vec<u8>, trailers: Box<[u8]>) -> Self {
        let is_empty = Pairs::parse(&trailers).is_none_or(|trailers| trailers.is_empty());
        // A length and trailers do not go together in HTTP/1.
        if is_empty && !matches!(status, 100..=199 | 204 | 304) {
            headers.push(b"content-length", body.len().to_string().as_bytes());
        }
        Self {
            headers: headers.build(),
            body,
            trailers: if is_empty { Box::default() } else { trailers },
            shape: Shape::Http,
            code: code_of(status),
            status,
            streamed: false,
            share: Share::Anyone,
            life: Life::default(),
        }
    }

    /// Records an upstream response: header blocks as the host hands them out, and the body.
    pub fn record(headers: &[u8], body: Vec<u8>, trailers: &[u8]) -> Self {
        let (Some(headers), Some(trailers)) = (Pairs::parse(headers), Pairs::parse(trailers)) else {
            return Self::failure(Code::INTERNAL, "collapser: unreadable headers in the upstream's response");
        };
        if let Some(failure) = unusable(headers) {
            return failure;
        }
        let status =
            |pairs: Pairs<'_>| pairs.first(b"grpc-status").map(|v| Code::parse(v).unwrap_or(Code::UNKNOWN));
        if let Some(code) = status(headers) {
            return Self::trailers_only(headers, trailers, code);
        }
        let framing = framing::inspect(&body, body.len());
        if framing == Framing::Partial {
            return Self::failure(
                Code::INTERNAL,
                "collapser: the upstream's response ended within a message",
            );
        }
        let Some(code) = status(trailers) else {
            return Self::failure(
                Code::UNKNOWN,
                "collapser: the upstream's response ended without a grpc-status",
            );
        };
        Self {
            headers: endtoend(headers).build(),
            body,
            trailers: endtoend(trailers).build(),
            shape: Shape::Full,
            code,
            status: 200,
            streamed: framing == Framing::More,
            share: Share::Anyone,
            life: Life::default(),
        }
    }

    fn trailers_only(headers: Pairs<'_>, trailers: Pairs<'_>, code: Code) -> Self {
        let mut all = endtoend(headers);
        trailers.iter().filter(|(name, _)| !is_hop_by_hop(name)).for_each(|(n, v)| {
            all.push(n, v);
        });
        Self::without_body(all.build(), code)
    }

    /// Whether the call succeeded.
    pub fn is_ok(&self) -> bool {
        self.code == Code::OK
    }

    /// Whether a cookie is set in its trailers, where nobody should look for one, but somebody may.
    pub fn sets_late_cookie(&self) -> bool {
        Pairs::parse(&self.trailers).is_some_and(|trailers| trailers.first(b"set-cookie").is_some())
    }

    /// Whether this tells what there is now, and not only that one caller, or a part of the content, has to be treated
    /// differently (HTTP: RFC 9110, sections 15.2, 15.3.7 and 15.4.5; RFC 6585).
    pub fn is_about_content(&self) -> bool {
        match self.shape {
            Shape::Http => !matches!(self.status, 100..=199 | 206 | 304 | 428 | 429 | 431 | 511),
            _ => self.code != Code::RESOURCE_EXHAUSTED,
        }
    }

    /// Whether this is Envoy's own word that its timer for the call ran out. An upstream that is an Envoy may say the
    /// same of a call of its own.
    pub fn is_envoys_timeout(&self) -> bool {
        if self.shape == Shape::Http {
            return self.status == 504 && self.body == b"upstream request timeout";
        }
        let message = Pairs::parse(&self.headers).and_then(|headers| headers.first(b"grpc-message"));
        self.code == Code::UNAVAILABLE && message == Some(b"upstream request timeout")
    }

    /// Whether Envoy takes this reply while the request is being read. FACT: it then drops the
    /// trailers of a reply without a message (seen with 1.36.4, gone in 1.40.0).
    pub fn can_answer_at_once(&self) -> bool {
        self.shape != Shape::Full || !self.body.is_empty()
    }

    /// The headers, with more of them behind.
    pub fn headers_with(&self, more: &[(&str, &str)]) -> Box<[u8]> {
        let Some(headers) = Pairs::parse(&self.headers) else { return self.headers.clone() };
        let mut all = PairsBuilder::with_capacity(headers.len() + more.len());
        headers.iter().for_each(|(name, value)| {
            all.push(name, value);
        });
        more.iter().for_each(|(name, value)| {
            all.push(name.as_bytes(), value.as_bytes());
        });
        all.build()
    }

    /// The bytes that keeping this reply takes.
    pub fn weight(&self) -> usize {
        self.headers.len() + self.body.len() + self.trailers.len() + OVERHEAD
    }

    /// The bytes that [`Self::encode`] writes.
    pub fn encoded_len(&self) -> usize {
        let variant = if matches!(self.share, Share::Variant(_)) { 32 } else { 0 };
        ENCODED_HEAD + variant + self.headers.len() + self.body.len() + self.trailers.len()
    }

    /// Writes the reply for other workers behind what is in `out`, which grows once at most. What is for the leader
    /// alone becomes what is for nobody.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.reserve(self.encoded_len());
        out.push(self.flags());
        let number = if self.shape == Shape::Http { u32::from(self.status) } else { self.code.0 };
        out.extend_from_slice(&number.to_le_bytes());
        self.life.encode(out);
        if let Share::Variant(key) = self.share {
            out.extend_from_slice(&key.0);
        }
        wire::put_bytes(out, &self.headers);
        wire::put_bytes(out, &self.trailers);
        wire::put_bytes(out, &self.body);
    }

    fn flags(&self) -> u8 {
        let shape = match self.shape {
            Shape::TrailersOnly => 0,
            Shape::Full => FULL,
            Shape::Http => HTTP,
        };
        let share = match self.share {
            Share::Anyone => 0,
            Share::Variant(_) => VARIANT,
            Share::Leader | Share::Nobody => NOBODY,
        };
        shape | share | if self.streamed { STREAMED } else { 0 }
    }

    /// Reads what [`Self::encode`] wrote and nothing else: whatever is read here can be replayed.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader::new(bytes);
        let flags = reader.u8()?;
        let number = reader.u32()?;
        let life = Life::decode(&mut reader)?;
        let share = match flags & (VARIANT | NOBODY) {
            0 => Share::Anyone,
            VARIANT => Share::Variant(Key(reader.array()?)),
            NOBODY => Share::Nobody,
            _ => return None,
        };
        let (shape, status) = match flags & (FULL | HTTP) {
            0 => (Shape::TrailersOnly, 200),
            FULL => (Shape::Full, 200),
            HTTP => (Shape::Http, u16::try_from(number).ok()?),
            _ => return None,
        };
        let code = if shape == Shape::Http { code_of(status) } else { Code(number) };
        let (headers, trailers, body) = (reader.bytes()?, reader.bytes()?, reader.bytes()?);
        let fits = shape != Shape::TrailersOnly || (trailers.is_empty() && body.is_empty());
        let is_known = flags & !(FULL | STREAMED | HTTP | VARIANT | NOBODY) == 0;
        let is_readable = Pairs::parse(headers).is_some() && Pairs::parse(trailers).is_some();
        if !fits || !is_known || !is_readable || !reader.is_empty() {
            return None;
        }
        Some(Self {
            headers: headers.into(),
            body: body.to_vec(),
            trailers: trailers.into(),
            shape,
            code,
            status,
            streamed: flags & STREAMED != 0,
            share,
            life,
        })
    }
}

/// What a gRPC client would make of an HTTP status; anything up to 399 is no failure.
fn code_of(status: u16) -> Code {
    if status < 400 { Code::OK } else { Code::from_http(u32::from(status)) }
}

fn http_status(headers: Pairs<'_>) -> Option<u16> {
    let status = std::str::from_utf8(headers.first(b":status")?).ok()?.parse().ok()?;
    (100..=999).contains(&status).then_some(status)
}

/// What callers are told when Envoy says of a call only that it is over.
const ABORTED: &str = "collapser: the upstream call was aborted: its connection broke, or its reply is larger than Envoy takes (32 MiB)";

/// The gRPC error for a response that is no gRPC response at all, as a gRPC client would report it
/// (gRPC "HTTP to gRPC Status Code Mapping").
fn unusable(headers: Pairs<'_>) -> Option<Reply> {
    let status = headers.first(b":status").and_then(|v| std::str::from_utf8(v).ok()?.parse::<u32>().ok());
    let Some(status) = status else {
        return Some(Reply::failure(Code::UNAVAILABLE, ABORTED));
    };
    let content_type = headers.first(b"content-type").unwrap_or_default();
    let is_grpc = grpc::is_grpc_content_type(content_type);
    if headers.first(b"grpc-status").is_some() || (status == 200 && is_grpc) {
        return None;
    }
    let code = if status == 200 { Code::UNKNOWN } else { Code::from_http(status) };
    let content_type = String::from_utf8_lossy(content_type);
    let message = format!(
        "collapser: the upstream answered HTTP {status} with content-type \"{content_type}\" instead of gRPC"
    );
    Some(Reply::failure(code, &message))
}

fn push_status(headers: &mut PairsBuilder, code: Code, message: &str) {
    headers.push(b"grpc-status", code.0.to_string().as_bytes());
    headers.push(b"grpc-message", grpc::encode_message(message).as_bytes());
}

fn is_hop_by_hop(name: &[u8]) -> bool {
    HOP_BY_HOP.contains(&name)
}

/// The headers that are this hop's by its own word (RFC 9110, section 7.6.1).
fn connection_names(headers: Pairs<'_>) -> impl Iterator<Item = &[u8]> {
    headers.all(b"connection").flat_map(|value| value.split(|byte| *byte == b',')).map(<[u8]>::trim_ascii)
}

fn endtoend(pairs: Pairs<'_>) -> PairsBuilder {
    let mut kept = PairsBuilder::default();
    for (name, value) in pairs.iter().filter(|(name, _)| !is_hop_by_hop(name)) {
        kept.push(name, value);
    }
    kept
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::pairs::block;
    use crate::testing::{runner, test};
    use proptest::prelude::*;

    /// A successful reply that weighs `extra` more than the lightest one.
    pub(crate) fn of_weight(extra: usize) -> Reply {
        let mut body = vec![0];
        body.extend_from_slice(&(extra as u32).to_be_bytes());
        body.resize(body.len() + extra, b'x');
        Reply::record(&grpc_headers(), body, &block(&[("grpc-status", "0")]))
    }

    fn grpc_headers() -> Box<[u8]> {
        block(&[(":status", "200"), ("content-type", "application/grpc")])
    }

    fn header<'a>(of: &'a [u8], name: &str) -> Option<&'a str> {
        Pairs::parse(of).unwrap().first(name.as_bytes()).map(|v| std::str::from_utf8(v).unwrap())
    }

    const ONE: &[u8] = b"\0\0\0\0\x01a";

    #[test]
    fn cookies_in_trailers_are_seen() {
        let headers = block(&[(":status", "200"), ("set-cookie", "a=b")]);
        let recorded = |trailers: &[(&str, &str)]| Reply::record_http(&headers, Vec::new(), &block(trailers));
        assert!(recorded(&[("x", "y"), ("set-cookie", "a=b")]).sets_late_cookie());
        for trailers in [&[][..], &[("x", "set-cookie")]] {
            assert!(!recorded(trailers).sets_late_cookie());
        }
    }

    #[test]
    fn what_is_about_one_caller_is_not_about_the_content() {
        let is_about = |status: u16| Reply::http_failure(status, "").is_about_content();
        for status in [200, 204, 301, 401, 403, 404, 410, 503] {
            assert!(is_about(status), "{status}");
        }
        for status in [103, 206, 304, 428, 429, 431, 511] {
            assert!(!is_about(status), "{status}");
        }
        assert!(Reply::failure(Code(5), "").is_about_content());
        assert!(!Reply::failure(Code::RESOURCE_EXHAUSTED, "").is_about_content());
    }

    #[test]
    fn a_good_reply_is_kept_as_it_is() {
        let headers =
            block(&[(":status", "200"), ("content-type", "application/grpc+proto"), ("a", "1"), ("a", "2")]);
        let trailers = block(&[("grpc-status", "0"), ("grpc-message", "%C3%A4"), ("x-bin", "AAA=")]);
        let reply = Reply::record(&headers, ONE.to_vec(), &trailers);
        assert_eq!((reply.shape, reply.code, reply.streamed), (Shape::Full, Code::OK, false));
        assert_eq!((&*reply.headers, &*reply.body, &*reply.trailers), (&*headers, ONE, &*trailers));
    }

    #[test]
    fn hop_by_hop_headers_and_the_marker_are_dropped() {
        let headers = block(&[
            (":status", "200"),
            ("content-type", "application/grpc"),
            ("connection", "close"),
            (MARKER, "1"),
            ("content-length", "6"),
        ]);
        let reply = Reply::record(&headers, ONE.to_vec(), &block(&[("grpc-status", "0"), (MARKER, "1")]));
        assert_eq!(reply.headers, grpc_headers());
        assert_eq!(reply.trailers, block(&[("grpc-status", "0")]));
    }

    #[test]
    fn trailers_only_stays_trailers_only() {
        let headers = block(&[
            (":status", "200"),
            ("content-type", "application/grpc"),
            ("grpc-status", "5"),
            ("grpc-message", "nope"),
        ]);
        let reply = Reply::record(&headers, Vec::new(), &[]);
        assert_eq!((reply.shape, reply.code), (Shape::TrailersOnly, Code(5)));
        assert_eq!(reply.headers, headers);
    }

    #[test]
    fn envoys_timeout_is_known_by_its_words() {
        let said = |code: &str, message: &str| {
            let headers = block(&[
                (":status", "200"),
                ("content-type", "application/grpc"),
                ("grpc-status", code),
                ("grpc-message", message),
            ]);
            Reply::record(&headers, Vec::new(), &[]).is_envoys_timeout()
        };
        assert!(said("14", "upstream request timeout"));
        assert!(!said("4", "upstream request timeout"));
        assert!(!said("14", "upstream connect error"));
    }

    #[test]
    fn what_is_no_grpc_becomes_a_grpc_error() {
        type Case<'a> = (&'a [(&'a str, &'a str)], u32, &'a str);
        let cases: [Case<'_>; 5] = [
            (&[(":status", "503"), ("content-type", "text/plain")], 14, "HTTP 503"),
            (&[(":status", "200"), ("content-type", "text/html")], 2, "text/html"),
            (&[(":status", "404")], 12, "HTTP 404"),
            (&[(":status", "200")], 2, "HTTP 200"),
            (&[], 14, "aborted"),
        ];
        for (headers, code, words) in cases {
            let reply = Reply::record(&block(headers), b"<html>".to_vec(), &[]);
            assert_eq!((reply.shape, reply.code), (Shape::TrailersOnly, Code(code)), "{headers:?}");
            assert!(header(&reply.headers, "grpc-message").unwrap().contains(words), "{headers:?}");
            assert_eq!(header(&reply.headers, ":status"), Some("200"));
        }
    }

    #[test]
    fn a_response_cut_short_is_an_error() {
        let cut = Reply::record(&grpc_headers(), ONE[..5].to_vec(), &block(&[("grpc-status", "0")]));
        assert_eq!(cut.code, Code::INTERNAL);
        let no_status = Reply::record(&grpc_headers(), ONE.to_vec(), &[]);
        assert_eq!(no_status.code, Code::UNKNOWN);
        let odd_status = Reply::record(&grpc_headers(), ONE.to_vec(), &block(&[("grpc-status", "ok")]));
        assert_eq!((odd_status.code, odd_status.shape), (Code::UNKNOWN, Shape::Full));
        let nonsense = Reply::record(b"\xff\xff\xff\xff", ONE.to_vec(), &[]);
        assert_eq!(nonsense.code, Code::INTERNAL);
    }

    #[test]
    fn more_than_one_message_is_noticed() {
        let reply = Reply::record(&grpc_headers(), [ONE, ONE].concat(), &block(&[("grpc-status", "0")]));
        assert!(reply.streamed && reply.is_ok());
    }

    #[test]
    fn an_error_with_headers_and_trailers_keeps_both() {
        let trailers = block(&[("grpc-status", "9"), ("grpc-message", "x"), ("detail", "1")]);
        let reply = Reply::record(&grpc_headers(), Vec::new(), &trailers);
        assert_eq!((reply.shape, reply.code), (Shape::Full, Code(9)));
        assert_eq!(&*reply.trailers, &*trailers);
    }

    #[test]
    fn a_failure_of_our_own_is_percent_encoded() {
        let reply = Reply::failure(Code::UNAVAILABLE, "ä");
        assert_eq!(header(&reply.headers, "grpc-message"), Some("%C3%A4"));
        assert_eq!(header(&reply.headers, "grpc-status"), Some("14"));
    }

    fn replies() -> impl Strategy<Value = Reply> {
        let pairs = prop::collection::vec(("[a-z:]{0,8}", "[ -~]{0,8}"), 0..4).prop_map(|pairs| {
            let pairs: Vec<_> = pairs.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
            block(&pairs)
        });
        let body = prop::collection::vec(any::<u8>(), 0..40);
        (pairs.clone(), pairs, body, any::<(bool, u32, bool)>()).prop_map(
            |(headers, trailers, body, (full, code, streamed))| {
                let (shape, code) = (if full { Shape::Full } else { Shape::TrailersOnly }, Code(code));
                let (body, trailers) = if full { (body, trailers) } else { Default::default() };
                let (share, life, status) = (Share::Anyone, Life::default(), 200);
                Reply { headers, body, trailers, shape, code, status, streamed, share, life }
            },
        )
    }

    #[test]
    fn an_encoded_reply_is_read_as_it_was() {
        runner(if cfg!(target_arch = "wasm32") { 200 } else { 2_000 })
            .run(&replies(), |reply| {
                let mut out = b"before".to_vec();
                reply.encode(&mut out);
                prop_assert_eq!(out.len(), 6 + reply.encoded_len());
                prop_assert_eq!(Reply::decode(&out[6..]), Some(reply));
                prop_assert_eq!(Reply::decode(&out[6..out.len() - 1]), None);
                out.push(0);
                prop_assert_eq!(Reply::decode(&out[6..]), None);
                Ok(())
            })
            .unwrap();
    }

    #[test]
    fn whatever_is_read_as_a_reply_can_be_written_again() {
        // An encoded reply with some bytes changed: plain noise would be refused at its first length.
        let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4);
        runner(if cfg!(target_arch = "wasm32") { 200 } else { 5_000 })
            .run(&(replies(), changes), |(reply, changes)| {
                let mut bytes = Vec::new();
                reply.encode(&mut bytes);
                for (at, byte) in changes {
                    let at = at.index(bytes.len());
                    bytes[at] = byte;
                }
                if let Some(reply) = Reply::decode(&bytes) {
                    let mut again = Vec::new();
                    reply.encode(&mut again);
                    prop_assert_eq!(again, bytes);
                }
                Ok(())
            })
            .unwrap();
        assert_eq!(Reply::decode(&[]), None);
    }
}
