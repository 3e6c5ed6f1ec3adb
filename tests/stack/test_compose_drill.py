"""The compose stack on a real Docker engine: built, started, chatted with, inspected, stopped. See drill/README.md.

One test, since each step needs the one before; run by hand (`make drill`).
"""

import contextlib
import functools
import http.server
import json
import os
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import several_engines

from services.tools import figures

pytestmark = [pytest.mark.compose, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
DRILL = Path(__file__).parent / "drill"
RUNNING = ("engine-cpu", "api", "redis", "prometheus")
STAND_IN_IMAGES = {
    "THIMBLE_PYTHON_IMAGE": "thimble-stand-in/python:3.11",
    "THIMBLE_REDIS_IMAGE": "thimble-stand-in/valkey:1",
    "THIMBLE_PROMETHEUS_IMAGE": "thimble-stand-in/prometheus:1",
}


class Drill:
    def __init__(self, environ: dict[str, str], stand_ins: bool) -> None:
        self.environ = environ
        self.services = RUNNING if stand_ins else (*RUNNING, "grafana")
        self.note = "stand-in base images" if stand_ins else "official base images"
        self.files = ["docker-compose.yml", str(DRILL / "override.yml")]

    def docker(self, *words: str) -> str:
        result = subprocess.run(
            ["docker", *words], cwd=ROOT, env=self.environ, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, f"docker {' '.join(words)}\n{result.stdout}\n{result.stderr}"
        return result.stdout

    def compose(self, *words: str) -> str:
        files = [word for file in self.files for word in ("--file", file)]
        return self.docker("compose", "--project-name", "thimble-drill", *files, "--profile", "cpu", *words)

    def allow_for_this_engine(self) -> None:
        """Once the images are there: leave out the one thing that a confined Docker engine cannot do."""
        asked = ["docker", "run", "--rm", "--ulimit", "memlock=-1", "thimble-api:0.1.0", "true"]
        if subprocess.run(asked, env=self.environ, capture_output=True, check=False).returncode:
            print("this Docker engine cannot raise RLIMIT_MEMLOCK: ulimits left out")
            self.files.append(str(DRILL / "no_memlock.yml"))

    def inspect(self, service: str) -> dict[str, Any]:
        """Its first container."""
        return json.loads(self.docker("inspect", self.compose("ps", "--all", "--quiet", service).split()[0]))[0]

    def image_bytes(self, service: str) -> int:
        return int(json.loads(self.docker("image", "inspect", f"thimble-{service}:0.1.0"))[0]["Size"])

    def figure(self, name: str, value: float, unit: str, note: str = "") -> None:
        print(f"{name} = {value:.3g} {unit}")
        if path := os.environ.get("THIMBLE_DRILL_RESULTS"):
            figures.append(Path(path), name, value, unit, f"{self.note}; {note}" if note else self.note)

    @contextlib.contextmanager
    def timed(self, name: str, note: str = "") -> Iterator[None]:
        begin = time.monotonic()
        yield
        self.figure(name, time.monotonic() - begin, "s", note)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
def wheels() -> Iterator[str]:
    """pip flags that point at THIMBLE_DRILL_WHEELS, served while the images are built."""
    folder = os.environ.get("THIMBLE_DRILL_WHEELS")
    if not folder:
        yield ""
        return
    files = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), files) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"--find-links http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture
def drill(wheels: str) -> Iterator[Drill]:
    if "DOCKER_HOST" not in os.environ:
        pytest.skip("set DOCKER_HOST to the engine that may build and run this; see tests/stack/drill/README.md")
    work = os.environ.get("THIMBLE_DRILL_STAND_INS")
    if work:
        subprocess.run([DRILL / "stand_ins.sh", work], check=True)
    ports = {f"THIMBLE_{name}PORT": str(free_port()) for name in ("", "PROMETHEUS_", "GRAFANA_")}
    environ = os.environ | ports | (STAND_IN_IMAGES if work else {}) | {"THIMBLE_PIP_FLAGS": wheels}
    drill = Drill(environ, stand_ins=bool(work))
    try:
        yield drill
    finally:
        drill.compose("down", "--volumes", "--timeout", "30")
        left = drill.docker("ps", "--all", "--quiet", "--filter", "label=com.docker.compose.project=thimble-drill")
        assert left == ""


