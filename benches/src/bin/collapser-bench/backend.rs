//! A backend that costs little: HTTP/2 and nothing else, on a thread of its own.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use bytes::{Bytes, BytesMut};
use h2::RecvStream;
use h2::server::{self, SendResponse};
use http::{HeaderMap, HeaderValue, Request, Response};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::wire;

/// Windows that no message fills.
const WINDOW: u32 = 1 << 30;

/// A running backend. It ends with the program.
pub struct Backend {
    addr: SocketAddr,
    state: Arc<State>,
}

struct State {
    reply_bytes: usize,
    latency_micros: AtomicU64,
    calls: AtomicU64,
    open: watch::Sender<bool>,
    /// The last large reply and what it was for: benchmarks of size ask for one key.
    large: Mutex<Option<(Bytes, Bytes)>>,
}

impl Backend {
    /// Starts one whose replies have this many bytes. Its thread runs on the cores of this one.
    pub fn start(reply_bytes: usize) -> anyhow::Result<Self> {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        listener.set_nonblocking(true)?;
        let addr = listener.local_addr()?;
        let state = Arc::new(State {
            reply_bytes,
            latency_micros: AtomicU64::new(0),
            calls: AtomicU64::new(0),
            open: watch::Sender::new(true),
            large: Mutex::default(),
        });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let shared = Arc::clone(&state);
        let accept = async move {
            let listener = TcpListener::from_std(listener)?;
            loop {
                let (stream, _) = listener.accept().await?;
                stream.set_nodelay(true)?;
                tokio::spawn(serve(stream, Arc::clone(&shared)));
            }
        };
        thread::Builder::new().name("backend".to_owned()).spawn(move || {
            let ended: std::io::Result<()> = runtime.block_on(accept);
            eprintln!("the backend ended: {ended:?}");
        })?;
        Ok(Self { addr, state })
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Calls that have arrived so far.
    pub fn calls(&self) -> u64 {
        self.state.calls.load(Relaxed)
    }

    /// How long calls take that arrive from now on.
    pub fn set_latency(&self, latency: Duration) {
        self.state.latency_micros.store(latency.as_micros() as u64, Relaxed);
    }

    /// Answers no more until [`release`](Self::release).
    pub fn hold(&self) {
        self.state.open.send_replace(false);
    }

    /// Answers all calls that were held.
    pub fn release(&self) {
        self.state.open.send_replace(true);
    }
}

async fn serve(stream: TcpStream, state: Arc<State>) {
    let handshake = server::Builder::new()
        .initial_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .max_send_buffer_size(64 << 20)
        .handshake(stream);
    // An error is the peer's: health checks connect and hang up.
    let Ok(mut connection) = handshake.await else { return };
    while let Some(Ok((request, respond))) = connection.accept().await {
        state.calls.fetch_add(1, Relaxed);
        tokio::spawn(answer(request, respond, Arc::clone(&state)));
    }
}

async fn answer(request: Request<RecvStream>, mut respond: SendResponse<Bytes>, state: Arc<State>) {
    // A caller that hangs up needs no answer.
    let _ = try_answer(request.into_body(), &mut respond, &state).await;
}

async fn try_answer(
    mut body: RecvStream,
    respond: &mut SendResponse<Bytes>,
    state: &State,
) -> anyhow::Result<()> {
    let mut message = BytesMut::new();
    while let Some(chunk) = body.data().await {
        let chunk = chunk?;
        body.flow_control().release_capacity(chunk.len())?;
        message.extend_from_slice(&chunk);
    }
    anyhow::ensure!(message.len() >= wire::framed(wire::SMALLEST), "no whole message");
    let latency = Duration::from_micros(state.latency_micros.load(Relaxed));
    if !latency.is_zero() {
        tokio::time::sleep(latency).await;
    }
    if !*state.open.borrow() {
        state.open.subscribe().wait_for(|open| *open).await?;
    }
    let mut response = Response::new(());
    response.headers_mut().insert("content-type", HeaderValue::from_static(wire::GRPC));
    let mut stream = respond.send_response(response, false)?;
    stream.send_data(state.reply(message.freeze()), false)?;
    let mut trailers = HeaderMap::with_capacity(1);
    trailers.insert("grpc-status", HeaderValue::from_static("0"));
    stream.send_trailers(trailers).context("the stream has ended")
}

impl State {
    fn reply(&self, request: Bytes) -> Bytes {
        if self.reply_bytes < 1024 {
            return wire::reply(&request, self.reply_bytes);
        }
        let mut large = self.large.lock().unwrap_or_else(PoisonError::into_inner);
        match &*large {
            Some((asked, reply)) if *asked == request => reply.clone(),
            _ => large.insert((request.clone(), wire::reply(&request, self.reply_bytes))).1.clone(),
        }
    }
}
