#!/usr/bin/env bash
# Builds the images with podman and runs the shipped manifests with `podman kube play` under the tests of loadgen/tests/pod.
# Needs no registry and no cluster: Envoy's image is made from the Envoy in .tools. Needs root, since the tests call
# the pod by its address. Takes ENVOY, PROGRAMS, MODULE and KUBECTL.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=kind/scripts/common.sh
source kind/scripts/common.sh

work=$PWD/target/pod
mkdir -p "$work"
[[ $(id -u) -eq 0 ]] || fail "the pod's test runs as root (podman gives a pod an address that can be reached only then)"

# Names of pods and images are the machine's, so of two runs the second waits. The lock is held by flock itself: a container
# that is left behind does not keep it.
if [[ -z ${COLLAPSER_POD_LOCKED:-} ]]; then
  lock=/run/collapser-test-pod.lock
  flock --nonblock "$lock" true || echo "another run of this test is under way on this machine; waiting for its end"
  COLLAPSER_POD_LOCKED=1 exec flock --close "$lock" "$PWD/kind/scripts/test-pod.sh" "$@"
fi

# Installs what is missing of podman and what it needs, and fails if that is nothing.
install_podman() {
  local package missing=()
  command -v apt-get >/dev/null && command -v dpkg-query >/dev/null || return
  for package in podman runc catatonit netavark iptables; do
    [[ $(dpkg-query --show --showformat '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
  done
  [[ ${#missing[@]} -gt 0 ]] || return
  echo "installing ${missing[*]}"
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"; } \
    >"$work/apt.log" 2>&1 || fail "cannot install ${missing[*]}; see $work/apt.log"
}

# One static program in a pod, to see whether podman works with these variables (NAME=VALUE).
podman_works_with() {
  env "$@" podman pod rm --force collapser-probe 2>/dev/null || true
  env "$@" podman build --quiet --file kind/images/loadgen.Dockerfile --tag localhost/collapser-probe:dev "$PROGRAMS" &&
    env "$@" podman run --rm --pod new:collapser-probe localhost/collapser-probe:dev --version &&
    env "$@" podman pod rm --force collapser-probe
}

# The user's own configuration comes first and is never changed. The other is for where podman misses what it takes for
# granted: systemd, high limits, the overlay file system.
settle_podman() {
  local ours=("CONTAINERS_CONF=$work/containers.conf")
  command -v podman >/dev/null || return
  if podman_works_with; then return; fi
  if podman_works_with "${ours[@]}"; then
    export "${ours[@]}"
    return
  fi
  ours+=(STORAGE_DRIVER=vfs)
  podman_works_with "${ours[@]}" && export "${ours[@]}"
}

cat >"$work/containers.conf" <<'CONF'
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
CONF
settle_podman >"$work/podman.log" 2>&1 || { install_podman && settle_podman >>"$work/podman.log" 2>&1; } || {
  tail -n 5 "$work/podman.log" >&2
  fail "podman is missing or cannot run a container here; see $work/podman.log"
}
echo "$(podman --version)${CONTAINERS_CONF:+, with $CONTAINERS_CONF}"

# Envoy and the libraries that it names, where the loader looks for them.
base=$work/base
rm -rf "$base"
mkdir -p "$base/rootfs/usr/local/bin" "$base/rootfs/etc/ssl/certs"
install -m 0755 "$(readlink -f "$ENVOY")" "$base/rootfs/usr/local/bin/envoy"
ldd "$(readlink -f "$ENVOY")" | sed -n 's/^[^/]*\(\/[^ ]*\) (0x[0-9a-f]*)$/\1/p' | while read -r library; do
  install -D -m 0755 "$library" "$base/rootfs$library"
done
[[ ! -f /etc/ssl/certs/ca-certificates.crt ]] || install -m 0644 /etc/ssl/certs/ca-certificates.crt "$base/rootfs/etc/ssl/certs"
printf 'FROM scratch\nCOPY rootfs /\n' >"$base/Dockerfile"
export ENVOY_IMAGE=localhost/collapser-envoy:test
echo "building $ENVOY_IMAGE from $ENVOY"
podman build --quiet --tag "$ENVOY_IMAGE" "$base" >/dev/null
CONTAINER_ENGINE=podman kind/scripts/images.sh sidecar backend loadgen module

"$KUBECTL" kustomize kind/podman >"$work/podman.yaml"
"$KUBECTL" kustomize kind/demo >"$work/demo.yaml"
"$KUBECTL" kustomize kind/demo/load >"$work/load.yaml"

# The tests do so too; this is for one that is killed, and for what an earlier run has left.
clean_up() {
  podman kube down "$work/podman.yaml" >/dev/null 2>&1 || true
  podman rm --force --filter label=collapser-test >/dev/null 2>&1 || true
}
trap clean_up EXIT
clean_up
export COLLAPSER_POD_MANIFESTS=$work
cargo test --release --package collapser-loadgen --test pod -- --test-threads 1 --nocapture
