//! The sidecar's configuration: the shipped file, changed in the few places that differ.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use collapser_engine::settings::Settings;
use serde_json::{Map, Value, json};

/// What is changed in the shipped configuration.
#[derive(Clone, Debug)]
pub struct ConfigOptions {
    /// The configuration to start from.
    pub template: PathBuf,
    /// The Wasm module.
    pub module: PathBuf,
    /// Where callers connect.
    pub listen: SocketAddr,
    /// Where `/metrics`, `/health` and `/ready` are served.
    pub metrics: SocketAddr,
    /// Envoy's admin interface; on loopback, or whoever reaches it can stop Envoy.
    pub admin: SocketAddr,
    /// The backend's name or address.
    pub backend_host: String,
    /// The backend's port.
    pub backend_port: u16,
    /// Replicas, in place of the one backend; the configuration is then one that balances between them.
    pub replicas: Vec<ReplicaAddr>,
    /// TLS towards the backend.
    pub backend_tls: Option<BackendTls>,
    /// TLS towards callers.
    pub tls: Option<ListenerTls>,
    /// The filter's settings that differ from those in the file.
    pub settings: Value,
    /// How long a request may wait in the filter; longer than `backend_timeout`. `None` leaves what is there.
    pub hold_timeout: Option<Duration>,
    /// Any other change.
    pub edit: fn(&mut Value),
}

/// Where a replica is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaAddr {
    /// Where it takes calls.
    pub grpc: SocketAddr,
    /// The port at which its health is checked, if it is another one.
    pub health_port: Option<u16>,
}

/// A certificate chain and its key, both in PEM files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The certificate chain.
    pub certificate: PathBuf,
    /// The private key.
    pub key: PathBuf,
}

/// TLS towards the backend.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BackendTls {
    /// Authorities to trust; `None` trusts those of the system.
    pub ca: Option<PathBuf>,
    /// What to show the backend, if it asks.
    pub identity: Option<Identity>,
    /// The name to ask for and to find in the certificate; `None` takes the backend's host.
    pub sni: Option<String>,
}

/// TLS towards callers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenerTls {
    /// What to show callers.
    pub identity: Identity,
    /// Authorities one of which must have signed the caller's certificate; `None` asks for none.
    pub client_ca: Option<PathBuf>,
}

/// Where the filter's configuration stands in `envoy.yaml`, as a JSON pointer.
pub const FILTER: &str =
    "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/http_filters/0/typed_config/config";

const SETTINGS: &str = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/http_filters/0/typed_config/config/configuration/value";
const MANAGER: &str = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config";
const BACKEND: &str = "/static_resources/clusters/0";
const BACKEND_HTTP1: &str = "/static_resources/clusters/0/typed_extension_protocol_options/envoy.extensions.upstreams.http.v3.HttpProtocolOptions/explicit_http_config/http_protocol_options";
const ENDPOINTS: &str = "load_assignment/endpoints/0/lb_endpoints";
const ENDPOINT: &str = "load_assignment/endpoints/0/lb_endpoints/0/endpoint/address";

impl ConfigOptions {
    /// The shipped configuration as it is, for a backend at this address.
    pub fn new(backend_host: &str, backend_port: u16) -> Self {
        let any = |port| SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
        Self {
            template: PathBuf::from("envoy/envoy.yaml"),
            module: PathBuf::from("target/collapser.wasm"),
            listen: any(50052),
            metrics: any(2112),
            admin: SocketAddr::from((Ipv4Addr::LOCALHOST, 9901)),
            backend_host: backend_host.to_owned(),
            backend_port,
            replicas: Vec::new(),
            backend_tls: None,
            tls: None,
            settings: json!({}),
            hold_timeout: None,
            edit: |_| (),
        }
    }

    /// The configuration as JSON, which Envoy takes as well as YAML.
    ///
    /// # Errors
    /// If the file or the module cannot be read, or the file lacks a place that is to be changed.
    pub fn render(&self) -> anyhow::Result<String> {
        let path = self.template.display();
        let text = fs::read_to_string(&self.template).with_context(|| format!("cannot read {path}"))?;
        let mut config: Value =
            serde_saphyr::from_str(&text).with_context(|| format!("{path} is no YAML"))?;
        for (pointer, value) in self.changes(&config)? {
            set(&mut config, &pointer, value).with_context(|| format!("{path} has no {pointer}"))?;
        }
        self.set_endpoints(&mut config).with_context(|| format!("{path} has no endpoints"))?;
        let settings = self.settings(&config).with_context(|| format!("{path} has no settings as JSON"))?;
        set(&mut config, SETTINGS, json!(settings)).with_context(|| format!("{path} has no {SETTINGS}"))?;
        (self.edit)(&mut config);
        Ok(config.to_string())
    }

