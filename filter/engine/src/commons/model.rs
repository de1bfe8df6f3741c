//! Workers that share a memory, in which every access to shared data and every message is a step of its own, and any
//! step may follow any other.
//!
//! An operation of the commons is a plain function and cannot stop halfway. So it is run again for each of its steps: it is
//! given the answers that it had before, then one from the memory, and from there on none; only the run in which
//! it needed no more than that counts.

use super::bucket::Bucket;
use super::*;
use crate::key::tests::numbered;
use crate::reply::{Shape, Share};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::hash::{Hash, Hasher};
use std::rc::Rc;

pub(super) const MILLISECOND: Nanos = 1_000_000;

/// Far beyond the time in which everybody has to be answered: a waiter who is answered only by the deadline counts as lost.
const DEADLINE: Nanos = 100 * STALE;

/// Within this everybody is answered if all goes on fairly: the time to see that an owner is dead, twice over, and flights.
const PATIENCE: Nanos = 4 * STALE;

/// How long a flight takes in a fair course of things.
const FLIGHT: Nanos = 3 * BEAT;

#[derive(Clone)]
struct Slot {
    number: u32,
    value: Rc<Vec<u8>>,
    token: u32,
}

#[derive(Clone, Default)]
struct Memory {
    slots: Vec<Slot>,
    last_token: u32,
}

impl Memory {
    fn get(&self, slot: u32) -> Option<(Rc<Vec<u8>>, u32)> {
        let slot = self.slots.iter().find(|found| found.number == slot)?;
        Some((Rc::clone(&slot.value), slot.token))
    }

    fn set(&mut self, slot: u32, value: &[u8], token: u32) -> bool {
        self.last_token += 1;
        let value = Rc::new(value.to_vec());
        match self.slots.iter_mut().find(|found| found.number == slot) {
            Some(found) if token != 0 && found.token != token => return false,
            Some(found) => (found.value, found.token) = (value, self.last_token),
            None => self.slots.push(Slot { number: slot, value, token: self.last_token }),
        }
        true
    }

    fn check(&self) -> Result<(), String> {
        for slot in &self.slots {
            let is_sound = match slot.number {
                ROSTER => roster::is_sound(&slot.value),
                _ => Bucket::decode(&slot.value).is_some(),
            };
            if !is_sound {
                return Err(format!("slot {} holds garbage", slot.number));
            }
        }
        Ok(())
    }
}

/// What an operation was answered.
#[derive(Clone)]
enum Answer {
    Got(u32, Option<(Rc<Vec<u8>>, u32)>),
    Set(bool),
}

/// The memory as one run of an operation sees it.
struct Window<'a> {
    memory: &'a RefCell<Memory>,
    log: RefCell<Vec<Answer>>,
    replayed: Cell<usize>,
    /// How many steps may still be taken.
    steps: Cell<usize>,
    is_cut: Cell<bool>,
}

impl Window<'_> {
    fn answer(&self, ask: impl FnOnce() -> Answer) -> Option<Answer> {
        let at = self.replayed.get();
        if self.is_cut.get() {
            return None;
        }
        if at == self.log.borrow().len() {
            if self.steps.get() == 0 {
                self.is_cut.set(true);
                return None;
            }
            self.steps.set(self.steps.get() - 1);
            let answer = ask();
            self.log.borrow_mut().push(answer);
        }
        self.replayed.set(at + 1);
        self.log.borrow().get(at).cloned()
    }
}

impl Shared for Window<'_> {
    fn get(&self, slot: u32) -> Option<(Vec<u8>, u32)> {
        match self.answer(|| Answer::Got(slot, self.memory.borrow().get(slot)))? {
            Answer::Got(_, got) => got.map(|(value, token)| (value.to_vec(), token)),
            Answer::Set(_) => panic!("an operation took another turn when it was run again"),
        }
    }

    fn set(&self, slot: u32, value: &[u8], token: u32) -> bool {
        let set = || Answer::Set(self.memory.borrow_mut().set(slot, value, token));
        matches!(self.answer(set), Some(Answer::Set(true)))
    }
}

/// How a flight ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Ending {
    Cached,
    NotCached,
    /// Larger than a bucket.
    Large,
    GivenUp,
}

