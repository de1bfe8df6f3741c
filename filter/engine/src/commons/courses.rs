//! The protocol, step by step: all courses that a few workers can take, and random ones of more.

use super::model::{Action, Ending, MILLISECOND, Tally, World};
use super::*;
use crate::testing::{runner, test};
use proptest::prelude::*;
use std::cell::RefCell;
use std::collections::HashSet;
use std::rc::Rc;

/// What may happen in all, and how often.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Left {
    arrivals: [u8; 3],
    crashes: u8,
    restarts: u8,
    stalls: u8,
}

/// All courses of some workers that are asked for one key.
struct Courses {
    workers: usize,
    ttl: Nanos,
    endings: &'static [Ending],
    left: Left,
    /// Whether one upstream call is enough, whatever the course.
    one_call: bool,
}

/// The way to a state, from its end.
struct Path {
    action: Action,
    before: Option<Rc<Path>>,
}

fn tell(path: &Option<Rc<Path>>) -> String {
    let (mut actions, mut at) = (Vec::new(), path);
    while let Some(step) = at {
        actions.push(format!("{:?}", step.action));
        at = &step.before;
    }
    actions.reverse();
    actions.join(", ")
}

const KEY: u32 = 0;

/// There are so many states at the least; fewer tell that the walk ends early.
const MANY: usize = 5_000;

impl Courses {
    /// Walks all of them; returns how many states there were.
    fn walk(&self) -> usize {
        let world = World::new(&vec![1; self.workers], &[KEY], self.ttl);
        let (mut seen, mut stack) = (HashSet::new(), vec![(world, self.left, None)]);
        while let Some((world, left, path)) = stack.pop() {
            let mut actions = Vec::new();
            world.enabled(self.endings, &mut actions);
            self.add_arrivals(&world, left, &mut actions);
            if actions.is_empty() {
                self.check_end(&world, left).unwrap_or_else(|error| panic!("{error}: {}", tell(&path)));
            }
            self.add_faults(&world, left, &mut actions);
            for action in actions {
                let (mut next, left) = (world.clone(), spend(left, action));
                let acted = next.act(action);
                let path = Some(Rc::new(Path { action, before: path.clone() }));
                acted.unwrap_or_else(|error| panic!("{error}: {}", tell(&path)));
                if seen.insert((next.fingerprint(), left)) {
                    stack.push((next, left, path));
                }
            }
        }
        seen.len()
    }

    fn add_arrivals(&self, world: &World, left: Left, actions: &mut Vec<Action>) {
        let may_arrive = |worker: &usize| left.arrivals[*worker] > 0 && world.is_idle(*worker);
        let arrive = |worker| Action::Arrive { worker, key: KEY };
        actions.extend((0..self.workers).filter(may_arrive).map(arrive));
    }

    fn add_faults(&self, world: &World, left: Left, actions: &mut Vec<Action>) {
        if left.crashes > 0 {
            actions.extend((0..self.workers).filter(|worker| world.is_alive(*worker)).map(Action::Crash));
        }
        if left.restarts > 0 {
            actions.extend((0..self.workers).filter(|worker| !world.is_alive(*worker)).map(Action::Restart));
        }
        if left.stalls > 0 {
            actions.push(Action::Stall(None));
            actions.extend((0..self.workers).map(|worker| Action::Stall(Some(worker))));
        }
    }

    /// Nothing is left to do but to wait for time to pass.
    fn check_end(&self, world: &World, left: Left) -> Result<(), String> {
        let had_no_fault = (left.crashes, left.stalls) == (self.left.crashes, self.left.stalls);
        if had_no_fault && !world.is_answered() {
            return Err("somebody waits for a fault".into());
        }
        if world.tally.unshared > 0 {
            return Err("a flight was not shared".into());
        }
        if self.one_call && had_no_fault && world.tally.flights > 1 {
            return Err("more than one call".into());
        }
        world.clone().goes_on()
    }
}

fn spend(mut left: Left, action: Action) -> Left {
    match action {
        Action::Arrive { worker, .. } => left.arrivals[worker] -= 1,
        Action::Crash(_) => left.crashes -= 1,
        Action::Restart(_) => left.restarts -= 1,
        Action::Stall(_) => left.stalls -= 1,
        _ => (),
    }
    left
}

#[test]
fn workers_without_a_fault_make_one_call() {
    let left = Left { arrivals: [2, 2, 2], crashes: 0, restarts: 0, stalls: 0 };
    let endings = &[Ending::Cached];
    assert!(Courses { workers: 3, ttl: STALE, endings, left, one_call: true }.walk() > MANY);
}

