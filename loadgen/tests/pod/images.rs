//! What the images hold.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::engine::{Pod, podman_says, run_locked_down};
use crate::manifests::documents;

/// The files of an image, below where it is mounted.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

#[test]
fn the_image_of_the_module_is_what_istio_pulls() {
    let image = "collapser/module:dev";
    let layers: Vec<Value> =
        serde_json::from_str(&podman_says(&["inspect", image, "--format", "{{json .RootFS.Layers}}"]))
            .unwrap();
    assert_eq!(layers.len(), 1, "Istio takes the last layer and no other");
    let mounted = PathBuf::from(podman_says(&["image", "mount", image]));
    let names: Vec<_> =
        files(&mounted).iter().map(|path| path.strip_prefix(&mounted).unwrap().to_owned()).collect();
    let module = fs::read(mounted.join("plugin.wasm"));
    podman_says(&["image", "unmount", image]);
    assert_eq!(names, [Path::new("plugin.wasm")]);
    // What was built at the time; the file in target may be newer by now.
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/images/context/collapser.wasm");
    let built = fs::read(built).unwrap();
    assert!(module.unwrap() == built, "the image holds the module that was built");
}

/// The Job's own arguments, with the Service's name leading to the pod.
#[tokio::test]
async fn the_job_sends_its_load() {
    let pod = Pod::start().await;
    let job = documents("load.yaml").into_iter().find(|document| document["kind"] == "Job").unwrap();
    let container = &job["spec"]["template"]["spec"]["containers"][0];
    let arguments: Vec<_> =
        container["args"].as_array().unwrap().iter().map(|value| value.as_str().unwrap()).collect();
    let host = format!("--add-host=collapser-demo:{}", pod.address);
    let output = run_locked_down(container["image"].as_str().unwrap(), &[&host], &arguments);
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("ok           10,000"), "{said}");
}