#[derive(Clone, Hash)]
enum Operation {
    Beat,
    Leave,
    Claim(u32),
    Land { key: u32, ticket: Ticket, freshness: Freshness, body: Vec<u8> },
    GiveUp { key: u32, ticket: Ticket },
}

enum Outcome {
    Done,
    Left,
    Claimed(u32, Claim),
    Tell(Vec<u32>, Vec<u8>),
}

#[derive(Clone)]
struct Running {
    operation: Operation,
    since: Nanos,
    log: Vec<Answer>,
}

#[derive(Clone, Hash)]
enum Local {
    Flying { ticket: Option<Ticket>, since: Nanos, is_doubtful: bool },
    Watching { watch: Watch, is_told: bool },
}

/// What a worker has of one key.
#[derive(Clone, Default, Hash)]
struct Place {
    local: Option<Local>,
    /// When those came who wait.
    waiting: Vec<Nanos>,
}

#[derive(Clone)]
struct Worker {
    is_alive: bool,
    commons: Commons,
    running: Option<Running>,
    places: Vec<Place>,
    inbox: VecDeque<Rc<Vec<u8>>>,
    outbox: VecDeque<(u32, Rc<Vec<u8>>)>,
    /// When it last wrote a beat.
    beaten: Nanos,
}

impl Worker {
    fn is_idle(&self) -> bool {
        self.is_alive && self.running.is_none() && self.outbox.is_empty()
    }
}

/// What may happen next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Arrive {
        worker: usize,
        key: u32,
    },
    Step(usize),
    End {
        worker: usize,
        key: u32,
        ending: Ending,
    },
    Send(usize),
    Receive(usize),
    Reclaim {
        worker: usize,
        key: u32,
    },
    Beat(usize),
    Crash(usize),
    Restart(usize),
    Leave(usize),
    /// A message is not sent.
    Lose(usize),
    /// Time passes and nobody beats.
    Wait(Nanos),
    /// Time passes until one who does not beat is dead; all others beat whenever they can.
    Stall(Option<usize>),
}

impl Tally {
    pub(super) fn add(&mut self, other: Self) {
        self.flights += other.flights;
        self.unshared += other.unshared;
        self.waited += other.waited;
        self.taken += other.taken;
        self.told += other.told;
        self.lost += other.lost;
    }
}

#[derive(Clone)]
pub(super) struct World {
    pub(super) now: Nanos,
    memory: Memory,
    workers: Vec<Worker>,
    /// The main thread's VM, once for each realm.
    mains: Vec<Commons>,
    realms: Vec<u64>,
    keys: Vec<u32>,
    ttl: Nanos,
    started: u64,
    pub(super) tally: Tally,
}

/// What has happened so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tally {
    /// Upstream calls.
    pub(super) flights: usize,
    /// Those not shared though there was somebody to share with.
    pub(super) unshared: usize,
    /// Claims that were to wait.
    pub(super) waited: usize,
    /// Replies taken from a bucket.
    pub(super) taken: usize,
    /// Replies that came by message and answered somebody.
    pub(super) told: usize,
    /// Flights whose owner had lost them when they landed.
    pub(super) lost: usize,
}

/// Bytes of replies in a bucket.
const MAX_BYTES: usize = 250;

type Checked = Result<(), String>;

impl World {
    /// Workers of these realms, who know each other and are asked for these keys.
    pub(super) fn new(realms: &[u64], keys: &[u32], ttl: Nanos) -> Self {
        let mut world = Self {
            now: 1,
            memory: Memory::default(),
            workers: Vec::new(),
            mains: Vec::new(),
            realms: realms.to_vec(),
            keys: keys.to_vec(),
            ttl,
            started: 0,
            tally: Tally::default(),
        };
        world.memory.set(ROSTER, &roster::empty(), 0);
        for key in keys {
            world.memory.set(slot_of(&numbered(*key)), &Bucket::default().encode(), 0);
        }
        for worker in 0..realms.len() {
            if !realms[..worker].contains(&realms[worker]) {
                let number = realms[worker];
                world.mains.push(Commons::new(u64::MAX - number, number, u32::MAX - number as u32, 0));
            }
            let fresh = world.fresh_worker(worker);
            world.workers.push(fresh);
        }
        for _ in 0..2 {
            world.all_beat(None);
            world.now += BEAT;
        }
        world
    }

