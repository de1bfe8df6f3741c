#!/usr/bin/env bash
# Applies Prometheus, or Grafana with it, waits for it and forwards a port of this machine to it until Ctrl-C.
# Usage: observability.sh prometheus|grafana PORT. Takes KIND_CLUSTER and KUBECTL.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=kind/scripts/common.sh
source kind/scripts/common.sh

name=$1 port=$2

bring() {
  kube apply --kustomize "kind/observability/$1"
  kube rollout status "deployment/$1" --namespace collapser --timeout 300s || {
    kube get pods --namespace collapser --selector "app.kubernetes.io/name=$1" --output wide >&2
    kube logs --namespace collapser --selector "app.kubernetes.io/name=$1" --tail 20 --prefix >&2 || true
    fail "$1 does not get ready; see above"
  }
}

need_cluster
# `make deploy` may come later.
kube get namespace collapser >/dev/null 2>&1 || kube apply --filename kind/demo/namespace.yaml
bring prometheus
[[ $name == prometheus ]] || bring "$name"
echo
echo "$name: http://127.0.0.1:$port   (until Ctrl-C; in the cluster it goes on running)"
exec "$KUBECTL" --context "kind-$KIND_CLUSTER" port-forward "service/$name" "$port:http" --namespace collapser >/dev/null
