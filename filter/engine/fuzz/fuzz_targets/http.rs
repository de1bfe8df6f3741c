//! Any bytes as the header blocks of a plain HTTP request and its response: judged without a panic, and what is for one
//! caller only stays so.
#![no_main]

use collapser_engine::http::{conditional, date, freshness, request, vary};
use collapser_engine::key::Key;
use collapser_engine::pairs::{Pairs, PairsBuilder};
use collapser_engine::reply::Reply;
use libfuzzer_sys::fuzz_target;
use std::time::Duration;

/// The headers on which the rules look, each with a line of the input for its value.
const NAMES: [&[u8]; 10] = [
    b"cache-control",
    b"date",
    b"age",
    b"expires",
    b"vary",
    b"etag",
    b"last-modified",
    b"if-none-match",
    b"if-modified-since",
    b"accept",
];

fuzz_target!(|input: &[u8]| {
    let lines: Vec<&[u8]> = input.split(|byte| *byte == b'\n').collect();
    let mut headers = PairsBuilder::default();
    headers.push(b":method", b"GET").push(b":status", b"200");
    for (name, line) in NAMES.iter().cycle().zip(&lines).take(100) {
        headers.push(name, line);
    }
    let block = headers.build();
    let headers = Pairs::parse(&block).expect("what was built can be read");

    let verdict = freshness::judge(headers, headers, 1_800_000_000, Duration::from_millis(40));
    for mark in [(&b"cache-control"[..], &b"private"[..]), (b"set-cookie", b"a=b")] {
        let block = marked(headers, mark);
        let response = Pairs::parse(&block).expect("what was built can be read");
        let forbidden = freshness::judge(headers, response, 1_800_000_000, Duration::ZERO).forbidden;
        assert!(forbidden.is_some(), "{mark:?}");
    }
    let _ = (freshness::judge_grpc(headers), request::judge(headers), verdict);
    for line in &lines {
        let _ = date::parse(line);
    }
    if let vary::Vary::Names(names) = vary::of(headers, |_| false) {
        let key = Key([0; 32]);
        assert_eq!(vary::variant(&key, &names, headers), vary::variant(&key, &names, headers));
        assert!(names.len() <= 32 && names.is_sorted());
    }
    let _ = conditional::not_modified(headers, headers);
    let told = conditional::not_modified_headers(headers).build();
    assert!(Pairs::parse(&told).expect("what was built can be read").first(b":status") == Some(b"304"));
    let reply = Reply::record_http(&block, input.to_vec(), &[]);
    assert_eq!(reply.body, input);
});

/// The same response, marked as its caller's own by one header more in front.
fn marked(headers: Pairs<'_>, mark: (&[u8], &[u8])) -> Box<[u8]> {
    let mut builder = PairsBuilder::default();
    builder.push(mark.0, mark.1);
    headers.iter().for_each(|(name, value)| {
        builder.push(name, value);
    });
    builder.build()
}
