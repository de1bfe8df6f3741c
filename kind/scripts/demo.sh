#!/usr/bin/env bash
# Sends 10,000 identical calls from a Job in the cluster and shows how many reached the backends. Takes KIND_CLUSTER, KUBECTL
# and MIN_RATIO. Fails if a call failed, an answer was wrong, or there were fewer than MIN_RATIO calls to a backend call.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=kind/scripts/common.sh
source kind/scripts/common.sh

min_ratio=${MIN_RATIO:-500}
shown=(
  collapser_requests_total collapser_backend_calls_total collapser_collapsed_requests_total
  collapser_cache_hits_total collapser_bypassed_requests_total collapser_refused_requests_total collapser_errors_total
)

in_namespace() {
  kube --namespace collapser "$@"
}

# ask POD PORT PATH: an HTTP GET by way of the API server, so that no port has to be forwarded.
ask() {
  in_namespace get --raw "/api/v1/namespaces/collapser/pods/$1:$2/proxy$3"
}

# metric NAME: its sum over labels and pods, from their metrics on standard input.
metric() {
  awk -v name="$1" '{ sub(/[{ ].*/, "", $1) } $1 == name { sum += $NF } END { printf "%d", sum }'
}

all_metrics() {
  local pod
  for pod in "${pods[@]}"; do
    ask "$pod" 2112 /metrics
  done
}

state() {
  in_namespace get job collapser-load --output 'jsonpath={range .status.conditions[?(@.status=="True")]}{.type} {end}'
}

need_cluster
in_namespace rollout status deployment/collapser-demo --timeout 120s >/dev/null ||
  fail "the demo is not deployed or not ready; run: make deploy"
mapfile -t pods < <(in_namespace get pods --selector app.kubernetes.io/name=collapser-demo --output go-template='
  {{- range .items}}{{if not .metadata.deletionTimestamp}}{{.metadata.name}}{{"\n"}}{{end}}{{end}}')
[[ ${#pods[@]} -gt 0 ]] || fail "there are no pods; run: make deploy"

for pod in "${pods[@]}"; do
  ask "$pod" 8080 /reset >/dev/null
done
before=$(all_metrics)

in_namespace delete job collapser-load --ignore-not-found >/dev/null
kube apply --kustomize kind/demo/load >/dev/null
echo "sending 10,000 identical calls to ${#pods[@]} pods"
deadline=$((SECONDS + 200))
until [[ $(state) =~ (Complete|Failed) ]]; do
  ((SECONDS < deadline)) || fail "the load did not end; see: kubectl --namespace collapser describe job collapser-load"
  sleep 1
done
outcome=${BASH_REMATCH[1]}
report=$(in_namespace logs job/collapser-load)
# It cannot know the backend calls, which each pod counts for itself.
printf '\n%s\n' "$report" | sed '/^backend calls/d'

# Metrics lag by up to 100 ms.
sleep 0.5
after=$(all_metrics)
calls=$(awk '$1 == "calls" { gsub(/,/, "", $2); print $2 }' <<<"$report")
printf '\ncounted at the backends:\n'
reached=0
for pod in "${pods[@]}"; do
  count=$(ask "$pod" 8080 /calls | sed -n 's/.*"compute":\([0-9]*\).*/\1/p')
  [[ $count ]] || fail "the backend of $pod does not tell its calls"
  printf '  %-40s %10d\n' "$pod" "$count"
  reached=$((reached + count))
done
printf '\nas the metrics of the sidecars tell it:\n'
for name in "${shown[@]}"; do
  printf '  %-40s %10d\n' "$name" $(($(metric "$name" <<<"$after") - $(metric "$name" <<<"$before")))
done

[[ $outcome == Complete ]] || fail "calls failed or answers were wrong; see the report above"
[[ $calls && $reached -gt 0 ]] || fail "nothing was counted"
printf '\n%d calls, %d backend calls (%d:1).\n' "$calls" "$reached" $((calls / reached))
((calls >= reached * min_ratio)) || fail "fewer than $min_ratio calls to a backend call"
