//! The sidecar's container is told to stop, as the kubelet tells it while the backend's preStop still sleeps.

use std::time::{Duration, Instant};

use http::StatusCode;
use tokio::process::Command;
use tokio::time::sleep;

use crate::engine::{Pod, eventually, request};

/// Longer than DRAIN_DELAY, shorter than DRAIN_TIMEOUT and the filter's backend_timeout.
const CALL: Duration = Duration::from_secs(8);

#[tokio::test]
async fn a_stopped_sidecar_fails_readiness_first_and_answers_what_is_in_flight() {
    let pod = Pod::start().await;
    let mut client = pod.client().await;
    let began = Instant::now();
    let in_flight =
        tokio::spawn(async move { (client.compute(request("slow", CALL)).await, Instant::now()) });
    sleep(Duration::from_millis(500)).await;

    let container = pod.container("collapser");
    let stop = Command::new("podman").args(["stop", "--time", "40", &container]).output();
    let stop = tokio::spawn(async move { (stop.await.unwrap(), Instant::now()) });
    pod.wait_for("readiness", StatusCode::SERVICE_UNAVAILABLE).await;
    let unready = began.elapsed();
    assert!(!in_flight.is_finished() && !stop.is_finished());
    assert_eq!(pod.probe("liveness").await, Some(StatusCode::OK), "a draining sidecar is not restarted");

    // Callers who have not noticed yet are served, on new connections too.
    let mut late = pod.client().await;
    late.compute(request("late", Duration::ZERO)).await.unwrap();

    let (answer, answered) = in_flight.await.unwrap();
    answer.unwrap();
    assert!(answered - began >= CALL);
    let (stopped, ended) = stop.await.unwrap();
    assert!(stopped.status.success(), "{}", String::from_utf8_lossy(&stopped.stderr));
    assert!(ended >= answered, "the sidecar ended before the call in flight");
    assert!(
        ended - answered < Duration::from_secs(5),
        "it ends when nothing is in flight: {:?}",
        ended - answered
    );
    println!(
        "unready after {unready:?}, answered after {:?}, ended after {:?}",
        answered - began,
        ended - began
    );
    assert_eq!(pod.inspect("collapser", ".State.ExitCode"), "0");
    eventually("nobody listens any more", async || pod.probe("liveness").await.is_none()).await;
}
