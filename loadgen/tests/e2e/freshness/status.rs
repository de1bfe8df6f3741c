//! The initial metadata `cache-status`, beside what other tests see of it.

use collapser_loadgen::proto::{ComputeRequest, CountRequest, Metadata};
use serde_json::json;
use tonic::Code;

use super::scene::{CROWD, Scene, Told};
use crate::raw::headers;
use crate::rig::{Rig, ask};

#[tokio::test(flavor = "multi_thread")]
async fn replies_that_are_trailers_only_tell_it_too() {
    let scene = Scene::start(json!({"cache_errors": true, "cache_duration": "1m"}), 500, 1).await;
    let request = ComputeRequest { fail_code: Code::NotFound as u32, ..ask("k") };
    let mut told = scene.together(&request, &[], CROWD).await;
    told.push(scene.one(&request, &[]).await);
    for told in &told {
        assert!(told.0.trailers.is_none() && told.0.data.is_empty(), "{told:?}");
        assert_eq!(told.0.headers["grpc-status"], "5");
        assert_eq!(told.0.headers.get_all("cache-status").iter().count(), 1);
    }
    assert_eq!(told[0].status(), "collapser; fwd=miss; stored");
    assert!(told[1..CROWD].iter().all(|told| told.status() == "collapser; fwd=miss; stored; collapsed"));
    assert!(told[CROWD].is_hit(), "{:?}", told[CROWD]);
}

#[tokio::test(flavor = "multi_thread")]
async fn it_stands_behind_what_caches_before_have_said() {
    let scene = Scene::start(json!({"cache_duration": "1m"}), 0, 1).await;
    let (name, value) = ("cache-status".to_string(), "inner; hit".to_string());
    let entry = Metadata { name, value, ..Metadata::default() };
    let request = ComputeRequest { initial_metadata: vec![entry], ..ask("k") };
    for ours in ["collapser; fwd=miss; stored", "collapser; hit; ttl=59"] {
        let told = scene.one(&request, &[]).await;
        let all: Vec<_> = told.0.headers.get_all("cache-status").iter().collect();
        assert_eq!(all, ["inner; hit", ours]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_passes_is_told_why() {
    let settings = json!({"methods": ["!/collapser.demo.v1.Demo/Count"], "max_request_bytes": "1KiB"});
    let scene = Scene::start(settings, 0, 1).await;
    let path = "/collapser.demo.v1.Demo/Count";
    let count = CountRequest { count: 2, ..CountRequest::default() };
    let told = scene.client().await.call(path, &count, headers(&[])).await.unwrap();
    assert_eq!(Told(told).status(), "collapser; fwd=bypass; detail=method");
    let large = ComputeRequest { padding: vec![0; 2_000].into(), ..ask("k") };
    let told = scene.one(&large, &[]).await;
    assert_eq!(told.status(), "collapser; fwd=bypass; detail=too_large");
}

#[tokio::test(flavor = "multi_thread")]
async fn unless_asked_for_it_is_not_told() {
    let scene = Scene(Rig::start(json!({"cache_duration": "1m"}), 0).await);
    for metadata in [&[][..], &[], &[("cache-control", "no-store")]] {
        let told = scene.one(&ask("k"), metadata).await;
        assert_eq!((told.code(), told.status(), told.age()), ("0", "", None));
    }
}
