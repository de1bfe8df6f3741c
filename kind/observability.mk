# Prometheus and Grafana: in the cluster, and their test.

PROMETHEUS_PORT ?= 9090
GRAFANA_PORT ?= 3000

# The programs of Debian's package, which is unpacked and not installed: no service is started. PROMETHEUS and PROMTOOL name
# others, 2.42 or newer.
PROMETHEUS_DIR := $(TOOLS)/prometheus
PROMETHEUS ?= $(or $(shell command -v prometheus),$(PROMETHEUS_DIR)/usr/bin/prometheus)
PROMTOOL ?= $(or $(shell command -v promtool),$(PROMETHEUS_DIR)/usr/bin/promtool)
OBSERVE = KUBECTL="$(KUBECTL)" KIND_CLUSTER="$(KIND_CLUSTER)" kind/scripts/observability.sh

##@ In Prometheus and Grafana

.PHONY: prometheus
prometheus: kubectl ## Bring Prometheus and its alerts into the kind cluster, and open them on port 9090 (PROMETHEUS_PORT)
	@$(OBSERVE) prometheus $(PROMETHEUS_PORT)

.PHONY: grafana
grafana: kubectl ## Bring Grafana and Prometheus, and open the dashboard on port 3000 (GRAFANA_PORT)
	@$(OBSERVE) grafana $(GRAFANA_PORT)

.PHONY: test-observability
test-observability: wasm wasm-trap programs envoy prometheus-tools ## The alerts, and every query of the dashboard, in a real Prometheus
	@"$(PROMTOOL)" test rules kind/observability/prometheus/rules_test.yml
	@PROMETHEUS="$(PROMETHEUS)" PROMTOOL="$(PROMTOOL)" \
		cargo test --release --package collapser-loadgen --test observability -- --nocapture

.PHONY: prometheus-tools
prometheus-tools: $(if $(and $(wildcard $(PROMETHEUS)),$(wildcard $(PROMTOOL))),,$(PROMETHEUS_DIR)/.done)
	@for program in "$(PROMETHEUS)" "$(PROMTOOL)"; do \
		"$$program" --version >/dev/null 2>&1 \
			|| { echo "error: $$program does not run; PROMETHEUS and PROMTOOL can name others" >&2; exit 1; }; \
	done

$(PROMETHEUS_DIR)/.done:
	@command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null \
		|| { echo "error: prometheus and promtool are missing; get 2.42 or newer: https://prometheus.io/download" >&2; exit 1; }
	@echo "fetching Debian's prometheus"
	@rm -rf $(@D) && mkdir -p $(@D)
	@cd $(@D) && fetch="apt-get download -qq -o APT::Sandbox::User=root prometheus"; \
	$$fetch 2>/dev/null || { apt-get update -qq && $$fetch; } \
		|| { echo "error: apt-get cannot fetch prometheus; try as root: apt-get update" >&2; exit 1; }
	@cd $(@D) && dpkg-deb -x prometheus_*.deb . && rm prometheus_*.deb
	@touch $@
