//! The manifests as kustomize renders them, and what they must say for the parts to fit each other. Podman knows no Services,
//! no preStop and no grace period, so these are looked at here.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use collapser_engine::bytesize;
use collapser_loadgen::args::parse_duration;
use serde_json::Value;

use crate::engine::work;

/// The rendered demo, as it goes to Kubernetes.
pub struct Manifests(Vec<Value>);

/// The documents of a rendered file.
pub fn documents(file: &str) -> Vec<Value> {
    let text = fs::read_to_string(work().join(file)).unwrap();
    serde_saphyr::from_multiple(&text).unwrap()
}

impl Manifests {
    pub fn read() -> Self {
        Self(documents("demo.yaml"))
    }

    fn find(&self, kind: &str, name: &str) -> &Value {
        let wanted = |document: &&Value| {
            document["kind"] == kind && document["metadata"]["name"].as_str().unwrap().starts_with(name)
        };
        let found: Vec<_> = self.0.iter().filter(wanted).collect();
        let exact = found.iter().find(|document| document["metadata"]["name"] == name);
        exact.or(found.first()).unwrap_or_else(|| panic!("there is no {kind} {name}"))
    }

    fn template(&self) -> &Value {
        &self.find("Deployment", "collapser-demo")["spec"]["template"]
    }

    fn container(&self, name: &str) -> &Value {
        let containers = self.template()["spec"]["containers"].as_array().unwrap();
        containers.iter().find(|container| container["name"] == name).unwrap()
    }

    /// Port and path of a container's probe, such as `liveness`.
    pub fn probe(&self, container: &str, kind: &str) -> (u16, String) {
        let get = &self.container(container)[format!("{kind}Probe")]["httpGet"];
        let port = get["port"].as_u64().unwrap().try_into().unwrap();
        (port, get["path"].as_str().unwrap().to_owned())
    }

    /// Port and path that the pod's annotations tell Prometheus.
    pub fn scrape(&self) -> (u16, String) {
        let annotation = |name: &str| {
            self.template()["metadata"]["annotations"][format!("prometheus.io/{name}")].as_str().unwrap()
        };
        assert_eq!(annotation("scrape"), "true");
        (annotation("port").parse().unwrap(), annotation("path").to_owned())
    }

    /// The container port that a port of a Service leads to.
    pub fn service_target(&self, service: &str, port: &str) -> u16 {
        let spec = &self.find("Service", service)["spec"];
        assert_eq!(spec["selector"], self.template()["metadata"]["labels"], "{service} selects the pods");
        let ports = spec["ports"].as_array().unwrap();
        let target = &ports.iter().find(|entry| entry["name"] == port).unwrap()["targetPort"];
        let containers = self.template()["spec"]["containers"].as_array().unwrap();
        let mut all = containers.iter().flat_map(|container| container["ports"].as_array().unwrap());
        let found = all.find(|entry| &entry["name"] == target).unwrap_or_else(|| panic!("no port {target}"));
        found["containerPort"].as_u64().unwrap().try_into().unwrap()
    }

    /// The settings that the sidecar gets from its ConfigMap.
    pub fn settings(&self) -> BTreeMap<String, String> {
        let name = &self.container("collapser")["envFrom"][0]["configMapRef"]["name"];
        let map = self.find("ConfigMap", "collapser-settings");
        assert_eq!(&map["metadata"]["name"], name, "the container takes the settings that are shipped");
        serde_json::from_value(map["data"].clone()).unwrap()
    }
}

fn seconds(value: &Value) -> Duration {
    Duration::from_secs(value.as_u64().unwrap())
}

#[test]
fn the_drain_fits_into_the_grace_period_and_the_backend_outlives_it() {
    let manifests = Manifests::read();
    let settings = manifests.settings();
    let setting = |name: &str| parse_duration(&settings[name]).unwrap();
    let drain = setting("DRAIN_DELAY") + setting("DRAIN_TIMEOUT");
    let backend = seconds(&manifests.container("backend")["lifecycle"]["preStop"]["sleep"]["seconds"]);
    let grace = seconds(&manifests.template()["spec"]["terminationGracePeriodSeconds"]);
    assert!(drain < backend && backend + Duration::from_secs(5) < grace, "{drain:?} {backend:?} {grace:?}");
    assert!(setting("BACKEND_TIMEOUT") < setting("DRAIN_TIMEOUT"), "flights can end within the drain");
}

#[test]
fn services_lead_to_the_ports_that_the_settings_name() {
    let manifests = Manifests::read();
    let settings = manifests.settings();
    let target = |service, port| manifests.service_target(service, port).to_string();
    assert_eq!(target("collapser-demo", "grpc"), settings["GRPC_PORT"]);
    assert_eq!(target("collapser-demo-metrics", "metrics"), settings["METRICS_PORT"]);
    let (port, _) = manifests.scrape();
    assert_eq!(port.to_string(), settings["METRICS_PORT"]);
    for kind in ["startup", "liveness", "readiness"] {
        assert_eq!(manifests.probe("collapser", kind).0.to_string(), settings["METRICS_PORT"], "{kind}");
    }
    let listens = &manifests.container("backend")["env"][0];
    assert_eq!(
        (&listens["name"], listens["value"].as_str()),
        (&Value::from("BACKEND_GRPC_ADDR"), Some(&*settings["BACKEND_ADDRESS"]))
    );
}

#[test]
fn the_memory_limit_leaves_room_above_envoys_heap_limit() {
    let manifests = Manifests::read();
    let limit = &manifests.container("collapser")["resources"]["limits"]["memory"];
    // Kubernetes leaves out the B.
    let bytes = bytesize::parse(&format!("{}B", limit.as_str().unwrap())).unwrap();
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../envoy/envoy.yaml");
    let config: Value = serde_saphyr::from_str(&fs::read_to_string(file).unwrap()).unwrap();
    let heap = &config["overload_manager"]["resource_monitors"][0]["typed_config"]["max_heap_size_bytes"];
    assert!(bytes >= heap.as_u64().unwrap() + 200 * 1024 * 1024, "{limit} {heap}");
}

#[test]
fn more_than_one_replica_has_a_disruption_budget() {
    let manifests = Manifests::read();
    let deployment = manifests.find("Deployment", "collapser-demo");
    assert!(deployment["spec"]["replicas"].as_u64() > Some(1));
    let budget = manifests.find("PodDisruptionBudget", "collapser-demo");
    assert_eq!(budget["spec"]["selector"], deployment["spec"]["selector"]);
}
