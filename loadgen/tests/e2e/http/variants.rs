//! Responses that depend on headers that only they name (`vary`; RFC 9111, section 4.1).

use http::Method;

use super::gateway::{Gateway, plain, queries, serial};

const PATH: &str = "/page/varied?header=cache-control:max-age=60&header=vary:x-a&echo=x-a";

#[tokio::test]
async fn followers_with_other_values_get_their_own_response() {
    let gateway = Gateway::start(plain(), 150).await;
    let (one, two): (&[_], &[_]) = (&[("x-a", "1")], &[("x-a", "2")]);
    let answers = gateway.together(PATH, &[one, two, one, two, &[], two]).await;
    for (nth, value) in [(0, "1"), (1, "2"), (2, "1"), (3, "2"), (5, "2")] {
        assert!(answers[nth].text().contains(&format!("x-a: {value}")), "{nth}: {}", answers[nth].text());
    }
    assert!(!answers[4].text().contains("x-a: "));
    assert_eq!((queries(&answers), gateway.backend.calls()), (3, 3), "one call for each variant");
    for pairs in [one, two, &[]] {
        let later = gateway.get(PATH, pairs).await;
        assert!(answers.iter().any(|answer| serial(answer) == serial(&later)));
    }
    assert_eq!(gateway.backend.calls(), 3, "each variant is kept");
}

#[tokio::test]
async fn once_variants_are_known_nobody_waits_for_another_ones() {
    let gateway = Gateway::start(plain(), 200).await;
    gateway.get(PATH, &[("x-a", "0")]).await;
    let (one, two): (&[_], &[_]) = (&[("x-a", "1")], &[("x-a", "2")]);
    let answers = gateway.together(PATH, &[one, two, one, two]).await;
    assert_eq!(queries(&answers), 2);
    let longest = answers.iter().map(|answer| answer.took).max().unwrap();
    assert!(longest.as_millis() < 380, "{longest:?}: the two calls run at the same time");
}

#[tokio::test]
async fn what_the_key_has_anyway_makes_no_variants() {
    let gateway = Gateway::start(plain(), 100).await;
    let path = "/page/same?header=cache-control:max-age=60&header=vary:Accept-Encoding,%20Cookie";
    let answers = gateway.together(path, &[&[("x-a", "1")], &[("x-a", "2")]]).await;
    assert_eq!((queries(&answers), gateway.backend.calls()), (1, 1));
}

#[tokio::test]
async fn a_page_that_varies_no_longer_is_one_page_again() {
    let gateway = Gateway::start(plain(), 100).await;
    let path = "/page/changing";
    gateway.backend.set_answer(Some("header=vary:x-a&header=cache-control:max-age=1")).unwrap();
    gateway.get(path, &[("x-a", "1")]).await;
    gateway.backend.set_answer(Some("header=cache-control:max-age=60")).unwrap();
    tokio::time::sleep(std::time::Duration::from_millis(1_100)).await;
    gateway.get(path, &[("x-a", "1")]).await;
    let calls = gateway.backend.calls();
    for value in ["1", "2", "3"] {
        gateway.get(path, &[("x-a", value)]).await;
    }
    assert_eq!(gateway.backend.calls(), calls);
}

/// What is kept of a variant is no answer for one who wants none that is kept, nor after a change, also if it turns out
/// only after a wait that this variant is wanted.
#[tokio::test]
async fn who_waited_for_another_variant_is_given_nothing_that_will_not_do() {
    const VARIED: &str = "header=vary:x-a&header=cache-control:max-age=60";
    let gateway = Gateway::start(plain(), 150).await;
    for (path, asks) in [("/page/changed", &[("x-a", "2")][..]), ("/page/anew", &ANEW)] {
        gateway.backend.set_answer(Some(VARIED)).unwrap();
        gateway.get(path, &[("x-a", "1")]).await;
        let kept = serial(&gateway.get(path, &[("x-a", "2")]).await);
        gateway.backend.set_answer(Some("status=404")).unwrap();
        gateway.get(path, &[("x-a", "3")]).await;
        gateway.backend.set_answer(Some(VARIED)).unwrap();
        if asks.len() == 1 {
            gateway.send(Method::POST, path, &[]).await;
        }
        let answers = gateway.together(path, &[&[("x-a", "1")], asks]).await;
        assert!(serial(&answers[1]) > kept && queries(&answers) == 2, "{path}: {answers:?}");
    }
}

const ANEW: [(&str, &str); 2] = [("x-a", "2"), ("cache-control", "no-cache")];

#[tokio::test]
async fn variants_are_told_apart_across_workers() {
    let gateway = Gateway::start_with(plain(), 150, |options| options.concurrency = 4).await;
    let mut asked = Vec::new();
    for n in 0..32 {
        let client = gateway.client().await;
        asked.push(tokio::spawn(async move {
            let value = (n % 2).to_string();
            let answer = client.get(PATH, &super::gateway::headers(&[("x-a", &value)])).await.unwrap();
            assert!(answer.text().contains(&format!("x-a: {value}")), "{n}: {}", answer.text());
        }));
    }
    for one in asked {
        one.await.unwrap();
    }
    // One call found out, and each worker may then ask for the other one.
    assert!(gateway.backend.calls() <= 6, "{}", gateway.backend.calls());
}