    /// Leaves no endpoint of the file's but the first, which is the backend by now, or one for each replica.
    fn set_endpoints(&self, config: &mut Value) -> Option<()> {
        let endpoints = config.pointer_mut(&format!("{BACKEND}/{ENDPOINTS}"))?.as_array_mut()?;
        endpoints.truncate(1);
        if !self.replicas.is_empty() {
            *endpoints = self.replicas.iter().map(ReplicaAddr::endpoint).collect();
        }
        Some(())
    }

    /// The filter's settings as the file has them, with the changes.
    fn settings(&self, config: &Value) -> Option<String> {
        let mut settings: Value = serde_json::from_str(config.pointer(SETTINGS)?.as_str()?).ok()?;
        let changes = self.settings.as_object().cloned().unwrap_or_default();
        settings.as_object_mut()?.extend(changes);
        Some(settings.to_string())
    }

    fn changes(&self, config: &Value) -> anyhow::Result<Vec<(String, Value)>> {
        let module = fs::canonicalize(&self.module)
            .with_context(|| format!("cannot find the Wasm module {}", self.module.display()))?;
        let mut changes = vec![
            ("/admin/address".to_owned(), address(self.admin)),
            ("/static_resources/listeners/0/address".to_owned(), address(self.listen)),
            ("/static_resources/listeners/1/address".to_owned(), address(self.metrics)),
            (format!("{BACKEND}/{ENDPOINT}"), host_and_port(&self.backend_host, self.backend_port)),
            (format!("/static_resources/clusters/1/{ENDPOINT}"), address(self.admin)),
            (format!("{FILTER}/vm_config/code/local/filename"), json!(module)),
        ];
        if let Some(limit) = self.hold_timeout {
            changes.push((
                format!("{MANAGER}/stream_idle_timeout"),
                json!(format!("{:.3}s", limit.as_secs_f64())),
            ));
        }
        if let Some(tls) = &self.backend_tls {
            let speaks_http1 = config.pointer(BACKEND_HTTP1).is_some();
            let protocol = if speaks_http1 { "http/1.1" } else { "h2" };
            changes.push((format!("{BACKEND}/transport_socket"), tls.socket(&self.backend_host, protocol)?));
            changes.extend(TLS_RUNTIME.map(|key| (format!("{RUNTIME}/{key}"), json!(false))));
        }
        if let Some(tls) = &self.tls {
            let pointer = "/static_resources/listeners/0/filter_chains/0/transport_socket";
            changes.push((pointer.to_owned(), tls.socket()));
        }
        Ok(changes)
    }
}

impl ReplicaAddr {
    fn endpoint(&self) -> Value {
        let mut endpoint = json!({"address": address(self.grpc)});
        if let Some(port) = self.health_port {
            endpoint["health_check_config"] = json!({"port_value": port});
        }
        json!({"endpoint": endpoint})
    }
}

/// Checks the settings in this process's environment as the filter will, so that a wrong one is known before Envoy
/// starts, and one whose name is misspelt is not overlooked.
///
/// # Errors
/// Every fault, a line each.
pub fn check_settings(template: &Path) -> anyhow::Result<()> {
    let known: Vec<_> = Settings::environment().chain(LAUNCH_VARIABLES).collect();
    // Kubernetes puts variables of its own, such as COLLAPSER_SERVICE_HOST, where a Service is named so.
    let is_kubernetes = |name: &str| name.contains("_SERVICE_") || name.contains("_PORT");
    let unknown = |name: &String| {
        name.starts_with("COLLAPSER_") && !is_kubernetes(name) && !known.contains(&name.as_str())
    };
    let mut faults: Vec<_> = std::env::vars_os()
        .filter_map(|(name, _)| name.into_string().ok())
        .filter(unknown)
        .map(|name| format!("{name}: there is no such setting; allowed: {}", known.join(", ")))
        .collect();
    let path = template.display();
    let text = fs::read_to_string(template).with_context(|| format!("cannot read {path}"))?;
    let config: Value = serde_saphyr::from_str(&text).with_context(|| format!("{path} is no YAML"))?;
    let json = config.pointer(SETTINGS).and_then(Value::as_str).unwrap_or_default();
    if let Err(more) = Settings::load(json.as_bytes(), |name| std::env::var(name).ok()) {
        faults.extend(more);
    }
    anyhow::ensure!(faults.is_empty(), "wrong settings:\n  {}", faults.join("\n  "));
    Ok(())
}

/// Variables of the launcher that begin like settings.
const LAUNCH_VARIABLES: [&str; 3] = ["COLLAPSER_CONFIG", "COLLAPSER_MODULE", "COLLAPSER_PYTHON"];

