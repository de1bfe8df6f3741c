#!/usr/bin/env bash
# Brings the images into the kind cluster, applies the demo and waits for it. Takes KIND_CLUSTER, KUBECTL, CONTAINER_ENGINE.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=kind/scripts/common.sh
source kind/scripts/common.sh

need_kind
have_cluster || fail "there is no kind cluster \`$KIND_CLUSTER\`; run: make cluster"

# Not the module: Istio pulls it from a registry.
for image in sidecar backend loadgen; do
  name=$(image_name "$image")
  echo "loading $name"
  if [[ $CONTAINER_ENGINE == docker ]]; then
    kind load docker-image --name "$KIND_CLUSTER" "$name"
  else
    # kind asks podman for images by names that podman has not.
    archive=target/images/$image.tar
    rm -f "$archive"
    podman save --quiet --output "$archive" "$name"
    kind load image-archive --name "$KIND_CLUSTER" "$archive"
    rm -f "$archive"
  fi
done

was_there=$(kube get deployment collapser-demo --namespace collapser --ignore-not-found --output name)
kube apply --kustomize kind/demo
# The tag stays the same when an image changes, so Kubernetes sees no reason to start new pods.
[[ -z $was_there ]] || kube rollout restart deployment/collapser-demo --namespace collapser
kube rollout status deployment/collapser-demo --namespace collapser --timeout 180s || {
  kube get pods --namespace collapser --output wide >&2
  kube logs --namespace collapser --selector app.kubernetes.io/name=collapser-demo --container collapser \
    --tail 20 --prefix >&2 || true
  fail "the pods do not get ready; see above"
}
