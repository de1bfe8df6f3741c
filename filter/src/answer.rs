//! The way of a reply through its stream: a local reply goes off, and what was recorded is put into it as it comes by.

use crate::host::{self, MapType};
use crate::worker::Worker;
use collapser_engine::Nanos;
use collapser_engine::cache_status::{self, Reason, Status};
use collapser_engine::classify::Bypass;
use collapser_engine::flights::{By, Collected};
use collapser_engine::http::conditional;
use collapser_engine::pairs::{Pairs, PairsBuilder};
use collapser_engine::reply::{Reply, Shape, Share};
use std::borrow::Cow;
use std::rc::Rc;

/// What an answer depends on besides the reply: it is noted when a request arrives, and kept with its place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Note(pub u8);

impl Note {
    /// It may be told that what it has will do (RFC 9110, section 13).
    pub const CONDITIONAL: u8 = 1;
    /// It is HEAD, whose answer has no body.
    pub const HEAD: u8 = 2;
    /// A reply that is there will not do for it.
    pub const ANEW: u8 = 4;

    /// Whether this is noted.
    pub fn has(self, what: u8) -> bool {
        self.0 & what != 0
    }
}

/// A reply for one stream.
pub struct Answer {
    /// The reply.
    pub reply: Rc<Reply>,
    by: By,
    note: Note,
    /// Whether its receiver has it already.
    not_modified: bool,
    /// When it was chosen, if that was a moment ago.
    at: Option<Nanos>,
    /// Whether it is the filter's own word, of which there is no more to say.
    is_own: bool,
}

impl Answer {
    /// What was collected, for a request whose headers are `request` if they matter.
    pub fn new(collected: &Collected, note: Note, request: impl FnOnce() -> Vec<u8>) -> Self {
        let reply = Rc::clone(&collected.reply);
        let not_modified = is_not_modified(&reply, note, request);
        Self { reply, by: collected.by, note, not_modified, at: None, is_own: false }
    }

    /// The same, chosen just now, which saves a look at the clock.
    pub fn at(self, now: Nanos) -> Self {
        Self { at: Some(now), ..self }
    }

    /// One that the filter makes itself.
    pub fn own(reply: &Rc<Reply>) -> Self {
        let (note, not_modified) = (Note::default(), false);
        Self { reply: Rc::clone(reply), by: By::Leading, note, not_modified, at: None, is_own: true }
    }

    /// What sends the local reply off.
    pub fn sender(&self) -> impl FnOnce(&Reply, &Worker) -> host::Result<()> + use<> {
        let (note, not_modified) = (self.note, self.not_modified);
        move |reply, worker| send(reply, note, not_modified, worker)
    }

    /// Whether body and trailers are put into their places one by one, which takes a body slot.
    pub fn needs_slot(&self) -> bool {
        needs_slot(&self.reply, self.note, self.not_modified)
    }

    /// Whether it is older than it should be.
    pub fn is_stale(&self) -> bool {
        matches!(self.by, By::Revalidate | By::Error)
    }

    /// What access logs call it.
    pub fn outcome(&self) -> &'static str {
        match self.by {
            By::Leading => "leader",
            By::Following => "follower",
            By::Cache => "hit",
            By::Revalidate | By::Error => "stale",
        }
    }

    /// Whether it stands in for a failure.
    pub fn is_for_error(&self) -> bool {
        self.by == By::Error
    }

    /// The headers.
    pub fn headers(&self, tells_status: bool, now: impl FnOnce() -> Nanos) -> Cow<'_, [u8]> {
        let tells_status = tells_status && !self.is_own;
        let is_http = self.reply.shape == Shape::Http;
        let tells_age =
            self.is_stale() || (is_http && (self.by == By::Cache || self.reply.life.age >= SECOND));
        if !tells_age && !tells_status && !self.not_modified {
            return Cow::Borrowed(&self.reply.headers);
        }
        let now = self.at.unwrap_or_else(now);
        let age = tells_age.then(|| (self.reply.life.age_at(now) / SECOND).to_string());
        let status = tells_status.then(|| self.status(now));
        let age = age.as_deref().map(|age| ("age", age));
        let status = status.as_deref().map(|status| (HEADER, status));
        let more: Vec<_> = age.into_iter().chain(status).collect();
        if self.not_modified
            && let Some(headers) = Pairs::parse(&self.reply.headers)
        {
            return Cow::Owned(with(conditional::not_modified_headers(headers), &more).into());
        }
        Cow::Owned(self.reply.headers_with(&more).into())
    }

    fn status(&self, now: Nanos) -> String {
        let Reply { life, share, .. } = *self.reply;
        let ttl = life.ttl_at(now);
        let status = match self.by {
            By::Cache => Status::Hit { ttl },
            By::Revalidate => Status::Stale { ttl, detail: "stale-while-revalidate" },
            By::Error => Status::Stale { ttl, detail: "stale-if-error" },
            By::Leading | By::Following => Status::Forward {
                reason: if self.note.has(Note::ANEW) { Reason::Request } else { Reason::Miss },
                collapsed: self.by == By::Following,
                stored: life.kept() > life.landed && !matches!(share, Share::Leader | Share::Nobody),
                status: None,
                detail: None,
            },
        };
        cache_status::member(&status)
    }
}

const SECOND: Nanos = 1_000_000_000;

/// The header that tells how an answer came about.
const HEADER: &str = "cache-status";

fn with(mut headers: PairsBuilder, more: &[(&str, &str)]) -> Box<[u8]> {
    for (name, value) in more {
        headers.push(name.as_bytes(), value.as_bytes());
    }
    headers.build()
}

/// Whether one who asks has a reply already. The headers of its request are looked at only if that may be.
pub fn is_not_modified(reply: &Reply, note: Note, request: impl FnOnce() -> Vec<u8>) -> bool {
    if !note.has(Note::CONDITIONAL) {
        return false;
    }
    let request = request();
    let pair = Pairs::parse(&request).zip(Pairs::parse(&reply.headers));
    pair.is_some_and(|(request, response)| conditional::not_modified(request, response))
}

fn needs_slot(reply: &Reply, note: Note, not_modified: bool) -> bool {
    match reply.shape {
        Shape::Full => true,
        Shape::TrailersOnly => false,
        Shape::Http => !not_modified && !note.has(Note::HEAD) && !reply.trailers.is_empty(),
    }
}

/// Sends the local reply of the effective stream, which its callbacks then fill in.
pub fn send(reply: &Reply, note: Note, not_modified: bool, worker: &Worker) -> host::Result<()> {
    if needs_slot(reply, note, not_modified) {
        return host::send_local_response(reply.status, &worker.marker, &[]);
    }
    match reply.shape {
        Shape::Http if not_modified => host::send_local_response(304, &[], &[]),
        Shape::Http if !note.has(Note::HEAD) => host::send_local_response(reply.status, &[], &reply.body),
        _ => host::send_local_response(reply.status, &[], &[]),
    }
}

/// Adds to the response that passes by why its request passed.
pub fn tell_bypass(reason: Bypass) {
    let told = match reason {
        Bypass::HttpMethod | Bypass::NotGrpc => Reason::Method,
        Bypass::Asked => Reason::Request,
        _ => Reason::Bypass,
    };
    let (collapsed, stored, detail) = (false, false, Some(reason.name()));
    let status = Status::Forward { reason: told, collapsed, stored, status: None, detail };
    // Refused only if the stream is going away.
    let _ = host::add_header(MapType::ResponseHeaders, HEADER, &cache_status::member(&status));
}
