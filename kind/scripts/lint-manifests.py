#!/usr/bin/env python3
"""Checks everything under kind/ that a cluster or an image builder would read, without either of them.

- shell scripts of the whole repository: shellcheck
- Dockerfiles: hadolint
- the kind cluster's configuration
- every kustomization is built; every manifest belongs to one
- Kubernetes resources: strictly against the schemas of the oldest and the newest Kubernetes
- Istio resources: against Istio's CRDs (or, where that file is absent, the typed models of Istio 1.24)
- names that refer to each other: selectors, ports, ConfigMaps, clusters of Istio
- what Istio makes of its resources: derived as Envoy configuration, which a real Envoy validates, and which the
  fixture of the end-to-end tests (envoy/istio-inbound.yaml) agrees with

Prints every fault it finds, and exits with 1 if there is any.
"""

import argparse
import copy
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import jsonschema
import kubernetes_validate
import yaml

ROOT = Path(__file__).resolve().parents[2]
KIND = ROOT / "kind"
POD_OWNERS = {"Deployment", "StatefulSet", "DaemonSet", "Job"}
HCM = "envoy.filters.network.http_connection_manager"
ROUTER = "envoy.filters.http.router"
# Where the end-to-end tests run what Istio makes of kind/istio/wasmplugin, with the demo's backend and ports.
FIXTURE = ROOT / "envoy" / "istio-inbound.yaml"
FIXTURE_OF = KIND / "istio" / "demo" / "wasmplugin"
# What a resource that is not formed as expected makes of a check that takes it to be.
MISSHAPEN = (AttributeError, IndexError, KeyError, TypeError, ValueError)


class Report:
    """Collects faults, so that one run shows all of them."""

    def __init__(self):
        self.faults = []
        self.notices = []

    def fault(self, where, what):
        self.faults.append(f"{where}: {what}")

    def notice(self, what):
        self.notices.append(what)

    def step(self, what):
        print(f"  {what}", flush=True)

    def end(self):
        for notice in self.notices:
            print(f"NOTICE: {notice}")
        if not self.faults:
            print("manifests: no fault")
            return 0
        print(f"\nmanifests: {len(self.faults)} fault(s)", file=sys.stderr)
        for fault in self.faults:
            print(f"error: {fault}", file=sys.stderr)
        return 1


def relative(path):
    return str(Path(path).resolve().relative_to(ROOT))


def run(command, **options):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)


class Loader(yaml.SafeLoader):
    """YAML as Kubernetes reads it: a key that is given twice is an error."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def load_all(text):
    # Loader is a SafeLoader.
    return [document for document in yaml.load_all(text, Loader=Loader) if document is not None]


def load_files(paths, report):
    """The documents of each YAML file; what cannot be read is a fault."""
    loaded = {}
    for path in paths:
        try:
            loaded[path] = load_all(path.read_text())
        except yaml.YAMLError as error:
            report.fault(relative(path), f"not YAML: {' '.join(str(error).split())}")
    return loaded


# ---------------------------------------------------------------- scripts and Dockerfiles


def files():
    """Files of the repository; what a build or a tool puts there is left out."""
    for folder, folders, names in os.walk(ROOT):
        folders[:] = sorted(name for name in folders if name not in {".git", ".tools", "target", "node_modules"})
        for name in sorted(names):
            yield Path(folder) / name


def is_shell(path):
    if path.suffix == ".sh":
        return True
    if path.suffix or not path.is_file():
        return False
    with path.open("rb") as file:
        return re.match(rb"#!.*\b(ba|da|k)?sh\b", file.readline(200)) is not None


def is_dockerfile(path):
    return path.name in {"Dockerfile", "Containerfile"} or path.name.startswith("Dockerfile.") \
        or path.suffix in {".Dockerfile", ".dockerfile"}


def check_scripts(shellcheck, report):
    scripts = [path for path in files() if is_shell(path)]
    report.step(f"shellcheck: {len(scripts)} scripts")
    for script in scripts:
        result = run([shellcheck, "--external-sources", "--source-path=SCRIPTDIR", "--format=gcc", script], cwd=ROOT)
        if result.returncode != 0:
            for line in (result.stdout + result.stderr).strip().splitlines():
                report.fault("shellcheck", line.replace(f"{ROOT}/", ""))


def check_dockerfiles(hadolint, report):
    dockerfiles = [path for path in files() if is_dockerfile(path)]
    report.step(f"hadolint: {len(dockerfiles)} Dockerfiles")
    if not dockerfiles:
        report.fault("kind/images", "there is no Dockerfile")
    for dockerfile in dockerfiles:
        result = run([hadolint, "--no-color", "--failure-threshold", "style", relative(dockerfile)], cwd=ROOT)
        if result.returncode != 0:
            for line in (result.stdout + result.stderr).strip().splitlines():
                report.fault("hadolint", line)
        # An image by name alone is another one tomorrow, also where the name is an argument.
        for number, line in enumerate(dockerfile.read_text().splitlines(), 1):
            default = re.match(r"ARG\s+\w*IMAGE\w*=(\S+)", line)
            if default and not re.search(r"(:(?!latest$)[\w.-]+|@sha256:[0-9a-f]{64})$", default[1]):
                report.fault(f"{relative(dockerfile)}:{number}", f"the image {default[1]} is not pinned")


# ---------------------------------------------------------------- kind


def check_cluster(report):
    """kind's own configuration has no published schema; these are the fields of v1alpha4 that are in use."""
    path = KIND / "cluster.yaml"
    report.step("kind: cluster.yaml")
    if not path.is_file():
        return report.fault("kind/cluster.yaml", "is missing")
    documents = load_files([path], report).get(path, [])
    if len(documents) != 1:
        return report.fault("kind/cluster.yaml", f"one document is expected, not {len(documents)}")
    cluster = documents[0]
    fault = lambda what: report.fault("kind/cluster.yaml", what)
    if (cluster.get("kind"), cluster.get("apiVersion")) != ("Cluster", "kind.x-k8s.io/v1alpha4"):
        fault("is not a Cluster of kind.x-k8s.io/v1alpha4")
    known = {"kind", "apiVersion", "name", "nodes", "networking", "featureGates", "runtimeConfig",
             "kubeadmConfigPatches", "kubeadmConfigPatchesJSON6902", "containerdConfigPatches",
             "containerdConfigPatchesJSON6902"}
    for key in set(cluster) - known:
        fault(f"unknown field {key}")
    known = {"role", "image", "labels", "extraMounts", "extraPortMappings", "kubeadmConfigPatches",
             "kubeadmConfigPatchesJSON6902"}
    nodes = cluster.get("nodes") or []
    if not any(node.get("role") == "control-plane" for node in nodes):
        fault("no node is control-plane")
    for number, node in enumerate(nodes):
        for key in set(node) - known:
            fault(f"nodes[{number}]: unknown field {key}")
        if node.get("role") not in {"control-plane", "worker"}:
            fault(f"nodes[{number}]: role is {node.get('role')!r}")
        if not re.search(r"kindest/node:v\d+\.\d+\.\d+@sha256:[0-9a-f]{64}$", node.get("image", "")):
            fault(f"nodes[{number}]: image must be kindest/node with version and digest")


