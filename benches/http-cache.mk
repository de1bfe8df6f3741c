# The public HTTP cache tests: through the gateway, and through nginx and Varnish beside it.

# BLESS=1 takes the filter's results over into the list; HTTP_CACHE_ARGS='--only collapser' and the like.

HTTP_CACHE_TESTS_VERSION := 0.4.5
# Their client needs it, in this major version.
NODE_FETCH_VERSION := 2.7.0
HTTP_CACHE_TESTS := $(TOOLS)/http-cache-tests

.PHONY: http-cache-tests
http-cache-tests: wasm envoy check-rust $(HTTP_CACHE_TESTS)/$(HTTP_CACHE_TESTS_VERSION) ## The public HTTP cache tests, through the gateway, nginx and Varnish
	@cargo build --release --package collapser-benches --bin collapser-http-cache
	@$(or $(CARGO_TARGET_DIR),target)/release/collapser-http-cache --tests $(HTTP_CACHE_TESTS) \
		$(if $(HTTP_CACHE_ARGS),,--out benches/results/http-cache.md) $(if $(BLESS),--bless) $(HTTP_CACHE_ARGS)

$(HTTP_CACHE_TESTS)/$(HTTP_CACHE_TESTS_VERSION):
	@command -v npm >/dev/null || { echo "error: npm is missing; on Debian: apt-get install npm" >&2; exit 1; }
	@echo "installing http-cache-tests $(HTTP_CACHE_TESTS_VERSION)"
	@mkdir -p $(@D) && cd $(@D) && \
		npm pack --silent http-cache-tests@$(HTTP_CACHE_TESTS_VERSION) >/dev/null && \
		tar xzf http-cache-tests-$(HTTP_CACHE_TESTS_VERSION).tgz && \
		npm install --silent --no-save --no-package-lock --prefix . node-fetch@$(NODE_FETCH_VERSION) \
		|| { echo "error: npm cannot fetch http-cache-tests; is its registry reachable?" >&2; exit 1; }
	@touch $@
