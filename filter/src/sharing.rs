//! Flights that all workers of the process share: the engine's commons, bound to Envoy's shared data and queues.

use crate::host;
use crate::slots::Slots;
use crate::worker::Request;
use collapser_engine::changes::Resource;
use collapser_engine::commons::{self, Claim, Commons, Freshness, Good, Message, Ticket, Watch};
use collapser_engine::flights::FlightId;
use collapser_engine::key::Key;
use collapser_engine::reply::Reply;
use collapser_engine::settings::{Mode, Scope, Settings};
use collapser_engine::table::Ask;
use collapser_engine::{Nanos, nanos};
use std::cell::RefCell;
use std::collections::HashMap;
use std::time::Duration;

/// How long after its deadline a flight has ended for certain: Envoy's timers are late on a busy machine.
const SLACK: Duration = Duration::from_secs(1);

/// Where the commons is.
const SLOTS: Slots = Slots(commons::NAME);

/// A flight of this worker's table that needs an upstream call, or somebody else's reply.
pub struct Departure {
    /// What is asked for. If it is for those who come later, a reply that is there will not do.
    pub ask: Ask,
    /// The flight.
    pub flight: FlightId,
    /// When it began.
    pub since: Nanos,
    /// What to send, should the call be this worker's.
    pub request: Request,
    /// Whether it is for those who come later, and nobody led to it.
    pub is_refresh: bool,
}

/// What a message of another worker means for this one.
pub enum News {
    /// The reply that this departure waits for.
    Reply {
        /// Which.
        departure: Departure,
        /// The reply.
        reply: Reply,
    },
    /// Claim again for this one.
    Gone(Departure),
    /// This resource has been changed.
    Changed(Resource),
}

/// A worker's part in what all share.
pub struct Sharing {
    commons: RefCell<Commons>,
    watched: RefCell<HashMap<Key, (Watch, Departure)>>,
    patience: Nanos,
}

impl Sharing {
    /// The part of the worker `owner`, which reads `queue`; none if the settings want every worker by itself.
    pub fn new(owner: u64, queue: u32, settings: &Settings) -> Option<Self> {
        if settings.scope == Scope::Worker || settings.mode == Mode::Affinity {
            return None;
        }
        Commons::create_slots(&SLOTS);
        let max_bytes = commons::bucket_bytes(settings.max_cache_bytes);
        Some(Self {
            commons: RefCell::new(Commons::new(owner, settings.realm(), queue, max_bytes)),
            watched: RefCell::default(),
            patience: nanos(settings.backend_timeout.saturating_add(SLACK)),
        })
    }

    /// See [`Commons::beat`].
    pub fn beat(&self, now: Nanos) {
        self.commons.borrow_mut().beat(now, &SLOTS);
    }

    /// See [`Commons::claim_for`].
    pub fn claim(&self, ask: &Ask, now: Nanos) -> Claim {
        self.commons.borrow_mut().claim_for(ask, now, now.saturating_add(self.patience), &SLOTS)
    }

    /// Keeps a departure that waits for another worker's flight.
    pub fn watch(&self, watch: Watch, departure: Departure) {
        self.watched.borrow_mut().insert(departure.ask.key, (watch, departure));
    }

    /// How many departures wait for other workers.
    pub fn watched(&self) -> usize {
        self.watched.borrow().len()
    }

    /// Takes out the departures for which it is time to claim again.
    pub fn due(&self, now: Nanos) -> Vec<Departure> {
        let mut watched = self.watched.borrow_mut();
        if watched.is_empty() {
            return Vec::new();
        }
        let commons = self.commons.borrow();
        watched.extract_if(|_, (watch, _)| commons.is_due(watch, now)).map(|(_, (_, one))| one).collect()
    }

    /// Reads a message of another worker.
    pub fn read(&self, message: &[u8]) -> Option<News> {
        let message = self.commons.borrow().read(message)?;
        let mut watched = self.watched.borrow_mut();
        match message {
            Message::Changed(resource) => Some(News::Changed(resource)),
            Message::Gone { key } => watched.remove(&key).map(|(_, departure)| News::Gone(departure)),
            Message::Reply { key, freshness, reply } => {
                // Whoever joined a moment later is as well off as one who joins while a reply is on the wire.
                let (_, departure) = watched.remove(&key)?;
                Some(match freshness.is_good_for(departure.since) {
                    true => News::Reply { departure, reply },
                    // It joined that flight when it had just landed.
                    false => News::Gone(departure),
                })
            }
        }
    }

    /// This worker's flight for all has ended with a reply that is `good` for so long.
    pub fn land(&self, key: &Key, ticket: Ticket, reply: &Reply, good: Good, now: Nanos) {
        let mut commons = self.commons.borrow_mut();
        let queues = commons.land(ticket, reply, good, now, &SLOTS);
        if !queues.is_empty() {
            let message = commons.reply_message(key, Freshness { landed: now, expires: good.fresh }, reply);
            tell(&queues, &message);
        }
    }

    /// A resource has been changed by a request at this worker.
    pub fn changed(&self, resource: Resource, now: Nanos) {
        let mut commons = self.commons.borrow_mut();
        tell(&commons.others(now, &SLOTS), &commons.changed_message(resource));
    }

    /// This worker's flight for all will not end here.
    pub fn give_up(&self, key: &Key, ticket: Ticket, now: Nanos) {
        let mut commons = self.commons.borrow_mut();
        let queues = commons.give_up(ticket, now, &SLOTS);
        tell(&queues, &commons.gone_message(key));
    }

    /// Leaves. Flights that are not given up before are taken over by others.
    pub fn end(&self) {
        self.commons.borrow_mut().end(&SLOTS);
    }
}

fn tell(queues: &[u32], message: &[u8]) {
    for queue in queues {
        // Where the message does not arrive, its receiver looks after the flight itself.
        let _ = host::send(*queue, message);
    }
}