# ---------------------------------------------------------------- kustomize


def referenced(kustomization, folder):
    """What a kustomization names: files and folders, as absolute paths."""
    names = list(kustomization.get("resources") or []) + list(kustomization.get("components") or [])
    names += [patch["path"] for patch in kustomization.get("patches") or [] if "path" in patch]
    names += list(kustomization.get("configurations") or [])
    names += [item["path"] for item in kustomization.get("replacements") or [] if "path" in item]
    for kind in ("configMapGenerator", "secretGenerator"):
        for generator in kustomization.get(kind) or []:
            names += [name.split("=", 1)[-1] for name in (generator.get("files") or []) + (generator.get("envs") or [])]
    return {(folder / name).resolve() for name in names}


def build_all(kubectl, report):
    """Builds every kustomization: {folder: resources}. A component is built by those that use it."""
    kustomizations = {}
    for path in sorted(KIND.rglob("kustomization.y*ml")):
        documents = load_files([path], report).get(path)
        if documents:
            kustomizations[path.parent] = documents[0]
    if not kustomizations:
        report.fault("kind", "there is no kustomization")
    report.step(f"kustomize: {len(kustomizations)} kustomizations")

    used = set().union(*(referenced(content, folder) for folder, content in kustomizations.items()))
    loaded = load_files([path for path in sorted(KIND.rglob("*.y*ml")) if path.name != "kustomization.yaml"], report)
    for path, documents in loaded.items():
        is_manifest = any(isinstance(item, dict) and "apiVersion" in item and "kind" in item for item in documents)
        if is_manifest and path.resolve() not in used and path != KIND / "cluster.yaml":
            # Grafana's and Prometheus' own files have an apiVersion too, but a number.
            if all(isinstance(item.get("apiVersion"), str) for item in documents):
                report.fault(relative(path), "no kustomization uses it, so nobody applies it")

    built = {}
    for folder, content in kustomizations.items():
        if content.get("kind") == "Component":
            if folder.resolve() not in used:
                report.fault(relative(folder), "no kustomization uses this component, so nothing tests it")
            continue
        result = run([kubectl, "kustomize", folder])
        if result.returncode != 0:
            report.fault(relative(folder), f"kustomize: {result.stderr.strip()}")
        if result.stderr.strip() and result.returncode == 0:
            report.fault(relative(folder), f"kustomize warns: {result.stderr.strip()}")
        try:
            built[folder] = load_all(result.stdout)
        except yaml.YAMLError as error:
            report.fault(relative(folder), f"kustomize made what is not YAML: {error}")
    return built


def check_own_workload(kubectl, report):
    """The variants of Istio, used for a Deployment that has other labels and another port than the demo's."""
    report.step("kustomize: Istio's variants for a workload of one's own")
    workload = {
        "apiVersion": "apps/v1", "kind": "Deployment",
        "metadata": {"name": "own", "annotations": {"collapser-port": "9000"}},
        "spec": {"selector": {"matchLabels": {"app": "own"}}, "template": {
            "metadata": {"labels": {"app": "own"}}, "spec": {"containers": [{"name": "own", "image": "own:1"}]}}}}
    for variant in ("wasmplugin", "envoyfilter"):
        component = KIND / "istio" / variant
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder).resolve()
            (folder / "own.yaml").write_text(yaml.safe_dump(workload))
            (folder / "kustomization.yaml").write_text(yaml.safe_dump({
                "apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "nameSuffix": "-own",
                "resources": ["own.yaml"], "components": [os.path.relpath(component, folder)]}))
            result = run([kubectl, "kustomize", folder])
        if result.returncode != 0:
            report.fault(relative(component), f"kustomize, for a workload of one's own: {result.stderr.strip()}")
        for left in ("50051", "collapser-demo", "bootstrapOverride: collapser-bootstrap\n"):
            if left in result.stdout:
                report.fault(relative(component), f"leaves {left.strip()!r} in what is for a workload of one's own")


# ---------------------------------------------------------------- schemas


