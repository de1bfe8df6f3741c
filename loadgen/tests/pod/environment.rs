//! A wrong setting ends the container with a message that names it.

use std::collections::BTreeMap;

use crate::engine::run_locked_down;
use crate::manifests::Manifests;

const IMAGE: &str = "collapser/sidecar:dev";

/// What the container says when the shipped settings are changed so, and fails; `None` removes a setting.
fn complaint(changes: &[(&str, Option<&str>)]) -> String {
    let mut settings: BTreeMap<_, _> = Manifests::read().settings();
    for (name, value) in changes {
        match value {
            Some(value) => settings.insert((*name).to_owned(), (*value).to_owned()),
            None => settings.remove(*name),
        };
    }
    let pairs: Vec<_> = settings.iter().map(|(name, value)| format!("--env={name}={value}")).collect();
    let options: Vec<_> = pairs.iter().map(String::as_str).chain(["--timeout=20"]).collect();
    let output = run_locked_down(IMAGE, &options, &[]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    // 1 and 2 are the launcher's; podman's own failures are 125 and more, and so is a container that had to be stopped.
    assert!(matches!(output.status.code(), Some(1 | 2)), "{changes:?}: {:?} {said}", output.status);
    said
}

#[test]
fn wrong_settings_are_named() {
    for (name, value) in [
        ("GRPC_PORT", "0"),
        ("GRPC_PORT", "70000"),
        ("GRPC_PORT", "tcp://10.96.0.12:50052"),
        ("METRICS_PORT", "http"),
        ("ADMIN_PORT", "-1"),
        ("BACKEND_ADDRESS", "backend"),
        ("BACKEND_ADDRESS", "http://127.0.0.1:50051"),
        ("BACKEND_USE_TLS", "perhaps"),
        ("BACKEND_TIMEOUT", "soon"),
        ("COLLAPSER_CACHE_DURATION", "100"),
        ("COLLAPSER_CACHE_DURATION", "25h"),
        ("COLLAPSER_MAX_WAITERS", "0"),
        ("COLLAPSER_METHODS", "Compute"),
        ("LOG_LEVEL", "loud"),
        ("LOG_FORMAT", "xml"),
        ("CONCURRENCY", "0"),
        ("DRAIN_DELAY", "5"),
        ("DRAIN_TIMEOUT", "never"),
    ] {
        let said = complaint(&[(name, Some(value))]);
        assert!(said.contains(name), "{name}={value}: {said}");
        println!("{name}={value}: {}", said.lines().take(2).collect::<Vec<_>>().join(" "));
    }
}

#[test]
fn a_backend_must_be_named() {
    for value in [None, Some("")] {
        let said = complaint(&[("BACKEND_ADDRESS", value)]);
        assert!(said.contains("BACKEND_ADDRESS"), "{said}");
    }
}

#[test]
fn a_misspelt_setting_is_not_overlooked() {
    let said = complaint(&[("COLLAPSER_CACHE_DURATON", Some("1s"))]);
    assert!(said.contains("COLLAPSER_CACHE_DURATON"), "{said}");
}

#[test]
fn files_for_tls_must_be_there() {
    let use_tls = ("BACKEND_USE_TLS", Some("true"));
    let said = complaint(&[use_tls, ("BACKEND_TLS_CA_FILE", Some("/tls/ca.pem"))]);
    assert!(said.contains("BACKEND_TLS_CA_FILE") && said.contains("/tls/ca.pem"), "{said}");
    let said = complaint(&[use_tls, ("BACKEND_TLS_CERT_FILE", Some("/etc/collapser/envoy.yaml"))]);
    assert!(said.contains("BACKEND_TLS_KEY_FILE"), "{said}");
    let said = complaint(&[("TLS_CERT_FILE", Some("/etc/collapser/envoy.yaml"))]);
    assert!(said.contains("TLS_KEY_FILE"), "{said}");
    let said = complaint(&[("BACKEND_TLS_SNI", Some("backend.example"))]);
    assert!(said.contains("BACKEND_USE_TLS"), "{said}");
}

#[test]
fn ports_must_differ() {
    let said = complaint(&[("METRICS_PORT", Some("50052"))]);
    assert!(said.contains("50052"), "{said}");
}
