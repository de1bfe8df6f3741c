//! Callers in large numbers, each of whom checks its answer.

use std::time::Duration;

use collapser_loadgen::payload::payload_matches;
use collapser_loadgen::proto::ComputeRequest;
use collapser_loadgen::proto::demo_client::DemoClient;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint};

use crate::rig::ask;

pub type Client = DemoClient<Channel>;

/// Ends a test whose call is never answered.
const PATIENCE: Duration = Duration::from_secs(180);

/// Hang-ups that the client library puts up with on a connection, so that only Envoy's own limits show.
const MAX_RESETS: usize = 1_000_000;

/// Clients with a connection each, on which the server may be this many bytes ahead of their reading.
pub async fn clients_with_window(uri: &str, count: usize, window: u32) -> Vec<Client> {
    let endpoint = Endpoint::from_shared(uri.to_string())
        .unwrap()
        .initial_stream_window_size(window.min(4 << 20))
        .initial_connection_window_size(window)
        .buffer_size(16 * 1024)
        .http2_max_concurrent_reset_streams(MAX_RESETS)
        .http2_max_local_error_reset_streams(MAX_RESETS);
    let mut clients = Vec::with_capacity(count);
    for _ in 0..count {
        let channel = endpoint.connect().await.unwrap();
        clients.push(DemoClient::new(channel).max_decoding_message_size(8 << 20));
    }
    clients
}

/// Clients with a connection each, whom flow control never holds back.
pub async fn clients(uri: &str, count: usize) -> Vec<Client> {
    clients_with_window(uri, count, 1 << 30).await
}

/// A request with a reply of that size.
pub fn sized(key: &str, payload_bytes: u32) -> ComputeRequest {
    ComputeRequest { payload_bytes, ..ask(key) }
}

/// One call; an error says what was wrong with the answer.
pub async fn call(mut client: Client, key: &str, payload_bytes: u32) -> Result<(), String> {
    let answer = timeout(PATIENCE, client.compute(sized(key, payload_bytes))).await;
    let answer = answer.map_err(|_| format!("no answer within {PATIENCE:?}"))?;
    let reply = answer.map_err(|status| format!("{:?}: {}", status.code(), status.message()))?.into_inner();
    let whole = payload_bytes == 0 || reply.payload.len() == payload_bytes as usize;
    if reply.key == key && whole && payload_matches(key, &reply.payload) {
        return Ok(());
    }
    Err(format!("asked for {key}, got {} with {} bytes", reply.key, reply.payload.len()))
}

/// `count` calls for one key, spread over the clients.
pub fn crowd(clients: &[Client], count: usize, key: &str, payload_bytes: u32) -> JoinSet<Result<(), String>> {
    let clients = clients.iter().cycle().take(count);
    clients
        .map(|client| {
            let (client, key) = (client.clone(), key.to_string());
            async move { call(client, &key, payload_bytes).await }
        })
        .collect()
}

/// All have the right answer.
pub async fn assert_right(calls: JoinSet<Result<(), String>>) {
    let count = calls.len();
    let wrong: Vec<_> = calls.join_all().await.into_iter().filter_map(Result::err).collect();
    assert!(wrong.is_empty(), "{} of {count} calls went wrong, the first: {}", wrong.len(), wrong[0]);
}
