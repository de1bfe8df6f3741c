//! The backend's HTTP side, for whoever cannot call a Rust function: a person
//! with `curl`, a probe, the load generator.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;

use super::calls::State;
use super::listen::Server;

pub(super) fn start(addr: SocketAddr, state: Arc<State>) -> anyhow::Result<Server> {
    Server::start(addr, move |stream| {
        let state = Arc::clone(&state);
        async move {
            let serve = service_fn(move |request| {
                let response = respond(&state, &request);
                async move { Ok::<_, Infallible>(response) }
            });
            // An error is the peer's: it hung up, or does not speak HTTP/1.1.
            let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), serve).await;
        }
    })
}

fn respond<B>(state: &State, request: &Request<B>) -> Response<Full<Bytes>> {
    let method = request.method();
    match request.uri().path() {
        "/health" if method == Method::GET => text(StatusCode::OK, "ok"),
        "/calls" if method == Method::GET => calls(state),
        "/reset" if method == Method::GET || method == Method::POST => {
            state.reset();
            text(StatusCode::OK, "ok")
        }
        "/latency" if method == Method::POST => set_latency(state, request.uri().query()),
        "/health" | "/calls" | "/reset" | "/latency" => {
            text(StatusCode::METHOD_NOT_ALLOWED, "method not allowed")
        }
        _ => text(StatusCode::NOT_FOUND, "not found; there are /calls, /reset, /health and /latency?ms=N"),
    }
}

fn calls(state: &State) -> Response<Full<Bytes>> {
    match serde_json::to_string(&state.counts()) {
        Ok(json) => {
            let mut response = text(StatusCode::OK, json);
            let value = http::HeaderValue::from_static("application/json");
            response.headers_mut().insert(CONTENT_TYPE, value);
            response
        }
        Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
    }
}

fn set_latency(state: &State, query: Option<&str>) -> Response<Full<Bytes>> {
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
fn text(status: StatusCode, body: impl Into<String>) -> Response<Full<Bytes>> {
    let mut body = body.into();
    body.push('\n');
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    let value = http::HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(CONTENT_TYPE, value);
    response
}
