#!/usr/bin/env bash
# Removes the namespace with all that was deployed there. Takes KIND_CLUSTER and KUBECTL.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=kind/scripts/common.sh
source kind/scripts/common.sh

need_cluster
# The pods drain meanwhile.
kube delete namespace collapser --ignore-not-found --timeout 120s
