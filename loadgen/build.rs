//! Compiles the demo service's proto in pure Rust, so that no `protoc` is needed,
//! and keeps its descriptor set for gRPC reflection.

use anyhow::Context as _;
use prost::Message as _;

const PROTO: &str = "collapser/demo/v1/demo.proto";

fn main() -> anyhow::Result<()> {
    println!("cargo:rerun-if-changed=proto/{PROTO}");
    let descriptors = protox::compile([PROTO], ["proto"]).context("compiling the demo proto")?;

    let out_dir = std::env::var_os("OUT_DIR").context("OUT_DIR is set by cargo")?;
    let file = std::path::Path::new(&out_dir).join("demo_descriptor.bin");
    std::fs::write(&file, descriptors.encode_to_vec())
        .with_context(|| format!("writing {}", file.display()))?;

    tonic_prost_build::configure().bytes(".").compile_fds(descriptors).context("generating the demo service")
}
