# The whole sidecar.

# BENCH_ARGS='--scenario hit-10B --also old=/tmp/old.wasm' and the like; --check fails where a promise is not kept.

MATPLOTLIB_VERSION := 3.11.2

.PHONY: bench-e2e
bench-e2e: wasm envoy bench-program ## The sidecar beside Envoy without the filter and beside PEER_CMD, if it is set
	@$(BENCH) e2e $(BENCH_ARGS)

.PHONY: bench-report
bench-report: wasm envoy bench-program $(TOOLS)/plots/.done ## The same and how it scales, with plots, into benches/results
	@$(BENCH) e2e --out benches/results/e2e.json $(BENCH_ARGS)
	@$(BENCH) scale --out benches/results/scale.json $(SCALE_ARGS)
	@$(TOOLS)/plots/bin/python benches/report.py benches/results

BENCH = $(or $(CARGO_TARGET_DIR),target)/release/collapser-bench

.PHONY: bench-program
bench-program: check-rust
	@cargo build --release --package collapser-benches --bin collapser-bench
	@command -v h2load >/dev/null || { echo "error: h2load is missing; on Debian: apt-get install nghttp2-client" >&2; exit 1; }

$(TOOLS)/plots/.done: | check-python
	@echo "installing matplotlib $(MATPLOTLIB_VERSION)"
	@$(call venv,$(@D),matplotlib==$(MATPLOTLIB_VERSION))
	@touch $@
