//! What the methods of the demo service do.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use http::HeaderMap;
use tokio_stream::{Stream, StreamExt as _};
use tonic::metadata::MetadataMap;
use tonic::{Code, Request, Response, Status, Streaming};

use super::calls::State;
use crate::MAX_MESSAGE_BYTES;
use crate::args::append_metadata;
use crate::payload::payload_for;
use crate::proto::demo_server::Demo;
use crate::proto::{
    ComputeReply, ComputeRequest, CountReply, CountRequest, EchoMessage, Metadata, SumReply, SumRequest,
};

/// Room that a reply needs besides its payload.
const REPLY_OVERHEAD: usize = 1024 * 1024;

/// How a response ends, where that is more than tonic's own handlers can say.
/// Left in the response's extensions for the layer that writes the trailers.
#[derive(Clone)]
pub(super) enum Ending {
    /// These follow the message, beside `grpc-status`.
    Also(HeaderMap),
    /// These follow the headers, and there is no message: a failure after
    /// initial metadata, which leaves a server in a frame of its own.
    Instead(HeaderMap),
}

/// The demo service.
pub(super) struct DemoService {
    pub(super) state: Arc<State>,
}

#[tonic::async_trait]
impl Demo for DemoService {
    async fn compute(&self, request: Request<ComputeRequest>) -> Result<Response<ComputeReply>, Status> {
        let ask = request.into_inner();
        let call = self.state.begin(&ask.key);
        let initial = joined(&self.state.initial, &ask.initial_metadata)?;
        let trailing = joined(&self.state.trailing, &ask.trailing_metadata)?;

        let latency = match ask.latency_ms {
            0 => self.state.latency(),
            ms => Duration::from_millis(ms.into()),
        };
        // The failure is settled on arrival, like the latency.
        let failure = self.failure(&ask)?;
        if !latency.is_zero() {
            tokio::time::sleep(latency).await;
        }
        match failure {
            Some((code, message)) => failed(code, message, initial, trailing),
            None => Ok(answered(self.reply(ask, call.serial)?, initial, trailing)),
        }
    }

    type CountStream = Pin<Box<dyn Stream<Item = Result<CountReply, Status>> + Send>>;

    async fn count(&self, request: Request<CountRequest>) -> Result<Response<Self::CountStream>, Status> {
        self.state.count.fetch_add(1, Relaxed);
        let ask = request.into_inner();
        let bytes = payload_len(ask.payload_bytes)?;
        let interval = Duration::from_millis(ask.interval_ms.into());
        let replies = tokio_stream::iter(0..ask.count).then(move |index| async move {
            if index > 0 && !interval.is_zero() {
                tokio::time::sleep(interval).await;
            }
            let payload = payload_for(&index.to_string(), bytes);
            Ok(CountReply { index, payload })
        });
        Ok(Response::new(Box::pin(replies)))
    }

    async fn sum(&self, request: Request<Streaming<SumRequest>>) -> Result<Response<SumReply>, Status> {
        self.state.sum.fetch_add(1, Relaxed);
        let mut messages = request.into_inner();
        let mut reply = SumReply::default();
        while let Some(message) = messages.message().await? {
            reply.sum = reply.sum.wrapping_add(message.value);
            reply.messages += 1;
        }
        Ok(Response::new(reply))
    }

    type EchoStream = Streaming<EchoMessage>;

    async fn echo(
        &self,
        request: Request<Streaming<EchoMessage>>,
    ) -> Result<Response<Self::EchoStream>, Status> {
        self.state.echo.fetch_add(1, Relaxed);
        Ok(Response::new(request.into_inner()))
    }
}

impl DemoService {
    /// What the request asks for goes before what the backend is set to.
    fn failure(&self, ask: &ComputeRequest) -> Result<Option<(Code, String)>, Status> {
        match ask.fail_code {
            0 => Ok(self.state.failure().map(|failure| (failure.code, failure.message))),
            code @ 1..=16 => Ok(Some((Code::from_i32(code as i32), ask.fail_message.clone()))),
            code => Err(Status::invalid_argument(format!(
                "fail_code is {code}; gRPC status codes go from 0 to 16"
            ))),
        }
    }

    fn reply(&self, ask: ComputeRequest, serial: u64) -> Result<ComputeReply, Status> {
        if ask.empty_reply {
            return Ok(ComputeReply::default());
        }
        let len = match ask.payload_bytes {
            0 => payload_len(self.state.payload_bytes)?,
            asked => payload_len(asked)?,
        };
        Ok(ComputeReply { payload: payload_for(&ask.key, len), key: ask.key, serial })
    }
}

fn payload_len(asked: u32) -> Result<usize, Status> {
    let len = asked as usize;
    if len > MAX_MESSAGE_BYTES - REPLY_OVERHEAD {
        return Err(Status::invalid_argument(format!(
            "payload_bytes is {asked}; at most {} fit into a reply",
            MAX_MESSAGE_BYTES - REPLY_OVERHEAD
        )));
    }
    Ok(len)
}

fn joined(defaults: &MetadataMap, asked: &[Metadata]) -> Result<MetadataMap, Status> {
    let mut map = defaults.clone();
    for entry in asked {
        append_metadata(&mut map, entry).map_err(Status::invalid_argument)?;
    }
    Ok(map)
}

fn answered(reply: ComputeReply, initial: MetadataMap, trailing: MetadataMap) -> Response<ComputeReply> {
    let mut response = Response::new(reply);
    *response.metadata_mut() = initial;
    if !trailing.is_empty() {
        let ending = Ending::Also(trailing.into_headers());
        response.extensions_mut().insert(ending);
    }
    response
}

/// Without initial metadata a failure is a single frame, like that of any gRPC
/// server; with it, headers come first.
fn failed(
    code: Code,
    message: String,
    initial: MetadataMap,
    trailing: MetadataMap,
) -> Result<Response<ComputeReply>, Status> {
    let status = Status::with_metadata(code, message, trailing);
    if initial.is_empty() {
        return Err(status);
    }
    let mut trailers = HeaderMap::new();
    status.add_header(&mut trailers)?;
    let mut response = Response::new(ComputeReply::default());
    *response.metadata_mut() = initial;
    response.extensions_mut().insert(Ending::Instead(trailers));
    Ok(response)
}