def name_of(resource):
    return f"{resource.get('kind')}/{resource.get('metadata', {}).get('name')}"


def is_istio(resource):
    return str(resource.get("apiVersion", "")).split("/")[0].endswith(".istio.io")


def check_kubernetes(built, versions, report):
    resources = [(folder, item) for folder, items in built.items() for item in items if not is_istio(item)]
    report.step(f"kubernetes-validate: {len(resources)} resources, each for {' and '.join(versions)}")
    known = {kubernetes_validate.utils.major_minor(version) for version in kubernetes_validate.utils.all_versions()}
    for version in versions:
        if version not in known:
            report.fault("kubernetes-validate", f"has no schemas for Kubernetes {version}, only for {sorted(known)}")
    for folder, resource in resources:
        where = f"{relative(folder)}: {name_of(resource)}"
        for version in versions:
            try:
                kubernetes_validate.validate(resource, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                path = ".".join(str(part) for part in error.path)
                report.fault(where, f"Kubernetes {version}: {path or 'resource'}: {error.message}")
            except Exception as error:  # its other errors share no base class
                report.fault(where, f"Kubernetes {version}: {getattr(error, 'message', error)}")


def strict(schema):
    """A CRD's schema as JSON Schema that refuses unknown fields, as the API server does with --validate=strict."""
    if not isinstance(schema, dict):
        return schema
    schema = dict(schema)
    if schema.pop("x-kubernetes-int-or-string", False):
        schema.pop("type", None)
        schema["type"] = ["integer", "string"]
    keep = schema.pop("x-kubernetes-preserve-unknown-fields", False)
    if "properties" in schema:
        schema["properties"] = {name: strict(item) for name, item in schema["properties"].items()}
        if not keep and "additionalProperties" not in schema:
            schema["additionalProperties"] = False
    if isinstance(schema.get("additionalProperties"), dict):
        schema["additionalProperties"] = strict(schema["additionalProperties"])
    if "items" in schema:
        schema["items"] = strict(schema["items"])
    if schema.pop("nullable", False) and "type" in schema:
        schema["type"] = [schema["type"], "null"]
    # anyOf, oneOf and not only restrict what properties declares, so they stay as they are.
    return schema


def crd_schemas(path):
    schemas = {}
    for crd in load_all(path.read_text()):
        if crd.get("kind") != "CustomResourceDefinition":
            continue
        spec = crd["spec"]
        for version in spec["versions"]:
            if version.get("served"):
                schema = strict(version["schema"]["openAPIV3Schema"])
                schema["properties"].update(apiVersion={"type": "string"}, kind={"type": "string"},
                                            metadata={"type": "object"})
                schemas[f"{spec['group']}/{version['name']}", spec["names"]["kind"]] = schema
    return schemas


def lost(before, after, path=""):
    """Fields of `before` that are not in `after`."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            if key not in after:
                yield f"{path}.{key}".lstrip(".")
            else:
                yield from lost(value, after[key], f"{path}.{key}")
    elif isinstance(before, list) and isinstance(after, list):
        for number, (one, other) in enumerate(zip(before, after)):
            yield from lost(one, other, f"{path}[{number}]")


def check_by_models(resource, where, report):
    """Without the CRDs: the models of Istio 1.24, which know all but one of the fields and values in use."""
    import importlib

    import pydantic

    group, version = resource["apiVersion"].split("/")
    try:
        module = importlib.import_module(f"cloudcoil.models.istio.{group.split('.')[0]}.{version}")
        model = getattr(module, resource["kind"])
    except (ImportError, AttributeError):
        return report.fault(where, f"Istio has no {resource['kind']} in {resource['apiVersion']}")
    resource = copy.deepcopy(resource)
    if resource["kind"] == "WasmPlugin" and resource.get("spec", {}).get("failStrategy") == "FAIL_RELOAD":
        resource["spec"]["failStrategy"] = "FAIL_OPEN"  # FAIL_RELOAD came with Istio 1.27
    try:
        parsed = model.model_validate(resource)
    except pydantic.ValidationError as error:
        for item in error.errors():
            report.fault(where, f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}")
        return None
    # The models ignore what they do not know; it is missing when they are written out again.
    for field in lost(resource["spec"], parsed.model_dump(by_alias=True, exclude_unset=True, mode="json")["spec"]):
        report.fault(where, f"unknown field spec.{field}")
    return None


def check_istio_schemas(built, crds, report):
    resources = [(folder, item) for folder, items in built.items() for item in items if is_istio(item)]
    if not resources:
        return
    schemas = crd_schemas(crds) if crds.is_file() else None
    source = crds.name if schemas is not None else "the models of Istio 1.24"
    report.step(f"Istio: {len(resources)} resources, against {source}")
    if schemas is None:
        report.notice(f"Istio's CRDs are not at {crds} (ISTIO_CRDS names another file), so its resources were checked "
                      "against the models of Istio 1.24 only")
    for folder, resource in resources:
        where = f"{relative(folder)}: {name_of(resource)}"
        if schemas is None:
            check_by_models(resource, where, report)
            continue
        schema = schemas.get((resource["apiVersion"], resource["kind"]))
        if schema is None:
            report.fault(where, f"Istio has no {resource['kind']} in {resource['apiVersion']}")
            continue
        for error in jsonschema.Draft202012Validator(schema).iter_errors(resource):
            report.fault(where, f"{'.'.join(str(part) for part in error.path) or 'resource'}: {error.message}")


# ---------------------------------------------------------------- names that refer to each other


def pod_template(resource):
    return resource["spec"]["template"] if resource.get("kind") in POD_OWNERS else None


def matches(selector, labels):
    return selector and all((labels or {}).get(key) == value for key, value in selector.items())


def check_names(built, report):
    report.step("names: selectors, ports, ConfigMaps")
    for folder, resources in built.items():
        try:
            check_names_of(folder, resources, report)
        except MISSHAPEN as error:
            report.fault(relative(folder), f"names cannot be checked: {error!r}")


def check_names_of(folder, resources, report):
    fault = lambda resource, what: report.fault(f"{relative(folder)}: {name_of(resource)}", what)
    identities = [(item["apiVersion"].split("/")[0], name_of(item), item["metadata"].get("namespace"))
                  for item in resources]
    for identity in {item for item in identities if identities.count(item) > 1}:
        report.fault(relative(folder), f"{identity[1]} is there twice")
    templates = [(item, pod_template(item)) for item in resources if pod_template(item)]
    maps = {item["metadata"]["name"] for item in resources if item["kind"] == "ConfigMap"}

    for resource in resources:
        spec = resource.get("spec") or {}
        selectors = {
            "Service": lambda: spec.get("selector"),
            "PodDisruptionBudget": lambda: (spec.get("selector") or {}).get("matchLabels"),
            "WasmPlugin": lambda: (spec.get("selector") or {}).get("matchLabels"),
            "EnvoyFilter": lambda: (spec.get("workloadSelector") or {}).get("labels"),
            "Sidecar": lambda: (spec.get("workloadSelector") or {}).get("labels"),
        }.get(resource["kind"])
        if selectors and templates:
            selected = [template for _, template in templates
                        if matches(selectors(), template["metadata"].get("labels"))]
            if not selected:
                fault(resource, f"selects no pod of this kustomization: {selectors()}")
            for port in spec.get("ports") or [] if resource["kind"] == "Service" else []:
                target = port.get("targetPort", port["port"])
                for template in selected:
                    ports = [item for container in template["spec"]["containers"]
                             for item in container.get("ports") or []]
                    if not any(target in (item.get("name"), item["containerPort"]) for item in ports):
                        fault(resource, f"port {port.get('name')}: no container of its pods has the port {target}")

    for owner, template in templates:
        labels = template["metadata"].get("labels")
        if owner["kind"] != "Job" and not matches(owner["spec"]["selector"].get("matchLabels"), labels):
            fault(owner, "its selector does not match its own pods")
        pod = template["spec"]
        needed = {volume["configMap"]["name"] for volume in pod.get("volumes") or [] if "configMap" in volume}
        for container in pod["containers"] + (pod.get("initContainers") or []):
            needed |= {source["configMapRef"]["name"] for source in container.get("envFrom") or []
                       if "configMapRef" in source}
            names = [port["name"] for port in container.get("ports") or [] if "name" in port]
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                port = (container.get(probe) or {}).get("httpGet", {}).get("port")
                if isinstance(port, str) and port not in names:
                    fault(owner, f"{container['name']}: {probe} asks at the port {port}, which it does not have")
            mounts = {mount["name"] for mount in container.get("volumeMounts") or []}
            volumes = {volume["name"] for volume in pod.get("volumes") or []}
            for mount in mounts - volumes:
                fault(owner, f"{container['name']}: mounts {mount}, which is no volume of the pod")
            if not re.search(r"(:(?!latest$)[\w.-]+|@sha256:[0-9a-f]{64})$", container.get("image", "")):
                fault(owner, f"{container['name']}: the image {container.get('image')} is not pinned")
        annotations = template["metadata"].get("annotations") or {}
        override = annotations.get("sidecar.istio.io/bootstrapOverride")
        needed |= {override} if override else set()
        for name in needed - maps:
            fault(owner, f"needs the ConfigMap {name}, which is not in this kustomization")
        for name in ("sidecar.istio.io/userVolume", "sidecar.istio.io/userVolumeMount"):
            try:
                json.loads(annotations.get(name, "{}"))
            except ValueError as error:
                fault(owner, f"annotation {name}: not JSON: {error}")
        try:
            if not isinstance(yaml.safe_load(annotations.get("proxy.istio.io/config", "{}")), dict):
                fault(owner, "annotation proxy.istio.io/config is not a mapping")
        except yaml.YAMLError as error:
            fault(owner, f"annotation proxy.istio.io/config: not YAML: {error}")


# ---------------------------------------------------------------- Istio as Envoy sees it


def merge(target, patch):
    """What Istio's MERGE and Envoy's --config-yaml do: lists are appended, single values replaced."""
    for key, value in patch.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            merge(target[key], value)
        elif isinstance(value, list) and isinstance(target.get(key), list):
            target[key] += copy.deepcopy(value)
        else:
            target[key] = copy.deepcopy(value)


class Inbound:
    """The inbound side of a sidecar as istiod writes it (Istio's pilot/pkg/networking/core), for what is validated
    here: plain text only, and without Istio's own filters for metadata and telemetry, which a plain Envoy lacks."""

    def __init__(self, resources):
        self.of = lambda kind: [item for item in resources if item["kind"] == kind]
        self.faults = []
        self.clusters = {}
        self.chains = {}
        for sidecar in self.of("Sidecar"):
            for ingress in sidecar["spec"].get("ingress") or []:
                self.add_port(ingress)
        self.listener = {
            "name": "virtualInbound", "traffic_direction": "INBOUND",
            "address": {"socket_address": {"address": "0.0.0.0", "port_value": 15006}},
            "filter_chains": list(self.chains.values()),
            "listener_filters": [{"name": "envoy.filters.listener.original_dst", "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.filters.listener.original_dst.v3.OriginalDst"}}],
        }
        for plugin in self.of("WasmPlugin"):
            self.add_plugin(plugin)
        for resource in self.of("EnvoyFilter"):
            for number, patch in enumerate(resource["spec"].get("configPatches") or []):
                self.apply(f"{name_of(resource)}: configPatches[{number}]", patch)

    def add_port(self, ingress):
        port = ingress["port"]["number"]
        is_http2 = ingress["port"]["protocol"] in {"GRPC", "HTTP2"}
        name = f"inbound|{port}||"
        pool = ingress.get("connectionPool") or {}
        tcp, http = pool.get("tcp") or {}, pool.get("http") or {}
        unlimited = 4294967295
        cluster = {
            "name": name, "connect_timeout": tcp.get("connectTimeout", "10s"),
            "circuit_breakers": {"thresholds": [{
                "max_connections": tcp.get("maxConnections", unlimited),
                "max_pending_requests": http.get("http1MaxPendingRequests", unlimited),
                "max_requests": http.get("http2MaxRequests", unlimited),
                "max_retries": http.get("maxRetries", unlimited),
                "track_remaining": True}]},
        }
        if "defaultEndpoint" in ingress:
            host, endpoint = ingress["defaultEndpoint"].rsplit(":", 1)
            address = {"socket_address": {"address": host, "port_value": int(endpoint)}}
            cluster["type"] = "STATIC"
            cluster["load_assignment"] = {
                "cluster_name": name, "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}]}
        else:
            cluster.update(type="ORIGINAL_DST", lb_policy="CLUSTER_PROVIDED")
        if is_http2:
            cluster["typed_extension_protocol_options"] = {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {"http2_protocol_options": {}}}}
        self.clusters[name] = cluster
        extension = lambda short, message, **fields: {"name": f"envoy.filters.http.{short}", "typed_config": {
            "@type": f"type.googleapis.com/envoy.extensions.filters.http.{short}.v3.{message}", **fields}}
        manager = {
            "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3."
                     "HttpConnectionManager",
            "stat_prefix": f"inbound_0.0.0.0_{port};", "stream_idle_timeout": "0s",
            "normalize_path": True, "path_with_escaped_slashes_action": "KEEP_UNCHANGED",
            "use_remote_address": False, "server_name": "istio-envoy",
            "forward_client_cert_details": "APPEND_FORWARD",
            "set_current_client_cert_details": {"subject": True, "uri": True, "dns": True},
            "upgrade_configs": [{"upgrade_type": "websocket"}],
            "route_config": {"name": name, "validate_clusters": False, "virtual_hosts": [{
                "name": f"inbound|http|{port}", "domains": ["*"], "routes": [{
                    "name": "default", "match": {"prefix": "/"},
                    "route": {"cluster": name, "timeout": "0s", "max_stream_duration": {
                        "max_stream_duration": "0s", "grpc_timeout_header_max": "0s"}}}]}]},
            "http_filters": [
                extension("grpc_stats", "FilterConfig", emit_filter_state=True, stats_for_all_methods=False),
                extension("fault", "HTTPFault"), extension("cors", "Cors"), extension("router", "Router")],
        }
        if is_http2:
            manager["http2_protocol_options"] = {}
        self.chains[port] = {"name": f"0.0.0.0_{port}", "filter_chain_match": {"destination_port": port},
                             "filters": [{"name": HCM, "typed_config": manager}]}

    def manager(self, port):
        return self.chains[port]["filters"][0]["typed_config"]

    def add_plugin(self, plugin):
        spec, meta = plugin["spec"], plugin["metadata"]
        environment = {"ISTIO_META_WASM_PLUGIN_RESOURCE_VERSION": "1"}
        host = []
        for item in (spec.get("vmConfig") or {}).get("env") or []:
            if item.get("valueFrom", "INLINE") == "HOST":
                host.append(item["name"])
            else:
                environment[item["name"]] = item.get("value", "")
        policy = {"FAIL_CLOSE": "FAIL_CLOSED"}.get(spec.get("failStrategy"), spec.get("failStrategy", "FAIL_CLOSED"))
        wasm = {"name": f"extensions.istio.io/wasmplugin/{meta['namespace']}.{meta['name']}", "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm",
            "config": {
                "name": f"{meta['namespace']}.{meta['name']}", "root_id": spec.get("pluginName", ""),
                "failure_policy": policy,
                "configuration": {"@type": "type.googleapis.com/google.protobuf.StringValue",
                                  "value": json.dumps(spec.get("pluginConfig") or {})},
                "vm_config": {"runtime": "envoy.wasm.runtime.v8", "code": {"local": {"filename": "collapser.wasm"}},
                              "environment_variables": {"key_values": environment, "host_env_keys": host}}}}}
        ports = {port["number"] for item in spec.get("match") or [] for port in item.get("ports") or []}
        for port in ports or set(self.chains):
            if port not in self.chains:
                self.faults.append(f"{name_of(plugin)}: no Sidecar has an ingress port {port}")
                continue
            # Behind authentication and authorisation, before what Istio puts last.
            self.manager(port)["http_filters"].insert(0, wasm)

    def apply(self, where, patch):
        match, operation, value = patch.get("match") or {}, patch["patch"]["operation"], patch["patch"].get("value")
        fault = lambda what: self.faults.append(f"{where}: {what}")
        if match.get("context") != "SIDECAR_INBOUND":
            return fault("context is not SIDECAR_INBOUND")
        listener, routes = match.get("listener") or {}, match.get("routeConfiguration") or {}
        if listener.get("name", "virtualInbound") != "virtualInbound":
            return fault(f"there is no inbound listener {listener['name']}")
        port = listener.get("portNumber") or routes.get("portNumber")
        if port and port not in self.chains:
            return fault(f"no Sidecar has an ingress port {port}")
        managers = [self.manager(item) for item in ([port] if port else self.chains)]
        kind = (patch["applyTo"], operation)
        sub_filter = ((listener.get("filterChain") or {}).get("filter") or {}).get("subFilter", {}).get("name")
        if kind == ("LISTENER", "MERGE"):
            merge(self.listener, value)
        elif kind == ("CLUSTER", "MERGE"):
            cluster = self.clusters.get((match.get("cluster") or {}).get("name"))
            if cluster is None:
                return fault(f"there is no inbound cluster {match.get('cluster')}")
            # Options are packed messages to Istio, which replaces them as a whole.
            cluster.get("typed_extension_protocol_options", {}).clear()
            merge(cluster, value)
        elif kind == ("NETWORK_FILTER", "MERGE"):
            for manager in managers:
                if value["typed_config"]["@type"] != manager["@type"]:
                    return fault("merges another type into the connection manager")
                merge(manager, value["typed_config"])
        elif kind == ("HTTP_FILTER", "INSERT_BEFORE"):
            for manager in managers:
                names = [item["name"] for item in manager["http_filters"]]
                if sub_filter not in names:
                    return fault(f"there is no filter {sub_filter} to insert before")
                manager["http_filters"].insert(names.index(sub_filter), copy.deepcopy(value))
        elif kind == ("ROUTE_CONFIGURATION", "MERGE"):
            for manager in managers:
                merge(manager["route_config"], value)
        elif kind == ("HTTP_ROUTE", "INSERT_FIRST"):
            for manager in managers:
                manager["route_config"]["virtual_hosts"][0]["routes"].insert(0, copy.deepcopy(value))
                cluster = value.get("route", {}).get("cluster")
                if cluster not in self.clusters:
                    fault(f"route to the cluster {cluster}, which no Sidecar makes")
        else:
            fault(f"{kind[0]} with {kind[1]} is nothing that this check can apply; teach it")
        return None

    def plugins(self):
        """The Wasm filters, whichever way they came: (port, configuration)."""
        for port in self.chains:
            for item in self.manager(port)["http_filters"]:
                config = item["typed_config"]
                config = config.get("value", config)
                if "vm_config" in config.get("config", {}):
                    yield port, config["config"]

    def bootstrap(self):
        """Istio's bootstrap, in what a custom one may collide with."""
        return {
            "node": {"id": "sidecar~127.0.0.1~collapser-demo.collapser~collapser.svc", "cluster": "collapser-demo"},
            "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 15000}}},
            "layered_runtime": {"layers": [
                {"name": "global config",
                 "static_layer": {"re2.max_program_size.error_level": "32768",
                                  "envoy.reloadable_features.http_reject_path_with_fragment": False}},
                {"name": "admin", "admin_layer": {}}]},
            "stats_config": {"use_all_default_tags": False, "stats_tags": [
                {"tag_name": "cluster_name", "regex": "^cluster\\.((.+?(\\..+?\\.svc\\.cluster\\.local)?)\\.)"},
                {"tag_name": "component", "regex": "(component\\.(.+?)\\.)"}],
                "stats_matcher": {"inclusion_list": {"patterns": [{"prefix": "reporter="}, {"prefix": "wasm"}]}}},
            "static_resources": {"listeners": [self.listener], "clusters": list(self.clusters.values())},
        }


