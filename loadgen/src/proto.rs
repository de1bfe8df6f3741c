//! The demo service `collapser.demo.v1.Demo` as generated from its proto, in a
//! module of its own because generated code is held to no lint.
#![allow(missing_docs, clippy::all, rustdoc::all)]

tonic::include_proto!("collapser.demo.v1");

/// The encoded descriptor set of the demo service, for reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/demo_descriptor.bin"));
