//! Host calls, entries into the VM and instructions of each kind of request, in the module that is shipped.
//!
//! A host call costs a third of a microsecond and more, an entry a microsecond or two, so their number is most of what the filter
//! costs. [`table::TABLE`] says what they are; any change of it is a change of the filter's speed and is made on purpose.
//!
//! The counts are those of a filter that is at work: tables have grown, the timer runs. A request that comes after a pause
//! sets the timer, which is one call more.

mod host;
mod table;

use host::{BODY_SLOT, Counts, End, Envoy, Headers, Message, engine};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;
use table::{Expected, TABLE};
use wasmtime::Module;

/// How far instructions may rise above the table without notice: compilers differ.
const SLACK: f64 = 1.10;

const PATH: &str = "/collapser.demo.v1.Demo/Compute";

/// A method that the configuration excludes.
const EXCLUDED: &str = "/collapser.demo.v1.Demo/Excluded";

fn module() -> &'static Module {
    static MODULE: OnceLock<Module> = OnceLock::new();
    MODULE.get_or_init(|| {
        let path = std::env::var_os("COLLAPSER_MODULE").map_or_else(
            || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../target/collapser.wasm")),
            PathBuf::from,
        );
        assert!(path.exists(), "{} is not there: run make wasm", path.display());
        Module::from_file(&engine().unwrap(), &path).unwrap()
    })
}

fn envoy() -> Envoy {
    let configuration = r#"{
        "cluster": "backend", "cache_duration": "1h", "methods": ["!/collapser.demo.v1.Demo/Excluded"]
    }"#;
    Envoy::start(module(), configuration).unwrap()
}

fn message(text: &str) -> Vec<u8> {
    let mut message = vec![0];
    message.extend((text.len() as u32).to_be_bytes());
    message.extend_from_slice(text.as_bytes());
    message
}

fn call(path: &str, text: &str) -> Message {
    let headers = Headers::new(&[
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "demo.default.svc.cluster.local:50052"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        ("user-agent", "grpc-go/1.70.0"),
        ("grpc-accept-encoding", "gzip"),
        ("authorization", "Bearer 0123456789abcdef"),
    ]);
    Message { headers, body: message(text), trailers: None }
}

fn request(text: &str) -> Message {
    call(PATH, text)
}

/// What the backend answers, as its client would see it.
fn reply(text: &str) -> Message {
    Message {
        headers: Headers::new(&[
            (":status", "200"),
            ("content-type", "application/grpc+proto"),
            ("x-served-by", "pod-1"),
        ]),
        body: message(text),
        trailers: Some(Headers::new(&[("grpc-status", "0"), ("x-cost", "1"), ("x-cost", "2")])),
    }
}

/// A failure, which has no message.
fn failure() -> Message {
    let headers = [
        (":status", "200"),
        ("content-type", "application/grpc+proto"),
        ("grpc-status", "5"),
        ("grpc-message", "not found"),
        ("x-served-by", "pod-1"),
    ];
    Message { headers: Headers::new(&headers), ..Message::default() }
}

/// The same as it comes from Envoy, which adds a header of its own.
fn from_upstream(reply: &Message) -> Message {
    let mut reply = reply.clone();
    reply.headers.add(b"x-envoy-upstream-service-time", b"3");
    reply
}

/// Headers of different names may change places.
fn in_order(headers: &Headers) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut all: Vec<_> = headers.iter().map(|(name, value)| (name.to_vec(), value.to_vec())).collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

#[track_caller]
fn assert_answered(envoy: &Envoy, stream: u32, expected: &Message) {
    let Some(End::Answered(answer)) = envoy.end(stream) else {
        panic!("request {stream} was not answered: {:?}", envoy.end(stream))
    };
    assert_eq!(in_order(&answer.headers), in_order(&expected.headers), "headers");
    assert_eq!(answer.body, expected.body, "body");
    let trailers = |message: &Message| message.trailers.as_ref().map(in_order).unwrap_or_default();
    assert_eq!(trailers(answer), trailers(expected), "trailers");
}

/// The one flight that is under way lands.
fn land(envoy: &mut Envoy, reply: &Message) {
    envoy.turn().unwrap();
    let [flight] = envoy.flights() else { panic!("not one flight: {:?}", envoy.flights()) };
    let token = flight.token;
    envoy.land(token, from_upstream(reply)).unwrap();
    envoy.turn().unwrap();
}

/// A flight with so many waiters, from the first request to the last answer.
fn burst(envoy: &mut Envoy, text: &str, waiters: usize) {
    let streams: Vec<_> = (0..waiters).map(|_| envoy.request(request(text)).unwrap()).collect();
    land(envoy, &reply(text));
    envoy.settle().unwrap();
    streams.into_iter().for_each(|stream| assert_answered(envoy, stream, &reply(text)));
}