    fn fresh_worker(&mut self, worker: usize) -> Worker {
        self.started += 1;
        let realm = self.realms[worker];
        let commons = Commons::new(self.started * 100 + worker as u64, realm, self.started as u32, MAX_BYTES);
        Worker {
            is_alive: true,
            commons,
            running: None,
            places: vec![Place::default(); self.keys.len()],
            inbox: VecDeque::new(),
            outbox: VecDeque::new(),
            beaten: self.now,
        }
    }

    fn all_beat(&mut self, but: Option<usize>) {
        self.doubt();
        let memory = RefCell::new(std::mem::take(&mut self.memory));
        self.mains.iter_mut().for_each(|main| main.beat(self.now, &open(&memory)));
        self.memory = memory.into_inner();
        for worker in 0..self.workers.len() {
            if Some(worker) != but && self.workers[worker].is_idle() {
                self.start(worker, Operation::Beat);
                while self.workers[worker].running.is_some() {
                    self.step(worker).expect("a beat answers nobody");
                }
            }
        }
    }

    /// Whether a worker may be chosen for what begins a callback.
    pub(super) fn is_idle(&self, worker: usize) -> bool {
        self.workers[worker].is_idle()
    }

    pub(super) fn workers(&self) -> usize {
        self.workers.len()
    }

    pub(super) fn is_alive(&self, worker: usize) -> bool {
        self.workers[worker].is_alive
    }

    pub(super) fn is_answered(&self) -> bool {
        self.workers.iter().all(|worker| worker.places.iter().all(|place| place.waiting.is_empty()))
    }

    /// What goes on by itself.
    pub(super) fn enabled(&self, endings: &[Ending], actions: &mut Vec<Action>) {
        for (n, worker) in self.workers.iter().enumerate().filter(|(_, worker)| worker.is_alive) {
            if worker.running.is_some() {
                actions.push(Action::Step(n));
                continue;
            }
            if !worker.outbox.is_empty() {
                actions.push(Action::Send(n));
                continue;
            }
            if !worker.inbox.is_empty() {
                actions.push(Action::Receive(n));
            }
            for (place, key) in worker.places.iter().zip(&self.keys) {
                match &place.local {
                    Some(Local::Flying { .. }) => actions.extend(endings.iter().map(|ending| Action::End {
                        worker: n,
                        key: *key,
                        ending: *ending,
                    })),
                    Some(Local::Watching { watch, is_told })
                        if *is_told || worker.commons.is_due(watch, self.now) =>
                    {
                        actions.push(Action::Reclaim { worker: n, key: *key });
                    }
                    _ => (),
                }
            }
        }
    }

    pub(super) fn act(&mut self, action: Action) -> Checked {
        match action {
            Action::Arrive { worker, key } => {
                let now = self.now;
                let place = self.place(worker, key);
                place.waiting.push(now);
                if place.local.is_none() {
                    self.start(worker, Operation::Claim(key));
                    self.step(worker)?;
                }
            }
            Action::Step(worker) => self.step(worker)?,
            Action::End { worker, key, ending } => self.end_flight(worker, key, ending)?,
            Action::Send(worker) => self.send(worker),
            Action::Receive(worker) => self.receive(worker)?,
            Action::Reclaim { worker, key } => {
                self.start(worker, Operation::Claim(key));
                self.step(worker)?;
            }
            Action::Beat(worker) => {
                self.start(worker, Operation::Beat);
                self.step(worker)?;
            }
            Action::Crash(worker) => {
                let worker = &mut self.workers[worker];
                worker.is_alive = false;
                worker.running = None;
                worker.inbox.clear();
                worker.outbox.clear();
                worker.places.fill(Place::default());
            }
            Action::Restart(worker) => {
                self.workers[worker] = self.fresh_worker(worker);
                self.start(worker, Operation::Beat);
            }
            Action::Leave(worker) => {
                self.start(worker, Operation::Leave);
                self.step(worker)?;
            }
            Action::Lose(worker) => {
                self.workers[worker].outbox.pop_front();
            }
            Action::Wait(nanos) => self.now += nanos,
            Action::Stall(stalled) => {
                for _ in 0..3 {
                    self.now += 4 * BEAT;
                    self.all_beat(stalled);
                }
            }
        }
        self.doubt();
        self.check()
    }

