//! A client that costs little, for loads whose keys differ or whose connections stay open.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use bytes::Bytes;
use h2::client::{self, SendRequest};
use http::{HeaderMap, HeaderValue, Request};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::wire;

/// Windows that no message fills.
const WINDOW: u32 = 1 << 30;

/// Keys asked for only once begin here; below are those asked for again and again.
const FIRST_NEW: u64 = 1 << 24;

/// Which keys a load asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keys {
    /// Always the same.
    One,
    /// Any of the first so many, spread evenly.
    Among(u32),
    /// One after the other, beginning with this one.
    From(u32),
    /// A new one each time.
    Distinct,
    /// A new one for every tenth call, one of so many for the others.
    NineOfTen(u32),
}

/// What all calls of a client have in common.
#[derive(Clone, Debug)]
pub struct Shape {
    /// The request's content type.
    pub content_type: &'static str,
    /// Whether an answer must end in trailers with a gRPC status.
    pub grpc: bool,
    /// Size of a reply's message.
    pub reply_bytes: usize,
    /// Further headers.
    pub headers: HeaderMap,
}

/// Open connections to one candidate.
pub struct Client {
    connections: Vec<SendRequest<Bytes>>,
    shape: Arc<Shape>,
    request: Request<()>,
    /// Numbers the keys that are asked for once.
    new: Arc<AtomicU64>,
}

/// What a load took.
pub struct Load {
    /// Until the last answer.
    pub elapsed: Duration,
    /// Of each call, in microseconds, in no order.
    pub latencies: Vec<u32>,
}

impl Client {
    /// Connects so many times.
    pub async fn connect(addr: SocketAddr, connections: usize, shape: Shape) -> anyhow::Result<Self> {
        let mut request = Request::post(format!("http://{addr}{}", wire::PATH)).body(())?;
        let headers = request.headers_mut();
        headers.insert("content-type", HeaderValue::from_static(shape.content_type));
        headers.insert("te", HeaderValue::from_static("trailers"));
        headers.insert("user-agent", HeaderValue::from_static("collapser-bench"));
        headers.extend(shape.headers.clone());
        let mut opened = Vec::with_capacity(connections);
        for _ in 0..connections {
            opened.push(open(addr).await.with_context(|| format!("cannot connect to {addr}"))?);
        }
        let new = Arc::new(AtomicU64::new(FIRST_NEW));
        Ok(Self { connections: opened, shape: Arc::new(shape), request, new })
    }

    /// So many calls over `streams` streams on each connection, each of which sends its next call when it has its
    /// answer.
    pub async fn closed_loop(&self, streams: usize, keys: Keys, calls: u64) -> anyhow::Result<Load> {
        let started = Arc::new(AtomicU64::new(0));
        let mut workers = JoinSet::new();
        let start = Instant::now();
        for worker in 0..self.connections.len() * streams {
            let call = self.call(worker);
            let (started, new) = (Arc::clone(&started), Arc::clone(&self.new));
            workers.spawn(async move {
                let mut latencies = Vec::new();
                loop {
                    let number = started.fetch_add(1, Relaxed);
                    if number >= calls {
                        return Ok(latencies);
                    }
                    latencies.push(call.make(keys.nth(number, &new)).await?);
                }
            });
        }
        gather(workers, start).await
    }

    /// So many calls at once, which ask for `flights` new keys; everybody for one of them.
    pub async fn wave(&self, callers: u64, flights: u64) -> anyhow::Result<Load> {
        let first = self.new.fetch_add(flights, Relaxed);
        let mut waiting = JoinSet::new();
        let start = Instant::now();
        for caller in 0..callers {
            let call = self.call(caller as usize);
            let key = (first + caller % flights) as u32;
            waiting.spawn(async move { anyhow::Ok(vec![call.make(key).await?]) });
        }
        gather(waiting, start).await
    }

    fn call(&self, worker: usize) -> Call {
        let connection = self.connections[worker % self.connections.len()].clone();
        Call { connection, shape: Arc::clone(&self.shape), request: self.request.clone() }
    }
}