def prometheus(port: str, query: str) -> list[dict[str, Any]]:
    url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": query})
    with urllib.request.urlopen(url, timeout=5) as reply:
        return list(json.load(reply)["data"]["result"])


def eventually(port: str, query: str, seconds: float = 40) -> float:
    """The sum of a query's values, as soon as it is above zero."""
    deadline = time.monotonic() + seconds
    while True:
        total = sum(float(series["value"][1]) for series in prometheus(port, query))
        if total > 0 or time.monotonic() > deadline:
            return total
        time.sleep(1)


def chat(client: openai.OpenAI, model: str, messages: list[Any]) -> tuple[str, int]:
    """The streamed answer and how many of its prompt's tokens came from a snapshot."""
    text, cached = "", 0
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 48, "stream_options": {"include_usage": True}}
    for chunk in client.chat.completions.create(model=model, messages=messages, stream=True, **options):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        if chunk.usage and chunk.usage.prompt_tokens_details:
            cached = chunk.usage.prompt_tokens_details.cached_tokens or 0
    return text, cached


def check_confinement(drill: Drill) -> None:
    for service in drill.services:
        container = drill.inspect(service)
        host = container["HostConfig"]
        assert container["Config"]["User"] not in ("", "0", "root"), service
        assert host["ReadonlyRootfs"], service
        assert host["CapDrop"] == ["ALL"], service
        assert not host["Privileged"], service
        bound = [bind["HostIp"] for binds in (host["PortBindings"] or {}).values() for bind in binds]
        assert set(bound) <= {"127.0.0.1"}, service
    status = drill.compose("exec", "engine-cpu", "sh", "-c", "cat /proc/1/status; touch /app/x 2>&1 || true")
    assert "CapEff:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status
    assert "Read-only file system" in status
    library = drill.compose("exec", "engine-cpu", "python", "-c", "from kernels.build import library; print(library())")
    assert library.startswith("/app/.cache/thimble/libthimble-"), "the image must carry the compiled kernels"
    assert "computed in Python" not in drill.compose("logs", "engine-cpu")
    modules = "import importlib.util as u; print([m for m in ('torch', 'triton', 'transformers') if u.find_spec(m)])"
    assert drill.compose("exec", "api", "python", "-c", modules).strip() == "[]"


def test_the_stack_runs(drill: Drill) -> None:
    with drill.timed("stack.build_s", "both images; layers may be cached"):
        print(drill.compose("build"))
    drill.allow_for_this_engine()
    for name in ("engine", "api"):
        drill.figure(f"stack.image_{name}_mb", drill.image_bytes(name) / 1e6, "MB", "uncompressed")
    with drill.timed("stack.compose_up_s", "to all healthy; demo store made"):
        drill.compose("up", "--detach", "--wait", "--wait-timeout", "300", *drill.services)

    begin = time.monotonic()
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{drill.environ['THIMBLE_PORT']}/v1", api_key="none", max_retries=0
    )
    model = client.models.list().data[0].id
    dialog: list[Any] = [{"role": "user", "content": "Tell me a short story about a fox."}]
    story, _ = chat(client, model, dialog)
    drill.figure("stack.compose_first_answer_s", time.monotonic() - begin, "s", "48 tokens")
    assert len(story.split()) > 10
    print(story)
    dialog += [{"role": "assistant", "content": story}, {"role": "user", "content": "Thank you!"}]
    deadline = time.monotonic() + 20
    cached = 0
    while not cached and time.monotonic() < deadline:  # snapshots are stored off the request's path
        _, cached = chat(client, model, dialog)
    assert cached > 0

    port = drill.environ["THIMBLE_PROMETHEUS_PORT"]
    assert eventually(port, 'up{job="thimble-engine"}') == 1
    assert eventually(port, 'up{job="thimble-api"}') == 1
    assert eventually(port, "thimble_generation_tokens_total") > 0
    check_confinement(drill)
    several_engines.check(drill, client, model)
    drill.compose("up", "--detach", "--wait", "--wait-timeout", "300", "--scale", "engine-cpu=2", *drill.services)
    with drill.timed("stack.compose_down_s"):
        drill.compose("stop", "--timeout", "30")
    assert drill.inspect("engine-cpu")["State"]["ExitCode"] == 0
    assert drill.inspect("api")["State"]["ExitCode"] == 0
