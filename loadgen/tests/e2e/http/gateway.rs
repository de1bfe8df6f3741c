//! The shipped gateway with a demo HTTP backend behind it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use collapser_loadgen::http_backend::{HttpBackend, HttpBackendHandle, HttpBackendOptions, Page};
use collapser_loadgen::http_load::{Answer, HttpClient, Protocol};
use collapser_loadgen::sidecar::{Sidecar, SidecarOptions};
use http::{HeaderMap, Method};
use serde_json::{Value, json};

use crate::rig::{eventually, root};

/// Gateway and backend.
pub struct Gateway {
    pub backend: HttpBackendHandle,
    pub sidecar: Sidecar,
}

/// No request headers but those that each has.
pub const NOTHING: &[(&str, &str)] = &[];

/// Request headers.
pub fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
    pairs.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
}

/// The settings of most tests: nothing is kept that does not say so.
pub fn plain() -> Value {
    json!({"stale_if_error": "0"})
}

impl Gateway {
    /// Both, with these settings beside those of the shipped file.
    pub async fn start(settings: Value, latency_ms: u64) -> Self {
        Self::start_with(settings, latency_ms, |_| ()).await
    }

    /// The same, with other changes to how the gateway starts.
    pub async fn start_with(
        settings: Value,
        latency_ms: u64,
        change: impl FnOnce(&mut SidecarOptions),
    ) -> Self {
        let latency = Duration::from_millis(latency_ms);
        let backend =
            HttpBackend::start(HttpBackendOptions { latency, ..HttpBackendOptions::default() }).unwrap();
        let mut options = SidecarOptions::gateway(root(), backend.addr());
        options.config.settings = settings;
        change(&mut options);
        let sidecar = Sidecar::start(options).await.unwrap();
        Self { backend, sidecar }
    }

    /// A client with HTTP/2, whose requests do not wait for each other.
    pub async fn client(&self) -> Arc<HttpClient> {
        Arc::new(HttpClient::connect(&self.sidecar.uri(), Protocol::Http2).await.unwrap())
    }

    /// One GET on a connection of its own.
    pub async fn get(&self, path: &str, pairs: &[(&'static str, &str)]) -> Answer {
        self.client().await.get(path, &headers(pairs)).await.unwrap()
    }

    /// One request on a connection of its own.
    pub async fn send(&self, method: Method, path: &str, pairs: &[(&'static str, &str)]) -> Answer {
        self.client().await.send(method, path, &headers(pairs), Bytes::new()).await.unwrap()
    }

    /// Several requests for a page: the first one leads a flight, and the others come while it is in the air.
    pub async fn together(&self, path: &str, requests: &[&[(&'static str, &str)]]) -> Vec<Answer> {
        let client = self.client().await;
        let before = self.backend.calls();
        let ask = |pairs: &[(&'static str, &str)]| {
            let (client, path, headers) = (client.clone(), path.to_string(), headers(pairs));
            tokio::spawn(async move { client.get(&path, &headers).await.unwrap() })
        };
        let mut asked = vec![ask(requests[0])];
        eventually("the leader's call", async || self.backend.calls() > before).await;
        asked.extend(requests[1..].iter().map(|pairs| ask(pairs)));
        let mut answers = Vec::new();
        for one in asked {
            answers.push(one.await.unwrap());
        }
        answers
    }
}

/// From which query of the backend's an answer came.
pub fn serial(answer: &Answer) -> u64 {
    Page::read(&answer.body).unwrap_or_else(|| panic!("{answer:?} is no page")).serial
}

/// How many queries these answers came from.
pub fn queries(answers: &[Answer]) -> usize {
    answers.iter().map(serial).collect::<BTreeSet<_>>().len()
}

/// The last member of `cache-status`, which is the filter's.
pub fn status(answer: &Answer) -> String {
    let last = answer.headers.get_all("cache-status").iter().next_back();
    last.map_or_else(String::new, |value| value.to_str().unwrap().to_string())
}
