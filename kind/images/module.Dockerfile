# The Wasm module alone, for Istio's `url: oci://...`: one layer, which holds plugin.wasm and nothing else.
FROM scratch
COPY collapser.wasm /plugin.wasm