class Outbound:
    """What the sidecar of a caller makes of one service, likewise: routes of its VirtualService with the hash policy of its
    DestinationRule, and the filters that are inserted."""

    def __init__(self, resources):
        one = lambda kind: next(item for item in resources if item["kind"] == kind)
        self.virtual, self.rule = one("VirtualService")["spec"], one("DestinationRule")["spec"]
        self.faults = []
        self.plugins = []
        self.filters = [{"name": ROUTER, "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"}}]
        self.port = self.virtual["http"][0]["route"][0]["destination"]["port"]["number"]
        self.cluster = f"outbound|{self.port}||{self.rule['host']}"
        policy = self.rule["trafficPolicy"]
        self.hash = policy["loadBalancer"]["consistentHash"]
        self.pool = policy.get("connectionPool", {}).get("http", {})
        if self.virtual["hosts"] != [self.rule["host"]]:
            self.faults.append(f"VirtualService for {self.virtual['hosts']}, DestinationRule for {self.rule['host']}")
        for resource in resources:
            if resource["kind"] == "EnvoyFilter":
                for patch in resource["spec"]["configPatches"]:
                    self.apply(name_of(resource), patch)

    def apply(self, where, patch):
        match, operation = patch["match"], patch["patch"]["operation"]
        if (patch["applyTo"], operation, match["context"]) != ("HTTP_FILTER", "INSERT_BEFORE", "SIDECAR_OUTBOUND"):
            return self.faults.append(f"{where}: {patch['applyTo']} is nothing that this check can apply; teach it")
        if match["listener"]["portNumber"] != self.port:
            self.faults.append(f"{where}: port {match['listener']['portNumber']}, but the service has {self.port}")
        self.filters.insert(len(self.filters) - 1, copy.deepcopy(patch["patch"]["value"]))
        config = self.filters[-2]["typed_config"]
        self.plugins.append(config.get("value", config)["config"])
        return None

    def route(self, rule):
        retries = rule.get("retries", {"attempts": 2, "retryOn": "connect-failure,refused-stream,unavailable,cancelled"})
        action = {"cluster": self.cluster, "timeout": "0s",
                  "hash_policy": [{"header": {"header_name": self.hash["httpHeaderName"]}}]}
        if retries["attempts"]:
            action["retry_policy"] = {"retry_on": retries["retryOn"], "num_retries": retries["attempts"]}
        headers = (rule.get("match") or [{}])[0].get("headers", {})
        return {"match": {"prefix": "/", "headers": [{"name": name, "string_match": value}
                                                     for name, value in headers.items()]},
                "request_headers_to_remove": rule.get("headers", {}).get("request", {}).get("remove", []),
                "route": action}

    def bootstrap(self):
        routes = [self.route(rule) for rule in self.virtual["http"]]
        manager = {
            "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3."
                     "HttpConnectionManager",
            "stat_prefix": "outbound", "http_filters": self.filters,
            "route_config": {"name": str(self.port), "virtual_hosts": [
                {"name": self.rule["host"], "domains": ["*"], "routes": routes}]}}
        cluster = {"name": self.cluster, "connect_timeout": "10s", "type": "STATIC",
                   "lb_policy": "MAGLEV" if "maglev" in self.hash else "RING_HASH",
                   "circuit_breakers": {"thresholds": [{"max_requests": self.pool.get("http2MaxRequests", 1024),
                                                        "max_retries": self.pool.get("maxRetries", 3)}]}}
        return {"static_resources": {
            "clusters": [cluster],
            "listeners": [{"name": "outbound",
                           "address": {"socket_address": {"address": "127.0.0.1", "port_value": self.port}},
                           "filter_chains": [{"filters": [{"name": HCM, "typed_config": manager}]}]}]}}