#[test]
fn workers_without_a_fault_and_without_a_cache() {
    let left = Left { arrivals: [2, 1, 1], crashes: 0, restarts: 0, stalls: 0 };
    let endings = &[Ending::NotCached, Ending::Large, Ending::GivenUp];
    assert!(Courses { workers: 3, ttl: STALE, endings, left, one_call: false }.walk() > MANY);
}

#[test]
fn two_workers_with_every_crash_and_stall() {
    let left = Left { arrivals: [2, 1, 0], crashes: 1, restarts: 0, stalls: 2 };
    let endings = &[Ending::Cached, Ending::NotCached];
    assert!(Courses { workers: 2, ttl: 5 * STALE, endings, left, one_call: false }.walk() > MANY);
}

#[test]
fn two_workers_with_every_crash_and_restart() {
    let left = Left { arrivals: [2, 1, 0], crashes: 1, restarts: 1, stalls: 1 };
    let endings = &[Ending::Cached];
    assert!(Courses { workers: 2, ttl: STALE, endings, left, one_call: false }.walk() > MANY);
}

#[test]
fn three_workers_with_every_crash() {
    // Under Node, in a time that can be borne.
    let arrivals = if cfg!(target_arch = "wasm32") { [1, 1, 0] } else { [1, 1, 1] };
    let left = Left { arrivals, crashes: 1, restarts: 0, stalls: 1 };
    let endings = &[Ending::Cached];
    assert!(Courses { workers: 3, ttl: 1, endings, left, one_call: false }.walk() > MANY);
}

/// More keys than a bucket has entries, all in one bucket, and one in another.
const KEYS: [u32; 11] = [
    0,
    1,
    BUCKETS,
    2 * BUCKETS,
    3 * BUCKETS,
    4 * BUCKETS,
    5 * BUCKETS,
    6 * BUCKETS,
    7 * BUCKETS,
    8 * BUCKETS,
    9 * BUCKETS,
];

const ENDINGS: &[Ending] = &[Ending::Cached, Ending::NotCached, Ending::Large, Ending::GivenUp];

/// One of the things that may happen, chosen by the dice; arrivals are for the first so many keys.
fn any_action(world: &World, keys: usize, [kind, worker, key, at]: [u8; 4]) -> Option<Action> {
    let worker = usize::from(worker) % world.workers();
    let (is_alive, is_idle) = (world.is_alive(worker), world.is_idle(worker));
    let key = KEYS[usize::from(key) % keys];
    match kind {
        0..50 => is_idle.then_some(Action::Arrive { worker, key }),
        50..60 => Some(Action::Wait((1 + Nanos::from(at)) * MILLISECOND / 4)),
        60..62 => is_alive.then_some(Action::Crash(worker)),
        62 => is_idle.then_some(Action::Leave(worker)),
        63..73 => (!is_alive).then_some(Action::Restart(worker)),
        73 => Some(Action::Lose(worker)),
        74..77 => Some(Action::Stall((at % 4 > 0).then_some(worker))),
        77..100 => is_idle.then_some(Action::Beat(worker)),
        _ => {
            // Flights take long.
            let endings = if at % 8 == 0 { ENDINGS } else { &[] };
            let mut actions = Vec::new();
            world.enabled(endings, &mut actions);
            let count = actions.len().max(1);
            actions.get((usize::from(at) * 7 + worker) % count).copied()
        }
    }
}

#[test]
fn whatever_workers_do_everybody_is_answered_rightly() {
    let dice = prop::collection::vec(any::<[u8; 4]>(), 0..600);
    let all = RefCell::new(Tally::default());
    runner(if cfg!(target_arch = "wasm32") { 50 } else { 3_000 })
        .run(&(dice, 1..=KEYS.len(), 1..STALE), |(dice, keys, ttl)| {
            let mut world = World::new(&[1, 1, 1, 2, 2], &KEYS, ttl);
            for dice in dice {
                if let Some(action) = any_action(&world, keys, dice) {
                    world.act(action).map_err(TestCaseError::fail)?;
                }
            }
            all.borrow_mut().add(world.tally);
            world.goes_on().map_err(TestCaseError::fail)
        })
        .unwrap();
    let Tally { flights, unshared, waited, taken, told, lost } = all.into_inner();
    let counts = [flights, unshared, waited, taken, told, lost];
    assert!(counts.iter().all(|count| *count > 0) || cfg!(target_arch = "wasm32"), "{counts:?}");
    eprintln!("{counts:?}");
}
