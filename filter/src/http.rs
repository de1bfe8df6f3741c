//! Keys and variants of plain HTTP, what its responses say of who may be given them, and whom a reply suits.

use crate::answer::Note;
use crate::host;
use crate::worker::{Airborne, Request, Worker};
use collapser_engine::changes::Resource;
use collapser_engine::classify::Protocol;
use collapser_engine::flights::Call;
use collapser_engine::http::directives::RequestDirectives;
use collapser_engine::http::freshness::{self, Verdict};
use collapser_engine::http::{conditional, location, vary};
use collapser_engine::key::Key;
use collapser_engine::life::Terms;
use collapser_engine::pairs::Pairs;
use collapser_engine::policy::PolicyId;
use collapser_engine::reply::{Reply, Share};
use collapser_engine::table::Ask;
use collapser_engine::{Nanos, nanos, terms};
use std::time::Duration;

/// Methods that change nothing (RFC 9110, section 9.2.1): such a request may be made twice.
const SAFE: [&[u8]; 3] = [b"GET", b"HEAD", b"OPTIONS"];

/// What becomes of a waiter whose flight has landed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// It is given the reply.
    Answer,
    /// It makes its own call.
    Release,
    /// The reply is for another variant: it asks again, by a key that tells them apart.
    Again(Key),
}

impl Worker {
    /// What a plain HTTP request asks for, and its key without what only replies name.
    pub fn ask_http(&self, headers: Pairs<'_>, body: &[u8], policy: PolicyId, now: Nanos) -> (Ask, Key) {
        let method = headers.first(b":method").unwrap_or_default();
        let is_head = method == b"HEAD";
        // A flight's reply answers both, so that is what is asked for upstream.
        let asked = if is_head { b"GET" } else { method };
        let primary = self.keyer(policy).borrow_mut().http_key(asked, headers, body);
        let names = self.variants.borrow().names(&primary, now);
        let key = names.map_or(primary, |names| vary::variant(&primary, &names, headers));
        let is_conditional = (is_head || method == b"GET") && conditional::is_conditional(headers);
        let note = if is_conditional { Note::CONDITIONAL } else { 0 } | if is_head { Note::HEAD } else { 0 };
        (Ask { note, early_refresh: self.policy(policy).early_refresh, ..Ask::new(key) }, primary)
    }

    /// What a plain HTTP response is recorded as. One that cannot be handed on whole is for nobody: those who wait make
    /// calls of their own, if that does no harm.
    pub fn record_http(&self, call: &Airborne, headers: &[u8], body: Vec<u8>, trailers: &[u8]) -> Reply {
        let method = Pairs::parse(&call.leader).and_then(|leader| leader.first(b":method"));
        let is_aborted = Pairs::parse(headers).is_none_or(|headers| headers.is_empty());
        let (size, most) = (body.len(), self.settings.max_replay_bytes);
        let is_safe = method.is_some_and(|method| SAFE.contains(&method));
        if is_aborted && is_safe {
            return Reply { share: Share::Nobody, ..Reply::http_failure(502, "") };
        }
        if size > most && is_safe {
            return Reply::for_nobody();
        }
        if size > most {
            let message =
                format!("collapser: the reply has {size} bytes, more than {most} (max_replay_bytes)\n");
            return Reply::http_failure(502, &message);
        }
        Reply::record_http(headers, body, trailers)
    }

    /// The terms for a plain HTTP reply, and who may be given it. `response` has its headers as they came, unless the
    /// filter has made it.
    pub fn http_terms(
        &self,
        call: &Airborne,
        reply: &mut Reply,
        response: Option<&[u8]>,
        failed: bool,
        now: Nanos,
    ) -> Terms {
        let policy = self.policy(call.policy);
        let terms = |reply: &Reply, verdict: &Verdict| {
            terms::of_http(reply, verdict, policy, self.settings.cache_errors, failed)
        };
        let pairs = Pairs::parse(&call.leader).zip(response.and_then(Pairs::parse));
        let Some((request, response)) = pairs.filter(|_| reply.share == Share::Anyone) else {
            return terms(reply, &Verdict::SILENT);
        };
        let took = Duration::from_nanos(now.saturating_sub(call.dispatched));
        let verdict = freshness::judge(request, response, host::wall_seconds(), took);
        reply.share = match verdict.forbidden {
            Some(_) => Share::Leader,
            None if reply.sets_late_cookie() => Share::Leader,
            None => self.share_of(call, request, response, failed, now),
        };
        terms(reply, &verdict)
    }

