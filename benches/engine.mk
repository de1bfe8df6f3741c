# The engine's benchmarks, and the count of host calls.

##@ Benchmarks

BENCH_GUESTS := target/bench-guest
# The engine as a Wasm module, built as the filter is. Flags for the compiler must reach the engine's dependencies too, so
# they are given by RUSTFLAGS, and each set of them has a folder of its own.
bench_guest = RUSTFLAGS="$(2)" cargo rustc --package collapser-bench-guest --lib --crate-type cdylib \
	--target wasm32-wasip1 --profile wasm --target-dir $(BENCH_GUESTS)/$(1) \
	&& cp $(BENCH_GUESTS)/$(1)/wasm32-wasip1/wasm/collapser_bench_guest.wasm $(BENCH_GUESTS)/$(1).wasm \
	&& rm -f $(BENCH_GUESTS)/$(if $(filter plain,$(1)),opt,$(1)-opt).wasm \
	&& if command -v wasm-opt >/dev/null; then \
		wasm-opt -O3 --all-features $(BENCH_GUESTS)/$(1).wasm -o $(BENCH_GUESTS)/$(if $(filter plain,$(1)),opt,$(1)-opt).wasm; \
	fi

bench_summary = COLLAPSER_BENCH_GUESTS=$(CURDIR)/$(BENCH_GUESTS) cargo bench --package collapser-benches --bench summary

.PHONY: bench
bench: bench-guests ## Benchmark the engine, native and as Wasm: Criterion, then a table with allocations
	@cargo bench --package collapser-benches --bench key --bench table
	@$(bench_summary)

.PHONY: bench-summary
bench-summary: bench-guests ## Only the table: benches/results/engine.md
	@$(bench_summary)

.PHONY: bench-guests
bench-guests: check-rust
	@mkdir -p $(BENCH_GUESTS)
	@$(call bench_guest,plain,)
	@$(call bench_guest,simd,-C target-feature=+simd128)

host_calls = cargo test --release --package collapser-benches --test host_calls -- --nocapture --test-threads 1

.PHONY: test-host-calls
test-host-calls: wasm ## Count host calls and instructions of each kind of request, and hold them against the table in the test
	@$(host_calls)

.PHONY: bench-host-calls
bench-host-calls: wasm ## The same; writes benches/results/host-calls.md
	@mkdir -p benches/results
	@COLLAPSER_HOST_CALLS=$(CURDIR)/benches/results/host-calls.md $(host_calls)