impl Keys {
    fn nth(self, number: u64, new: &AtomicU64) -> u32 {
        let next_new = || new.fetch_add(1, Relaxed) as u32;
        match self {
            Self::One => 0,
            // A multiplier that shares no factor with the count reaches all of them, far from each other.
            Self::Among(count) => (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32 % count,
            Self::From(first) => first + number as u32,
            Self::Distinct => next_new(),
            Self::NineOfTen(_) if number.is_multiple_of(10) => next_new(),
            Self::NineOfTen(hot) => (number % u64::from(hot)) as u32,
        }
    }

    /// How many of so many calls ask for a key that was never asked for.
    pub fn new_of(self, calls: u64) -> u64 {
        match self {
            Self::One | Self::Among(_) => 0,
            Self::From(_) | Self::Distinct => calls,
            Self::NineOfTen(_) => calls.div_ceil(10),
        }
    }
}

struct Call {
    connection: SendRequest<Bytes>,
    shape: Arc<Shape>,
    request: Request<()>,
}

impl Call {
    /// Makes it and tells how long it took, in microseconds. A wrong answer is an error.
    async fn make(&self, key: u32) -> anyhow::Result<u32> {
        let message = wire::request(key);
        let start = Instant::now();
        let mut connection = self.connection.clone().ready().await?;
        let (response, mut stream) = connection.send_request(self.request.clone(), false)?;
        stream.send_data(message.clone(), true)?;
        let response = response.await?;
        let status = response.status();
        let (parts, mut body) = response.into_parts();
        let (mut len, mut head) = (0, Bytes::new());
        while let Some(chunk) = body.data().await {
            let chunk = chunk?;
            body.flow_control().release_capacity(chunk.len())?;
            len += chunk.len();
            if head.is_empty() {
                head = chunk;
            }
        }
        let trailers = body.trailers().await?;
        let took = start.elapsed();
        ensure!(status == 200, "an answer had status {status}");
        if self.shape.grpc {
            let code = trailers.as_ref().and_then(|trailers| trailers.get("grpc-status"));
            ensure!(code.is_some_and(|code| code == "0"), "a call failed: {:?} {trailers:?}", parts.headers);
        }
        ensure!(
            wire::answers(&head, len, &message, self.shape.reply_bytes),
            "key {key} got a wrong answer of {len} bytes: {:?}",
            &head[..head.len().min(64)]
        );
        Ok(took.as_micros() as u32)
    }
}

async fn gather(mut tasks: JoinSet<anyhow::Result<Vec<u32>>>, start: Instant) -> anyhow::Result<Load> {
    let mut latencies = Vec::new();
    while let Some(ended) = tasks.join_next().await {
        latencies.append(&mut ended??);
    }
    Ok(Load { elapsed: start.elapsed(), latencies })
}

async fn open(addr: SocketAddr) -> anyhow::Result<SendRequest<Bytes>> {
    let stream = TcpStream::connect(addr).await?;
    stream.set_nodelay(true)?;
    let (sender, connection) = client::Builder::new()
        .initial_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .initial_max_send_streams(1024)
        .handshake(stream)
        .await?;
    // Its error reaches the calls.
    tokio::spawn(connection);
    Ok(sender.ready().await?)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn keys_are_as_told() {
        let new = AtomicU64::new(FIRST_NEW);
        let keys = |keys: Keys| (0..1000).map(|n| keys.nth(n, &new)).collect::<BTreeSet<_>>();
        assert_eq!(keys(Keys::One).len(), 1);
        assert_eq!(keys(Keys::Distinct).len(), 1000);
        assert_eq!(keys(Keys::From(7)), (7..1007).collect());
        assert_eq!(keys(Keys::Among(7)).len(), 7);
        assert_eq!(keys(Keys::NineOfTen(7)).len() as u64, 7 + Keys::NineOfTen(7).new_of(1000));
    }
}