    /// From here on, all goes well: everybody who lives is answered in time.
    pub(super) fn goes_on(mut self) -> Checked {
        let end = self.now + PATIENCE;
        while !self.is_answered() {
            if self.now >= end {
                return Err("somebody is not answered".into());
            }
            self.now += BEAT;
            self.finish_running()?;
            self.all_beat(None);
            self.do_what_is_due()?;
        }
        Ok(())
    }

    fn do_what_is_due(&mut self) -> Checked {
        for _ in 0..1_000 {
            let mut actions = Vec::new();
            self.enabled(&[Ending::Cached], &mut actions);
            let Some(action) = actions.into_iter().find(|action| self.is_due(*action)) else { return Ok(()) };
            self.act(action)?;
        }
        Err("there is no end of it".into())
    }

    fn finish_running(&mut self) -> Checked {
        for worker in 0..self.workers.len() {
            while self.workers[worker].running.is_some() {
                self.step(worker)?;
            }
        }
        Ok(())
    }

    fn is_due(&self, action: Action) -> bool {
        let Action::End { worker, key, .. } = action else { return true };
        match &self.workers[worker].places[self.index(key)].local {
            Some(Local::Flying { since, .. }) => self.now - since >= FLIGHT,
            _ => true,
        }
    }

    fn place(&mut self, worker: usize, key: u32) -> &mut Place {
        let at = self.index(key);
        &mut self.workers[worker].places[at]
    }

    fn index(&self, key: u32) -> usize {
        self.keys.iter().position(|known| *known == key).expect("a key of this world")
    }

    fn start(&mut self, worker: usize, operation: Operation) {
        assert!(self.workers[worker].is_idle());
        self.workers[worker].running = Some(Running { operation, since: self.now, log: Vec::new() });
    }

    /// One step of what a worker is at.
    fn step(&mut self, number: usize) -> Checked {
        let Some(mut running) = self.workers[number].running.take() else { return Ok(()) };
        let memory = RefCell::new(std::mem::take(&mut self.memory));
        let window = Window {
            memory: &memory,
            log: RefCell::new(running.log),
            replayed: Cell::new(0),
            steps: Cell::new(1),
            is_cut: Cell::new(false),
        };
        let mut commons = self.workers[number].commons.clone();
        let outcome = run(&mut commons, &running.operation, running.since, &window);
        let is_cut = window.is_cut.get();
        running.log = window.log.into_inner();
        self.memory = memory.into_inner();
        if is_cut {
            self.workers[number].running = Some(running);
            return Ok(());
        }
        let worker = &mut self.workers[number];
        if let Some(beat) = commons.me.last_beat() {
            worker.beaten = beat;
        }
        worker.commons = commons;
        self.apply(number, outcome, running.since)
    }

    fn apply(&mut self, number: usize, outcome: Outcome, since: Nanos) -> Checked {
        match outcome {
            Outcome::Done => (),
            Outcome::Left => {
                self.act(Action::Crash(number))?;
            }
            Outcome::Tell(queues, message) => {
                let message = Rc::new(message);
                let worker = &mut self.workers[number];
                worker.outbox.extend(queues.into_iter().map(|queue| (queue, Rc::clone(&message))));
            }
            Outcome::Claimed(key, claim) => {
                let ticket = match claim {
                    Claim::Fly(ticket) | Claim::Replace { ticket, .. } => Some(ticket),
                    Claim::Unshared => None,
                    Claim::Wait(watch) => {
                        self.tally.waited += 1;
                        self.place(number, key).local = Some(Local::Watching { watch, is_told: false });
                        return Ok(());
                    }
                    Claim::Take { reply, expires } => {
                        if expires <= since {
                            return Err("an expired reply was taken".into());
                        }
                        self.tally.taken += 1;
                        self.place(number, key).local = None;
                        return self.answer(number, key, &reply, |_| true);
                    }
                };
                let is_alone = self.workers[number].commons.alone();
                self.tally.unshared += usize::from(ticket.is_none() && !is_alone);
                self.tally.flights += 1;
                let since = self.now;
                self.place(number, key).local = Some(Local::Flying { ticket, since, is_doubtful: false });
            }
        }
        Ok(())
    }

