//! What a page's query string asks the backend to answer with.

use std::time::Duration;

use http::{HeaderName, HeaderValue, StatusCode};
use percent_encoding::percent_decode_str;

/// Bodies are not larger than this, in bytes.
const MAX_BODY: usize = 64 * 1024 * 1024;

/// How a page is to be answered. A query string has these parts, with `%XX` for what a URL cannot
/// hold; those marked + may be repeated:
///
/// | part | meaning |
/// |---|---|
/// | `status=503` | the status, 200 to 599; 200 unless said |
/// | `header=name:value` + | a response header |
/// | `trailer=name:value` + | a trailer; over HTTP/1.1 sent only to who asks with `te: trailers` |
/// | `echo=name` + | the body repeats this request header |
/// | `size=1000` | the body has exactly this many bytes, up to 64 MiB |
/// | `latency_ms=40` | how long the query takes |
/// | `chunks=3` | the body comes in this many pieces, without a length |
/// | `chunk_delay_ms=10` | what lies between the pieces |
/// | `cut` | the body breaks off half-way, with the connection or stream |
///
/// Any other part means nothing, and makes another page.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ask {
    /// The status.
    pub status: StatusCode,
    /// Response headers, in order.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// Trailers, in order.
    pub trailers: Vec<(HeaderName, HeaderValue)>,
    /// Request headers that the body repeats.
    pub echo: Vec<HeaderName>,
    /// The length of the body in bytes; `None` is as long as what it says.
    pub size: Option<usize>,
    /// How long the query takes; `None` takes the backend's own setting.
    pub latency: Option<Duration>,
    /// The number of pieces; `None` is one, with a length.
    pub chunks: Option<usize>,
    /// What lies between two pieces.
    pub chunk_delay: Duration,
    /// Whether the body breaks off half-way.
    pub cut: bool,
}

impl Ask {
    /// Reads a query string, without its question mark.
    ///
    /// # Errors
    /// If a known part has a value that makes no sense; says which.
    pub fn parse(query: &str) -> Result<Self, String> {
        let mut ask = Self::default();
        for part in query.split('&') {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let value = percent_decode_str(value).decode_utf8_lossy();
            ask.take(name, &value).ok_or_else(|| format!("`{part}` makes no sense"))?;
        }
        Ok(ask)
    }

    fn take(&mut self, name: &str, value: &str) -> Option<()> {
        match name {
            "status" => self.status = status(value)?,
            "header" => self.headers.push(field(value)?),
            "trailer" => self.trailers.push(field(value)?),
            "echo" => self.echo.push(value.parse().ok()?),
            "size" => self.size = Some(value.parse().ok().filter(|&size| size <= MAX_BODY)?),
            "latency_ms" => self.latency = Some(millis(value)?),
            "chunks" => self.chunks = Some(value.parse().ok().filter(|&chunks| chunks > 0)?),
            "chunk_delay_ms" => self.chunk_delay = millis(value)?,
            "cut" => self.cut = true,
            _ => (),
        }
        Some(())
    }
}

/// Statuses below 200 are no answers.
fn status(text: &str) -> Option<StatusCode> {
    let status = text.parse().ok().filter(|number| (200..600).contains(number))?;
    StatusCode::from_u16(status).ok()
}

fn millis(text: &str) -> Option<Duration> {
    text.parse::<u32>().ok().map(|ms| Duration::from_millis(ms.into()))
}

fn field(text: &str) -> Option<(HeaderName, HeaderValue)> {
    let (name, value) = text.split_once(':')?;
    Some((name.trim().parse().ok()?, value.trim().parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_an_ordinary_page() {
        assert_eq!(Ask::parse(""), Ok(Ask::default()));
        assert_eq!(Ask::parse("user=7&flag"), Ok(Ask::default()));
        assert_eq!(Ask::default().status, StatusCode::OK);
    }

    #[test]
    fn every_part_is_read() {
        let query = "status=503&header=cache-control:max-age=5,%20public&header=vary:x-a&trailer=x-t:1&echo=X-A\
                     &size=1000&latency_ms=40&chunks=3&chunk_delay_ms=2&cut";
        let ask = Ask::parse(query).unwrap();
        assert_eq!((ask.status.as_u16(), ask.size, ask.chunks), (503, Some(1000), Some(3)));
        assert_eq!(ask.headers[0].1, "max-age=5, public");
        assert_eq!((ask.headers[1].0.as_str(), ask.trailers[0].0.as_str()), ("vary", "x-t"));
        assert_eq!(ask.echo, ["x-a"]);
        assert_eq!(ask.latency, Some(Duration::from_millis(40)));
        assert!(ask.cut && ask.chunk_delay == Duration::from_millis(2));
    }

    #[test]
    fn nonsense_is_named() {
        for part in [
            "status=100",
            "status=x",
            "header=x",
            "header=a:b%01",
            "trailer=:",
            "echo=",
            "size=-1",
            "size=99999999999",
            "latency_ms=1s",
            "chunks=0",
        ] {
            let refused = Ask::parse(&format!("size=1&{part}"));
            assert!(refused.unwrap_err().contains(part), "{part}");
        }
    }
}