impl Identity {
    fn value(&self) -> Value {
        json!({"certificate_chain": file(&self.certificate), "private_key": file(&self.key)})
    }
}

impl BackendTls {
    /// Source: Envoy docs, `UpstreamTlsContext`. Envoy checks no name unless told which, and then wants its authorities
    /// from a file.
    fn socket(&self, host: &str, protocol: &str) -> anyhow::Result<Value> {
        let name = self.sni.as_deref().unwrap_or(host);
        let kind = if name.parse::<IpAddr>().is_ok() { "IP_ADDRESS" } else { "DNS" };
        let mut validation = Map::new();
        let ca = match &self.ca {
            Some(ca) => ca,
            None => system_authorities().context("the system has no file of TLS authorities; name one")?,
        };
        validation.insert("trusted_ca".to_owned(), file(ca));
        validation.insert(
            "match_typed_subject_alt_names".to_owned(),
            json!([{"san_type": kind, "matcher": {"exact": name}}]),
        );
        let mut common = json!({"alpn_protocols": [protocol], "validation_context": validation});
        if let Some(identity) = &self.identity {
            common["tls_certificates"] = json!([identity.value()]);
        }
        let mut context = json!({"common_tls_context": common});
        if kind == "DNS" {
            context["sni"] = json!(name);
        }
        Ok(transport_socket("UpstreamTlsContext", context))
    }
}

const RUNTIME: &str = "/layered_runtime/layers/0/static_layer";

/// Turned off, these let callers see why TLS to the backend failed: a dispatched call has no access log to tell it. The
/// second keeps a wrong certificate from looking like a reset (envoyproxy/envoy issue 45011). Envoys
/// that do not know one of them (1.36.4 for one) complain and go on.
const TLS_RUNTIME: [&str; 2] = [
    "envoy.reloadable_features.hide_transport_failure_reason_in_response_body",
    "envoy.reloadable_features.ssl_socket_report_connection_reset",
];

/// Where Debian and Alpine, Fedora, and OpenSUSE keep the authorities that the system trusts.
const SYSTEM_AUTHORITIES: [&str; 3] =
    ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem"];

fn system_authorities() -> Option<&'static Path> {
    SYSTEM_AUTHORITIES.into_iter().map(Path::new).find(|path| path.is_file())
}

impl ListenerTls {
    /// Source: Envoy docs, `DownstreamTlsContext`.
    fn socket(&self) -> Value {
        let mut common =
            json!({"alpn_protocols": ["h2", "http/1.1"], "tls_certificates": [self.identity.value()]});
        if let Some(ca) = &self.client_ca {
            common["validation_context"] = json!({"trusted_ca": file(ca)});
        }
        let context =
            json!({"common_tls_context": common, "require_client_certificate": self.client_ca.is_some()});
        transport_socket("DownstreamTlsContext", context)
    }
}

fn transport_socket(kind: &str, mut context: Value) -> Value {
    context["@type"] = json!(format!("type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.{kind}"));
    json!({"name": "envoy.transport_sockets.tls", "typed_config": context})
}

fn file(path: &Path) -> Value {
    json!({"filename": path})
}

fn address(addr: SocketAddr) -> Value {
    host_and_port(&addr.ip().to_string(), addr.port())
}

/// The unspecified IPv6 address stands for both families.
fn host_and_port(host: &str, port: u16) -> Value {
    let mut address = json!({"address": host, "port_value": port});
    if host == "::" {
        address["ipv4_compat"] = json!(true);
    }
    json!({"socket_address": address})
}

