#!/usr/bin/env bash
# Builds the images. The programs are static and built beforehand (`make image-programs`), so no compiler runs in a container.
#   images.sh sidecar backend loadgen module
# Takes CONTAINER_ENGINE, ENVOY_IMAGE, PROGRAMS (the folder with the static programs) and MODULE.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=kind/scripts/common.sh
source kind/scripts/common.sh

choose_engine
# Docker's builder would add an attestation, which makes the image an index that kind cannot load.
export BUILDX_NO_DEFAULT_ATTESTATIONS=1

# A folder with just what goes into the images; the repository with its target folder would be sent to the engine otherwise.
context=target/images/context
rm -rf "$context"
mkdir -p "$context"
install -m 0755 "$PROGRAMS"/collapser-{sidecar,backend,loadgen} "$context"
install -m 0644 "$MODULE" "$context/collapser.wasm"
install -m 0644 envoy/envoy.yaml envoy/affinity.yaml "$context"

for image in "$@"; do
  arguments=()
  [[ $image != sidecar ]] || arguments=(--build-arg "ENVOY_IMAGE=$ENVOY_IMAGE")
  echo "building $(image_name "$image")"
  "$CONTAINER_ENGINE" build --quiet "${arguments[@]}" --file "kind/images/$image.Dockerfile" \
    --tag "$(image_name "$image")" "$context" >/dev/null
done
