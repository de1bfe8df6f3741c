//! Any bytes as a request's header block: read, judged (`cache-control` among them) and repeated without a panic.
#![no_main]

use collapser_engine::classify::classify;
use collapser_engine::outbound;
use collapser_engine::pairs::{Pairs, PairsBuilder};
use collapser_engine::settings::{Http, Settings};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|block: &[u8]| {
    let Some(headers) = Pairs::parse(block) else { return };
    assert_eq!(headers.iter().count(), headers.len());
    let settings = Settings { http: Some(Http::default()), ..Settings::for_cluster("c") };
    if classify(headers, false, &settings).is_ok() {
        let repeated = outbound::headers(headers, "1S");
        let repeated = Pairs::parse(&repeated).expect("what was built can be read");
        assert!(repeated.len() <= headers.len() + 1);
        assert_eq!(repeated.iter().filter(|(name, _)| *name == b"grpc-timeout").count(), 1);
    }
    // With `cache-control` made of the same bytes.
    let mut builder = PairsBuilder::default();
    builder.push(b":method", b"POST").push(b"cache-control", block);
    let rebuilt = builder.build();
    let _ = classify(Pairs::parse(&rebuilt).expect("what was built can be read"), false, &settings);
});
