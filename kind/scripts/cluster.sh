#!/usr/bin/env bash
# cluster.sh up|down|check: creates the kind cluster, deletes it, or sees whether it and its tools are there.
# Takes KIND_CLUSTER and CONTAINER_ENGINE.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=kind/scripts/common.sh
source kind/scripts/common.sh

need_kind
case ${1:-} in
up)
  if have_cluster; then
    echo "the kind cluster \`$KIND_CLUSTER\` is there already"
  else
    kind create cluster --name "$KIND_CLUSTER" --config kind/cluster.yaml --wait 180s
  fi
  ;;
down) kind delete cluster --name "$KIND_CLUSTER" ;;
check) have_cluster || fail "there is no kind cluster \`$KIND_CLUSTER\`; run: make cluster" ;;
*) fail "usage: cluster.sh up|down|check" ;;
esac
