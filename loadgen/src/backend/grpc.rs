//! Serves the demo service, health and reflection over HTTP/2, and does around
//! the service what generated code cannot: trailers on a success, and a record of
//! what arrived.

use std::convert::Infallible;
use std::future::ready;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::Service as _;
use tonic::service::Routes;

use super::calls::{SeenRequest, State};
use super::listen::Server;
use super::service::{DemoService, Ending};
use crate::MAX_MESSAGE_BYTES;
use crate::proto;
use crate::proto::demo_server::DemoServer;

const DEMO_PREFIX: &str = "/collapser.demo.v1.Demo/";
const COMPUTE_PATH: &str = "/collapser.demo.v1.Demo/Compute";

/// Windows so large that flow control never holds back a burst.
const STREAM_WINDOW: u32 = 4 * 1024 * 1024;
const CONNECTION_WINDOW: u32 = 1 << 30;

/// Callers that hang up by the thousand are something to observe here, not an attack.
const MAX_RESETS: usize = 1_000_000;

pub(super) async fn start(addr: SocketAddr, state: Arc<State>) -> anyhow::Result<Server> {
    let services = Services::new(state).await?;
    Server::start(addr, move |stream| {
        let services = services.clone();
        async move {
            let serve = service_fn(move |request| services.clone().handle(request));
            // An error is the peer's: it hung up, or does not speak HTTP/2.
            let _ = http2::Builder::new(TokioExecutor::new())
                .max_concurrent_streams(None)
                .max_pending_accept_reset_streams(MAX_RESETS)
                .max_local_error_reset_streams(MAX_RESETS)
                .initial_stream_window_size(STREAM_WINDOW)
                .initial_connection_window_size(CONNECTION_WINDOW)
                .serve_connection(TokioIo::new(stream), serve)
                .await;
        }
    })
}

#[derive(Clone)]
struct Services {
    state: Arc<State>,
    demo: DemoServer<DemoService>,
    /// Health and reflection.
    others: Routes,
}

impl Services {
    async fn new(state: Arc<State>) -> anyhow::Result<Self> {
        let service = DemoService { state: Arc::clone(&state) };
        let demo = DemoServer::new(service)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        let (reporter, health) = tonic_health::server::health_reporter();
        reporter.set_serving::<DemoServer<DemoService>>().await;

        let reflection = || {
            tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(proto::FILE_DESCRIPTOR_SET)
                .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        };
        let others = Routes::new(health)
            .add_service(reflection().build_v1().context("reflection v1")?)
            .add_service(reflection().build_v1alpha().context("reflection v1alpha")?)
            .prepare();
        Ok(Self { state, demo, others })
    }

    async fn handle(mut self, request: Request<Incoming>) -> Result<Response<Body>, Infallible> {
        let path = request.uri().path();
        if path == COMPUTE_PATH {
            Ok(self.compute(request).await)
        } else if path.starts_with(DEMO_PREFIX) {
            self.demo.call(request).await
        } else {
            self.others.call(request).await
        }
    }

    async fn compute(&mut self, request: Request<Incoming>) -> Response<Body> {
        self.state.remember(SeenRequest { uri: request.uri().clone(), headers: request.headers().clone() });
        let limit = grpc_timeout(request.headers());
        let answer = self.demo.call(request);
        let answered = match limit {
            Some(limit) => tokio::time::timeout(limit, answer).await,
            None => Ok(answer.await),
        };
        match answered {
            Ok(Ok(response)) => with_ending(response),
            Ok(Err(never)) => match never {},
            Err(_) => Status::deadline_exceeded("the deadline passed in the backend").into_http(),
        }
    }
}

/// Puts the trailers in place that the service left in the extensions.
fn with_ending(mut response: Response<Body>) -> Response<Body> {
    match response.extensions_mut().remove::<Ending>() {
        None => response,
        Some(Ending::Also(more)) => response.map(|body| {
            Body::new(body.map_frame(move |frame| match frame.into_trailers() {
                Ok(mut trailers) => {
                    append_all(&mut trailers, &more);
                    hyper::body::Frame::trailers(trailers)
                }
                Err(data) => data,
            }))
        }),
        Some(Ending::Instead(trailers)) => response.map(|_| {
            let trailers = ready(Some(Ok::<_, Infallible>(trailers)));
            Body::new(Empty::<Bytes>::new().with_trailers(trailers))
        }),
    }
}

fn append_all(trailers: &mut HeaderMap, more: &HeaderMap) {
    for (name, value) in more {
        trailers.append(name, value.clone());
    }
}

/// A server ends a call at its caller's deadline, and so does this one: a call
/// that carries somebody else's deadline must show.
fn grpc_timeout(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get("grpc-timeout")?.to_str().ok()?;
    let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let number: u32 = number.parse().ok()?;
    let unit = match unit {
        "H" => Duration::from_secs(3600),
        "M" => Duration::from_secs(60),
        "S" => Duration::from_secs(1),
        "m" => Duration::from_millis(1),
        "u" => Duration::from_micros(1),
        "n" => Duration::from_nanos(1),
        _ => return None,
    };
    Some(unit * number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timeout(text: &str) -> Option<Duration> {
        let mut headers = HeaderMap::new();
        headers.insert("grpc-timeout", text.parse().unwrap());
        grpc_timeout(&headers)
    }

    #[test]
    fn reads_deadlines() {
        assert_eq!(timeout("5S"), Some(Duration::from_secs(5)));
        assert_eq!(timeout("1500m"), Some(Duration::from_millis(1500)));
        assert_eq!(timeout("99999999H"), Some(Duration::from_secs(359_999_996_400)));
        for text in ["", "S", "5", "5x", "-5S"] {
            assert_eq!(timeout(text), None, "{text}");
        }
        assert_eq!(grpc_timeout(&HeaderMap::new()), None);
    }

    #[test]
    fn appended_trailers_keep_what_is_there() {
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", "0".parse().unwrap());
        let mut more = HeaderMap::new();
        more.append("x", "1".parse().unwrap());
        more.append("x", "2".parse().unwrap());
        append_all(&mut trailers, &more);
        assert_eq!(trailers["grpc-status"], "0");
        assert_eq!(trailers.get_all("x").iter().count(), 2);
    }
}
