//! The pod at work, with a backend that comes and goes, and what it is allowed to do.

use std::fs;
use std::time::{Duration, Instant};

use http::StatusCode;
use serde_json::Value;
use tonic::Code;

use crate::engine::{Pod, eventually, podman_says, request};

const CALLS: u64 = 10_000;

#[tokio::test]
async fn ten_thousand_identical_calls_become_a_few() {
    let pod = Pod::start().await;
    let report = pod.burst(CALLS).await;
    assert!(report.is_clean(), "{report}");
    assert!(report.reaches_ratio(500.0), "{report}");
    println!("{report}");

    let mut metrics = pod.metrics().await;
    eventually("the metrics have counted all calls and nobody waits", async || {
        metrics = pod.metrics().await;
        metrics.get("collapser_requests_total") >= CALLS as f64
            && metrics.get("collapser_waiting_requests") == 0.0
    })
    .await;
    assert_eq!(metrics.get("collapser_requests_total"), CALLS as f64);
    assert_eq!(metrics.get("collapser_backend_calls_total"), report.backend_calls.unwrap() as f64);
    let removed =
        metrics.get("collapser_collapsed_requests_total") + metrics.get("collapser_cache_hits_total");
    assert_eq!(removed + metrics.get("collapser_backend_calls_total"), CALLS as f64);
    assert_eq!(metrics.sum("collapser_errors_total"), 0.0);
}

#[tokio::test]
async fn a_backend_that_stops_fails_readiness_and_restarts_nothing() {
    let pod = Pod::start().await;
    assert_eq!(pod.probe("startup").await, Some(StatusCode::OK));
    assert_eq!(pod.probe("liveness").await, Some(StatusCode::OK));
    let mut client = pod.client().await;
    client.compute(request("before", Duration::ZERO)).await.unwrap();
    let process = pod.inspect("collapser", ".State.Pid");

    podman_says(&["stop", "--time", "5", &pod.container("backend")]);
    let stopped = Instant::now();
    pod.wait_for("readiness", StatusCode::SERVICE_UNAVAILABLE).await;
    println!("not ready {:?} after the backend's end", stopped.elapsed());
    assert_eq!(
        pod.probe("liveness").await,
        Some(StatusCode::OK),
        "an outage is no reason to restart the sidecar"
    );
    let error = client.compute(request("meanwhile", Duration::ZERO)).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable, "{error}");

    podman_says(&["start", &pod.container("backend")]);
    let started = Instant::now();
    eventually("calls succeed again", async || {
        client.compute(request("after", Duration::ZERO)).await.is_ok()
    })
    .await;
    println!("calls succeed {:?} after the backend's start", started.elapsed());
    pod.wait_for("readiness", StatusCode::OK).await;
    println!("ready {:?} after the backend's start", started.elapsed());
    assert_eq!(pod.probe("liveness").await, Some(StatusCode::OK));
    assert_eq!(pod.inspect("collapser", ".State.Pid"), process, "the sidecar is the same process");
}

/// Asked of the kernel, not of podman.
#[tokio::test]
async fn no_container_is_root_or_can_write_to_its_file_system() {
    let pod = Pod::start().await;
    for container in ["backend", "collapser"] {
        let process = pod.inspect(container, ".State.Pid");
        let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
        let field = |name: &str| {
            let line = status.lines().find(|line| line.starts_with(name)).unwrap();
            line.split_whitespace().skip(1).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(field("Uid:"), "65532 65532 65532 65532", "{container}");
        assert_eq!(field("Gid:"), "65532 65532 65532 65532", "{container}");
        for set in ["CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
            assert_eq!(u64::from_str_radix(&field(set), 16), Ok(0), "{container} {set}");
        }
        assert_eq!(field("NoNewPrivs:"), "1", "{container}");
        assert_eq!(field("Seccomp:"), "2", "{container} has a seccomp filter");
        let mounts = fs::read_to_string(format!("/proc/{process}/mountinfo")).unwrap();
        let root = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        let root: Vec<_> = root.filter(|fields| fields[4] == "/").collect();
        assert!(
            !root.is_empty() && root.iter().all(|fields| fields[5].split(',').any(|o| o == "ro")),
            "{mounts}"
        );
        let shell = format!("/proc/{process}/root/bin/sh");
        assert!(fs::symlink_metadata(shell).is_err(), "{container} has a shell");
    }
}

#[tokio::test]
async fn logs_are_json() {
    let pod = Pod::start().await;
    pod.client().await.compute(request("a", Duration::ZERO)).await.unwrap();
    let logs = pod.logs("collapser");
    assert!(logs.lines().count() > 10, "{logs}");
    for line in logs.lines() {
        let entry: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        for field in ["time", "level", "logger", "message"] {
            assert!(entry[field].is_string(), "{field}: {line}");
        }
    }
    assert!(logs.contains("starting main dispatch loop"), "{logs}");
}