def contains(whole, part, path=""):
    """Where `whole` lacks something of `part`; list items may be anywhere in the list."""
    if isinstance(part, dict):
        if not isinstance(whole, dict):
            yield f"{path or 'it'} is not a mapping"
            return
        for key, value in part.items():
            if key not in whole:
                yield f"{path}.{key} is missing".lstrip(".")
            else:
                yield from contains(whole[key], value, f"{path}.{key}".lstrip("."))
    elif isinstance(part, list):
        for number, item in enumerate(part):
            if not any(not list(contains(other, item)) for other in whole or []):
                yield f"{path}[{number}] is missing: {json.dumps(item)}"
    elif whole != part:
        yield f"{path} is {whole!r}, not {part!r}"


def differences(fixture, inbound, overrides):
    """Where the fixture is not what the resources ask for. It leaves out or names otherwise what its head says."""
    def chain(bootstrap):
        listener = next(item for item in bootstrap["static_resources"]["listeners"] if item["name"] == "virtualInbound")
        return listener, listener["filter_chains"][0]["filters"][0]["typed_config"]

    def settings(manager):
        """Takes the plugin's configuration out, as JSON that can be compared."""
        for item in manager["http_filters"]:
            configuration = item["typed_config"].get("config", {}).get("configuration")
            if configuration:
                item["typed_config"]["config"].pop("name")
                item["typed_config"]["config"]["vm_config"].pop("code")
                item["typed_config"]["config"]["vm_config"]["environment_variables"]["key_values"].pop(
                    "ISTIO_META_WASM_PLUGIN_RESOURCE_VERSION", None)
                return json.loads(configuration.pop("value"))
        return None

    fixture, wanted = copy.deepcopy(fixture), copy.deepcopy(inbound.bootstrap())
    listener, manager = chain(fixture)
    wanted_listener, wanted_manager = chain(wanted)
    for one in (manager, wanted_manager):
        one.pop("stat_prefix")
    for one in (listener, wanted_listener):
        for key in ("filter_chains", "listener_filters", "address"):
            one.pop(key, None)
    if settings(manager) != settings(wanted_manager):
        yield "the plugin's configuration is not that of the WasmPlugin"
    names = [[item["name"] for item in one["http_filters"]] for one in (manager, wanted_manager)]
    if names[0] != names[1]:
        yield f"http_filters are {names[0]}, not {names[1]}"
    for one, other in zip(manager.pop("http_filters"), wanted_manager.pop("http_filters")):
        yield from unequal(one, other, f"filter {other['name']}")
    yield from unequal(manager, wanted_manager)
    yield from unequal(listener, wanted_listener)
    cluster = copy.deepcopy(inbound.clusters[manager["route_config"]["name"]])
    cluster["circuit_breakers"]["thresholds"][0].pop("track_remaining")
    yield from contains(fixture["static_resources"]["clusters"], [cluster], "clusters")
    for override in overrides:
        yield from contains(fixture, json.loads(override))


