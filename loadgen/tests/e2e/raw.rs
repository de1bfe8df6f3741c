//! HTTP/2 without gRPC's manners: an upstream that misbehaves on request and answers when let go, and a client that
//! sees every header and byte. A gRPC library would hide both.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use collapser_loadgen::proto::demo_client::DemoClient;
use collapser_loadgen::proto::{ComputeReply, ComputeRequest};
use collapser_loadgen::sidecar::{Sidecar, SidecarOptions};
use h2::{Reason, RecvStream, client, server};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use prost::Message;
use serde_json::Value;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;
use tonic::Status;
use tonic::transport::Channel;

use crate::rig::{ask, channel, eventually, root};

/// The unary method of the demo service.
pub const COMPUTE: &str = "/collapser.demo.v1.Demo/Compute";

/// Windows that no test's message fills.
const WINDOW: u32 = 16 * 1024 * 1024;

/// Ends a test whose call is never answered.
const PATIENCE: Duration = Duration::from_secs(60);

/// A response, as sent or as received.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub data: Bytes,
    /// `None` if the response ended without a frame of trailers.
    pub trailers: Option<HeaderMap>,
}

impl Answer {
    /// A successful call's.
    pub fn grpc(data: Bytes) -> Self {
        Self {
            status: 200,
            headers: headers(&[("content-type", "application/grpc")]),
            data,
            trailers: Some(headers(&[("grpc-status", "0")])),
        }
    }

    /// The demo service's answer to a request for `key`.
    pub fn compute(key: &str) -> Self {
        Self::grpc(frame(&ComputeReply { key: key.to_string(), ..ComputeReply::default() }))
    }

    /// A response of something that knows no gRPC.
    pub fn http(status: u16, content_type: &str, text: &'static str) -> Self {
        let headers = headers(&[("content-type", content_type)]);
        Self { status, headers, data: Bytes::from_static(text.as_bytes()), trailers: None }
    }

    /// The gRPC status, wherever it stands.
    pub fn code(&self) -> Option<&str> {
        let trailers = self.trailers.as_ref();
        let value = trailers.and_then(|t| t.get("grpc-status")).or(self.headers.get("grpc-status"))?;
        value.to_str().ok()
    }
}

/// A header map; a repeated name keeps all its values.
pub fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
    let pair = |(name, value): &(&str, &str)| {
        (name.parse::<HeaderName>().unwrap(), value.parse::<HeaderValue>().unwrap())
    };
    let mut map = HeaderMap::new();
    pairs.iter().map(pair).for_each(|(name, value)| {
        map.append(name, value);
    });
    map
}

/// A message as gRPC sends it.
pub fn frame(message: &impl Message) -> Bytes {
    framed(&message.encode_to_vec())
}

/// The same for a message that is encoded already.
pub fn framed(message: &[u8]) -> Bytes {
    let mut framed = BytesMut::with_capacity(5 + message.len());
    framed.put_u8(0);
    framed.put_u32(message.len() as u32);
    framed.put_slice(message);
    framed.freeze()
}

/// What the upstream does with a request.
#[derive(Clone, Debug)]
pub enum Act {
    Answer(Answer),
    /// Announces that the connection will close, and answers nevertheless, as it must.
    AnswerAndLeave(Answer),
    /// Sends headers and the beginning of a message, and resets the stream.
    ResetAfterHeaders,
    /// Closes the connection without a word.
    Disconnect,
    /// Gives up the connection with an error.
    GoAway,
}

/// Something to be done to a whole connection.
enum Order {
    Leave,
    Disconnect,
    GoAway,
}

struct Script {
    act: Mutex<Act>,
    seen: Mutex<Vec<HeaderMap>>,
    open: watch::Sender<bool>,
}

/// An upstream that does what it is told, once [`release`](Self::release) lets it.
pub struct Upstream {
    addr: SocketAddr,
    script: Arc<Script>,
    task: JoinHandle<()>,
}

impl Upstream {
    pub async fn start(act: Act) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let script = Script { act: Mutex::new(act), seen: Mutex::default(), open: watch::Sender::new(false) };
        let script = Arc::new(script);
        let task = tokio::spawn(accept(listener, Arc::clone(&script)));
        Self { addr, script, task }
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Changes what is done with requests that are still held or yet to come.
    pub fn set(&self, act: Act) {
        *self.script.act.lock().unwrap() = act;
    }

    /// From now on nothing is held.
    pub fn release(&self) {
        self.script.open.send_replace(true);
    }

    /// From now on requests are held again.
    pub fn hold(&self) {
        self.script.open.send_replace(false);
    }

