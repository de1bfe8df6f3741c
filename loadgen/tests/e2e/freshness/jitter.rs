//! `ttl_jitter`: what was filled together does not expire together.

use serde_json::json;

use super::scene::{Scene, pass_ms};

const KEYS: u64 = 40;

/// How many of the keys have expired three quarters through their TTL of 6 s, and how many after it.
async fn expired(jitter: serde_json::Value) -> (u64, u64) {
    let scene = Scene::start(json!({"cache_duration": "6s", "ttl_jitter": jitter}), 0, 1).await;
    let mut calls = Vec::new();
    for pause in [0, 4_500, 2_500] {
        pass_ms(pause).await;
        let before = scene.calls();
        for key in 0..KEYS {
            scene.get(&key.to_string()).await;
        }
        calls.push(scene.calls() - before);
    }
    assert_eq!(calls[0], KEYS);
    (calls[1], calls[2])
}

#[tokio::test(flavor = "multi_thread")]
async fn with_jitter_keys_expire_one_by_one() {
    let (before, after) = expired(json!("50%")).await;
    assert!((1..KEYS).contains(&before), "{before} of {KEYS} keys");
    assert!(after > 0, "the others expire as well");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_it_all_expire_at_the_end() {
    assert_eq!(expired(json!(0)).await, (0, KEYS));
}
