//! A caller that asks and then does not read.

use std::future::pending;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use collapser_loadgen::proto::ComputeRequest;
use h2::client::{self, SendRequest};
use h2::{Error, RecvStream};
use http::Request;
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::{JoinHandle, JoinSet};

use crate::raw::{COMPUTE, frame, headers};

/// A client on a connection of its own that takes so many bytes of each answer and then stalls.
pub struct SlowReader {
    addr: SocketAddr,
    requests: SendRequest<Bytes>,
    connection: JoinHandle<()>,
    freeze: Option<oneshot::Sender<()>>,
    calls: JoinSet<bool>,
}

impl SlowReader {
    /// Connects. With `window` 0 not even the first byte of an answer is taken.
    pub async fn connect(addr: SocketAddr, window: u32) -> Self {
        Self::connect_with(addr, window, 65_535).await
    }

    /// The same with this window for the whole connection, which HTTP/2 has at 65535 at least.
    pub async fn connect_with(addr: SocketAddr, window: u32, connection_window: u32) -> Self {
        let socket = TcpStream::connect(addr).await.unwrap();
        let mut builder = client::Builder::new();
        builder.initial_window_size(window).initial_connection_window_size(connection_window);
        let (requests, connection) = builder.handshake(socket).await.unwrap();
        let (freeze, frozen) = oneshot::channel();
        let connection = tokio::spawn(async move {
            let mut connection = std::pin::pin!(connection);
            tokio::select! {
                // What goes wrong with a connection shows in each of its calls.
                _ = &mut connection => (),
                // The connection stays open, and nobody looks at it any more.
                Ok(()) = frozen => pending().await,
            }
        });
        Self { addr, requests, connection, freeze: Some(freeze), calls: JoinSet::new() }
    }

    /// Sends a request whose answer will stall.
    pub async fn ask(&mut self, message: &ComputeRequest) {
        let response = send(self.addr, &mut self.requests, message).await;
        self.calls.spawn(async move {
            let Ok(mut body) = response.await else { return false };
            // Capacity is never released, so this ends only with a small answer or a reset.
            while let Some(chunk) = body.data().await {
                if chunk.is_err() {
                    return false;
                }
            }
            true
        });
    }

    /// From now on not even the socket is read.
    pub fn freeze(&mut self) {
        self.freeze.take().unwrap().send(()).unwrap();
    }

    /// Waits until every call has ended, and returns how many were cut short.
    pub async fn cut_short(mut self) -> usize {
        let calls = std::mem::take(&mut self.calls);
        calls.join_all().await.into_iter().filter(|whole| !whole).count()
    }

    /// How many calls have ended by now.
    pub fn ended(&mut self) -> usize {
        std::iter::from_fn(|| self.calls.try_join_next()).count()
    }
}

impl Drop for SlowReader {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

/// Sends a request; returns what will be its answer's body.
async fn send(
    addr: SocketAddr,
    requests: &mut SendRequest<Bytes>,
    message: &ComputeRequest,
) -> impl Future<Output = Result<RecvStream, Error>> + use<> {
    let mut request = Request::post(format!("http://{addr}{COMPUTE}")).body(()).unwrap();
    *request.headers_mut() = headers(&[("content-type", "application/grpc"), ("te", "trailers")]);
    *requests = requests.clone().ready().await.unwrap();
    let (response, mut body) = requests.send_request(request, false).unwrap();
    body.send_data(frame(message), true).unwrap();
    async move { Ok(response.await?.into_body()) }
}

/// One call whose answer is read with a pause after every frame. Returns how many bytes came.
pub async fn steady_reader(
    addr: SocketAddr,
    message: &ComputeRequest,
    pause: Duration,
) -> Result<usize, Error> {
    let socket = TcpStream::connect(addr).await.unwrap();
    let (mut requests, connection) = client::handshake(socket).await.unwrap();
    let connection = tokio::spawn(async { drop(connection.await) });
    let mut body = send(addr, &mut requests, message).await.await?;
    let mut bytes = 0;
    while let Some(chunk) = body.data().await {
        let chunk = chunk?;
        bytes += chunk.len();
        tokio::time::sleep(pause).await;
        body.flow_control().release_capacity(chunk.len())?;
    }
    connection.abort();
    Ok(bytes)
}

/// So many readers that take `window` bytes of each answer, with `calls` calls of each under way.
pub async fn slow_readers(
    addr: SocketAddr,
    count: usize,
    calls: usize,
    window: u32,
    message: &ComputeRequest,
) -> Vec<SlowReader> {
    let mut readers = Vec::with_capacity(count);
    for _ in 0..count {
        let mut reader = SlowReader::connect(addr, window).await;
        for _ in 0..calls {
            reader.ask(message).await;
        }
        readers.push(reader);
    }
    readers
}
