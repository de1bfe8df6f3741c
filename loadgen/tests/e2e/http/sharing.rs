//! Who is given a response: its leader, those who wait, and those who come later (RFC 9111, section 3).

use collapser_loadgen::http_load::{self, Protocol};
use http::Method;

use super::gateway::{Gateway, NOTHING, headers, plain, queries, serial, status};

/// Who may be given a response.
#[derive(Clone, Copy, Debug, PartialEq)]
enum For {
    /// Those who wait and those who come later.
    All,
    /// Those who wait.
    Waiters,
    /// The one whose call it was.
    Leader,
}
use For::{All, Leader, Waiters};

/// Asks four at a time and then one more, and counts the backend's calls.
async fn shared(gateway: &Gateway, path: &str, request: &[(&'static str, &str)]) -> (u64, u64) {
    let before = gateway.backend.calls();
    let answers = gateway.together(path, &[request; 4]).await;
    let during = gateway.backend.calls() - before;
    assert_eq!(queries(&answers) as u64, during, "{path}: each call has its answer");
    assert!(answers.iter().all(|answer| answer.status == answers[0].status), "{path}");
    gateway.get(path, request).await;
    (during, gateway.backend.calls() - before - during)
}

async fn check(gateway: &Gateway, asks: &str, request: &[(&'static str, &str)], whom: For) {
    let path = format!("/page/shared?{asks}");
    let expected = match whom {
        All => (1, 0),
        Waiters => (1, 1),
        Leader => (4, 1),
    };
    let got = shared(gateway, &path, request).await;
    assert_eq!(got, expected, "calls for four at a time and one later, {whom:?}: {asks} {request:?}");
}

#[tokio::test]
async fn what_responses_say_of_sharing_is_heeded() {
    let gateway = Gateway::start(plain(), 150).await;
    let cases = [
        ("header=cache-control:max-age=60", All),
        ("header=cache-control:s-maxage=60,max-age=0", All),
        ("header=cache-control:public,max-age=60,must-revalidate", All),
        ("header=cache-control:max-age=60&status=404", All),
        ("x=1", Waiters),
        ("status=503", Waiters),
        ("status=404", Waiters),
        ("status=429", Leader),
        ("status=401", Leader),
        ("header=cache-control:no-store", Leader),
        ("header=cache-control:max-age=60,no-store", Leader),
        ("header=cache-control:no-cache", Leader),
        ("header=cache-control:private,max-age=60", Leader),
        ("header=cache-control:max-age=0", Leader),
        ("header=cache-control:s-maxage=0,max-age=60", Leader),
        ("header=set-cookie:a=b", Leader),
        ("header=set-cookie:a=b&header=cache-control:public,max-age=60", Leader),
        ("header=vary:*&header=cache-control:max-age=60", Leader),
        ("header=cache-control:max-age=60&header=age:61", Leader),
        ("header=expires:0&", Leader),
    ];
    for (asks, whom) in cases {
        check(&gateway, asks, &[], whom).await;
    }
}

#[tokio::test]
async fn credentials_need_a_responses_leave() {
    let gateway = Gateway::start(plain(), 150).await;
    let request: &[(&str, &str)] = &[("authorization", "Bearer a")];
    let cases = [
        ("header=cache-control:max-age=60", Leader),
        ("y=1", Leader),
        ("header=cache-control:public,max-age=60", All),
        ("header=cache-control:s-maxage=60", All),
        ("header=cache-control:max-age=60,must-revalidate", All),
    ];
    for (asks, whom) in cases {
        check(&gateway, asks, request, whom).await;
    }
}

#[tokio::test]
async fn tenants_share_nothing() {
    let gateway = Gateway::start(plain(), 150).await;
    let path = "/page/tenants?header=cache-control:public,max-age=60";
    for name in ["authorization", "cookie"] {
        let before = gateway.backend.calls();
        let (a, b): (&[_], &[_]) = (&[(name, "a")], &[(name, "b")]);
        let answers = gateway.together(path, &[a, b, a, b, &[]]).await;
        assert_eq!(serial(&answers[0]), serial(&answers[2]));
        assert_eq!(serial(&answers[1]), serial(&answers[3]));
        let _ = serial(&answers[4]);
        // The third time round, without a header, is the same for both names.
        let expected = if name == "authorization" { 3 } else { 2 };
        assert_eq!(gateway.backend.calls() - before, expected);
    }
}

#[tokio::test]
async fn whoever_negotiates_for_something_else_gets_it() {
    let gateway = Gateway::start(plain(), 100).await;
    let path = "/page/negotiated?header=cache-control:max-age=60&echo=accept&echo=accept-language&echo=accept-encoding";
    let requests: [&[_]; 5] = [
        &[("accept", "text/html")],
        &[("accept", "application/json")],
        &[("accept-language", "de")],
        &[("accept-encoding", "gzip")],
        &[("accept", "text/html"), ("accept-language", "de")],
    ];
    let answers = gateway.together(path, &requests).await;
    assert_eq!(queries(&answers), requests.len());
    for (request, answer) in requests.iter().zip(&answers) {
        for (name, value) in *request {
            assert!(answer.text().contains(&format!("{name}: {value}")), "{request:?}");
        }
    }
}

#[tokio::test]
async fn hosts_and_queries_are_different_pages() {
    let gateway = Gateway::start(plain(), 0).await;
    let ask = "header=cache-control:max-age=60";
    for (path, calls) in
        [(format!("/page/a?{ask}"), 1), (format!("/page/a?{ask}&x"), 2), (format!("/page/b?{ask}"), 3)]
    {
        for _ in 0..2 {
            gateway.get(&path, &[]).await;
            assert_eq!(gateway.backend.calls(), calls, "{path}");
        }
    }
    let (uri, path) = (gateway.sidecar.uri(), format!("/page/a?{ask}"));
    let other_name = uri.replace("127.0.0.1", "localhost");
    http_load::ask(&other_name, Protocol::Http1, Method::GET, &path, &headers(&[])).await.unwrap();
    assert_eq!(gateway.backend.calls(), 4);
}

#[tokio::test]
async fn whoever_comes_after_a_private_response_does_not_wait_in_vain() {
    let gateway = Gateway::start(serde_json::json!({"http": {"unshareable_for": "2s"}}), 300).await;
    let path = "/page/private?header=cache-control:private";
    gateway.get(path, &[]).await;
    let answers = gateway.together(path, &[NOTHING; 5]).await;
    assert_eq!(queries(&answers), 5);
    assert!(answers.iter().all(|answer| status(answer).contains("fwd=bypass; detail=unshareable")));
    let longest = answers.iter().map(|answer| answer.took).max().unwrap();
    assert!(longest.as_millis() < 550, "{longest:?}: one call, not two");
    tokio::time::sleep(std::time::Duration::from_millis(2_100)).await;
    let again = gateway.together(path, &[NOTHING; 2]).await;
    assert!(status(&again[0]).contains("fwd=miss"), "{}", status(&again[0]));
}

#[tokio::test]
async fn a_private_page_of_a_backend_that_hangs_is_given_up_like_any_other() {
    let settings = serde_json::json!({"backend_timeout": "1s"});
    let gateway = Gateway::start_with(settings, 50, |options| {
        options.config.hold_timeout = Some(std::time::Duration::from_secs(2));
    })
    .await;
    let path = "/page/hanging";
    gateway.backend.set_answer(Some("header=cache-control:private&latency_ms=700")).unwrap();
    let (first, released) = (gateway.together(path, &[NOTHING; 2]), async {
        tokio::time::sleep(std::time::Duration::from_millis(300)).await;
        gateway.backend.set_answer(Some("header=cache-control:private&latency_ms=20000")).unwrap();
    });
    let (answers, ()) = tokio::join!(first, released);
    assert_eq!((answers[0].status.as_u16(), answers[1].status.as_u16()), (200, 504), "{answers:?}");
    let later = gateway.get(path, &[]).await;
    assert_eq!(later.status, 504, "{later:?}");
    assert!(later.took.as_secs() < 15, "{:?}", later.took);
}

/// The worst of timings: many at once, while others hang up and the backend answers at its own pace.
#[tokio::test]
async fn a_private_or_set_cookie_response_never_reaches_a_second_caller() {
    let gateway = Gateway::start_with(plain(), 20, |options| options.concurrency = 2).await;
    for asks in [
        "header=cache-control:private,max-age=60",
        "header=set-cookie:id=1&header=cache-control:public,max-age=60",
    ] {
        let path = format!("/page/mine?{asks}");
        let mut all = Vec::new();
        for round in 0..6 {
            let clients = [gateway.client().await, gateway.client().await, gateway.client().await];
            let asked: Vec<_> = (0..60)
                .map(|n| {
                    let (client, path) = (clients[n % 3].clone(), path.clone());
                    let one = tokio::spawn(async move { client.get(&path, &headers(&[])).await });
                    if n % 7 == round {
                        one.abort();
                    }
                    one
                })
                .collect();
            for one in asked {
                if let Ok(answer) = one.await {
                    all.push(serial(&answer.unwrap()));
                }
            }
        }
        let distinct: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), all.len(), "{asks}: somebody got another's");
    }
}
