"""A server with OpenAI's chat completions, first of all our api, as commands ask it: whole answers or streams of them.

Owns the requests and what their failures are called. Uses nothing but the standard library, so that `thimble chat`
starts at once. Its key, if it wants one, is OPENAI_API_KEY.
"""

import http.client
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

ADDRESS = "give the address that `thimble up` prints"


class ServerError(Exception):
    """The server cannot be reached or refused the request. The message is for people."""

    code = "server"


@dataclass
class Server:
    """Where to ask. `url` is the server's root, with or without /v1."""

    url: str
    api_key: str = field(default_factory=lambda: os.environ.get("OPENAI_API_KEY", ""))
    timeout_s: float = 3600.0

    def models(self) -> list[str]:
        with self._reply("GET", "/models", None) as reply:
            try:
                found = [str(model["id"]) for model in json.loads(reply.read())["data"]]
            except (ValueError, KeyError, TypeError, OSError, http.client.HTTPException) as error:
                raise ServerError(
                    f"{self.url} is no OpenAI-compatible server: it has no list of models; {ADDRESS}"
                ) from error
        if not found:
            raise ServerError(f"{self.url}: the server has no model")
        return found

    def choice(self, body: dict[str, Any]) -> Any:
        """The first choice of one whole answer."""
        with self._reply("POST", "/chat/completions", body) as reply:
            try:
                return json.loads(reply.read())["choices"][0]
            except (ValueError, LookupError, TypeError, OSError, http.client.HTTPException) as error:
                raise ServerError(f"{self.url} has sent no chat completion: {error}; {ADDRESS}") from error

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of one streamed answer. Leaving the iteration early hangs up, and the server stops."""
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        with self._reply("POST", "/chat/completions", body) as reply:
            while line := self._line(reply):
                if not line.startswith(b"data:"):
                    continue
                data = line[len(b"data:") :].strip()
                if data == b"[DONE]":
                    return
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ServerError(chunk["error"]["message"])
                yield chunk
        raise ServerError("the connection ended in the middle of the answer")

    def _line(self, reply: http.client.HTTPResponse) -> bytes:
        try:
            return reply.readline()
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"the connection broke in the middle of the answer: {error}") from error

    def _reply(self, method: str, path: str, body: dict[str, Any] | None) -> http.client.HTTPResponse:
        try:
            parts = urlsplit(self.url if "//" in self.url else f"http://{self.url}")
            if parts.scheme not in ("http", "https") or not parts.hostname or not 0 < (parts.port or 80) < 65536:
                raise ValueError
        except ValueError as error:
            raise ServerError(f"{self.url!r} is no address; give one like http://127.0.0.1:8000") from error
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        connection = kind(parts.netloc, timeout=self.timeout_s)
        try:
            root = parts.path.rstrip("/").removesuffix("/v1")
            connection.request(method, f"{root}/v1{path}", json.dumps(body) if body else None, headers)
            reply = connection.getresponse()
        except http.client.BadStatusLine as error:
            connection.close()
            raise ServerError(f"{self.url} answers, but is no web server; {ADDRESS}") from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"cannot reach {self.url}: {error}; is `thimble up` running?") from error
        except UnicodeError as error:
            raise ServerError("OPENAI_API_KEY or the address has letters that no request can have") from error
        if reply.status != 200:
            with reply:
                raise ServerError(_error_message(reply.status, reply.read()))
        return reply


def _error_message(status: int, body: bytes) -> str:
    try:
        return f"{json.loads(body)['error']['message']} (status {status})"
    except (ValueError, KeyError, TypeError):
        return f"the server answered with status {status}"
