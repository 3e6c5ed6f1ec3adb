"""What docker-compose.yml promises: not reachable from outside, no privilege that is not needed, exact images.

Read as data, so it needs no Docker; that it works is the drill's business (tests/stack/drill).
"""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())


def complaints(compose: dict[str, Any]) -> list[str]:
    wrong = []
    for name, service in compose["services"].items():
        for port in service.get("ports", []):
            if not re.fullmatch(r"(127\.0\.0\.1|\$\{THIMBLE_BIND:-127\.0\.0\.1\}):\$\{\w+:-\d+\}:\d+", port):
                wrong.append(f"{name}: port {port}")
        image = re.sub(r"\$\{\w+:-(.*)\}", r"\1", service["image"])
        if not re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+[\w.-]*", image):
            wrong.append(f"{name}: image {image} is not an exact version")
        if service.get("read_only") is not True:
            wrong.append(f"{name}: writable root file system")
        if service.get("cap_drop") != ["ALL"] or "cap_add" in service or "privileged" in service:
            wrong.append(f"{name}: capabilities")
        if service.get("security_opt") != ["no-new-privileges:true"]:
            wrong.append(f"{name}: may gain privileges")
        if "build" not in service and not re.fullmatch(r"\d+:\d+", str(service.get("user", ""))):
            wrong.append(f"{name}: no user")
        if not set(service.get("networks", [])) <= {"inside", "edge"} or service.get("network_mode"):
            wrong.append(f"{name}: network")
        if any("docker.sock" in volume for volume in service.get("volumes", [])):
            wrong.append(f"{name}: owns the Docker engine")
    if compose["networks"]["inside"] != {"internal": True}:
        wrong.append("the inner network has a way out")
    return wrong


def test_the_stack_is_closed() -> None:
    assert complaints(COMPOSE) == []
    for name in ("engine", "engine-cpu", "demo-store", "redis"):
        assert "edge" not in COMPOSE["services"][name]["networks"], name
        assert "ports" not in COMPOSE["services"][name], name


@pytest.mark.parametrize(
    "change",
    [
        {"ports": ["9090:9090"]},
        {"ports": ["0.0.0.0:${P:-9090}:9090"]},
        {"image": "prom/prometheus"},
        {"image": "prom/prometheus:latest"},
        {"read_only": False},
        {"cap_drop": []},
        {"cap_add": ["SYS_ADMIN"]},
        {"security_opt": []},
        {"user": "root"},
        {"network_mode": "host"},
        {"volumes": ["/var/run/docker.sock:/var/run/docker.sock"]},
    ],
    ids=str,
)
def test_the_check_can_fail(change: dict[str, Any]) -> None:
    services = COMPOSE["services"] | {"prometheus": COMPOSE["services"]["prometheus"] | change}
    assert complaints(COMPOSE | {"services": services}) != []


def test_snapshots_are_bounded_and_never_written() -> None:
    redis = COMPOSE["services"]["redis"]
    command = redis["command"]
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert options["--save"] == ""
    assert options["--appendonly"] == "no"
    assert options["--maxmemory-policy"] == "allkeys-lru"
    assert options["--lazyfree-lazy-eviction"] == "no", "else one large payload drives out sixteen"
    assert options["--maxmemory"].startswith("${THIMBLE_REDIS_MEMORY")
    assert redis["mem_limit"] == redis["memswap_limit"]


def test_the_engine_gets_what_it_needs() -> None:
    for name in ("engine", "engine-cpu"):
        engine = COMPOSE["services"][name]
        assert engine["ulimits"] == {"memlock": -1}
        assert engine["stop_grace_period"] == "60s"
        assert engine["networks"]["inside"]["aliases"] == ["engine"]
    devices = COMPOSE["services"]["engine"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}]
    assert "deploy" not in COMPOSE["services"]["engine-cpu"]


@pytest.mark.parametrize("name", ["engine", "api"])
def test_images_run_as_nobody_in_particular_and_copy_nothing_twice(name: str) -> None:
    recipe = (ROOT / f"Dockerfile.{name}").read_text()
    final = recipe[recipe.rindex("\nFROM ") :]
    assert "\nUSER thimble\n" in final
    assert "\nHEALTHCHECK " in final
    installed = re.findall(r"apt-get install -y --no-install-recommends ([^&]+) &&", final)
    assert installed == (["gcc libc6-dev"] if name == "engine" else []), "Triton needs a C compiler, nothing else more"
    assert "ADD " not in recipe
    assert "# syntax=" not in recipe, "a frontend from a registry is one more thing to trust"
    if name == "api":
        assert "COPY kernels" not in recipe
        assert ".[engine]" not in recipe


def test_compose_itself_accepts_it() -> None:
    try:
        version = subprocess.run(
            ["docker", "compose", "version", "--short"], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        pytest.skip("no docker command here")
    if version.returncode:
        pytest.skip("no docker compose here")
    command = ["docker", "compose", "--profile", "cpu", "--profile", "gpu", "config", "--quiet"]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
