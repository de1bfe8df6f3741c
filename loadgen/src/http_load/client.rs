//! One HTTP connection, which is opened anew when it has ended.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use bytes::Bytes;
use http::{HeaderMap, Method, Request, StatusCode, Uri, Version, header};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;
use tokio::sync::Mutex;

use crate::load::parse_http_uri;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Windows so large that flow control never holds back a burst of answers.
const STREAM_WINDOW: u32 = 4 * 1024 * 1024;
const CONNECTION_WINDOW: u32 = 1 << 30;

/// What a connection speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.1: one request at a time.
    Http1,
    /// HTTP/2 without TLS, known beforehand: many at a time.
    Http2,
}

/// An answer, all of it.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The status.
    pub status: StatusCode,
    /// All headers, repeated ones included; no pseudo headers.
    pub headers: HeaderMap,
    /// The body.
    pub body: Bytes,
    /// The trailers, if there were any.
    pub trailers: Option<HeaderMap>,
    /// From the request to the end of the answer.
    pub took: Duration,
}

impl Answer {
    /// The first value of a header, if it is text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// A connection.
pub struct HttpClient {
    authority: String,
    protocol: Protocol,
    /// `None` after it has ended and until it is needed again.
    sender: Mutex<Option<Sender>>,
}

enum Sender {
    Http1(http1::SendRequest<Full<Bytes>>),
    Http2(http2::SendRequest<Full<Bytes>>),
}

impl HttpClient {
    /// Connects to `http://host:port`.
    ///
    /// # Errors
    /// If nothing listens there.
    pub async fn connect(target: &str, protocol: Protocol) -> anyhow::Result<Self> {
        let uri: Uri = parse_http_uri(target)?;
        let authority = uri.authority().context("no host")?.to_string();
        let sender = open(&authority, protocol).await?;
        Ok(Self { authority, protocol, sender: Mutex::new(Some(sender)) })
    }

    /// Sends a GET.
    ///
    /// # Errors
    /// If there is no answer, or not all of it.
    pub async fn get(&self, path: &str, headers: &HeaderMap) -> anyhow::Result<Answer> {
        self.send(Method::GET, path, headers, Bytes::new()).await
    }

    /// Sends a request. Over HTTP/1.1 it waits until the answers to those before it are there.
    ///
    /// # Errors
    /// If there is no answer, or not all of it.
    pub async fn send(
        &self,
        method: Method,
        path: &str,
        headers: &HeaderMap,
        body: Bytes,
    ) -> anyhow::Result<Answer> {
        let request = self.request(method, path, headers, body)?;
        let start = Instant::now();
        let mut slot = self.sender.lock().await;
        let sender = match slot.take().filter(Sender::is_open) {
            Some(sender) => sender,
            None => open(&self.authority, self.protocol).await?,
        };
        match sender {
            Sender::Http1(mut sender) => {
                sender.ready().await?;
                let answer = read(sender.send_request(request).await?, start).await?;
                // Only now, or whoever gave up half-way would leave its answer to the next.
                *slot = Some(Sender::Http1(sender));
                Ok(answer)
            }
            Sender::Http2(mut sender) => {
                *slot = Some(Sender::Http2(sender.clone()));
                drop(slot);
                sender.ready().await?;
                read(sender.send_request(request).await?, start).await
            }
        }
    }

    /// HTTP/2 wants scheme and authority in the URI, HTTP/1.1 a path and a `host`.
    fn request(
        &self,
        method: Method,
        path: &str,
        headers: &HeaderMap,
        body: Bytes,
    ) -> anyhow::Result<Request<Full<Bytes>>> {
        let request = Request::builder().method(method);
        let mut request = match self.protocol {
            Protocol::Http1 => request.uri(path).header(header::HOST, &self.authority),
            Protocol::Http2 => {
                request.uri(format!("http://{}{path}", self.authority)).version(Version::HTTP_2)
            }
        }
        .body(Full::new(body))?;
        let mut given = headers.clone();
        if let (Protocol::Http2, Some(host)) = (self.protocol, given.remove(header::HOST)) {
            *request.uri_mut() = format!("http://{}{path}", host.to_str()?).parse()?;
        }
        request.headers_mut().extend(given);
        Ok(request)
    }
}

impl Sender {
    fn is_open(&self) -> bool {
        match self {
            Self::Http1(sender) => !sender.is_closed(),
            Self::Http2(sender) => !sender.is_closed(),
        }
    }
}

async fn open(authority: &str, protocol: Protocol) -> anyhow::Result<Sender> {
    let stream = tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(authority))
        .await
        .with_context(|| format!("no connection to {authority} within {CONNECT_TIMEOUT:?}"))?
        .with_context(|| format!("cannot connect to {authority}"))?;
    // Small frames must not wait for an acknowledgement.
    stream.set_nodelay(true)?;
    let io = TokioIo::new(stream);
    // The connections end when their senders are dropped; their errors reach the senders too.
    match protocol {
        Protocol::Http1 => {
            let (sender, connection) = http1::handshake(io).await?;
            tokio::spawn(connection);
            Ok(Sender::Http1(sender))
        }
        Protocol::Http2 => {
            let (sender, connection) = http2::Builder::new(TokioExecutor::new())
                .initial_stream_window_size(STREAM_WINDOW)
                .initial_connection_window_size(CONNECTION_WINDOW)
                .handshake(io)
                .await?;
            tokio::spawn(connection);
            Ok(Sender::Http2(sender))
        }
    }
}

async fn read(response: http::Response<Incoming>, start: Instant) -> anyhow::Result<Answer> {
    let (parts, body) = response.into_parts();
    let body = body.collect().await.context("the answer broke off")?;
    let trailers = body.trailers().cloned();
    let body = body.to_bytes();
    Ok(Answer { status: parts.status, headers: parts.headers, body, trailers, took: start.elapsed() })
}
