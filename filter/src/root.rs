//! The root context: one for each worker, and one on the main thread that never serves a request.

use crate::host;
use crate::stream::Stream;
use crate::worker::Worker;
use collapser_engine::reply::Reply;
use collapser_engine::settings::Settings;
use proxy_wasm::traits::{Context, HttpContext, RootContext};
use proxy_wasm::types::{BufferType, ContextType, MapType};
use std::rc::Rc;

/// The root context.
pub struct Root {
    id: u32,
    worker: Option<Rc<Worker>>,
}

impl Root {
    /// A root context without settings yet.
    pub fn new(id: u32) -> Self {
        Self { id, worker: None }
    }
}

impl Context for Root {
    fn on_http_call_response(&mut self, token: u32, _headers: usize, body_size: usize, _trailers: usize) {
        let Some(worker) = &self.worker else { return };
        worker.on_call_response(token, || {
            let headers = host::header_map(MapType::HttpCallResponseHeaders);
            let trailers = host::header_map(MapType::HttpCallResponseTrailers);
            let body = host::buffer(BufferType::HttpCallResponseBody, 0, body_size);
            Reply::record(&headers, body, &trailers)
        });
    }

    fn on_done(&mut self) -> bool {
        if let Some(worker) = &self.worker {
            worker.on_done();
        }
        true
    }
}

impl RootContext for Root {
    fn on_configure(&mut self, size: usize) -> bool {
        let json = host::buffer(BufferType::PluginConfiguration, 0, size);
        let settings = match Settings::load(&json, |name| std::env::var(name).ok()) {
            Ok(settings) => settings,
            Err(faults) => {
                faults.iter().for_each(|fault| log::error!("collapser: wrong setting: {fault}"));
                return false;
            }
        };
        if settings.key_headers.is_empty() {
            log::warn!("collapser: key_headers is empty: callers with different credentials share answers");
        }
        match Worker::new(self.id, settings) {
            Ok(worker) => self.worker = Some(Rc::new(worker)),
            Err(host::Refused) => log::error!("collapser: Envoy refused a metric, a queue or a timer"),
        }
        self.worker.is_some()
    }

    fn on_tick(&mut self) {
        if let Some(worker) = &self.worker {
            worker.on_tick();
        }
    }

    fn on_queue_ready(&mut self, _queue: u32) {
        if let Some(worker) = &self.worker {
            worker.on_wake();
        }
    }

    fn create_http_context(&self, id: u32) -> Option<Box<dyn HttpContext>> {
        // Envoy creates no stream before the settings are accepted.
        Some(Box::new(Stream::new(id, self.worker.as_ref().map(Rc::clone)?)))
    }

    fn get_type(&self) -> Option<ContextType> {
        Some(ContextType::HttpContext)
    }
}