    fn end_flight(&mut self, worker: usize, key: u32, ending: Ending) -> Checked {
        let (now, realm) = (self.now, self.realms[worker]);
        let Some(Local::Flying { ticket, .. }) = self.place(worker, key).local.take() else { return Ok(()) };
        let expires = if ending == Ending::NotCached { 0 } else { now + self.ttl };
        let freshness = Freshness { landed: now, expires };
        let mut body = told(key, realm, freshness);
        if ending == Ending::Large {
            body.resize(MAX_BYTES, 0);
        }
        // Its own callers are answered by whatever came of the call.
        self.answer(worker, key, &reply_with(&body), |_| true)?;
        let Some(ticket) = ticket else { return Ok(()) };
        self.tally.lost += usize::from(!self.is_in_bucket(worker, key, &ticket));
        let operation = match ending {
            Ending::GivenUp => Operation::GiveUp { key, ticket },
            _ => Operation::Land { key, ticket, freshness, body },
        };
        self.start(worker, operation);
        self.step(worker)
    }

    fn is_in_bucket(&self, worker: usize, key: u32, ticket: &Ticket) -> bool {
        let (key, me) = (numbered(key), &self.workers[worker].commons.me);
        self.memory.get(slot_of(&key)).is_some_and(|(record, _)| {
            matches!(Bucket::read(&record).take(&key, me.realm), Some(State::Flying(flying))
                if flying.owner == me.owner && flying.serial == ticket.serial)
        })
    }

    /// Answers those whom a reply is said to be good for, and checks whether it is.
    fn answer(
        &mut self,
        worker: usize,
        key: u32,
        reply: &Reply,
        is_good_for: impl Fn(Nanos) -> bool,
    ) -> Checked {
        let realm = self.realms[worker];
        let (of_key, of_realm, freshness) = heard(&reply.body).ok_or("a reply that nobody sent")?;
        if (of_key, of_realm) != (key, realm) {
            return Err(format!("the reply for {of_key} of realm {of_realm} was given for {key} of {realm}"));
        }
        let waiting = &mut self.place(worker, key).waiting;
        for joined in waiting.iter().filter(|joined| is_good_for(**joined)) {
            if *joined > freshness.landed && *joined >= freshness.expires {
                return Err("an expired reply was given".into());
            }
        }
        waiting.retain(|joined| !is_good_for(*joined));
        Ok(())
    }

    fn send(&mut self, worker: usize) {
        let Some((queue, message)) = self.workers[worker].outbox.pop_front() else { return };
        let reader = self.workers.iter_mut().find(|other| other.is_alive && other.commons.me.queue == queue);
        if let Some(reader) = reader {
            reader.inbox.push_back(message);
        }
    }

    fn receive(&mut self, worker: usize) -> Checked {
        let Some(message) = self.workers[worker].inbox.pop_front() else { return Ok(()) };
        let Some(message) = self.workers[worker].commons.read(&message) else {
            return Err("a message of another realm".into());
        };
        let (Message::Reply { key, .. } | Message::Gone { key }) = &message else { return Ok(()) };
        let key = number_of(key);
        let Some(Local::Watching { is_told, .. }) = &mut self.place(worker, key).local else {
            return Ok(());
        };
        *is_told = true;
        if let Message::Reply { freshness, reply, .. } = message {
            self.answer(worker, key, &reply, |joined| freshness.is_good_for(joined))?;
            self.tally.told += 1;
            let place = self.place(worker, key);
            if place.waiting.is_empty() {
                place.local = None;
            }
        }
        Ok(())
    }

    /// Flights whose owner may rightly have been taken for dead.
    fn doubt(&mut self) {
        for worker in &mut self.workers {
            let is_late = self.now - worker.beaten > STALE;
            for place in &mut worker.places {
                if let Some(Local::Flying { is_doubtful, since, .. }) = &mut place.local {
                    *is_doubtful |= is_late || self.now >= *since + DEADLINE;
                }
            }
        }
    }