def unequal(there, wanted, path=""):
    yield from contains(there, wanted, path)
    yield from (f"what Istio would say: {what}" for what in contains(wanted, there, path))


def check_envoy(built, envoy, module, write_to, report):
    variants = [folder for folder, items in built.items()
                if any(item["kind"] in {"WasmPlugin", "EnvoyFilter"} for item in items)]
    callers = [folder for folder in variants if any(item["kind"] == "DestinationRule" for item in built[folder])]
    report.step(f"Envoy: the configuration that Istio makes of {len(variants)} variants")
    if FIXTURE_OF not in variants:
        report.fault(relative(FIXTURE), f"there is no {FIXTURE_OF.name} that it could belong to")
    for folder in variants:
        try:
            if folder in callers:
                check_caller(folder, built[folder], envoy, module, report)
                continue
            check_variant(folder, built[folder], envoy, module, write_to, report)
        except MISSHAPEN as error:
            report.fault(relative(folder), f"what Istio makes of it cannot be told: {error!r}")


def check_variant(folder, resources, envoy, module, write_to, report):
    fault = lambda what: report.fault(relative(folder), what)
    inbound = Inbound(resources)
    for what in inbound.faults:
        fault(what)
    overrides = [item["data"]["custom_bootstrap.json"] for item in resources
                 if item["kind"] == "ConfigMap" and "custom_bootstrap.json" in (item.get("data") or {})]
    for override in overrides:
        try:
            json.loads(override)
        except ValueError as error:
            return fault(f"custom_bootstrap.json is not JSON: {error}")

    plugins = list(inbound.plugins())
    if len(plugins) != 1:
        fault(f"one Wasm filter is expected, not {len(plugins)}")
    for port, plugin in plugins:
        check_plugin(inbound, port, plugin, fault)
        plugin["vm_config"]["code"]["local"]["filename"] = str(module)

    if folder == FIXTURE_OF:
        fixture = load_files([FIXTURE], report).get(FIXTURE, [None])[0] if FIXTURE.is_file() else None
        if fixture is None:
            report.fault(relative(FIXTURE), "is missing")
        else:
            for what in differences(fixture, inbound, overrides):
                report.fault(relative(FIXTURE), f"differs from what Istio makes of {relative(folder)}: {what}")

    if write_to:
        write_to.mkdir(parents=True, exist_ok=True)
        (write_to / f"{folder.name}.yaml").write_text(yaml.safe_dump(inbound.bootstrap(), sort_keys=False))
    validate(envoy, inbound.bootstrap(), overrides, fault)
    return None


