//! The promise: each key is computed once, by one of all replicas.

use std::time::Duration;

use collapser_loadgen::fleet;
use serde_json::json;

use crate::front::{homes, send};
use crate::rig::root;

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_calls_over_four_keys_are_four_backend_calls_over_four_replicas() {
    let ttl = json!({"cache_duration": "30s"});
    let replicas = fleet::replicas(root(), 4, Duration::from_secs(1), &ttl).await.unwrap();
    let front = fleet::front(root(), &replicas, |_| ()).await.unwrap();
    send(&front, 1_000, 4).await;
    assert_eq!(fleet::calls(&replicas), 4, "{:?}", fleet::owners(&replicas));
    assert_eq!(homes(&replicas).len(), 4);
    // And once more from the caches.
    let warm = send(&front, 1_000, 4).await;
    assert_eq!(fleet::calls(&replicas), 4, "{:?}", fleet::owners(&replicas));
    assert!(warm.elapsed_seconds < 1.0, "{warm}");
}