    fn check(&self) -> Checked {
        self.memory.check()?;
        for (at, key) in self.keys.iter().enumerate() {
            for realm in &self.realms {
                let of_realm = self.workers.iter().zip(&self.realms).filter(|(_, of)| *of == realm);
                let flights = of_realm.filter(|(worker, _)| {
                    matches!(
                        &worker.places[at].local,
                        Some(Local::Flying { ticket: Some(_), is_doubtful: false, .. })
                    )
                });
                if flights.count() > 1 {
                    return Err(format!("two flights for {key}"));
                }
            }
        }
        Ok(())
    }

    /// The same for two worlds that can only go on alike.
    pub(super) fn fingerprint(&self) -> u64 {
        let mut hash = std::hash::DefaultHasher::new();
        self.now.hash(&mut hash);
        self.memory.slots.iter().for_each(|slot| slot.value.hash(&mut hash));
        for worker in &self.workers {
            (worker.is_alive, &worker.commons, &worker.places, &worker.inbox).hash(&mut hash);
            (&worker.outbox, worker.beaten, worker.running.is_some()).hash(&mut hash);
            if let Some(running) = &worker.running {
                (&running.operation, running.since).hash(&mut hash);
                running.log.iter().for_each(|answer| self.hash_answer(answer, &mut hash));
            }
        }
        hash.finish()
    }

    /// Of a token, all that matters is whether it is still good.
    fn hash_answer(&self, answer: &Answer, hash: &mut impl Hasher) {
        match answer {
            Answer::Set(set) => set.hash(hash),
            Answer::Got(_, None) => 2_u8.hash(hash),
            Answer::Got(slot, Some((value, token))) => {
                let is_good = self.memory.get(*slot).is_some_and(|(_, current)| current == *token);
                (value, is_good).hash(hash);
            }
        }
    }
}

/// The memory without any stop.
fn open(memory: &RefCell<Memory>) -> Window<'_> {
    Window {
        memory,
        log: RefCell::default(),
        replayed: Cell::new(0),
        steps: Cell::new(usize::MAX),
        is_cut: Cell::new(false),
    }
}

fn run(commons: &mut Commons, operation: &Operation, now: Nanos, shared: &impl Shared) -> Outcome {
    match operation {
        Operation::Beat => {
            commons.beat(now, shared);
            Outcome::Done
        }
        Operation::Leave => {
            commons.end(shared);
            Outcome::Left
        }
        Operation::Claim(key) => {
            Outcome::Claimed(*key, commons.claim(&numbered(*key), false, now, now + DEADLINE, shared))
        }
        Operation::Land { key, ticket, freshness, body } => {
            let reply = reply_with(body);
            let queues = commons.land(ticket.clone(), &reply, freshness.expires, now, shared);
            Outcome::Tell(queues, commons.reply_message(&numbered(*key), *freshness, &reply))
        }
        Operation::GiveUp { key, ticket } => {
            let queues = commons.give_up(ticket.clone(), now, shared);
            Outcome::Tell(queues, commons.gone_message(&numbered(*key)))
        }
    }
}

fn reply_with(body: &[u8]) -> Reply {
    Reply { shape: Shape::Full, share: Share::Anyone, body: body.to_vec(), ..Reply::for_nobody() }
}

/// A body that says what it is the answer to, and when it was given.
fn told(key: u32, realm: u64, freshness: Freshness) -> Vec<u8> {
    let numbers = [u64::from(key), realm, freshness.landed, freshness.expires];
    numbers.into_iter().flat_map(u64::to_le_bytes).collect()
}

fn heard(body: &[u8]) -> Option<(u32, u64, Freshness)> {
    let mut reader = crate::wire::Reader::new(body);
    let (key, realm) = (u32::try_from(reader.u64()?).ok()?, reader.u64()?);
    Some((key, realm, Freshness { landed: reader.u64()?, expires: reader.u64()? }))
}

fn number_of(key: &Key) -> u32 {
    key.0.first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes))
}