fn hit(envoy: &mut Envoy, text: &str) {
    let stream = envoy.request(request(text)).unwrap();
    assert_answered(envoy, stream, &reply(text));
}

/// A web page is asked for and comes.
fn bypass(envoy: &mut Envoy) {
    let headers =
        Headers::new(&[(":method", "GET"), (":path", "/"), (":authority", "demo"), (":scheme", "http")]);
    let stream = envoy.request(Message { headers, ..Message::default() }).unwrap();
    let page = Message {
        headers: Headers::new(&[(":status", "200"), ("content-type", "text/html")]),
        body: b"<html>".to_vec(),
        trailers: None,
    };
    envoy.upstream_answers(stream, page.clone()).unwrap();
    assert_answered(envoy, stream, &page);
}

/// A page that may be kept for an hour.
fn page() -> Message {
    Message {
        headers: Headers::new(&[
            (":status", "200"),
            ("content-type", "text/html"),
            ("cache-control", "max-age=3600"),
            ("etag", "\"1\""),
        ]),
        body: b"<html>".to_vec(),
        trailers: None,
    }
}

fn request_of_page(path: &str) -> Message {
    let headers = Headers::new(&[
        (":method", "GET"),
        (":scheme", "https"),
        (":path", path),
        (":authority", "shop.example"),
        ("user-agent", "curl/8.14"),
        ("accept", "text/html"),
        ("accept-encoding", "gzip"),
        ("accept-language", "de"),
        ("cookie", "id=0123456789abcdef"),
    ]);
    Message { headers, ..Message::default() }
}

/// A flight for a page with so many waiters.
fn burst_for_page(envoy: &mut Envoy, path: &str, waiters: usize) {
    let streams: Vec<_> = (0..waiters).map(|_| envoy.request(request_of_page(path)).unwrap()).collect();
    land(envoy, &page());
    envoy.settle().unwrap();
    let mut expected = page();
    expected.headers.add(b"content-length", b"6");
    streams.into_iter().for_each(|stream| assert_answered(envoy, stream, &expected));
}

fn hit_page(envoy: &mut Envoy, path: &str) {
    let stream = envoy.request(request_of_page(path)).unwrap();
    let mut expected = page();
    expected.headers.add(b"content-length", b"6");
    expected.headers.add(b"age", b"0");
    assert_answered(envoy, stream, &expected);
}

/// A key that is new, of a method whose flights nobody has shared.
fn unshared(envoy: &mut Envoy, text: &str) {
    let stream = envoy.request(request(text)).unwrap();
    envoy.upstream_answers(stream, reply(text)).unwrap();
    assert_answered(envoy, stream, &reply(text));
}

fn bypass_of_a_method(envoy: &mut Envoy) {
    let stream = envoy.request(call(EXCLUDED, "x")).unwrap();
    envoy.upstream_answers(stream, reply("x")).unwrap();
    assert_answered(envoy, stream, &reply("x"));
}

/// What `work` takes.
fn taken(envoy: &mut Envoy, work: impl FnOnce(&mut Envoy)) -> Counts {
    let before = envoy.counts();
    work(envoy);
    minus(&envoy.counts(), &before)
}

fn minus(counts: &Counts, other: &Counts) -> Counts {
    let less = |all: &BTreeMap<&'static str, u64>, less: &BTreeMap<&'static str, u64>| {
        let rest = all.iter().map(|(name, count)| {
            let rest = count.checked_sub(less.get(name).copied().unwrap_or(0));
            (*name, rest.unwrap_or_else(|| panic!("fewer {name} for more work")))
        });
        rest.filter(|(_, count)| *count > 0).collect()
    };
    Counts {
        calls: less(&counts.calls, &other.calls),
        entries: less(&counts.entries, &other.entries),
        fuel: counts.fuel.saturating_sub(other.fuel),
    }
}

/// A share of what `parts` equal parts have taken.
fn share(counts: &Counts, parts: u64) -> Counts {
    let each = |all: &BTreeMap<&'static str, u64>| {
        let one = |(name, count): (&&'static str, &u64)| {
            assert!(count.is_multiple_of(parts), "{count} {name} for {parts} equal requests");
            (*name, count / parts)
        };
        all.iter().map(one).collect()
    };
    Counts { calls: each(&counts.calls), entries: each(&counts.entries), fuel: counts.fuel / parts }
}

