//! Serves the pages over HTTP/1.1 and HTTP/2, whichever the client begins with.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, TRAILER};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Empty, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use tokio_stream::StreamExt as _;

use super::state::{SeenPage, State};
use super::{Ask, Page};
use crate::backend::listen::Server;

type Body = UnsyncBoxBody<Bytes, io::Error>;

/// Windows so large that flow control never holds back a burst.
const STREAM_WINDOW: u32 = 4 * 1024 * 1024;
const CONNECTION_WINDOW: u32 = 1 << 30;

/// Time for what comes before a cut to be sent; a connection that fails at once sends nothing.
const CUT_DELAY: Duration = Duration::from_millis(10);

pub(super) fn start(addr: SocketAddr, state: Arc<State>) -> anyhow::Result<Server> {
    Server::start(addr, move |stream| {
        let state = Arc::clone(&state);
        async move {
            let serve = service_fn(move |request| {
                let state = Arc::clone(&state);
                async move { Ok::<_, Infallible>(respond(&state, request).await) }
            });
            let mut builder = auto::Builder::new(TokioExecutor::new());
            builder
                .http2()
                .max_concurrent_streams(None)
                .initial_stream_window_size(STREAM_WINDOW)
                .initial_connection_window_size(CONNECTION_WINDOW);
            // An error is the peer's: it hung up, or does not speak HTTP. Or it is a body that was cut as asked.
            let _ = builder.serve_connection(TokioIo::new(stream), serve).await;
        }
    })
}

async fn respond(state: &Arc<State>, request: Request<Incoming>) -> Response<Body> {
    let (method, path) = (request.method(), request.uri().path());
    match (method, path) {
        (_, path) if path.starts_with("/page/") => page(state, request).await,
        (&Method::GET, "/health") => text(StatusCode::OK, "ok"),
        (&Method::GET, "/calls") => calls(state),
        (&Method::POST, "/reset") => {
            state.reset();
            text(StatusCode::OK, "ok")
        }
        (&Method::POST, "/latency") => set_latency(state, request.uri().query()),
        (_, "/health" | "/calls" | "/reset" | "/latency") => {
            text(StatusCode::METHOD_NOT_ALLOWED, "method not allowed")
        }
        _ => {
            let there = "not found; there are /page/<anything>, /calls, /reset, /health and /latency?ms=N";
            text(StatusCode::NOT_FOUND, there)
        }
    }
}

/// Counts the request, takes the time of a query and answers as asked.
async fn page(state: &Arc<State>, request: Request<Incoming>) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let url = parts.uri.path_and_query().map_or("/", |url| url.as_str()).to_owned();
    let call = state.begin(&url);
    let asked = state.answer().map_or_else(|| Ask::parse(parts.uri.query().unwrap_or_default()), Ok);
    let Ok(body) = body.collect().await else {
        return text(StatusCode::BAD_REQUEST, "the request's body broke off");
    };
    let head_only = parts.method == Method::HEAD;
    let seen = SeenPage {
        method: parts.method,
        version: parts.version,
        uri: parts.uri,
        headers: parts.headers.clone(),
        body: body.to_bytes(),
    };
    state.remember(seen);
    let ask = match asked {
        Ok(ask) => ask,
        Err(what) => return text(StatusCode::BAD_REQUEST, what),
    };
    let latency = ask.latency.unwrap_or_else(|| state.latency());
    if !latency.is_zero() {
        tokio::time::sleep(latency).await;
    }
    let body = Page::body(&url, call.serial, &ask.echo, &parts.headers, ask.size);
    answer(ask, body, call.serial, head_only)
}

/// An answer as asked. `x-serial` tells the query's number where there is no body.
fn answer(ask: Ask, body: Bytes, serial: u64, head_only: bool) -> Response<Body> {
    let mut response = Response::new(empty());
    *response.status_mut() = ask.status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    headers.insert("x-serial", serial.into());
    let mut named = HeaderMap::new();
    for (name, value) in &ask.headers {
        named.append(name, value.clone());
    }
    // What is asked for replaces what there is of the same name.
    headers.extend(named);
    for (name, _) in &ask.trailers {
        headers.append(TRAILER, HeaderValue::from(name.clone()));
    }
    if matches!(ask.status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED) {
        return response;
    }
    let has_length = ask.chunks.is_none() && ask.trailers.is_empty();
    if has_length && !headers.contains_key(CONTENT_LENGTH) {
        headers.insert(CONTENT_LENGTH, body.len().into());
    }
    if head_only { response } else { response.map(|_| full(ask, body)) }
}

fn full(ask: Ask, body: Bytes) -> Body {
    if ask.chunks.is_none() && ask.trailers.is_empty() && !ask.cut {
        return Full::new(body).map_err(|never| match never {}).boxed_unsync();
    }
    let mut frames = pieces(&body, ask.chunks.unwrap_or(1));
    let mut delay = ask.chunk_delay;
    if ask.cut {
        delay = delay.max(CUT_DELAY);
        frames = vec![Ok(Frame::data(body.slice(..body.len() / 2))), Err(io::Error::other("cut as asked"))];
    } else if !ask.trailers.is_empty() {
        frames.push(Ok(Frame::trailers(ask.trailers.into_iter().collect())));
    }
    let frames = tokio_stream::iter(frames.into_iter().enumerate()).then(move |(index, frame)| async move {
        if index > 0 && !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        frame
    });
    StreamBody::new(frames).boxed_unsync()
}

/// The body in so many pieces, or in one for each byte if it has fewer.
fn pieces(body: &Bytes, chunks: usize) -> Vec<io::Result<Frame<Bytes>>> {
    let len = body.len().div_ceil(chunks.max(1)).max(1);
    let starts = (0..body.len()).step_by(len);
    starts.map(|start| Ok(Frame::data(body.slice(start..body.len().min(start + len))))).collect()
}

fn empty() -> Body {
    Empty::new().map_err(|never| match never {}).boxed_unsync()
}

fn calls(state: &State) -> Response<Body> {
    match serde_json::to_string(&state.counts()) {
        Ok(json) => text(StatusCode::OK, json),
        Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
    }
}

fn set_latency(state: &State, query: Option<&str>) -> Response<Body> {
    let ms = query.and_then(|query| query.strip_prefix("ms=")).and_then(|ms| ms.parse::<u32>().ok());
    match ms {
        Some(ms) => {
            state.set_latency(Duration::from_millis(ms.into()));
            text(StatusCode::OK, "ok")
        }
        None => text(StatusCode::BAD_REQUEST, "write /latency?ms=N, N in milliseconds"),
    }
}

/// A plain-text response that ends in a newline, for the sake of terminals.
fn text(status: StatusCode, body: impl Into<String>) -> Response<Body> {
    let body = body.into() + "\n";
    let mut response = Response::new(Full::from(body).map_err(|never| match never {}).boxed_unsync());
    *response.status_mut() = status;
    let value = HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(CONTENT_TYPE, value);
    response
}
