#!/usr/bin/env bash
# Removes the namespace with all that was deployed there. Takes KIND_CLUSTER and KUBECTL.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=kind/scripts/common.sh
source kind/scripts/common.sh

# kind takes its context away with a cluster.
"$KUBECTL" config get-contexts "kind-$KIND_CLUSTER" >/dev/null 2>&1 || {
  echo "there is no kind cluster \`$KIND_CLUSTER\`, so there is nothing to remove"
  exit
}
need_cluster
# The pods drain meanwhile.
kube delete namespace collapser --ignore-not-found --timeout 120s