def validate(envoy, bootstrap, overrides, fault):
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(bootstrap, file)
        file.flush()
        command = [envoy, "--mode", "validate", "--log-level", "warning", "-c", file.name]
        for override in overrides:
            command += ["--config-yaml", override]
        result = run(command)
    if result.returncode != 0:
        output = result.stdout + result.stderr
        for line in re.findall(r".*\[(?:error|critical)\].*", output) or [output.strip()]:
            fault(f"Envoy: {re.sub(r'^(.[^]]*.)*? *.source/[^ ]* ', '', line).replace(file.name, 'configuration')}")


def check_caller(folder, resources, envoy, module, report):
    fault = lambda what: report.fault(relative(folder), what)
    outbound = Outbound(resources)
    for what in outbound.faults:
        fault(what)
    if len(outbound.plugins) != 1:
        fault(f"one Wasm filter is expected, not {len(outbound.plugins)}")
    for plugin in outbound.plugins:
        if json.loads(plugin["configuration"]["value"]).get("mode") != "affinity":
            fault('a caller\'s filter needs "mode": "affinity"')
        if not plugin.get("allow_on_headers_stop_iteration"):
            fault("without allow_on_headers_stop_iteration there is no key in time")
        plugin["vm_config"]["code"]["local"]["filename"] = str(module)
    if outbound.hash["httpHeaderName"] != "x-collapser-key":
        fault(f"hashes {outbound.hash['httpHeaderName']}, but the filter sets x-collapser-key")
    opened = [rule for rule in outbound.virtual["http"] if rule.get("retries", {}).get("attempts") == 0]
    if not any(rule["match"][0]["headers"] == {"x-collapser-pass": {"exact": "open"}} for rule in opened):
        fault("retries open streams, which then get messages twice")
    validate(envoy, outbound.bootstrap(), [], fault)


