"""Manifests for Swarm and Kubernetes, read as data: what refers to something finds it, settings exist, nothing is open.

No cluster is needed. Both describe the same stack as docker-compose.yml, with several engines.
"""

import copy
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.api.config import ApiConfig
from services.engine.config import EngineConfig

ROOT = Path(__file__).parents[2]
KUBERNETES: list[dict[str, Any]] = list(yaml.safe_load_all((ROOT / "services/deploy/kubernetes.yml").read_text()))
SWARM: dict[str, Any] = yaml.safe_load((ROOT / "services/deploy/swarm.yml").read_text())
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SETTINGS = {
    f"THIMBLE_{part}_{field.name.upper()}"
    for part, config in (("ENGINE", EngineConfig), ("API", ApiConfig))
    for field in dataclasses.fields(config)
}
STORE_OPTIONS = {"--maxmemory-policy": "allkeys-lru", "--maxmemory-samples": "32", "--lazyfree-lazy-eviction": "no"}
VERSIONS = {"Namespace": "v1", "PersistentVolumeClaim": "v1", "Service": "v1", "Deployment": "apps/v1"}
VERSIONS["NetworkPolicy"] = "networking.k8s.io/v1"


def of_kind(objects: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one["spec"] for one in objects if one["kind"] == kind}


def pod_of(spec: dict[str, Any]) -> dict[str, Any]:
    return dict(spec["template"]["spec"])


def complaints(objects: list[dict[str, Any]]) -> list[str]:
    wrong = [f"{o['kind']}: apiVersion" for o in objects if VERSIONS.get(o["kind"]) != o["apiVersion"]]
    wrong += [
        f"{o['metadata']['name']}: namespace"
        for o in objects
        if o["kind"] != "Namespace" and o["metadata"].get("namespace") != "thimble"
    ]
    claims, deployments = of_kind(objects, "PersistentVolumeClaim"), of_kind(objects, "Deployment")
    for name, spec in deployments.items():
        labels, pod = spec["template"]["metadata"]["labels"], pod_of(spec)
        if spec["selector"]["matchLabels"] != labels:
            wrong.append(f"{name}: its selector finds other pods")
        context = pod["securityContext"]
        if not context["runAsNonRoot"] or not context["runAsUser"] or pod["automountServiceAccountToken"]:
            wrong.append(f"{name}: root, or a token of the cluster")
        volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
        for volume in volumes.values():
            claim = volume.get("persistentVolumeClaim")
            if claim and claim["claimName"] not in claims:
                wrong.append(f"{name}: no claim {claim['claimName']}")
        for container in pod["containers"]:
            wrong += [f"{name}: {text}" for text in container_complaints(container, set(volumes))]
    for name, spec in of_kind(objects, "Service").items():
        owner = next((d for d in deployments.values() if d["selector"]["matchLabels"] == spec["selector"]), None)
        ports = {port["name"] for c in pod_of(owner)["containers"] for port in c["ports"]} if owner else set()
        wrong += [f"{name}: port {port['targetPort']}" for port in spec["ports"] if port["targetPort"] not in ports]
        if spec.get("type", "ClusterIP") != "ClusterIP":
            wrong.append(f"{name}: open to the outside")
    return wrong


def container_complaints(container: dict[str, Any], volumes: set[str]) -> list[str]:
    wrong = []
    if not re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+[\w.-]*", container["image"]):
        wrong.append(f"image {container['image']} is not an exact version")
    expected = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    if container["securityContext"] != expected:
        wrong.append("privileges")
    if "readinessProbe" not in container or "memory" not in container["resources"]["limits"]:
        wrong.append("no probe or no limit")
    wrong += [f"no setting {e['name']}" for e in container.get("env", []) if e["name"] not in SETTINGS]
    wrong += [f"no volume {m['name']}" for m in container.get("volumeMounts", []) if m["name"] not in volumes]
    return wrong


def test_kubernetes() -> None:
    assert complaints(KUBERNETES) == []
    deployments, services = of_kind(KUBERNETES, "Deployment"), of_kind(KUBERNETES, "Service")
    (engine,) = pod_of(deployments["engine"])["containers"]
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == 1, "one GPU a replica"
    assert services["engine"]["clusterIP"] == "None", "else the api could not tell the engines apart"
    assert pod_of(deployments["engine"])["terminationGracePeriodSeconds"] == 60
    (api,) = pod_of(deployments["api"])["containers"]
    settings = {entry["name"]: entry["value"] for entry in api["env"]}
    assert settings["THIMBLE_API_ENGINES"] == f"engine:{services['engine']['ports'][0]['port']}"
    assert settings["THIMBLE_API_REDIS_URL"] == f"redis://redis:{services['redis']['ports'][0]['port']}/0"
    (store,) = pod_of(deployments["redis"])["containers"]
    options = dict(zip(store["args"][::2], store["args"][1::2], strict=True))
    assert options.items() >= STORE_OPTIONS.items()
    policy = of_kind(KUBERNETES, "NetworkPolicy")["inside"]
    assert policy["podSelector"]["matchExpressions"][0]["values"] == ["engine", "redis"]


@pytest.mark.parametrize(
    ("kind", "name", "path", "value"),
    [
        ("Service", "engine", ["ports", 0, "targetPort"], "http"),
        ("Service", "api", ["type"], "LoadBalancer"),
        ("Deployment", "api", ["selector", "matchLabels", "app"], "apis"),
        ("Deployment", "api", ["template", "spec", "containers", 0, "image"], "thimble-api:latest"),
        ("Deployment", "api", ["template", "spec", "containers", 0, "env", 0, "name"], "THIMBLE_API_MODEL"),
        ("Deployment", "api", ["template", "spec", "securityContext", "runAsUser"], 0),
        ("Deployment", "engine", ["template", "spec", "volumes", 0, "persistentVolumeClaim", "claimName"], "stores"),
        ("Deployment", "engine", ["template", "spec", "containers", 0, "volumeMounts", 0, "name"], "stores"),
    ],
)
def test_the_check_can_fail(kind: str, name: str, path: list[Any], value: Any) -> None:
    objects = copy.deepcopy(KUBERNETES)
    place: Any = of_kind(objects, kind)[name]
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    assert complaints(objects) != []


def test_swarm() -> None:
    services = SWARM["services"]
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert set(service["networks"]) <= set(SWARM["networks"]), name
        assert set(service.get("environment", {})) <= SETTINGS, name
        twin = COMPOSE["services"][name]
        image = re.sub(r"\$\{\w+:-(.*)\}", r"\1", twin["image"])
        assert service["image"] == image, f"{name}: another image than in docker-compose.yml"
        assert "ports" not in service or name == "api"
    engine = services["engine"]["deploy"]
    resources = engine["resources"]["reservations"]["generic_resources"]
    assert resources == [{"discrete_resource_spec": {"kind": "NVIDIA-GPU", "value": 1}}], "one GPU a replica"
    assert engine["endpoint_mode"] == "dnsrr", "else the api could not tell the engines apart"
    assert services["api"]["environment"]["THIMBLE_API_ENGINES"] == "engine:8600"
    command = services["redis"]["command"][1:]
    assert dict(zip(command[::2], command[1::2], strict=True)).items() >= STORE_OPTIONS.items()
    assert SWARM["networks"]["inside"]["internal"] is True
