//! Conditional requests and HEAD, which one recorded response answers too (RFC 9110, sections 9.3.2 and 13).

use http::Method;

use super::gateway::{Gateway, plain, serial};

const TAGGED: &str =
    "/page/tagged?header=cache-control:max-age=60&header=etag:%22v1%22&header=content-type:text/html";

#[tokio::test]
async fn who_has_the_page_is_told_so_whoever_leads() {
    let gateway = Gateway::start(plain(), 150).await;
    let (has, has_not): (&[_], &[_]) = (&[("if-none-match", "W/\"v1\"")], &[("if-none-match", "\"v0\"")]);
    let answers = gateway.together(TAGGED, &[has, &[], has_not, has]).await;
    let statuses: Vec<u16> = answers.iter().map(|answer| answer.status.as_u16()).collect();
    assert_eq!(statuses, [304, 200, 200, 304]);
    assert_eq!(gateway.backend.calls(), 1);
    assert!(gateway.backend.recent_requests()[0].headers.get("if-none-match").is_none());
    for answer in [&answers[0], &answers[3], &gateway.get(TAGGED, has).await] {
        assert_eq!((answer.status.as_u16(), answer.body.len()), (304, 0));
        assert_eq!((answer.header("etag"), answer.header("content-type")), (Some("\"v1\""), None));
        assert!(answer.header("cache-control").is_some() && answer.header("content-length").is_none());
    }
    let full = gateway.get(TAGGED, has_not).await;
    assert_eq!((full.status.as_u16(), serial(&full)), (200, 1));
    assert_eq!(gateway.backend.calls(), 1);
}

#[tokio::test]
async fn dates_do_where_there_are_no_tags() {
    let gateway = Gateway::start(plain(), 0).await;
    let path = "/page/dated?header=cache-control:max-age=60&header=last-modified:Tue,%2015%20Nov%202022%2012:45:26%20GMT";
    let ask = |since: &'static str| gateway.get(path, Box::leak(Box::new([("if-modified-since", since)])));
    assert_eq!(ask("Tue, 15 Nov 2022 12:45:26 GMT").await.status, 304);
    assert_eq!(ask("Tue, 15 Nov 2022 12:45:25 GMT").await.status, 200);
    assert_eq!(ask("Wed, 16 Nov 2022 12:45:25 GMT").await.status, 304);
    assert_eq!(gateway.backend.calls(), 1);
}

#[tokio::test]
async fn a_private_page_answers_its_leaders_condition_too() {
    let gateway = Gateway::start(plain(), 100).await;
    let path = "/page/private?header=cache-control:private&header=etag:%22v1%22";
    let has: &[_] = &[("if-none-match", "\"v1\"")];
    let answers = gateway.together(path, &[has, has]).await;
    assert_eq!(answers[0].status, 304);
    // The demo backend knows nothing of conditions, which the released one has kept.
    assert_eq!(answers[1].status, 200);
    assert!(gateway.backend.recent_requests()[1].headers.get("if-none-match").is_some());
}

#[tokio::test]
async fn head_is_answered_from_get_and_with_it() {
    let gateway = Gateway::start(plain(), 150).await;
    let page = gateway.get(TAGGED, &[]).await;
    let head = gateway.send(Method::HEAD, TAGGED, &[]).await;
    assert_eq!((head.status.as_u16(), head.body.len()), (200, 0));
    for name in ["content-length", "content-type", "etag", "cache-control"] {
        assert_eq!(head.header(name), page.header(name), "{name}");
    }
    assert_eq!(head.header("content-length"), Some(page.body.len().to_string().as_str()));
    assert_eq!(gateway.backend.calls(), 1);

    let other = format!("{TAGGED}&other");
    let client = gateway.client().await;
    let led = tokio::spawn({
        let (client, other) = (client.clone(), other.clone());
        async move { client.send(Method::HEAD, &other, &Default::default(), Default::default()).await.unwrap() }
    });
    crate::rig::eventually("the call", async || gateway.backend.calls() == 2).await;
    let joined = client.get(&other, &Default::default()).await.unwrap();
    let led = led.await.unwrap();
    assert_eq!((led.body.len(), led.header("content-length")), (0, joined.header("content-length")));
    assert_eq!((serial(&joined), gateway.backend.calls()), (2, 2));
    assert_eq!(gateway.backend.recent_requests()[1].method, Method::GET, "its reply answers both");
}

#[tokio::test]
async fn head_works_over_http_1_too() {
    let gateway = Gateway::start(plain(), 0).await;
    let ask = |method: Method| {
        let uri = gateway.sidecar.uri();
        async move {
            let http1 = collapser_loadgen::http_load::Protocol::Http1;
            collapser_loadgen::http_load::ask(&uri, http1, method, TAGGED, &Default::default()).await.unwrap()
        }
    };
    let head = ask(Method::HEAD).await;
    let page = ask(Method::GET).await;
    assert_eq!((head.status.as_u16(), head.body.len()), (200, 0));
    assert_eq!(head.header("content-length"), page.header("content-length"));
    assert_eq!(gateway.backend.calls(), 1);
}
