//! What access logs can tell: the filter state that `filter_state` writes.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use collapser_loadgen::sidecar::SidecarOptions;
use serde_json::{Value, json};

use super::scene::{CROWD, Scene, WORKERS, pass_ms, saying, telling, trouble};
use crate::raw::headers;
use crate::rig::{Rig, ask};

/// Envoy writes its access log every ten seconds.
const PATIENCE: Duration = Duration::from_secs(40);

/// How a line of the log begins.
const MARK: &str = "told ";

/// Has Envoy log name, outcome and key of every call.
fn add_log(config: &mut Value) {
    let manager = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config";
    let format = format!(
        "{MARK}%REQ(X-NAME)% %FILTER_STATE(wasm.collapser.outcome:PLAIN)% %FILTER_STATE(wasm.collapser.key:PLAIN)%\n"
    );
    config.pointer_mut(manager).unwrap()["access_log"] = json!([{
        "name": "stdout",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.access_loggers.stream.v3.StdoutAccessLog",
            "log_format": {"text_format_source": {"inline_string": format}},
        },
    }]);
}

/// Like [`Scene::start`], with a log.
async fn start(mut settings: Value, latency_ms: u64, workers: u32) -> Scene {
    settings["filter_state"] = json!(true);
    let change = |options: &mut SidecarOptions| {
        options.concurrency = workers;
        options.config.edit = add_log;
    };
    Scene(Rig::start_with(telling(settings), latency_ms, change).await)
}

/// The outcomes and keys that were logged, in order, once there are so many.
async fn logged(scene: &Scene, count: usize) -> Vec<(String, String, String)> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let log = scene.0.sidecar.log();
        let words = |line: &str| {
            let mut words = line.split_once(MARK)?.1.split(' ').map(str::to_string);
            Some((words.next()?, words.next()?, words.next()?))
        };
        let lines: Vec<_> = log.lines().filter_map(words).collect();
        if lines.len() >= count {
            return lines;
        }
        assert!(Instant::now() < deadline, "{} of {count} lines: {lines:?}", lines.len());
        pass_ms(100).await;
    }
}

/// How often each outcome was logged for calls of this name.
fn outcomes(lines: &[(String, String, String)], name: &str) -> Vec<(String, usize)> {
    let of_name = lines.iter().filter(|(of, ..)| of == name);
    let all: Vec<_> = of_name.map(|(_, outcome, _)| outcome.clone()).collect();
    let distinct: BTreeSet<_> = all.iter().cloned().collect();
    let count = |outcome: &String| all.iter().filter(|one| *one == outcome).count();
    distinct.into_iter().map(|outcome| (outcome.clone(), count(&outcome))).collect()
}

fn expected(all: &[(&str, usize)]) -> Vec<(String, usize)> {
    all.iter().map(|(outcome, count)| (outcome.to_string(), *count)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_outcome_is_logged_with_its_key() {
    let settings = json!({"cache_duration": "1s", "stale_if_error": "1m"});
    let scene = start(settings, 500, 1).await;
    let name = |name| [("x-name", name)];
    scene.together(&ask("k"), &name("together"), CROWD).await;
    scene.one(&ask("k"), &name("later")).await;
    scene.one(&ask("k"), &[("x-name", "alone"), ("cache-control", "no-store")]).await;
    scene.together(&saying("k", "private"), &name("private"), CROWD).await;
    scene.one(&saying("k", "private"), &name("private-later")).await;
    pass_ms(1_100).await;
    scene.0.backend.set_failure(trouble());
    scene.together(&ask("k"), &name("trouble"), CROWD).await;
    scene.one(&ask("k"), &name("trouble-later")).await;
    let lines = logged(&scene, 3 * CROWD + 4).await;
    let followers = CROWD - 1;
    for (name, all) in [
        ("together", &[("follower", followers), ("leader", 1)][..]),
        ("later", &[("hit", 1)]),
        ("alone", &[("bypass:asked", 1)]),
        ("private", &[("leader", 1), ("released", followers)]),
        ("private-later", &[("bypass:unshareable", 1)]),
        ("trouble", &[("stale", CROWD)]),
        ("trouble-later", &[("stale", 1)]),
    ] {
        assert_eq!(outcomes(&lines, name), expected(all), "{name}");
    }
    let keys_of = |names: &[&str]| -> BTreeSet<_> {
        lines.iter().filter(|(name, ..)| names.contains(&name.as_str())).map(|(.., key)| key).collect()
    };
    let shared = keys_of(&["together", "later", "trouble", "trouble-later"]);
    let private = keys_of(&["private"]);
    assert_eq!((shared.len(), private.len()), (1, 1), "{lines:?}");
    assert!(shared.is_disjoint(&private));
    assert!(shared.iter().chain(&private).all(|key| key.len() >= 8 && *key != "-"), "{shared:?}");
    assert_eq!(keys_of(&["alone"]), BTreeSet::from([&"-".to_string()]), "nobody has looked");
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_calls_are_logged() {
    let scene = start(json!({"max_waiters": 1}), 500, 1).await;
    let told = scene.together(&ask("k"), &[("x-name", "full")], CROWD).await;
    assert!(told[1..].iter().all(|told| told.code() == "8"), "{told:?}");
    let lines = logged(&scene, CROWD).await;
    assert_eq!(outcomes(&lines, "full"), expected(&[("leader", 1), ("refused", CROWD - 1)]));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_logged_is_what_callers_are_told() {
    for workers in WORKERS {
        let scene = start(json!({"cache_duration": "1m"}), 500, workers).await;
        scene.together(&ask("k"), &[("x-name", "together")], CROWD).await;
        let client = scene.client().await;
        for _ in 0..CROWD {
            scene.one(&ask("k"), &[("x-name", "later")]).await;
        }
        drop(client.compute(&ask("k"), headers(&[("x-name", "later")])).await.unwrap());
        let lines = logged(&scene, 2 * CROWD + 1).await;
        assert_eq!(
            outcomes(&lines, "together"),
            expected(&[("follower", CROWD - 1), ("leader", 1)]),
            "{workers} workers"
        );
        assert_eq!(outcomes(&lines, "later"), expected(&[("hit", CROWD + 1)]), "{workers} workers");
    }
}
