//! The demo HTTP backend and the HTTP load over real connections: they must do to the letter what
//! they are told, for tests of the filter lean on them.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use collapser_loadgen::http_backend::{HttpBackend, HttpBackendHandle, HttpBackendOptions, Page, PageCounts};
use collapser_loadgen::http_load::{self, Answer, HttpClient, HttpClients, HttpLoadOptions, Protocol};
use collapser_loadgen::load::LoadMode;
use http::{HeaderMap, Method, Version};

const BOTH: [Protocol; 2] = [Protocol::Http1, Protocol::Http2];

fn start(latency_ms: u64) -> HttpBackendHandle {
    let latency = Duration::from_millis(latency_ms);
    HttpBackend::start(HttpBackendOptions { latency, ..HttpBackendOptions::default() }).unwrap()
}

fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
    pairs.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
}

async fn ask(
    backend: &HttpBackendHandle,
    protocol: Protocol,
    method: Method,
    path: &str,
    pairs: &[(&'static str, &str)],
) -> anyhow::Result<Answer> {
    http_load::ask(&backend.uri(), protocol, method, path, &headers(pairs)).await
}

async fn get(backend: &HttpBackendHandle, protocol: Protocol, path: &str) -> Answer {
    ask(backend, protocol, Method::GET, path, &[]).await.unwrap()
}

#[tokio::test]
async fn a_page_tells_its_url_and_its_query() {
    let backend = start(0);
    for (protocol, serial) in BOTH.into_iter().zip(1..) {
        let answer = get(&backend, protocol, "/page/a?x=1").await;
        assert_eq!(answer.status, 200);
        assert_eq!(answer.header("x-serial"), Some(serial.to_string().as_str()));
        let page = Page::read(&answer.body).unwrap();
        assert_eq!((page.url.as_str(), page.serial), ("/page/a?x=1", serial));
    }
    assert_eq!((backend.calls(), backend.in_flight()), (2, 0));
    assert_eq!(backend.calls_by_page()["/page/a?x=1"], 2);
    let versions: Vec<_> = backend.recent_requests().iter().map(|seen| seen.version).collect();
    assert_eq!(versions, [Version::HTTP_11, Version::HTTP_2]);
}

#[tokio::test]
async fn a_page_is_answered_as_asked() {
    let backend = start(0);
    let path = "/page/a?status=503&header=cache-control:max-age=5&header=vary:x-a&header=content-type:text/html\
                &size=1000&chunks=3&chunk_delay_ms=5&trailer=x-t:1&echo=x-a";
    let sent = [("te", "trailers"), ("x-a", "one")];
    for protocol in BOTH {
        let answer = ask(&backend, protocol, Method::GET, path, &sent).await.unwrap();
        assert_eq!((answer.status.as_u16(), answer.body.len()), (503, 1000));
        assert_eq!(answer.header("cache-control"), Some("max-age=5"));
        assert_eq!((answer.header("vary"), answer.header("content-type")), (Some("x-a"), Some("text/html")));
        assert_eq!(answer.header("content-length"), None);
        assert_eq!(answer.trailers.as_ref().unwrap()["x-t"], "1", "{protocol:?}");
        assert_eq!(Page::read(&answer.body).unwrap().echo, [("x-a".to_owned(), "one".to_owned())]);
        assert!(answer.took >= Duration::from_millis(10));
    }
}

#[tokio::test]
async fn heads_and_statuses_without_a_body_have_none() {
    let backend = start(0);
    for protocol in BOTH {
        let head = ask(&backend, protocol, Method::HEAD, "/page/a?size=500", &[]).await.unwrap();
        assert_eq!((head.body.len(), head.header("content-length")), (0, Some("500")));
        for status in [204, 304] {
            let answer = get(&backend, protocol, &format!("/page/a?status={status}&header=etag:x")).await;
            assert_eq!((answer.status.as_u16(), answer.body.len()), (status, 0));
            assert_eq!((answer.header("content-length"), answer.header("etag")), (None, Some("x")));
        }
        assert_eq!(get(&backend, protocol, "/page/a?size=0").await.header("content-length"), Some("0"));
    }
}

#[tokio::test]
async fn other_methods_are_answered_and_remembered_with_their_bodies() {
    let backend = start(0);
    for protocol in BOTH {
        let client = HttpClient::connect(&backend.uri(), protocol).await.unwrap();
        let body = Bytes::from_static(b"a=1");
        let answer = client.send(Method::POST, "/page/a", &headers(&[("x-a", "1")]), body).await.unwrap();
        assert_eq!(answer.status, 200);
        let seen = backend.recent_requests().pop().unwrap();
        assert_eq!((seen.method, seen.body.as_ref()), (Method::POST, &b"a=1"[..]));
        assert_eq!(seen.headers["x-a"], "1");
    }
}

#[tokio::test]
async fn a_cut_body_is_no_answer() {
    let backend = start(0);
    for protocol in BOTH {
        let path = "/page/a?size=1000&cut";
        let answer = ask(&backend, protocol, Method::GET, path, &[]).await;
        assert!(answer.unwrap_err().to_string().contains("broke off"));
    }
}

#[tokio::test]
async fn latency_is_the_pages_or_the_backends() {
    let backend = start(60);
    assert!(get(&backend, Protocol::Http1, "/page/a").await.took >= Duration::from_millis(60));
    assert!(get(&backend, Protocol::Http1, "/page/a?latency_ms=1").await.took < Duration::from_millis(60));
    backend.set_latency(Duration::ZERO);
    assert!(get(&backend, Protocol::Http1, "/page/a").await.took < Duration::from_millis(60));
}

#[tokio::test]
async fn a_page_can_be_made_to_answer_otherwise() {
    let backend = start(0);
    let path = "/page/a?header=cache-control:max-age=5";
    backend.set_answer(Some("status=500")).unwrap();
    let answer = get(&backend, Protocol::Http1, path).await;
    assert_eq!((answer.status.as_u16(), answer.header("cache-control")), (500, None));
    assert_eq!(Page::read(&answer.body).unwrap().url, path);
    backend.set_answer(None).unwrap();
    assert_eq!(get(&backend, Protocol::Http1, path).await.status, 200);
    assert!(backend.set_answer(Some("status=1")).is_err());
    let refused = get(&backend, Protocol::Http1, "/page/a?status=1").await;
    assert_eq!((refused.status.as_u16(), refused.text().as_str()), (400, "`status=1` makes no sense\n"));
}

#[tokio::test]
async fn counters_are_told_and_reset_over_http() {
    let backend = start(0);
    get(&backend, Protocol::Http1, "/page/a").await;
    get(&backend, Protocol::Http1, "/page/b").await;
    let counts: PageCounts =
        serde_json::from_slice(&get(&backend, Protocol::Http1, "/calls").await.body).unwrap();
    assert_eq!((counts.calls, counts.pages, counts.per_page["/page/b"]), (2, 2, 1));
    let post = async |path| ask(&backend, Protocol::Http1, Method::POST, path, &[]).await;
    assert_eq!(post("/reset").await.unwrap().status, 200);
    assert_eq!((backend.calls(), backend.recent_requests().len()), (0, 0));
    assert_eq!(post("/latency?ms=50").await.unwrap().status, 200);
    assert!(get(&backend, Protocol::Http1, "/page/a").await.took >= Duration::from_millis(50));
    assert_eq!(post("/latency?ms=x").await.unwrap().status, 400);
    assert_eq!(get(&backend, Protocol::Http1, "/reset").await.status, 405);
    assert_eq!(get(&backend, Protocol::Http1, "/").await.status, 404);
}

#[tokio::test]
async fn stopped_and_started_again_on_the_same_port() {
    let mut backend = start(10_000);
    let client = HttpClient::connect(&backend.uri(), Protocol::Http1).await.unwrap();
    let waiting = async { client.get("/page/a", &HeaderMap::new()).await };
    let stopping = async {
        while backend.in_flight() == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        backend.stop().await;
    };
    let (answer, ()) = tokio::join!(waiting, stopping);
    assert!(answer.is_err());
    assert!(HttpClient::connect(&backend.uri(), Protocol::Http1).await.is_err());
    assert_eq!(backend.calls(), 1);

    backend.start_again().unwrap();
    backend.set_latency(Duration::ZERO);
    // The same client, which opens a connection anew.
    let page = Page::read(&client.get("/page/a", &HeaderMap::new()).await.unwrap().body).unwrap();
    assert_eq!(page.serial, 2);
}

#[tokio::test]
async fn a_burst_of_clients_with_a_connection_each() {
    let backend = start(50);
    let before = Instant::now();
    let options = HttpLoadOptions::burst("/page/a?size=2000", 1_000);
    let done = http_load::run(&backend.uri(), Protocol::Http1, 1_000, options).await.unwrap();
    assert!(done.report.is_clean(), "{}", done.report);
    assert_eq!((done.report.calls, done.report.connections, done.statuses[&200]), (1_000, 1_000, 1_000));
    assert_eq!(backend.calls(), 1_000);
    assert!(before.elapsed() < Duration::from_secs(25), "they did not wait for each other");
    assert!(done.report.latency_ms.min >= 50.0);
}

#[tokio::test]
async fn a_burst_over_streams_and_one_that_queues() {
    let backend = start(1);
    for protocol in BOTH {
        let clients = HttpClients::connect(&backend.uri(), protocol, 3).await.unwrap();
        let done = clients.load(HttpLoadOptions::burst("/page/a", 100), |_| ()).await.unwrap();
        assert!(done.report.is_clean(), "{}", done.report);
        assert_eq!(done.report.with_backend_calls(100).ratio, Some(1.0));
    }
    assert_eq!(backend.calls(), 200);
}

#[tokio::test]
async fn failures_and_wrong_answers_are_told_apart() {
    let mut backend = start(0);
    let clients = HttpClients::connect(&backend.uri(), Protocol::Http1, 10).await.unwrap();
    let load = async |options| clients.load(options, |_| ()).await.unwrap();

    let failed = load(HttpLoadOptions::burst("/page/a?status=503", 10)).await;
    assert_eq!(
        (failed.report.failed, failed.report.errors["503"].count, failed.statuses[&503]),
        (10, 10, 10)
    );

    let judge = HttpLoadOptions::burst("/page/b", 1).judge;
    let wrong = load(HttpLoadOptions { judge, ..HttpLoadOptions::burst("/page/a", 10) }).await;
    assert_eq!((wrong.report.wrong, wrong.report.failed, wrong.statuses[&200]), (10, 0, 10));
    assert_eq!(wrong.report.wrong_sample.as_deref(), Some("asked for `/page/b`, got `/page/a`"));

    let timeout = Some(Duration::from_millis(20));
    let late =
        load(HttpLoadOptions { timeout, ..HttpLoadOptions::burst("/page/a?latency_ms=500", 10) }).await;
    assert_eq!(late.report.errors["no answer"].count, 10);
    assert!(
        load(HttpLoadOptions::burst("/page/a", 10)).await.report.is_clean(),
        "connections are opened anew"
    );

    backend.stop().await;
    let gone = load(HttpLoadOptions::burst("/page/a", 10)).await;
    assert_eq!((gone.report.failed, gone.statuses.len()), (10, 0));
}

#[tokio::test]
async fn workers_keep_asking_and_a_judge_sees_every_answer() {
    let backend = start(1);
    let seen = Arc::new(Mutex::new(0));
    let counter = Arc::clone(&seen);
    let options = HttpLoadOptions {
        mode: LoadMode::Workers { workers: 4, duration: Duration::from_millis(200) },
        judge: Arc::new(move |_| {
            *counter.lock().unwrap() += 1;
            Ok(())
        }),
        ..HttpLoadOptions::burst("/page/a", 1)
    };
    let done = http_load::run(&backend.uri(), Protocol::Http2, 1, options).await.unwrap();
    assert!(done.report.is_clean() && done.report.calls > 20, "{}", done.report);
    assert_eq!(*seen.lock().unwrap(), done.report.calls);
    assert_eq!(backend.calls(), done.report.calls);
}
