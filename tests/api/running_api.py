"""The api as a real server in a thread, for its tests."""

import asyncio
import functools
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import uvicorn
from openai import OpenAI

from services.api.app import build_app
from services.api.config import ApiConfig
from services.api.connections import connection_options
from services.api.model_folder import load_model_folder
from services.api.program import Server

MODEL_DIR = Path(__file__).parents[2] / "demo"
PATIENT_MS = 20_000  # for a store, unless a test is about one in trouble
# Read once for all of them: it is as it was read, whoever uses it.
model_folder = functools.cache(load_model_folder)


class RunningApi:
    """The api on a free port, with its event loop in a thread."""

    def __init__(self, config: ApiConfig) -> None:
        with mock.patch("services.api.app.load_model_folder", model_folder):
            self.app = build_app(config, config.redis_url, config.redis_reader_url)
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        options = connection_options()
        self._server = Server(
            uvicorn.Config(self.app, log_config=None, access_log=False, timeout_graceful_shutdown=1, **options)
        )
        self.loop: asyncio.AbstractEventLoop | None = None
        started = threading.Event()

        async def serve() -> None:
            self.loop = asyncio.get_running_loop()
            self.loop.call_later(0, started.set)
            await self._server.serve(sockets=[listening])

        self._thread = threading.Thread(target=lambda: asyncio.run(serve()))
        self._thread.start()
        assert started.wait(10)
        self.client = httpx.Client(base_url=self.url, timeout=20)
        for _ in range(500):
            if self._server.started:
                return
            threading.Event().wait(0.01)
        raise AssertionError("the api did not start")

    def openai(self, **options: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=options.pop("api_key", "none"), max_retries=0, **options)

    def saved(self) -> None:
        """Wait until the histories of finished answers are read ahead, and their snapshots stored."""
        assert self.loop is not None
        chats = self.app.state.chats
        parts = [chats.saving, chats.ahead, chats.saving] if self.reads_ahead else [chats.saving]
        for part in parts:
            asyncio.run_coroutine_threadsafe(part.idle(), self.loop).result(20)

    def store_may_take(self, seconds: float) -> None:
        """For a look-up and for what is read, from now on."""
        store = self.app.state.chats.snapshots._store
        store._lookup_s = store._read_s = seconds

    @property
    def reads_ahead(self) -> bool:
        return self.app.state.chats.ahead is not None

    def metric(self, name: str, **labels: str) -> float:
        registry = self.app.state.chats.metrics.registry
        return float(registry.get_sample_value(f"thimble_api_{name}", labels) or 0)

    def chat(self, *messages: Any, **fields: Any) -> Any:
        """A chat that must succeed: the reply's JSON."""
        dialog = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
        answer = self.client.post("/v1/chat/completions", json={"model": "demo", "messages": dialog, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def begin(self, body: Any, headers: Mapping[str, str] | None = None) -> socket.socket:
        """A chat whose client may leave at any moment: by closing this connection."""
        data = httpx.Request("POST", self.url, json=body).read()  # the bytes that `client` would send
        named = {"Host": "x", "Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}
        head = "".join(f"{name}: {value}\r\n" for name, value in named.items())
        host, port = self.url.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)), timeout=20)
        connection.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n".encode() + data)
        return connection

    def close(self) -> None:
        self.client.close()
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()
