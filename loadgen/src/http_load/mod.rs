//! Many HTTP clients that ask for one page: over HTTP/1.1, where each has its connection, or over
//! HTTP/2, where they share some. Counts answers by status and checks each of them.

mod client;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use bytes::Bytes;
use http::{HeaderMap, Method};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::task::JoinSet;

pub use client::{Answer, HttpClient, Protocol};

use crate::http_backend::Page;
use crate::load::{Calls, LoadMode, Outcome, Progress, Subject, Tally, drive_with_progress};
use crate::lock;
use crate::report::Report;

/// More connections than this run into the limit of ports.
const MAX_CONNECTIONS: usize = 20_000;

/// Connections opened at a time; more than a listener's queue holds would be opened after a second
/// attempt, a second later.
const OPENED_AT_ONCE: usize = 500;

/// Says what is wrong with an answer whose status is a success.
pub type Judge = Arc<dyn Fn(&Answer) -> Result<(), String> + Send + Sync>;

/// Clients with their connections, for one load after the other.
pub struct HttpClients {
    target: String,
    clients: Arc<Vec<HttpClient>>,
}

/// What clients ask for.
#[derive(Clone)]
pub struct HttpLoadOptions {
    /// Path and query.
    pub path: String,
    /// How many requests, and when.
    pub mode: LoadMode,
    /// Request headers beside `host`.
    pub headers: HeaderMap,
    /// When a client gives up; `None` waits for ever.
    pub timeout: Option<Duration>,
    /// What a right answer is. Answers with statuses of 400 and above are not asked about: they
    /// count as failed.
    pub judge: Judge,
}

impl HttpLoadOptions {
    /// So many requests at once for a page of the demo HTTP backend, which must be that page.
    pub fn burst(path: impl Into<String>, calls: u64) -> Self {
        let path = path.into();
        Self {
            judge: is_page(path.clone()),
            path,
            mode: LoadMode::Burst { calls },
            headers: HeaderMap::new(),
            timeout: Some(Duration::from_secs(30)),
        }
    }
}

/// Asks for status 200 and the body of this page of the demo HTTP backend.
pub fn is_page(url: String) -> Judge {
    Arc::new(move |answer| {
        if answer.status != 200 {
            return Err(format!("the status is {}", answer.status));
        }
        match Page::read(&answer.body) {
            Some(page) if page.url == url => Ok(()),
            Some(page) => Err(format!("asked for `{url}`, got `{}`", page.url)),
            None => Err(format!("{} bytes that are no page", answer.body.len())),
        }
    })
}

/// What a load came to.
#[derive(Clone, Debug)]
pub struct HttpReport {
    /// The outcome as for calls of gRPC. The failed ones are by status, such as `503`, or `no answer`.
    pub report: Report,
    /// Answers by status, whatever became of them.
    pub statuses: BTreeMap<u16, u64>,
}

impl HttpClients {
    /// Opens so many connections to `http://host:port`, after raising this process's limit of open files as far as
    /// it goes.
    ///
    /// # Errors
    /// If one of them cannot be opened.
    pub async fn connect(target: &str, protocol: Protocol, connections: usize) -> anyhow::Result<Self> {
        ensure!(
            (1..=MAX_CONNECTIONS).contains(&connections),
            "{connections} connections; there can be 1 to {MAX_CONNECTIONS}"
        );
        raise_open_files()?;
        let mut opening = JoinSet::new();
        let mut clients = Vec::with_capacity(connections);
        for number in 0..connections {
            if number >= OPENED_AT_ONCE
                && let Some(opened) = opening.join_next().await
            {
                clients.push(opened??);
            }
            let target = target.to_owned();
            opening.spawn(async move {
                let opened = HttpClient::connect(&target, protocol).await;
                opened.with_context(|| format!("connection {} of {connections}", number + 1))
            });
        }
        while let Some(opened) = opening.join_next().await {
            clients.push(opened??);
        }
        Ok(Self { target: target.to_owned(), clients: Arc::new(clients) })
    }

    /// Runs one load. Requests go to the connections in turn; over HTTP/1.1, one that finds its connection busy
    /// waits. A connection that has ended is opened anew.
    ///
    /// # Errors
    /// If the load makes no sense. Requests that fail are part of the report.
    pub async fn load(
        &self,
        options: HttpLoadOptions,
        on_progress: impl FnMut(Progress),
    ) -> anyhow::Result<HttpReport> {
        options.mode.validate()?;
        let tally = Arc::new(Tally::new(&options.mode)?);
        let target = format!("{}{}", self.target, options.path);
        let mode = options.mode.clone();
        let asker = Arc::new(Asker { clients: self.clients.clone(), options, statuses: Mutex::default() });
        let elapsed = drive_with_progress(&mode, &asker, &tally, on_progress).await?;
        let subject = Subject { target: &target, connections: self.clients.len(), keys: 1 };
        let report = tally.report(subject, elapsed, None);
        let statuses = lock(&asker.statuses).clone();
        Ok(HttpReport { report, statuses })
    }
}

/// Opens the connections, runs one load and closes them.
///
/// # Errors
/// As of [`HttpClients::connect`] and [`HttpClients::load`].
pub async fn run(
    target: &str,
    protocol: Protocol,
    connections: usize,
    options: HttpLoadOptions,
) -> anyhow::Result<HttpReport> {
    HttpClients::connect(target, protocol, connections).await?.load(options, |_| ()).await
}

/// Everything that the requests of one load have in common.
struct Asker {
    clients: Arc<Vec<HttpClient>>,
    options: HttpLoadOptions,
    statuses: Mutex<BTreeMap<u16, u64>>,
}

impl Calls for Asker {
    async fn call(&self, number: u64) -> Outcome {
        let client = &self.clients[(number % self.clients.len() as u64) as usize];
        let answer = client.get(&self.options.path, &self.options.headers);
        let answered = match self.options.timeout {
            Some(limit) => tokio::time::timeout(limit, answer)
                .await
                .unwrap_or_else(|_| Err(anyhow::anyhow!("the client gave up after {limit:?}"))),
            None => answer.await,
        };
        match answered {
            Ok(answer) => self.judge(&answer),
            Err(error) => Outcome::Failed { status: "no answer".into(), message: format!("{error:#}") },
        }
    }
}

impl Asker {
    fn judge(&self, answer: &Answer) -> Outcome {
        let status = answer.status.as_u16();
        *lock(&self.statuses).entry(status).or_default() += 1;
        if status >= 400 {
            let message = String::from_utf8_lossy(&answer.body).trim_end().to_owned();
            return Outcome::Failed { status: status.to_string().into(), message };
        }
        (self.options.judge)(answer).map_or_else(Outcome::Wrong, |()| Outcome::Right)
    }
}

/// Sends one request on a connection of its own.
///
/// # Errors
/// If there is no answer, or not all of it.
pub async fn ask(
    target: &str,
    protocol: Protocol,
    method: Method,
    path: &str,
    headers: &HeaderMap,
) -> anyhow::Result<Answer> {
    HttpClient::connect(target, protocol).await?.send(method, path, headers, Bytes::new()).await
}

/// Thousands of connections need more open files than a shell allows by default.
fn raise_open_files() -> anyhow::Result<()> {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })
        .context("cannot raise the limit of open files")
}
