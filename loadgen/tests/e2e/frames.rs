//! HTTP/2 by hand, for what no library would send, and HTTP/1.1 likewise.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::raw::{COMPUTE, frame};
use crate::rig::ask;

/// Longer than anything may take that is answered at all.
const PATIENCE: Duration = Duration::from_secs(8);

/// Frame types and flags (RFC 9113, section 6).
pub const DATA: u8 = 0;
pub const HEADERS: u8 = 1;
pub const PRIORITY: u8 = 2;
pub const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
pub const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
pub const CONTINUATION: u8 = 9;
pub const END_STREAM: u8 = 1;
const ACK: u8 = 1;
pub const END_HEADERS: u8 = 4;

/// A header as it goes onto the wire.
pub type Header = (Vec<u8>, Vec<u8>);

/// A header from text.
pub fn header(name: &str, value: &str) -> Header {
    (name.as_bytes().to_vec(), value.as_bytes().to_vec())
}

/// What a gRPC library sends.
pub fn good() -> Vec<Header> {
    let all = [
        (":method", "POST"),
        (":scheme", "http"),
        (":authority", "sidecar"),
        (":path", COMPUTE),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ];
    all.map(|(name, value)| header(name, value)).to_vec()
}

/// The same, but for one header: its name stays, its value does not.
pub fn good_but(name: &str, value: &str) -> Vec<Header> {
    let mut all = good();
    all.retain(|(known, _)| known != name.as_bytes());
    all.insert(if name.starts_with(':') { 0 } else { all.len() }, header(name, value));
    all
}

/// The same and more.
pub fn good_and(more: &[Header]) -> Vec<Header> {
    [good(), more.to_vec()].concat()
}

/// The message that asks for `key`.
pub fn message(key: &str) -> Bytes {
    frame(&ask(key))
}

/// How a stream ended.
#[derive(Clone, Debug, PartialEq)]
pub enum End {
    /// With all these bytes.
    Whole(Bytes),
    /// By a reset.
    Reset,
    /// With its connection.
    Closed,
    /// Not at all.
    Hung,
}

/// A connection.
pub struct Frames {
    socket: TcpStream,
    unread: BytesMut,
    data: BTreeMap<u32, BytesMut>,
    ended: BTreeMap<u32, End>,
    closed: bool,
}

impl Frames {
    /// Connects, with windows that nothing fills.
    pub async fn connect(addr: SocketAddr) -> Self {
        let socket = TcpStream::connect(addr).await.unwrap();
        let (unread, data, ended) = Default::default();
        let mut frames = Self { socket, unread, data, ended, closed: false };
        frames.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await;
        // SETTINGS_INITIAL_WINDOW_SIZE, and as much for the connection.
        frames.send(SETTINGS, 0, 0, &[0, 4, 0x7f, 0xff, 0xff, 0xff]).await;
        frames.send(WINDOW_UPDATE, 0, 0, &0x7fff_0000_u32.to_be_bytes()).await;
        frames
    }

    async fn write(&mut self, bytes: &[u8]) {
        // An error is the other side's: it has closed, and reading tells.
        let _ = self.socket.write_all(bytes).await;
    }

    /// Sends a frame.
    pub async fn send(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        let mut bytes = BytesMut::with_capacity(9 + payload.len());
        bytes.put_uint(payload.len() as u64, 3);
        bytes.put_u8(kind);
        bytes.put_u8(flags);
        bytes.put_u32(stream);
        bytes.put_slice(payload);
        self.write(&bytes).await;
    }

    /// Begins a request.
    pub async fn begin(&mut self, stream: u32, headers: &[Header]) {
        self.send(HEADERS, END_HEADERS, stream, &hpack(headers)).await;
    }

    /// Sends a part of its body.
    pub async fn data(&mut self, stream: u32, bytes: &[u8]) {
        self.send(DATA, 0, stream, bytes).await;
    }

    /// Sends a part of its body, and its end.
    pub async fn last_data(&mut self, stream: u32, bytes: &[u8]) {
        self.send(DATA, END_STREAM, stream, bytes).await;
    }