def check_plugin(inbound, port, plugin, fault):
    filters = inbound.manager(port)["http_filters"]
    try:
        settings = json.loads(plugin["configuration"]["value"])
    except ValueError as error:
        return fault(f"the plugin's configuration is not JSON: {error}")
    cluster = inbound.clusters.get(settings.get("cluster"))
    if cluster is None:
        fault(f"the plugin's cluster {settings.get('cluster')!r} is none that a Sidecar makes: "
              f"{', '.join(inbound.clusters)}")
    elif cluster["type"] != "STATIC":
        fault(f"the cluster {cluster['name']} is {cluster['type']}, which a flight cannot use: its ingress "
              "needs a defaultEndpoint")
    holds = settings.get("hold") == "filter"
    if holds == bool(plugin.get("allow_on_headers_stop_iteration")):
        fault('either allow_on_headers_stop_iteration is true or "hold" is "filter"')
    names = [item["name"] for item in filters]
    lua = [item for item in filters if item["typed_config"].get("default_source_code")]
    if not lua or names[-1] != ROUTER or names[-2] != lua[-1]["name"]:
        return fault(f"the Lua filter is not directly before the router: {names}")
    code = lua[-1]["typed_config"]["default_source_code"]["inline_string"]
    if "x-collapser-slot" not in code or ("x-collapser-hold" in code) != holds:
        fault("the Lua filter does not fit the plugin's way to hold requests")
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for tool in ("kubectl", "shellcheck", "hadolint", "envoy"):
        parser.add_argument(f"--{tool}", required=True, help="path of the program")
    parser.add_argument("--module", required=True, type=Path, help="the Wasm module")
    parser.add_argument("--istio-crds", required=True, type=Path, help="file with Istio's CRDs; may be absent")
    parser.add_argument("--kubernetes", required=True, nargs="+", help="versions of Kubernetes, such as 1.30")
    parser.add_argument("--write-istio", type=Path, help="folder for the Envoy configuration that Istio would make")
    args = parser.parse_args()

    report = Report()
    print(f"checking {relative(KIND)}/", flush=True)
    check_scripts(args.shellcheck, report)
    check_dockerfiles(args.hadolint, report)
    check_cluster(report)
    built = build_all(args.kubectl, report)
    check_own_workload(args.kubectl, report)
    check_kubernetes(built, args.kubernetes, report)
    check_istio_schemas(built, args.istio_crds, report)
    check_names(built, report)
    check_envoy(built, args.envoy, args.module.resolve(), args.write_istio, report)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
