//! Waves of callers of whom half hang up around the moment in which the answers go out.

use std::time::{Duration, Instant};

use http::HeaderMap;
use rand::seq::SliceRandom as _;
use serde_json::json;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep_until;

use crate::callers::{Client, call, clients, sized};
use crate::gate::{GateRig, held};
use crate::health::{assert_unharmed, mib, rss, scaled};
use crate::raw::RawClient;

/// Callers of a wave: these stay, ...
const STAYING: usize = 2_500;
/// ... these reset their stream, ...
const RESETTING: usize = 1_500;
/// ... and these close their connection, with several calls on it.
const DROPPED_CONNECTIONS: usize = 20;
const CALLS_OF_DROPPED: usize = 50;

const WAVE: usize = STAYING + RESETTING + DROPPED_CONNECTIONS * CALLS_OF_DROPPED;

const PAYLOAD: u32 = 500;

/// Hang-ups happen this long before the flight's end ...
const BEFORE: Duration = Duration::from_millis(50);
/// ... to this long after it, by when most callers have been answered.
const AFTER: Duration = Duration::from_millis(400);

/// When the flight ends, once that is known.
type End = watch::Receiver<Option<Instant>>;

/// Returns at a random moment around the end.
async fn moment(mut end: End) {
    let end = end.wait_for(Option::is_some).await.unwrap().unwrap();
    sleep_until((end - BEFORE + (BEFORE + AFTER).mul_f64(rand::random())).into()).await;
}

/// Returns how many were not answered.
async fn one_that_resets(client: Client, key: String, end: End) -> Result<usize, String> {
    tokio::select! {
        answer = call(client, &key, PAYLOAD) => answer.map(|()| 0),
        () = moment(end) => Ok(1),
    }
}

async fn one_that_stays(client: Client, key: String) -> Result<usize, String> {
    call(client, &key, PAYLOAD).await.map(|()| 0)
}

async fn connection_that_drops(rig: &GateRig, key: &str, end: End) -> JoinSet<Result<usize, String>> {
    let connection = RawClient::connect(rig.sidecar.addr()).await;
    let mut calls = JoinSet::new();
    for _ in 0..CALLS_OF_DROPPED {
        let answer = connection.compute(&sized(key, PAYLOAD), HeaderMap::new());
        calls.spawn(async move { Ok(usize::from(answer.await.is_err())) });
    }
    calls.spawn(async move {
        moment(end).await;
        connection.disconnect();
        Ok(0)
    });
    calls
}

/// One wave; returns how many hung up before they had their answer.
async fn wave(rig: &GateRig, clients: &[Client], number: u64) -> usize {
    let (key, end) = (held(number), watch::Sender::new(None));
    let mut stays: Vec<_> = [true].repeat(STAYING).into_iter().chain([false].repeat(RESETTING)).collect();
    stays.shuffle(&mut rand::rng());
    let mut calls = JoinSet::new();
    for (client, stays) in clients.iter().cycle().zip(stays) {
        let (client, key) = (client.clone(), key.clone());
        if stays {
            calls.spawn(one_that_stays(client, key));
        } else {
            calls.spawn(one_that_resets(client, key, end.subscribe()));
        }
    }
    let mut dropping = Vec::new();
    for _ in 0..DROPPED_CONNECTIONS {
        dropping.push(connection_that_drops(rig, &key, end.subscribe()).await);
    }
    rig.waiting(WAVE).await;
    let at = Instant::now() + BEFORE;
    end.send_replace(Some(at));
    sleep_until(at.into()).await;
    rig.gate.release(number);
    let mut outcomes = calls.join_all().await;
    for calls in dropping {
        outcomes.extend(calls.join_all().await);
    }
    outcomes.into_iter().map(|outcome| outcome.unwrap()).sum()
}

async fn waves(connections: usize) {
    let mut rig = GateRig::start(json!({})).await;
    let (count, before) = (scaled(10), rss(&rig.sidecar));
    let clients = clients(&rig.sidecar.uri(), connections).await;
    let (mut left, start) = (0, Instant::now());
    for number in 1..=count {
        left += wave(&rig, &clients, number).await;
    }
    let calls = count * WAVE as u64;
    println!(
        "hang-ups, {connections} connections: {calls} calls in {:.1} s, {left} hung up unanswered, {} backend calls, RSS {:.0} -> {:.0} MiB",
        start.elapsed().as_secs_f64(),
        rig.gate.calls(),
        mib(before),
        mib(rss(&rig.sidecar)),
    );
    let most = count as usize * (WAVE - STAYING);
    assert!((most / 20..most).contains(&left), "{left} of {most} hung up: not around the end");
    assert_eq!(rig.gate.calls(), count);
    let metrics = assert_unharmed(&mut rig.sidecar, calls).await;
    assert!(metrics.get("collapser_abandoned_requests_total") > 0.0, "{metrics:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn half_of_all_callers_of_one_connection_hang_up() {
    waves(1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn half_of_all_callers_of_many_connections_hang_up() {
    waves(10).await;
}
