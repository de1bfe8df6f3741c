//! Makes one call and judges the answer.

use std::time::Duration;

use anyhow::Context as _;
use bytes::Bytes;
use tokio::task::JoinSet;
use tonic::metadata::MetadataMap;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

use super::drive::Calls;
use super::options::{KeyOrder, LoadOptions};
use super::tally::Outcome;
use crate::MAX_MESSAGE_BYTES;
use crate::args::metadata_map;
use crate::payload::payload_matches;
use crate::proto::demo_client::DemoClient;
use crate::proto::{ComputeReply, ComputeRequest};
use crate::report::status_name;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// Windows so large that flow control never holds back a burst of answers.
const STREAM_WINDOW: u32 = 4 * 1024 * 1024;
const CONNECTION_WINDOW: u32 = 1 << 30;

/// Calls that a connection takes over without making the rest queue for it.
const CALL_BUFFER: usize = 16 * 1024;

/// Calls given up on, whose late answers must not end the connection.
const MAX_RESETS: usize = 1_000_000;

/// Everything that the calls of one load have in common.
pub(super) struct Caller {
    clients: Vec<DemoClient<Channel>>,
    keys: u64,
    key_order: KeyOrder,
    key_prefix: String,
    payload_bytes: u32,
    latency_ms: u32,
    padding: Bytes,
    metadata: MetadataMap,
    timeout: Option<Duration>,
    send_grpc_timeout: bool,
}

impl Caller {
    /// Opens all connections; the first that cannot be opened is an error.
    pub(super) async fn connect(options: &LoadOptions) -> anyhow::Result<Self> {
        Ok(Self {
            clients: connect(&options.target, options.connections).await?,
            keys: options.keys,
            key_order: options.key_order,
            key_prefix: options.key_prefix.clone(),
            payload_bytes: options.payload_bytes,
            latency_ms: options.latency_ms,
            padding: vec![0; options.padding_bytes].into(),
            metadata: metadata_map(&options.headers).map_err(anyhow::Error::msg)?,
            timeout: options.timeout,
            send_grpc_timeout: options.send_grpc_timeout,
        })
    }

    fn key(&self, number: u64) -> String {
        let key = match self.key_order {
            KeyOrder::RoundRobin => number % self.keys,
            KeyOrder::Random => rand::random_range(0..self.keys),
        };
        format!("{}{key}", self.key_prefix)
    }

    fn request(&self, key: &str) -> Request<ComputeRequest> {
        let mut request = Request::new(ComputeRequest {
            key: key.to_owned(),
            latency_ms: self.latency_ms,
            payload_bytes: self.payload_bytes,
            padding: self.padding.clone(),
            ..ComputeRequest::default()
        });
        if !self.metadata.is_empty() {
            *request.metadata_mut() = self.metadata.clone();
        }
        if let (Some(timeout), true) = (self.timeout, self.send_grpc_timeout) {
            request.set_timeout(timeout);
        }
        request
    }

    fn judge(&self, key: &str, reply: &ComputeReply) -> Outcome {
        if reply.key != key {
            return Outcome::Wrong(format!("asked for `{key}`, got `{}`", reply.key));
        }
        let len = reply.payload.len();
        if self.payload_bytes != 0 && len != self.payload_bytes as usize {
            return Outcome::Wrong(format!("asked for {} payload bytes, got {len}", self.payload_bytes));
        }
        if !payload_matches(key, &reply.payload) {
            return Outcome::Wrong(format!("the payload of `{key}` is another's, or damaged"));
        }
        Outcome::Right
    }
}

impl Calls for Caller {
    /// The number decides on connection and key.
    async fn call(&self, number: u64) -> Outcome {
        let key = self.key(number);
        let connection = (number % self.clients.len() as u64) as usize;
        let mut client = self.clients[connection].clone();
        let answer = client.compute(self.request(&key));
        let answer = match self.timeout {
            Some(limit) => tokio::time::timeout(limit, answer).await.unwrap_or_else(|_| {
                let message = format!("no answer within {limit:?}; the client gave up");
                Err(Status::deadline_exceeded(message))
            }),
            None => answer.await,
        };
        match answer {
            Ok(reply) => self.judge(&key, reply.get_ref()),
            Err(status) => failed(&as_deadline(status)),
        }
    }
}

