//! The front and the sidecar mean the same by a key: what the front sets is what the engine makes of the request that
//! arrives behind it, and it differs exactly where a sidecar would tell two requests apart.

use std::collections::HashMap;

use collapser_engine::affinity;
use collapser_engine::key;
use collapser_engine::pairs::{Pairs, PairsBuilder};
use collapser_loadgen::proto::ComputeRequest;
use http::HeaderMap;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::json;

use crate::front::{RawFront, without_checks};
use crate::raw::{COMPUTE, RawClient, frame, headers};
use crate::rig::ask;

/// Few, so that many requests are equal.
const REQUESTS: usize = 400;

/// The key that a sidecar makes of a request that arrives with these headers.
fn of_the_sidecar(seen: &HeaderMap, request: &ComputeRequest, key_headers: &[String]) -> String {
    let mut block = PairsBuilder::default();
    block.push(b":path", COMPUTE.as_bytes());
    for (name, value) in seen {
        block.push(name.as_str().as_bytes(), value.as_bytes());
    }
    let block = block.build();
    affinity::value(&key::derive(Pairs::parse(&block).unwrap(), &frame(request), key_headers))
}

/// What a sidecar tells apart, in words: the values of each header that counts, and the message.
fn meaning(more: &HeaderMap, request: &ComputeRequest, key_headers: &[String]) -> String {
    let names = key_headers.iter().map(String::as_str).chain(["grpc-encoding", "grpc-accept-encoding"]);
    let values = names.map(|name| (name.to_owned(), more.get_all(name).iter().collect::<Vec<_>>()));
    format!("{:?} {}", values.collect::<Vec<_>>(), request.key)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_key_is_what_a_sidecar_makes_of_the_request() {
    let key_headers = ["authorization", "x-tenant"].map(str::to_owned);
    let rig = RawFront::start(1, json!({"key_headers": key_headers}), without_checks).await;
    let client = RawClient::connect(rig.addr()).await;
    let seed = rand::random();
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let (mut keys, mut meanings) = (HashMap::new(), HashMap::new());
    for _ in 0..REQUESTS {
        let mut more = HeaderMap::new();
        let names =
            ["x-tenant", "x-tenant", "authorization", "grpc-accept-encoding", "traceparent", "cookie"];
        for name in names {
            if random.random_bool(0.4) {
                let values = if name == "grpc-accept-encoding" { ["gzip", "identity"] } else { ["a", ""] };
                let value = values[usize::from(random.random_bool(0.3))];
                more.extend(appended(&more, name, value));
            }
        }
        let request = ask(["k", "", "k k"][random.random_range(0..3)]);
        client.compute(&request, more.clone()).await.unwrap();
        let seen = rig.upstreams[0].last_headers();
        let shown = seen["x-collapser-key"].to_str().unwrap().to_owned();
        assert_eq!(shown, of_the_sidecar(&seen, &request, &key_headers), "{seen:?}");

        let meaning = meaning(&more, &request, &key_headers);
        let earlier = keys.insert(meaning.clone(), shown.clone());
        assert!(earlier.is_none_or(|earlier| earlier == shown), "equal requests, two keys: {meaning}");
        let earlier = meanings.insert(shown, meaning.clone());
        assert!(earlier.is_none_or(|earlier| earlier == meaning), "one key, two requests: {meaning}");
    }
    println!("{REQUESTS} requests, {} keys", meanings.len());
    assert!((20..REQUESTS / 2).contains(&meanings.len()), "{} keys: nothing was compared", meanings.len());
}

/// All values of the header so far, and one more.
fn appended(more: &HeaderMap, name: &str, value: &str) -> HeaderMap {
    let so_far = more.get_all(name).iter().map(|value| (name, value.to_str().unwrap()));
    headers(&so_far.chain([(name, value)]).collect::<Vec<_>>())
}
