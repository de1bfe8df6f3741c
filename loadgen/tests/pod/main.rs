//! The pod as it is deployed: the shipped images and manifests, under `podman kube play`.
//!
//! `make test-pod` prepares all that these need and runs them, one at a time.

mod engine;
mod manifests;

mod drain;
mod environment;
mod images;
mod pod;