    /// A whole request.
    pub async fn request(&mut self, stream: u32, headers: &[Header], key: &str) {
        self.begin(stream, headers).await;
        self.last_data(stream, &message(key)).await;
    }

    /// Waits until a stream has ended.
    pub async fn end(&mut self, stream: u32) -> End {
        timeout(PATIENCE, self.read_to_end(stream)).await.unwrap_or(End::Hung)
    }

    async fn read_to_end(&mut self, stream: u32) -> End {
        loop {
            if let Some(end) = self.ended.get(&stream) {
                return end.clone();
            }
            if self.closed {
                return End::Closed;
            }
            self.read_some().await;
        }
    }

    async fn read_some(&mut self) {
        if !matches!(self.socket.read_buf(&mut self.unread).await, Ok(1..)) {
            self.closed = true;
        }
        while self.unread.len() >= 9 {
            let length = self.unread[..3].iter().fold(0, |sum, byte| sum << 8 | usize::from(*byte));
            if self.unread.len() < 9 + length {
                return;
            }
            let mut head = self.unread.split_to(9);
            let payload = self.unread.split_to(length);
            let stream = u32::from_be_bytes([head[5] & 0x7f, head[6], head[7], head[8]]);
            head.truncate(5);
            self.take(head[3], head[4], stream, &payload).await;
        }
    }

    async fn take(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        match kind {
            DATA => self.data.entry(stream).or_default().extend_from_slice(payload),
            RST_STREAM => drop(self.ended.entry(stream).or_insert(End::Reset)),
            SETTINGS if flags & ACK == 0 => self.send(SETTINGS, ACK, 0, &[]).await,
            PING if flags & ACK == 0 => self.send(PING, ACK, 0, payload).await,
            GOAWAY => self.closed = true,
            _ => (),
        }
        if matches!(kind, DATA | HEADERS) && flags & END_STREAM != 0 {
            let data = self.data.remove(&stream).unwrap_or_default();
            self.ended.entry(stream).or_insert(End::Whole(data.freeze()));
        }
    }
}

/// Headers as literals without indexing (RFC 7541, section 6.2.2), which takes whatever they are.
pub fn hpack(headers: &[Header]) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in headers {
        block.push(0);
        string(&mut block, name);
        string(&mut block, value);
    }
    block
}

fn string(block: &mut Vec<u8>, text: &[u8]) {
    // An integer with a prefix of seven bits (RFC 7541, section 5.1).
    let mut rest = text.len();
    if rest < 127 {
        block.push(rest as u8);
    } else {
        block.push(127);
        rest -= 127;
        while rest >= 128 {
            block.push((rest % 128) as u8 | 128);
            rest /= 128;
        }
        block.push(rest as u8);
    }
    block.extend_from_slice(text);
}

/// Sends bytes to an HTTP/1.1 server and returns all it says until it closes, or until it says nothing for a while.
pub async fn http1(addr: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    const QUIET: Duration = Duration::from_secs(2);
    let mut socket = TcpStream::connect(addr).await.unwrap();
    // As above.
    let _ = socket.write_all(bytes).await;
    let mut said = Vec::new();
    while let Ok(Ok(1..)) = timeout(QUIET, socket.read_buf(&mut said)).await {}
    said
}

/// A gRPC call as HTTP/1.1 would carry it.
pub fn grpc_over_http1(message: &[u8], chunked: bool, trailers: &str) -> Vec<u8> {
    let head = format!(
        "POST {COMPUTE} HTTP/1.1\r\nhost: sidecar\r\ncontent-type: application/grpc\r\nte: trailers\r\nconnection: close\r\n"
    );
    let mut bytes = head.into_bytes();
    if chunked {
        bytes.extend(format!("transfer-encoding: chunked\r\n\r\n{:x}\r\n", message.len()).bytes());
        bytes.extend_from_slice(message);
        bytes.extend(format!("\r\n0\r\n{trailers}\r\n").bytes());
    } else {
        bytes.extend(format!("content-length: {}\r\n\r\n", message.len()).bytes());
        bytes.extend_from_slice(message);
    }
    bytes
}