fn failed(status: &Status) -> Outcome {
    Outcome::Failed { status: status_name(status.code()).into(), message: words(status) }
}

/// The status message, and what caused it, where the client itself made it up:
/// "transport error" alone helps nobody.
fn words(status: &Status) -> String {
    let mut words = status.message().to_owned();
    let source = std::error::Error::source(status);
    for cause in std::iter::successors(source, |error| error.source()) {
        let cause = cause.to_string();
        if !words.contains(&cause) {
            words.push_str(": ");
            words.push_str(&cause);
        }
    }
    words
}

/// A deadline that tonic's client enforces itself comes out as CANCELLED; callers
/// of every other kind see DEADLINE_EXCEEDED.
fn as_deadline(status: Status) -> Status {
    let source = std::error::Error::source(&status);
    let expired = std::iter::successors(source, |error| error.source())
        .any(|error| error.is::<tonic::TimeoutExpired>());
    if expired { Status::deadline_exceeded("the deadline passed; the client gave up") } else { status }
}

/// Opens the connections side by side. A channel is one connection; when it
/// breaks, the next call on it opens it anew.
async fn connect(target: &str, connections: usize) -> anyhow::Result<Vec<DemoClient<Channel>>> {
    let endpoint = Endpoint::from_shared(target.to_owned())
        .context("the target")?
        .connect_timeout(CONNECT_TIMEOUT)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .buffer_size(CALL_BUFFER)
        .http2_max_concurrent_reset_streams(MAX_RESETS)
        .http2_max_local_error_reset_streams(MAX_RESETS);
    let mut opening = JoinSet::new();
    for _ in 0..connections {
        let endpoint = endpoint.clone();
        opening.spawn(async move { endpoint.connect().await });
    }
    let mut clients = Vec::with_capacity(connections);
    while let Some(opened) = opening.join_next().await {
        let channel = opened?.with_context(|| {
            format!(
                "cannot connect to {target} (connection {} of {connections}); \
                 start what should listen there, or give another address",
                clients.len() + 1
            )
        })?;
        let client = DemoClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES);
        clients.push(client);
    }
    Ok(clients)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::payload::payload_for;

    fn caller(payload_bytes: u32) -> Caller {
        Caller {
            clients: Vec::new(),
            keys: 3,
            key_order: KeyOrder::RoundRobin,
            key_prefix: "k".to_owned(),
            payload_bytes,
            latency_ms: 0,
            padding: Bytes::new(),
            metadata: MetadataMap::new(),
            timeout: None,
            send_grpc_timeout: false,
        }
    }

    fn reply(key: &str, payload: Bytes) -> ComputeReply {
        ComputeReply { key: key.to_owned(), serial: 1, payload }
    }

    #[test]
    fn keys_go_round() {
        let caller = caller(0);
        let keys: Vec<_> = (0..4).map(|number| caller.key(number)).collect();
        assert_eq!(keys, ["k0", "k1", "k2", "k0"]);
    }

    #[test]
    fn random_keys_stay_in_range() {
        let mut caller = caller(0);
        caller.key_order = KeyOrder::Random;
        for number in 0..100 {
            assert!(["k0", "k1", "k2"].contains(&caller.key(number).as_str()));
        }
    }

    #[test]
    fn wrong_answers_are_told_from_right_ones() {
        let right = |caller: &Caller, reply| matches!(caller.judge("a", &reply), Outcome::Right);
        let any = caller(0);
        assert!(right(&any, reply("a", payload_for("a", 20))));
        assert!(!right(&any, reply("b", payload_for("b", 20))));
        assert!(!right(&any, reply("a", payload_for("b", 20))));
        let sized = caller(20);
        assert!(right(&sized, reply("a", payload_for("a", 20))));
        assert!(!right(&sized, reply("a", payload_for("a", 19))));
    }
}