/// A kind of request, counted when it is routine.
fn routine(envoy: &mut Envoy, mut work: impl FnMut(&mut Envoy)) -> Counts {
    const TIMES: u64 = 10;
    (0..TIMES).for_each(|_| work(envoy));
    share(&taken(envoy, |envoy| (0..TIMES).for_each(|_| work(envoy))), TIMES)
}

/// Counts each kind of request.
fn measured() -> Vec<(&'static str, Counts)> {
    let mut envoy = envoy();
    let number = std::cell::Cell::new(0);
    let fresh = || {
        number.set(number.get() + 1);
        format!("{:06}", number.get())
    };
    let leader = routine(&mut envoy, |envoy| burst(envoy, &fresh(), 1));
    let hit = routine(&mut envoy, |envoy| hit(envoy, "000001"));
    // All in one batch, so that what a batch takes is in both.
    let few = routine(&mut envoy, |envoy| burst(envoy, &fresh(), 10));
    let many = routine(&mut envoy, |envoy| burst(envoy, &fresh(), 30));
    let follower = share(&minus(&many, &few), 20);
    let bypass = routine(&mut envoy, bypass);
    let bypass_of_a_method = routine(&mut envoy, bypass_of_a_method);
    burst(&mut envoy, "first thousand", 1_000);
    let thousand = taken(&mut envoy, |envoy| burst(envoy, "thousand", 1_000));
    (0..256).for_each(|_| burst(&mut envoy, &fresh(), 1));
    let unshared = routine(&mut envoy, |envoy| unshared(envoy, &fresh()));
    let configuration = r#"{"cluster": "backend", "http": {}}"#;
    let mut gateway = Envoy::start(module(), configuration).unwrap();
    let page_leader = routine(&mut gateway, |envoy| burst_for_page(envoy, &fresh(), 1));
    burst_for_page(&mut gateway, "/front", 1);
    let page_hit = routine(&mut gateway, |envoy| hit_page(envoy, "/front"));
    let few = routine(&mut gateway, |envoy| burst_for_page(envoy, &fresh(), 10));
    let many = routine(&mut gateway, |envoy| burst_for_page(envoy, &fresh(), 30));
    let page_follower = share(&minus(&many, &few), 20);
    assert_eq!(gateway.complaints(), [""; 0], "the module complains");
    let counted = vec![
        ("hit", hit),
        ("follower", follower),
        ("leader", leader),
        ("unshared", unshared),
        ("bypass: not gRPC", bypass),
        ("bypass: method", bypass_of_a_method),
        ("burst of 1,000", thousand),
        ("HTTP hit", page_hit),
        ("HTTP follower", page_follower),
        ("HTTP leader", page_leader),
    ];
    assert_eq!(envoy.complaints(), [""; 0], "the module complains");
    counted
}

fn as_table(counted: &[(&str, Counts)]) -> String {
    let mut out =
        String::from("| request | host calls | entries into the VM | instructions |\n|---|--:|--:|--:|\n");
    let sum = |all: &BTreeMap<&str, u64>| all.values().sum::<u64>();
    for (kind, counts) in counted {
        let _ =
            writeln!(out, "| {kind} | {} | {} | {} |", sum(&counts.calls), sum(&counts.entries), counts.fuel);
    }
    let mut lists = |what: &str, of: fn(&Counts) -> &BTreeMap<&'static str, u64>| {
        let names: std::collections::BTreeSet<_> = counted.iter().flat_map(|(_, c)| of(c).keys()).collect();
        let _ = writeln!(
            out,
            "\n| {what} | {} |",
            counted.iter().map(|(k, _)| *k).collect::<Vec<_>>().join(" | ")
        );
        let _ = writeln!(out, "|---|{}", "--:|".repeat(counted.len()));
        for name in names {
            let _ = write!(out, "| `{name}` |");
            for (_, counts) in counted {
                let _ = match of(counts).get(name) {
                    Some(count) => write!(out, " {count} |"),
                    None => write!(out, " |"),
                };
            }
            out.push('\n');
        }
    };
    lists("host call", |counts| &counts.calls);
    lists("entry", |counts| &counts.entries);
    out
}

/// What differs from the table, in words.
fn differences(expected: &Expected, counts: &Counts) -> Vec<String> {
    let mut out = Vec::new();
    for (what, expected, counted) in
        [("calls", expected.calls, &counts.calls), ("entries", expected.entries, &counts.entries)]
    {
        let expected: BTreeMap<_, _> = expected.iter().copied().collect();
        let names: std::collections::BTreeSet<_> = expected.keys().chain(counted.keys()).collect();
        for name in names {
            let count = |of: &BTreeMap<&str, u64>| of.get(name).copied().unwrap_or(0);
            let (before, now) = (count(&expected), count(counted));
            if before != now {
                out.push(format!("{what}: {name}: {now}, not {before}"));
            }
        }
    }
    if counts.fuel as f64 > expected.fuel as f64 * SLACK {
        out.push(format!("instructions: {}, not {} and some", counts.fuel, expected.fuel));
    }
    out
}

