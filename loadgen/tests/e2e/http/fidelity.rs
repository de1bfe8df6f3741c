//! What callers are given is what the backend sent.

use collapser_loadgen::http_backend::Page;
use collapser_loadgen::http_load::{self, Protocol};
use collapser_loadgen::sidecar::{Sidecar, SidecarOptions};
use http::Method;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::gateway::{Gateway, NOTHING, headers, plain, status};
use crate::rig::root;

const BOTH: [Protocol; 2] = [Protocol::Http1, Protocol::Http2];

/// Asks over both versions of HTTP, twice each, so that one leads and the others are hits.
async fn everywhere(gateway: &Gateway, path: &str) -> Vec<http_load::Answer> {
    let mut answers = Vec::new();
    for protocol in [BOTH, BOTH].concat() {
        let asked = headers(&[("te", "trailers")]);
        let uri = gateway.sidecar.uri();
        answers.push(http_load::ask(&uri, protocol, Method::GET, path, &asked).await.unwrap());
    }
    answers
}

#[tokio::test]
async fn status_headers_body_and_trailers_stay() {
    for http2_upstream in [false, true] {
        let gateway = Gateway::start_with(plain(), 0, |options| {
            if http2_upstream {
                options.config.edit = speak_http2_to_the_backend;
            }
        })
        .await;
        let cases = [
            "size=0",
            "size=1",
            "size=100000",
            "size=3000000",
            "status=404",
            "status=410&size=0",
            "status=301&header=location:/x&size=0",
            "header=x-a:1&header=x-a:2&header=content-type:text/html%3B%20charset%3Dutf-8",
            "chunks=5&size=50000",
            "chunks=3&trailer=x-t:1&trailer=x-t:2",
            "size=0&trailer=x-t:1",
            "status=204&size=0",
        ];
        for ask in cases {
            let path = format!(
                "/page/kept?header=cache-control:max-age=60&header=date:Tue,%2015%20Nov%202050%2012:45:26%20GMT&{ask}"
            );
            let direct = headers(&[("te", "trailers")]);
            let uri = gateway.backend.uri();
            let expected = http_load::ask(&uri, Protocol::Http2, Method::GET, &path, &direct).await.unwrap();
            let before = gateway.backend.calls();
            for answer in everywhere(&gateway, &path).await {
                assert_eq!(answer.status, expected.status, "{ask}");
                let (body, as_said) = (&answer.body, Page::read(&answer.body));
                assert!(
                    body.len() == expected.body.len() || as_said.is_some_and(|page| page.url == path),
                    "{ask}"
                );
                assert_eq!(answer.trailers, expected.trailers, "{ask}");
                for name in ["x-a", "content-type", "location", "date", "cache-control"] {
                    let all = |of: &http::HeaderMap| of.get_all(name).iter().cloned().collect::<Vec<_>>();
                    assert_eq!(all(&answer.headers), all(&expected.headers), "{ask}: {name}");
                }
                assert!(!answer.headers.keys().any(|name| name.as_str().starts_with("x-collapser")), "{ask}");
            }
            assert_eq!(gateway.backend.calls() - before, 1, "{ask}");
        }
    }
}

/// Has the cluster speak HTTP/2.
fn speak_http2_to_the_backend(config: &mut serde_json::Value) {
    let options = config
        .pointer_mut("/static_resources/clusters/0/typed_extension_protocol_options")
        .and_then(|all| all.get_mut("envoy.extensions.upstreams.http.v3.HttpProtocolOptions"))
        .unwrap();
    options["explicit_http_config"] = json!({"http2_protocol_options": {}});
}

#[tokio::test]
async fn a_response_too_large_to_be_shared_reaches_everybody_all_the_same() {
    let gateway = Gateway::start(json!({"max_replay_bytes": "64KiB"}), 100).await;
    let path = "/page/large?size=200000&header=cache-control:max-age=60";
    let answers = gateway.together(path, &[NOTHING; 3]).await;
    assert!(answers.iter().all(|answer| answer.status == 200 && answer.body.len() == 200_000));
    let calls = gateway.backend.calls();
    assert_eq!(gateway.get(path, &[]).await.body.len(), 200_000);
    assert_eq!(gateway.backend.calls(), calls + 1, "and the next one does not wait for it");
}

#[tokio::test]
async fn beyond_what_envoy_takes_whole_everybody_has_a_call_of_its_own() {
    let gateway = Gateway::start(plain(), 50).await;
    let path = "/page/huge?size=40000000";
    let answers = gateway.together(path, &[NOTHING; 2]).await;
    assert!(answers.iter().all(|answer| answer.status == 200 && answer.body.len() == 40_000_000));
}

#[tokio::test]
async fn the_backend_is_asked_what_the_leader_asked() {
    let gateway = Gateway::start(plain(), 0).await;
    gateway.get("/page/asked?q=%20", &[("x-any", "1"), ("user-agent", "me"), ("accept", "a/b")]).await;
    let seen = &gateway.backend.recent_requests()[0];
    for (name, value) in [("x-any", "1"), ("user-agent", "me"), ("accept", "a/b")] {
        assert_eq!(seen.headers.get(name).unwrap(), value);
    }
    assert!(seen.uri.to_string().ends_with("/page/asked?q=%20"));
    assert!(!seen.headers.keys().any(|name| name.as_str().starts_with("x-collapser")));
}

/// A backend that sends word ahead of its answer (RFC 8297, and RFC 9110, section 15.2).
#[tokio::test]
async fn interim_responses_are_not_the_answer() {
    let backend = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = backend.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = backend.accept().await {
            tokio::spawn(async move {
                let mut request = [0; 4096];
                while stream.read(&mut request).await.is_ok_and(|size| size > 0) {
                    let answer = "HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n\
                                  HTTP/1.1 200 OK\r\ncache-control: max-age=60\r\ncontent-length: 2\r\n\r\nok";
                    stream.write_all(answer.as_bytes()).await.unwrap();
                }
            });
        }
    });
    let sidecar = Sidecar::start(SidecarOptions::gateway(root(), addr)).await.unwrap();
    for (protocol, told) in BOTH.into_iter().zip(["fwd=miss; stored", "hit; ttl="]) {
        let uri = sidecar.uri();
        let answer = http_load::ask(&uri, protocol, Method::GET, "/", &headers(&[])).await.unwrap();
        assert_eq!(
            (answer.status.as_u16(), &answer.body[..], answer.header("link")),
            (200, &b"ok"[..], None)
        );
        assert!(status(&answer).contains(told), "{}", status(&answer));
    }
}
