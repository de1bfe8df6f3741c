//! TLS on both sides, with and without certificates of the caller, and what is said when one is not believed.

use std::net::SocketAddr;
use std::path::PathBuf;

use collapser_loadgen::proto::demo_client::DemoClient;
use collapser_loadgen::sidecar::{BackendTls, Identity, ListenerTls, Sidecar, SidecarOptions};
use http::StatusCode;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};
use serde_json::json;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Server, ServerTlsConfig};
use tonic::{Code, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use crate::rig::{Rig, ask, eventually, root};

/// The name in the backend's certificate, which no resolver knows.
const NAME: &str = "backend.test";

/// Callers of each flight.
const CALLERS: usize = 20;

/// An authority.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    folder: TempDir,
}

/// A certificate and its key, as text.
struct Issued {
    certificate: String,
    key: String,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        // Not the name of those it vouches for, or those would look as if they vouched for themselves.
        params.distinguished_name.push(DnType::CommonName, "an authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        Self { issuer, folder: TempDir::new().unwrap() }
    }

    fn issue(&self, name: &str) -> Issued {
        let mut params = CertificateParams::new([name.to_string()]).unwrap();
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap().pem();
        Issued { certificate, key: key.serialize_pem() }
    }

    fn pem(&self) -> String {
        self.issuer.pem()
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    /// Its own certificate in a file.
    fn file(&self) -> PathBuf {
        self.write("ca.pem", &self.pem())
    }

    /// A certificate for this name, in files.
    fn identity(&self, name: &str) -> Identity {
        let issued = self.issue(name);
        Identity {
            certificate: self.write(&format!("{name}.pem"), &issued.certificate),
            key: self.write(&format!("{name}.key"), &issued.key),
        }
    }
}

impl Issued {
    fn identity(&self) -> tonic::transport::Identity {
        tonic::transport::Identity::from_pem(&self.certificate, &self.key)
    }
}

/// gRPC's health service over TLS: a unary method like any other. It asks callers for a certificate of `clients`.
async fn backend(identity: &Issued, clients: Option<&Authority>) -> SocketAddr {
    let mut tls = ServerTlsConfig::new().identity(identity.identity());
    if let Some(clients) = clients {
        tls = tls.client_ca_root(Certificate::from_pem(clients.pem()));
    }
    let (_, health) = tonic_health::server::health_reporter();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let server = Server::builder().tls_config(tls).unwrap().add_service(health);
    // Ends with the runtime of the test.
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    addr
}

/// A sidecar that speaks TLS to the backend.
async fn sidecar(backend: SocketAddr, tls: BackendTls) -> Sidecar {
    let mut options = SidecarOptions::shipped(root(), backend);
    options.config.settings = json!({"cache_duration": "0"});
    options.config.backend_tls = Some(tls);
    options.wait_for_backend = false;
    Sidecar::start(options).await.unwrap()
}

/// What callers of one key are told.
async fn told(sidecar: &Sidecar) -> Vec<Result<(), Status>> {
    let channel = Endpoint::from_shared(sidecar.uri()).unwrap().connect().await.unwrap();
    let call = |_| {
        let mut client = HealthClient::new(channel.clone());
        async move { client.check(HealthCheckRequest::default()).await.map(drop) }
    };
    (0..CALLERS).map(call).collect::<JoinSet<_>>().join_all().await
}

async fn assert_answered(sidecar: &Sidecar) {
    eventually("ready", async || sidecar.status("/ready").await.unwrap().is_success()).await;
    for answer in told(sidecar).await {
        answer.unwrap();
    }
    let metrics = sidecar.metrics().await.unwrap();
    assert!(metrics.get("envoy_cluster_ssl_handshake{envoy_cluster_name=\"backend\"}") > 0.0, "{metrics:#?}");
}

/// Every caller is told that the backend cannot be reached, and the metric says why. Newer Envoys (1.38) keep the reason
/// itself to its log.
async fn assert_refused(sidecar: &Sidecar, reason: &str) {
    for answer in told(sidecar).await {
        let status = answer.unwrap_err();
        assert_eq!(status.code(), Code::Unavailable, "{status:?}");
        assert!(status.message().contains("connect"), "{status:?}");
        let is_certificate = reason.starts_with("fail_verify");
        assert!(!is_certificate || status.message().contains("CERTIFICATE_VERIFY_FAILED"), "{status:?}");
    }
    let name = format!("envoy_cluster_ssl_{reason}{{envoy_cluster_name=\"backend\"}}");
    eventually(&name, async || sidecar.metrics().await.unwrap().get(&name) > 0.0).await;
    assert_eq!(sidecar.status("/health").await.unwrap(), StatusCode::OK);
}

fn trusting(authority: &Authority, name: &str) -> BackendTls {
    BackendTls { ca: Some(authority.file()), identity: None, sni: Some(name.to_string()) }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backend_is_called_over_tls() {
    let authority = Authority::new();
    let backend = backend(&authority.issue(NAME), None).await;
    assert_answered(&sidecar(backend, trusting(&authority, NAME)).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backend_may_be_known_by_its_address() {
    let authority = Authority::new();
    let backend = backend(&authority.issue("127.0.0.1"), None).await;
    let tls = BackendTls { sni: None, ..trusting(&authority, "") };
    assert_answered(&sidecar(backend, tls).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backend_that_asks_is_shown_a_certificate() {
    let authority = Authority::new();
    let backend = backend(&authority.issue(NAME), Some(&authority)).await;
    let identity = Some(authority.identity("sidecar"));
    assert_answered(&sidecar(backend, BackendTls { identity, ..trusting(&authority, NAME) }).await).await;
    // Without one the backend ends the handshake.
    let without = sidecar(backend, trusting(&authority, NAME)).await;
    assert_refused(&without, "connection_error").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backend_of_another_authority_is_not_believed() {
    let (authority, other) = (Authority::new(), Authority::new());
    let backend = backend(&other.issue(NAME), None).await;
    let sidecar = sidecar(backend, trusting(&authority, NAME)).await;
    assert_refused(&sidecar, "fail_verify_error").await;
    eventually("not ready", async || !sidecar.status("/ready").await.unwrap().is_success()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backend_of_another_name_is_not_believed() {
    let authority = Authority::new();
    let backend = backend(&authority.issue("somebody.test"), None).await;
    let sidecar = sidecar(backend, trusting(&authority, NAME)).await;
    assert_refused(&sidecar, "fail_verify_san").await;
    eventually("not ready", async || !sidecar.status("/ready").await.unwrap().is_success()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_systems_authorities_do_not_vouch_for_a_private_one() {
    let backend = backend(&Authority::new().issue(NAME), None).await;
    let tls = BackendTls { sni: Some(NAME.to_string()), ..BackendTls::default() };
    assert_refused(&sidecar(backend, tls).await, "fail_verify_error").await;
}

/// A rig whose callers speak TLS, and must show a certificate of `clients` if there is one.
async fn listening(authority: &Authority, clients: Option<&Authority>) -> Rig {
    let tls =
        ListenerTls { identity: authority.identity("sidecar.test"), client_ca: clients.map(Authority::file) };
    Rig::start_with(json!({}), 200, |options| options.config.tls = Some(tls)).await
}

/// A caller that trusts the authority and shows this certificate.
async fn caller(
    rig: &Rig,
    authority: &Authority,
    identity: Option<&Issued>,
) -> Result<DemoClient<Channel>, tonic::transport::Error> {
    let trusted = Certificate::from_pem(authority.pem());
    let mut tls = ClientTlsConfig::new().ca_certificate(trusted).domain_name("sidecar.test");
    if let Some(identity) = identity {
        tls = tls.identity(identity.identity());
    }
    let uri = rig.sidecar.uri().replace("http:", "https:");
    Endpoint::from_shared(uri).unwrap().tls_config(tls).unwrap().connect().await.map(DemoClient::new)
}

/// Twenty calls of one key share an answer.
async fn assert_collapses(rig: &Rig, client: &DemoClient<Channel>) {
    let call = |_| {
        let mut client = client.clone();
        async move { client.compute(ask("k")).await.unwrap().into_inner() }
    };
    let replies = (0..CALLERS).map(call).collect::<JoinSet<_>>().join_all().await;
    assert!(replies.iter().all(|reply| *reply == replies[0]));
    assert_eq!(rig.backend.calls(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn callers_may_speak_tls() {
    let authority = Authority::new();
    let rig = listening(&authority, None).await;
    assert_collapses(&rig, &caller(&rig, &authority, None).await.unwrap()).await;
    // Plain text on the same port is no way in.
    let plain = Endpoint::from_shared(rig.sidecar.uri()).unwrap().connect().await;
    if let Ok(channel) = plain {
        DemoClient::new(channel).compute(ask("k")).await.unwrap_err();
    }
    assert_eq!(rig.backend.calls(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn callers_may_have_to_show_a_certificate() {
    let (authority, clients) = (Authority::new(), Authority::new());
    let rig = listening(&authority, Some(&clients)).await;
    for wrong in [None, Some(authority.issue("caller"))] {
        // In TLS 1.3 a caller learns that its certificate was refused when it first reads.
        if let Ok(mut client) = caller(&rig, &authority, wrong.as_ref()).await {
            client.compute(ask("k")).await.unwrap_err();
        }
    }
    assert_eq!(rig.backend.calls(), 0);
    let known = clients.issue("caller");
    assert_collapses(&rig, &caller(&rig, &authority, Some(&known)).await.unwrap()).await;
}
