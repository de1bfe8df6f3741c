//! The root context: one for each worker, and one on the main thread that never serves a request.

use crate::host::{self, BufferType, MapType};
use crate::worker::{Response, Worker};
use collapser_engine::settings::Settings;
use std::cell::OnceCell;
use std::rc::Rc;

/// The root context.
pub struct Root {
    id: u32,
    /// Nothing until the settings are accepted.
    worker: OnceCell<Rc<Worker>>,
}

impl Root {
    /// A root context without settings yet.
    pub fn new(id: u32) -> Self {
        Self { id, worker: OnceCell::new() }
    }

    /// What its streams share.
    pub fn worker(&self) -> Option<Rc<Worker>> {
        self.worker.get().map(Rc::clone)
    }

    /// The settings have come: so many bytes. Returns whether they are accepted.
    pub fn on_configure(&self, size: usize) -> bool {
        let json = host::buffer(BufferType::PluginConfiguration, 0, size);
        let settings = match Settings::load(&json, |name| std::env::var(name).ok()) {
            Ok(settings) => settings,
            Err(faults) => {
                faults.iter().for_each(|fault| log::error!("collapser: wrong setting: {fault}"));
                return false;
            }
        };
        if settings.policies.all().any(|(_, policy)| policy.key_headers.is_empty()) {
            log::warn!("collapser: key_headers is empty: callers with different credentials share answers");
        }
        let Ok(worker) = Worker::new(self.id, settings) else {
            log::error!("collapser: Envoy refused a metric, a queue or a timer");
            return false;
        };
        // Other settings come with another root context.
        self.worker.set(Rc::new(worker)).is_ok()
    }

    /// Time has passed.
    pub fn on_tick(&self) {
        if let Some(worker) = self.worker.get() {
            worker.on_tick();
        }
    }

    /// A message has come to the worker's queue.
    pub fn on_queue_ready(&self) {
        if let Some(worker) = self.worker.get() {
            worker.on_wake();
        }
    }

    /// A dispatched call has ended.
    pub fn on_http_call_response(&self, call: u32, body_size: usize) {
        let Some(worker) = self.worker.get() else { return };
        worker.on_call_response(call, || Response {
            headers: host::header_map(MapType::CallResponseHeaders),
            trailers: host::header_map(MapType::CallResponseTrailers),
            body: host::buffer(BufferType::CallResponseBody, 0, body_size),
        });
    }

    /// The context ends: its listener is gone.
    pub fn on_done(&self) {
        if let Some(worker) = self.worker.get() {
            worker.on_done();
        }
    }
}