    /// How many requests have come.
    pub fn calls(&self) -> usize {
        self.script.seen.lock().unwrap().len()
    }

    /// The headers of the last request.
    pub fn last_headers(&self) -> HeaderMap {
        self.script.seen.lock().unwrap().last().cloned().unwrap()
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(listener: TcpListener, script: Arc<Script>) {
    let mut connections = JoinSet::new();
    while let Ok((socket, _)) = listener.accept().await {
        connections.spawn(serve(socket, Arc::clone(&script)));
    }
}

/// Serves a connection until the peer or an order ends it. Health checks connect too, and say nothing.
async fn serve(socket: TcpStream, script: Arc<Script>) {
    let Ok(mut connection) = server::handshake(socket).await else { return };
    let (orders, mut ordered) = mpsc::unbounded_channel();
    // Ends with the connection, and the requests in it.
    let mut requests = JoinSet::new();
    loop {
        tokio::select! {
            accepted = connection.accept() => match accepted {
                Some(Ok((request, respond))) => {
                    let handling = handle(request, respond, Arc::clone(&script), orders.clone());
                    requests.spawn(handling);
                }
                _ => return,
            },
            Some(order) = ordered.recv() => match order {
                Order::Leave => connection.graceful_shutdown(),
                Order::GoAway => connection.abrupt_shutdown(Reason::INTERNAL_ERROR),
                Order::Disconnect => return,
            },
        }
    }
}

type Respond = server::SendResponse<Bytes>;

async fn handle(
    request: Request<RecvStream>,
    mut respond: Respond,
    script: Arc<Script>,
    orders: mpsc::UnboundedSender<Order>,
) {
    let (head, body) = request.into_parts();
    script.seen.lock().unwrap().push(head.headers);
    // An error is the peer's, who has gone.
    let Ok(_) = collect(body).await else { return };
    script.open.subscribe().wait_for(|open| *open).await.unwrap();
    let act = script.act.lock().unwrap().clone();
    let sent = match act {
        Act::Answer(answer) => send(&mut respond, answer),
        Act::AnswerAndLeave(answer) => {
            orders.send(Order::Leave).unwrap();
            send(&mut respond, answer)
        }
        Act::ResetAfterHeaders => begin_and_reset(&mut respond).await,
        Act::Disconnect => return orders.send(Order::Disconnect).unwrap(),
        Act::GoAway => return orders.send(Order::GoAway).unwrap(),
    };
    // As above.
    let _ = sent;
}

fn send(respond: &mut Respond, answer: Answer) -> Result<(), h2::Error> {
    let mut response = Response::builder().status(answer.status).body(()).unwrap();
    *response.headers_mut() = answer.headers;
    let headers_only = answer.data.is_empty() && answer.trailers.is_none();
    let mut stream = respond.send_response(response, headers_only)?;
    if !answer.data.is_empty() {
        stream.send_data(answer.data, answer.trailers.is_none())?;
    }
    answer.trailers.map_or(Ok(()), |trailers| stream.send_trailers(trailers))
}

async fn begin_and_reset(respond: &mut Respond) -> Result<(), h2::Error> {
    let answer = Answer::compute("k");
    let mut response = Response::new(());
    *response.headers_mut() = answer.headers;
    let mut stream = respond.send_response(response, false)?;
    stream.send_data(answer.data.slice(..6), false)?;
    // A reset drops what has not been written yet, and nothing tells when it has.
    tokio::time::sleep(Duration::from_millis(300)).await;
    stream.send_reset(Reason::INTERNAL_ERROR);
    Ok(())
}

/// All bytes of a body, and the trailers if there are any.
async fn collect(mut body: RecvStream) -> Result<(Bytes, Option<HeaderMap>), h2::Error> {
    let mut data = BytesMut::new();
    while let Some(chunk) = body.data().await {
        let chunk = chunk?;
        body.flow_control().release_capacity(chunk.len())?;
        data.extend_from_slice(&chunk);
    }
    Ok((data.freeze(), body.trailers().await?))
}

/// A client on a connection of its own.
pub struct RawClient {
    addr: SocketAddr,
    requests: client::SendRequest<Bytes>,
    connection: JoinHandle<()>,
}

impl RawClient {
    pub async fn connect(addr: SocketAddr) -> Self {
        let socket = TcpStream::connect(addr).await.unwrap();
        let mut builder = client::Builder::new();
        builder.initial_window_size(WINDOW).initial_connection_window_size(WINDOW);
        let (requests, connection) = builder.handshake(socket).await.unwrap();
        // What goes wrong with a connection shows in each of its calls.
        let connection = tokio::spawn(async { drop(connection.await) });
        Self { addr, requests, connection }
    }

    /// Calls a method with one message and these headers besides gRPC's own. Dropping the future resets
    /// the stream.
    pub fn call<M: Message>(
        &self,
        path: &str,
        message: &M,
        more: HeaderMap,
    ) -> impl Future<Output = Result<Answer, h2::Error>> + Send + use<M> {
        let uri = format!("http://{}{path}", self.addr);
        let mut request = Request::post(uri).body(()).unwrap();
        *request.headers_mut() = headers(&[("content-type", "application/grpc"), ("te", "trailers")]);
        request.headers_mut().extend(more);
        let (requests, message) = (self.requests.clone(), frame(message));
        let pause = Duration::ZERO;
        async move { timeout(PATIENCE, exchange(requests, request, pause, message)).await.expect("no answer") }
    }

    /// The same for the demo service's unary method, with a pause between headers and message.
    pub async fn compute_after(&self, pause: Duration, ask: &ComputeRequest) -> Result<Answer, h2::Error> {
        let mut request = Request::post(format!("http://{}{COMPUTE}", self.addr)).body(()).unwrap();
        *request.headers_mut() = headers(&[("content-type", "application/grpc"), ("te", "trailers")]);
        exchange(self.requests.clone(), request, pause, frame(ask)).await
    }

    /// The same for the demo service's unary method.
    pub fn compute(
        &self,
        request: &ComputeRequest,
        more: HeaderMap,
    ) -> impl Future<Output = Result<Answer, h2::Error>> + Send + use<> {
        self.call(COMPUTE, request, more)
    }

    /// Closes the connection without a word.
    pub fn disconnect(self) {}
}

impl Drop for RawClient {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

async fn exchange(
    requests: client::SendRequest<Bytes>,
    request: Request<()>,
    pause: Duration,
    message: Bytes,
) -> Result<Answer, h2::Error> {
    let (response, mut body) = requests.ready().await?.send_request(request, false)?;
    if !pause.is_zero() {
        tokio::time::sleep(pause).await;
    }
    body.send_data(message, true)?;
    let (head, body) = response.await?.into_parts();
    let (data, trailers) = collect(body).await?;
    Ok(Answer { status: head.status.as_u16(), headers: head.headers, data, trailers })
}

/// What became of a call through tonic.
pub type Outcome = Result<ComputeReply, Status>;

/// Sends `count` calls over one connection.
pub fn send_many(client: &DemoClient<Channel>, count: usize) -> JoinSet<Outcome> {
    let call = |mut client: DemoClient<Channel>| async move {
        let answered = timeout(PATIENCE, client.compute(ask("k"))).await;
        answered.expect("no answer").map(tonic::Response::into_inner)
    };
    (0..count).map(|_| call(client.clone())).collect()
}

/// A raw upstream with a sidecar in front of it.
pub struct RawRig {
    pub upstream: Upstream,
    pub sidecar: Sidecar,
}

impl RawRig {
    /// Both, the upstream answering requests for "k" once it is released.
    pub async fn start(settings: Value) -> Self {
        let upstream = Upstream::start(Act::Answer(Answer::compute("k"))).await;
        let mut options = SidecarOptions::shipped(root(), upstream.addr());
        options.config.settings = settings;
        let sidecar = Sidecar::start(options).await.unwrap();
        Self { upstream, sidecar }
    }

    /// A gRPC client on a connection of its own.
    pub async fn client(&self) -> DemoClient<Channel> {
        DemoClient::new(channel(&self.sidecar.uri()).await)
    }

    /// A raw client.
    pub async fn raw_client(&self) -> RawClient {
        RawClient::connect(self.sidecar.addr()).await
    }

    /// One call by a client of its own.
    pub async fn one(&self) -> Outcome {
        self.client().await.compute(ask("k")).await.map(tonic::Response::into_inner)
    }

    /// Sends `count` calls over a connection of their own.
    pub async fn crowd(&self, count: usize) -> JoinSet<Outcome> {
        send_many(&self.client().await, count)
    }

    /// Waits until a metric has this value.
    pub async fn metric(&self, name: &str, value: usize) {
        eventually(&format!("{name} is {value}"), async || {
            self.sidecar.metrics().await.unwrap().get(name) == value as f64
        })
        .await;
    }

    /// Waits until so many requests wait for a flight that has reached the upstream.
    pub async fn waiting(&self, count: usize) {
        self.metric("collapser_waiting_requests", count).await;
        eventually("the flight is at the upstream", async || self.upstream.calls() > 0).await;
    }

    /// Waits until no request waits and no flight is in the air.
    pub async fn quiet(&self) {
        self.waiting(0).await;
        self.metric("collapser_inflight_requests", 0).await;
    }
}