    /// Who may be given a response, by the headers on which it says to depend.
    fn share_of(
        &self,
        call: &Airborne,
        request: Pairs<'_>,
        response: Pairs<'_>,
        failed: bool,
        now: Nanos,
    ) -> Share {
        let keyer = self.keyer(call.policy).borrow();
        let names = match vary::of(response, |name| keyer.has_in_http(name)) {
            vary::Vary::None => Vec::new(),
            vary::Vary::Names(names) => names,
            vary::Vary::All => return Share::Leader,
        };
        let is_apart = names.is_empty() || call.key != call.primary;
        if failed && is_apart && self.variants.borrow().cover(&call.primary, &names, now) {
            // What made it seldom knows what the resource depends on, and the last good reply lies under its variant.
            return Share::Anyone;
        }
        let key = if names.is_empty() { call.primary } else { vary::variant(&call.primary, &names, request) };
        let until = now.saturating_add(terms::longest(self.policy(call.policy)));
        self.variants.borrow_mut().learn(call.primary, names, until);
        if key == call.key { Share::Anyone } else { Share::Variant(key) }
    }

    /// What becomes of a waiter that is called. Its context is the effective one.
    pub fn fit(&self, call: &Call, reply: &Reply, now: Nanos) -> Fit {
        match reply.share {
            Share::Anyone => Fit::Answer,
            Share::Leader if call.leader => Fit::Answer,
            Share::Leader | Share::Nobody => Fit::Release,
            Share::Variant(key) => {
                let Some(request) = self.request_again() else { return Fit::Release };
                match Pairs::parse(&request.headers) {
                    Some(headers) => match self.ask_http(headers, &request.body, request.policy, now).0.key {
                        own if own == key => Fit::Answer,
                        own => Fit::Again(own),
                    },
                    None => Fit::Release,
                }
            }
        }
    }

    /// The request of the effective stream, which waits, read once more.
    pub fn request_again(&self) -> Option<Request> {
        let headers = host::header_map(host::MapType::RequestHeaders);
        let body = host::buffer(host::BufferType::RequestBody, 0, self.settings.max_request_bytes);
        let pairs = Pairs::parse(&headers)?;
        let policy = self.settings.policies.http(pairs.first(b":path")?);
        let primary = self.ask_http(pairs, &body, policy, self.now()).1;
        let (method, protocol, resource) = (None, Protocol::Http, resource(pairs));
        Some(Request { headers, body, method, protocol, policy, primary, resource })
    }

    /// Whether a request changes something if it succeeds.
    pub fn may_change(&self, headers: Pairs<'_>) -> bool {
        let method = headers.first(b":method").filter(|_| self.settings.http.is_some());
        method.is_some_and(|method| !SAFE.contains(&method) && method != b"TRACE")
    }

    /// A request that may change something has this response: what is kept of what it has changed must go (RFC 9111,
    /// section 4.4).
    pub fn notice_change(&self, request: Pairs<'_>, response: Pairs<'_>) {
        if !matches!(response.first(b":status"), Some([b'2' | b'3', ..])) {
            return;
        }
        let target = resource(request);
        target.into_iter().for_each(|target| self.has_changed(target));
        location::named(request, response)
            .filter(|named| Some(*named) != target)
            .for_each(|named| self.has_changed(named));
    }
}

/// What a request is for.
pub fn resource(headers: Pairs<'_>) -> Option<Resource> {
    Some(Resource::of(headers.first(b":authority")?, headers.first(b":path")?))
}

/// Adds what a caller says to caches to what it asks for.
pub fn steer(ask: &mut Ask, headers: Pairs<'_>) {
    let said = RequestDirectives::of(headers);
    // `max-age=0` wants what `no-cache` does (RFC 9111, section 5.2.1.1).
    ask.anew = said.no_cache || said.max_age == Some(Duration::ZERO);
    ask.note |= if ask.anew { Note::ANEW } else { 0 };
    ask.max_age = said.max_age.map(nanos);
    ask.min_fresh = said.min_fresh.map_or(0, nanos);
    ask.only_if_cached = said.only_if_cached;
}
