//! What the body of a page says, and how it is read: a client can tell whose answer it got, from
//! which query, and whether all of it is there.

use std::fmt::Write as _;

use bytes::Bytes;
use http::{HeaderMap, HeaderName};

use crate::payload::{payload_for, payload_matches};

/// A page as its body tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// Path and query of the request.
    pub url: String,
    /// Which query it came from, from 1.
    pub serial: u64,
    /// The request headers that were asked for, in order; what was not sent is not there.
    pub echo: Vec<(String, String)>,
}

impl Page {
    /// The body: lines of text, a blank one, and filling that follows from the URL, `size` bytes in
    /// all. What a small `size` has no room for is cut off.
    pub(super) fn body(
        url: &str,
        serial: u64,
        echo: &[HeaderName],
        seen: &HeaderMap,
        size: Option<usize>,
    ) -> Bytes {
        let mut text = format!("page {url}\nserial {serial}\n");
        for name in echo {
            for value in seen.get_all(name) {
                // Writing to a string cannot fail.
                let _ = writeln!(text, "{name}: {}", value.to_str().unwrap_or("(no text)"));
            }
        }
        text.push('\n');
        let mut body = text.into_bytes();
        if let Some(size) = size {
            body.truncate(size);
            body.extend_from_slice(&payload_for(url, size - body.len()));
        }
        body.into()
    }

    /// Reads a body. `None` if it is not that of a page, is cut off in its text, or its filling is
    /// another page's or damaged.
    pub fn read(body: &[u8]) -> Option<Self> {
        let end = body.windows(2).position(|pair| pair == b"\n\n")?;
        let (text, filling) = (body.get(..end)?, body.get(end + 2..)?);
        let mut lines = str::from_utf8(text).ok()?.lines();
        let url = lines.next()?.strip_prefix("page ")?.to_owned();
        let serial = lines.next()?.strip_prefix("serial ")?.parse().ok()?;
        let pair =
            |line: &str| line.split_once(": ").map(|(name, value)| (name.to_owned(), value.to_owned()));
        let echo = lines.map(pair).collect::<Option<_>>()?;
        payload_matches(&url, filling).then_some(Self { url, serial, echo })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let mut seen = HeaderMap::new();
        seen.append("x-a", "1".parse().unwrap());
        seen.append("x-a", "2: 3".parse().unwrap());
        let names = ["x-a", "x-b"].map(HeaderName::from_static);
        let body = Page::body("/page/a?b=c", 7, &names, &seen, None);
        let page = Page::read(&body).unwrap();
        assert_eq!((page.url.as_str(), page.serial), ("/page/a?b=c", 7));
        assert_eq!(page.echo, [("x-a".into(), "1".into()), ("x-a".into(), "2: 3".into())]);
    }

    #[test]
    fn has_the_size_asked_for() {
        for size in [0, 5, 100, 100_000] {
            let body = Page::body("/page/a", 1, &[], &HeaderMap::new(), Some(size));
            assert_eq!(body.len(), size);
            assert_eq!(Page::read(&body).is_some(), size >= 100);
        }
    }

    #[test]
    fn damage_is_seen() {
        let body = Page::body("/page/a", 1, &[], &HeaderMap::new(), Some(100));
        let mut broken = body.to_vec();
        broken[99] ^= 1;
        assert_eq!(Page::read(&broken), None);
        assert_eq!(Page::read(b"<html>"), None);
        assert_eq!(Page::read(b""), None);
    }
}
