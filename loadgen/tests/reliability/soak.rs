//! The same load for a long time: collapsing holds, and memory does not grow.

use std::time::Duration;

use collapser_loadgen::load::{self, LoadMode, LoadOptions};
use serde_json::json;

use crate::health::{assert_unharmed, mib, rss, scale};
use crate::rig::Rig;

/// Load before memory is first looked at.
const WARM: Duration = Duration::from_secs(3);

/// A minute's soak is the longest.
fn duration() -> Duration {
    WARM + Duration::from_secs_f64((10.0 * scale()).clamp(2.0, 60.0))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_workers_on_one_key() {
    let mut rig = Rig::start(json!({}), 50).await;
    let (start, duration) = (rss(&rig.sidecar), duration());
    let options = LoadOptions {
        backend_url: rig.backend.http_uri(),
        mode: LoadMode::Workers { workers: 100, duration },
        connections: 10,
        ..LoadOptions::burst(rig.sidecar.uri(), 1)
    };
    let load = tokio::spawn(load::run(options, |_| ()));
    tokio::time::sleep(WARM).await;
    let warm = rss(&rig.sidecar);
    tokio::time::sleep(duration - WARM - Duration::from_millis(200)).await;
    let end = rss(&rig.sidecar);
    let report = load.await.unwrap().unwrap();
    let (calls, ratio) = (report.backend_calls.unwrap(), report.ratio.unwrap());
    println!(
        "soak: {} requests in {:.1} s ({:.0}/s), {calls} backend calls, {ratio:.0}:1, {} errors, p99 {:.1} ms, RSS {:.1} -> warm {:.1} -> {:.1} MiB",
        report.calls,
        report.elapsed_seconds,
        report.rate_per_second,
        report.failed,
        report.latency_ms.p99,
        mib(start),
        mib(warm),
        mib(end),
    );
    assert_eq!((report.failed, report.wrong), (0, 0), "{report:#?}");
    assert!(ratio >= 500.0, "{ratio}:1");
    assert!(end as f64 <= warm as f64 * 1.05, "RSS grew from {warm} to {end}");
    assert_unharmed(&mut rig.sidecar, report.calls).await;
}
