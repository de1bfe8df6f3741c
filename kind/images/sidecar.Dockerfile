# The sidecar: Envoy, the filter, its configuration and the launcher. `make images` builds it with Envoy's version from the
# Makefile; any image fits that holds Envoy 1.36 or newer at /usr/local/bin/envoy and authorities for TLS.
ARG ENVOY_IMAGE=docker.io/envoyproxy/envoy:distroless-v1.40.0
# hadolint ignore=DL3006
FROM ${ENVOY_IMAGE}

COPY collapser-sidecar /usr/local/bin/collapser-sidecar
COPY envoy.yaml affinity.yaml collapser.wasm /etc/collapser/

# Where the launcher finds things; it knows no more about being in a container.
ENV ENVOY=/usr/local/bin/envoy \
    COLLAPSER_CONFIG=/etc/collapser/envoy.yaml \
    COLLAPSER_MODULE=/etc/collapser/collapser.wasm \
    LOG_FORMAT=json

# In figures: Kubernetes cannot tell from a name that this is not root.
USER 65532:65532
EXPOSE 50052 2112
# The launcher drains on this signal. There is no shell in the image, and nothing is written to its file system.
STOPSIGNAL SIGTERM
ENTRYPOINT ["/usr/local/bin/collapser-sidecar"]
CMD []
