//! One small HTTP/1.1 question to a server on this machine: counters, metrics, readiness.

use std::time::Duration;

use anyhow::Context as _;
use bytes::Bytes;
use http::{Method, Request, StatusCode, Uri, header};
use http_body_util::{BodyExt as _, Empty};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

/// How long one question may take altogether.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Asks `http://host:port` for `path`, on a connection of its own. Any status is an answer; no
/// answer within five seconds is an error.
pub async fn ask(method: Method, server: &Uri, path: &str) -> anyhow::Result<(StatusCode, Bytes)> {
    let asked = tokio::time::timeout(TIMEOUT, exchange(method, server, path)).await;
    asked.unwrap_or_else(|_| Err(anyhow::anyhow!("no answer within {TIMEOUT:?}")))
}

async fn exchange(method: Method, server: &Uri, path: &str) -> anyhow::Result<(StatusCode, Bytes)> {
    let authority = server.authority().context("no host")?;
    let stream = TcpStream::connect(authority.as_str()).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // Ends by itself when the sender is dropped; its error reaches the sender too.
    let connection = tokio::spawn(connection);
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(header::HOST, authority.as_str())
        .body(Empty::<Bytes>::new())?;
    let response = sender.send_request(request).await?;
    let status = response.status();
    let body = response.into_body().collect().await?.to_bytes();
    connection.abort();
    Ok((status, body))
}
