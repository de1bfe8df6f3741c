//! A hot key that is asked for all the time: whether anybody ever waits for its flights.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::scene::{Scene, Told, WORKERS};
use crate::raw::headers;
use crate::rig::ask;

/// How long the backend takes.
const LATENCY: Duration = Duration::from_millis(500);

/// Long enough for several lives of a reply.
const SPELL: Duration = Duration::from_secs(6);

/// Asks for one key over several connections all the time, once it is there. What each was told, and when.
async fn asked_all_the_time(scene: &Scene) -> Vec<(Told, Duration)> {
    scene.get("hot").await;
    let end = Instant::now() + SPELL;
    let mut askers = Vec::new();
    for _ in 0..8 {
        let client = scene.client().await;
        askers.push(tokio::spawn(async move {
            let mut told = Vec::new();
            while Instant::now() < end {
                let begun = Instant::now();
                let answer = client.compute(&ask("hot"), headers(&[])).await.unwrap();
                told.push((Told(answer), begun.elapsed()));
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            told
        }));
    }
    let mut all = Vec::new();
    for asker in askers {
        all.extend(asker.await.unwrap());
    }
    all
}

async fn start(mut settings: Value, workers: u32) -> Scene {
    settings["cache_duration"] = json!("1500ms");
    Scene::start(settings, u64::try_from(LATENCY.as_millis()).unwrap(), workers).await
}

/// Answers that waited for a flight.
fn waited(all: &[(Told, Duration)]) -> usize {
    all.iter().filter(|(told, _)| told.status().contains("fwd=")).count()
}

/// Different replies that were given out.
fn replies(all: &[(Told, Duration)]) -> usize {
    let told: Vec<_> = all.iter().map(|(told, _)| told.clone()).collect();
    super::scene::calls_of(&told)
}

#[tokio::test(flavor = "multi_thread")]
async fn without_help_somebody_waits_whenever_it_expires() {
    let scene = start(json!({}), 1).await;
    let all = asked_all_the_time(&scene).await;
    assert!(waited(&all) > 1, "{} of {} waited", waited(&all), all.len());
    let longest = all.iter().map(|(_, took)| *took).max();
    assert!(longest >= Some(LATENCY), "{longest:?}");
    scene.metric("collapser_refreshes_total", 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn refreshed_early_it_is_always_fresh() {
    for workers in WORKERS {
        let scene = start(json!({"early_refresh": 1}), workers).await;
        let all = asked_all_the_time(&scene).await;
        assert_eq!(waited(&all), 0, "of {}, {workers} workers", all.len());
        assert!(all.iter().all(|(told, _)| told.is_hit()));
        assert!(replies(&all) >= 3, "{} replies", replies(&all));
        // One at a time, in each worker.
        let most = SPELL.as_millis() / LATENCY.as_millis() * u128::from(workers) + 2;
        assert!(u128::from(scene.calls()) <= most, "{} calls, {workers} workers", scene.calls());
        let refreshes = scene.0.sidecar.metrics().await.unwrap().get("collapser_refreshes_total");
        assert!(refreshes >= 3.0, "{refreshes}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn refreshed_late_it_is_stale_for_a_moment_and_always_there() {
    for workers in WORKERS {
        let scene = start(json!({"stale_while_revalidate": "1m"}), workers).await;
        let all = asked_all_the_time(&scene).await;
        assert_eq!(waited(&all), 0, "of {}, {workers} workers", all.len());
        let is_stale = |told: &Told| told.is_stale("stale-while-revalidate");
        assert!(all.iter().any(|(told, _)| is_stale(told)));
        assert!(all.iter().all(|(told, _)| told.is_hit() || is_stale(told)));
        assert!(replies(&all) >= 3, "{} replies", replies(&all));
    }
}