/// Sets what `pointer` names. Its last part may be new; all before it must be there.
fn set(config: &mut Value, pointer: &str, value: Value) -> Option<()> {
    let (parent, name) = pointer.rsplit_once('/')?;
    config.pointer_mut(parent)?.as_object_mut()?.insert(name.to_owned(), value);
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shipped(change: impl FnOnce(&mut ConfigOptions)) -> Value {
        let mut options = ConfigOptions::new("backend.example", 1234);
        options.template = Path::new(env!("CARGO_MANIFEST_DIR")).join("../envoy/envoy.yaml");
        // Any file will do.
        options.module = options.template.clone();
        change(&mut options);
        serde_json::from_str(&options.render().unwrap()).unwrap()
    }

    fn backend_tls(tls: BackendTls) -> Value {
        let config = shipped(|options| options.backend_tls = Some(tls));
        config.pointer(&format!("{BACKEND}/transport_socket/typed_config")).unwrap().clone()
    }

    #[test]
    fn the_shipped_file_has_every_place_that_is_changed() {
        let config = shipped(|options| {
            options.settings = json!({"cache_duration": "1s"});
            options.hold_timeout = Some(Duration::from_millis(1_500));
        });
        let at = |pointer: &str| config.pointer(pointer).unwrap().clone();
        assert_eq!(at(&format!("{BACKEND}/{ENDPOINT}/socket_address/address")), "backend.example");
        assert_eq!(at(&format!("{MANAGER}/stream_idle_timeout")), "1.500s");
        let settings: Value =
            serde_json::from_str(at(&format!("{FILTER}/configuration/value")).as_str().unwrap()).unwrap();
        let expected = json!({"cluster": "backend", "max_replay_bytes": "32MiB", "cache_duration": "1s"});
        assert_eq!(settings, expected);
    }

    #[test]
    fn the_gateway_has_every_place_too_and_speaks_http1_to_the_backend() {
        let config = shipped(|options| {
            options.template = options.template.with_file_name("gateway.yaml");
            options.hold_timeout = Some(Duration::from_secs(1));
            options.backend_tls = Some(BackendTls { ca: Some("/ca.pem".into()), ..BackendTls::default() });
            options.settings = json!({"stale_if_error": "5s"});
        });
        let at = |pointer: &str| config.pointer(pointer).unwrap().clone();
        assert_eq!(at(&format!("{BACKEND}/{ENDPOINT}/socket_address/address")), "backend.example");
        let common = at(&format!("{BACKEND}/transport_socket/typed_config/common_tls_context"));
        assert_eq!(common["alpn_protocols"], json!(["http/1.1"]));
        let settings: Value = serde_json::from_str(at(SETTINGS).as_str().unwrap()).unwrap();
        assert_eq!((&settings["http"], &settings["stale_if_error"]), (&json!({}), &json!("5s")));
    }

    #[test]
    fn replicas_replace_the_endpoints_and_one_backend_leaves_one() {
        let endpoints = |options: ConfigOptions| {
            let config: Value = serde_json::from_str(&options.render().unwrap()).unwrap();
            config.pointer(&format!("{BACKEND}/{ENDPOINTS}")).unwrap().as_array().unwrap().clone()
        };
        let mut options = ConfigOptions::new("replicas.example", 50052);
        options.template = Path::new(env!("CARGO_MANIFEST_DIR")).join("../envoy/affinity.yaml");
        options.module = options.template.clone();
        let one = endpoints(options.clone());
        assert_eq!(one.len(), 1);
        assert_eq!(one[0]["endpoint"]["address"]["socket_address"]["address"], "replicas.example");
        assert_eq!(one[0]["endpoint"]["health_check_config"]["port_value"], 2112, "that of every sidecar");
        let grpc = "127.0.0.1:1".parse().unwrap();
        options.replicas = [Some(2), None].map(|health_port| ReplicaAddr { grpc, health_port }).to_vec();
        let two = endpoints(options);
        assert_eq!(two.len(), 2);
        assert_eq!(two[0]["endpoint"]["health_check_config"]["port_value"], 2);
        assert_eq!(two[1]["endpoint"]["health_check_config"], Value::Null);
    }

    #[test]
    fn a_backend_is_verified_by_the_name_it_is_called_by() {
        let tls = backend_tls(BackendTls { ca: Some("/authorities.pem".into()), ..BackendTls::default() });
        assert_eq!(tls["sni"], "backend.example");
        let validation = &tls["common_tls_context"]["validation_context"];
        assert_eq!(validation["match_typed_subject_alt_names"][0]["matcher"]["exact"], "backend.example");
        assert_eq!(validation["trusted_ca"]["filename"], "/authorities.pem");
    }

    #[test]
    fn a_name_and_an_authority_of_ones_own_replace_the_default() {
        let tls = backend_tls(BackendTls {
            ca: Some("/ca.pem".into()),
            sni: Some("10.0.0.1".into()),
            identity: Some(Identity { certificate: "/c.pem".into(), key: "/k.pem".into() }),
        });
        assert_eq!(tls["sni"], Value::Null, "an address is no server name");
        let common = &tls["common_tls_context"];
        assert_eq!(common["validation_context"]["trusted_ca"]["filename"], "/ca.pem");
        assert_eq!(
            common["validation_context"]["match_typed_subject_alt_names"][0]["san_type"],
            "IP_ADDRESS"
        );
        assert_eq!(common["tls_certificates"][0]["private_key"]["filename"], "/k.pem");
    }

    #[test]
    fn a_file_that_lacks_a_place_is_an_error_that_names_it() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "admin: {}").unwrap();
        let mut options = ConfigOptions::new("x", 1);
        options.template = file.path().to_owned();
        options.module = file.path().to_owned();
        let error = format!("{:#}", options.render().unwrap_err());
        assert!(error.contains("/static_resources/listeners/0/address"), "{error}");
    }
}
