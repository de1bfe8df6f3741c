# shellcheck shell=bash
# Sourced by the other scripts: what all of them need.

: "${KIND_CLUSTER:=collapser}" "${KUBECTL:=kubectl}" "${CONTAINER_ENGINE:=}"

fail() {
  echo "error: $*" >&2
  exit 1
}

# The full name, which docker leaves out and podman does not: with it both engines, kind and `podman kube play` mean the
# same image by the `collapser/sidecar:dev` of the manifests.
image_name() {
  echo "docker.io/collapser/$1:dev"
}

# Sets CONTAINER_ENGINE to docker or podman, whichever works, unless it is set already.
choose_engine() {
  local candidates=(docker podman) candidate
  [[ -z ${CONTAINER_ENGINE:-} ]] || candidates=("$CONTAINER_ENGINE")
  for candidate in "${candidates[@]}"; do
    [[ $candidate == docker || $candidate == podman ]] || fail "CONTAINER_ENGINE=$candidate; it can be docker or podman"
    if "$candidate" info >/dev/null 2>&1; then
      export CONTAINER_ENGINE=$candidate
      return
    fi
  done
  for candidate in "${candidates[@]}"; do
    ! command -v "$candidate" >/dev/null || fail "\`$candidate info\` fails; is its service running, and may you use it?"
  done
  fail "not installed: ${candidates[*]}; get Docker (https://docs.docker.com/engine/install) or podman" \
    "(Debian: apt-get install podman)"
}

# kind, with the engine that was chosen. Node images can be used, and images be loaded, by a kind that is new enough.
need_kind() {
  local oldest=0.33.0 version
  command -v kind >/dev/null ||
    fail "kind is missing; install $oldest or newer: https://kind.sigs.k8s.io/docs/user/quick-start/#installation"
  version=$(kind version | sed -n 's/^kind v\([0-9.]*\).*/\1/p')
  [[ $(printf '%s\n' "$oldest" "$version" | sort -V | head -n 1) == "$oldest" ]] ||
    fail "kind ${version:-of unknown version} is too old for the node image of kind/cluster.yaml; install $oldest or newer"
  choose_engine
  export KIND_EXPERIMENTAL_PROVIDER=$CONTAINER_ENGINE
}

have_cluster() {
  kind get clusters 2>/dev/null | grep -qx "$KIND_CLUSTER"
}

# kubectl on the kind cluster, whatever the current context is.
kube() {
  "$KUBECTL" --context "kind-$KIND_CLUSTER" "$@"
}

need_cluster() {
  kube version >/dev/null 2>&1 || fail "there is no kind cluster \`$KIND_CLUSTER\`, or it does not answer; run: make cluster"
}
