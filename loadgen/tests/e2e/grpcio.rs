//! A client that is not Rust: gRPC's C core by way of Python, see `grpcio_client.py`.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::json;
use tokio::process::Command;
use tokio::time::timeout;

use crate::rig::{Rig, root};

/// For the whole script; it takes some ten seconds.
const PATIENCE: Duration = Duration::from_secs(240);

/// The interpreter that has the package `grpcio`.
fn python() -> PathBuf {
    let default = || root().join(".tools/python/bin/python");
    let python = std::env::var_os("COLLAPSER_PYTHON").map_or_else(default, PathBuf::from);
    assert!(
        python.is_file(),
        "no Python with grpcio at {}; run: make python-tools (or set COLLAPSER_PYTHON)",
        python.display()
    );
    python
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_of_grpcs_c_core_is_served() {
    let rig = Rig::start(json!({}), 0).await;
    let script = Command::new(python())
        .arg(root().join("loadgen/tests/e2e/grpcio_client.py"))
        .arg(rig.sidecar.addr().to_string())
        .arg(rig.backend.http_uri().unwrap())
        .kill_on_drop(true)
        .output();
    let output = timeout(PATIENCE, script).await.expect("the script does not end").unwrap();
    let said =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success(), "{}:\n{said}", output.status);
    // All that it has, and not just what it got to.
    assert_eq!(said.matches("ok   test_").count(), 6, "{said}");
    let seen = rig.backend.recent_requests();
    let binary = seen.iter().find_map(|request| request.headers.get("caller-bin"));
    assert!(
        binary.is_some_and(|value| value.len() > 256),
        "the caller's binary metadata is lost: {binary:?}"
    );
}