#[test]
fn each_kind_of_request_takes_what_the_table_says() {
    let counted = measured();
    let table = as_table(&counted);
    println!("\n{table}");
    if let Some(path) = std::env::var_os("COLLAPSER_HOST_CALLS") {
        let text = format!(
            "# Host calls and instructions\n\nMade by `make bench-host-calls`: the shipped module in a host that counts. Instructions are \
             those of Wasm, as wasmtime's fuel counts them. Memory that Envoy asks the module for is an entry too.\n\n{table}"
        );
        std::fs::write(path, text).unwrap();
    }
    let kinds: Vec<_> = TABLE.iter().map(|expected| expected.kind).collect();
    assert_eq!(kinds, counted.iter().map(|(kind, _)| *kind).collect::<Vec<_>>(), "kinds in the table");
    let mut wrong = String::new();
    for (expected, (kind, counts)) in TABLE.iter().zip(&counted) {
        for difference in differences(expected, counts) {
            let _ = writeln!(wrong, "{kind}: {difference}");
        }
        if (counts.fuel as f64) < expected.fuel as f64 / SLACK {
            println!("note: {kind} takes {} instructions now; the table has {}", counts.fuel, expected.fuel);
        }
    }
    assert!(wrong.is_empty(), "other than benches/tests/host_calls/table.rs says:\n{wrong}");
}

#[test]
fn a_flight_carries_the_request_and_a_deadline() {
    let mut envoy = envoy();
    envoy.request(request("a")).unwrap();
    envoy.turn().unwrap();
    let [flight] = envoy.flights() else { panic!("not one flight") };
    assert_eq!((flight.cluster.as_str(), flight.timeout), ("backend", Duration::from_secs(10)));
    assert_eq!(flight.request.body, message("a"));
    assert_eq!(flight.request.headers.first("grpc-timeout"), Some(&b"10000000u"[..]));
    for (name, value) in request("a").headers.iter() {
        let name = std::str::from_utf8(name).unwrap();
        assert_eq!(flight.request.headers.first(name), Some(value), "{name}");
    }
}

#[test]
fn failures_arrive_as_they_are() {
    let mut envoy = envoy();
    let streams: Vec<_> = (0..3).map(|_| envoy.request(request("a")).unwrap()).collect();
    land(&mut envoy, &failure());
    envoy.settle().unwrap();
    streams.into_iter().for_each(|stream| assert_answered(&envoy, stream, &failure()));
}

#[test]
fn a_flight_outlives_its_leader() {
    let mut envoy = envoy();
    let leader = envoy.request(request("a")).unwrap();
    let follower = envoy.request(request("a")).unwrap();
    envoy.turn().unwrap();
    envoy.hang_up(leader).unwrap();
    land(&mut envoy, &reply("a"));
    assert_answered(&envoy, follower, &reply("a"));
    assert_eq!(envoy.end(leader), Some(&End::HungUp));
    hit(&mut envoy, "a");
}

#[test]
fn what_was_done_is_in_the_metrics() {
    let mut envoy = envoy();
    burst(&mut envoy, "a", 100);
    hit(&mut envoy, "a");
    bypass(&mut envoy);
    envoy.advance(Duration::from_secs(1)).unwrap();
    for (name, value) in [
        ("collapser_requests_total", 102),
        ("collapser_collapsed_requests_total", 99),
        ("collapser_backend_calls_total", 1),
        ("collapser_cache_hits_total", 1),
        ("collapser_cached_results", 1),
        ("collapser_waiting_requests", 0),
        ("collapser_inflight_requests", 0),
    ] {
        assert_eq!(envoy.metric(name), Some(value), "{name}");
    }
}

#[test]
fn wrong_settings_are_refused() {
    let error = Envoy::start(module(), r#"{"cluster": "backend", "max_waiters": "many"}"#).err().unwrap();
    assert!(format!("{error:?}").contains("max_waiters"), "{error:?}");
}

/// This host plays the Lua filter of the configuration; the two must be the same.
#[test]
fn the_body_slot_is_that_of_the_configuration() {
    let yaml = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../envoy/envoy.yaml")).unwrap();
    let told = "change body_slot and BODY_SLOT in benches/tests/host_calls/host/mod.rs as envoy/envoy.yaml was changed";
    assert!(yaml.contains(BODY_SLOT), "{told}");
}
