//! Asks the demo backend how many calls reached it.

use anyhow::{Context as _, ensure};
use bytes::Bytes;
use http::{Method, Uri};

use super::options::parse_http_uri;
use crate::backend::CallCounts;
use crate::http_ask::ask;

/// A client of the demo backend's HTTP side.
#[derive(Clone, Debug)]
pub struct BackendClient {
    uri: Uri,
}

impl BackendClient {
    /// Takes `http://host:port`. Nothing is sent yet.
    pub fn new(url: &str) -> anyhow::Result<Self> {
        let uri = parse_http_uri(url).context("the backend's address")?;
        Ok(Self { uri })
    }

    /// The backend's counters.
    pub async fn counts(&self) -> anyhow::Result<CallCounts> {
        let body = self.ask(Method::GET, "/calls").await?;
        serde_json::from_slice(&body)
            .with_context(|| format!("{} is no demo backend: /calls is not what it gives", self.uri))
    }

    /// Zeroes the backend's counters.
    pub async fn reset(&self) -> anyhow::Result<()> {
        self.ask(Method::POST, "/reset").await.map(drop)
    }

    async fn ask(&self, method: Method, path: &str) -> anyhow::Result<Bytes> {
        let (status, body) = ask(method, &self.uri, path).await.with_context(|| {
            format!("cannot ask the backend for {path} at {}; is its HTTP side there?", self.uri)
        })?;
        ensure!(status.is_success(), "the backend answered {path} with HTTP status {status}");
        Ok(body)
    }
}
