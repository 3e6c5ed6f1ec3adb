"""`thimble chat`: a conversation in the terminal with any OpenAI-compatible server, first of all our api.

Owns the terminal and one conversation. Uses nothing but the standard library, so that it starts at once.
"""

import argparse
import contextlib
import http.client
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from services.tools.amounts import count, nothing_or_more, whole

STOPPED = "you"  # as the reason why an answer ended
INTERRUPTED = 130
DIM, PLAIN = "\033[2m", "\033[0m"
HELP = "/new starts over, /think switches thinking on and off, /quit (or Ctrl-D) ends; Ctrl-C stops an answer"


ADDRESS = "give the address that `thimble up` prints"


class ChatError(Exception):
    """The server cannot be reached or refused the request. The message is for people."""

    code = "chat"


@dataclass
class Answer:
    """What streamed in. Tokens are the server's counts, 0 where it sent none; times are seconds on our clock."""

    content: str = ""
    thinking: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token_s: float = 0.0
    total_s: float = 0.0

    def summary(self) -> str:
        decode_s = self.total_s - self.first_token_s
        speed = (
            f"{(self.completion_tokens - 1) / decode_s:.1f} tok/s, " if self.completion_tokens > 1 and decode_s else ""
        )
        cached = f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens from a snapshot"
        ending = "" if self.finish_reason in ("stop", "") else f", ended by {self.finish_reason}"
        return f"{speed}{self.completion_tokens} tokens, first after {self.first_token_s:.2f} s, {cached}{ending}"


@dataclass
class Server:
    """Where to ask. `url` is the server's root, with or without /v1."""

    url: str
    api_key: str = ""
    timeout_s: float = 3600.0

    def models(self) -> list[str]:
        with self._reply("GET", "/models", None) as reply:
            try:
                found = [str(model["id"]) for model in json.loads(reply.read())["data"]]
            except (ValueError, KeyError, TypeError, OSError, http.client.HTTPException) as error:
                raise ChatError(
                    f"{self.url} is no OpenAI-compatible server: it has no list of models; {ADDRESS}"
                ) from error
        if not found:
            raise ChatError(f"{self.url}: the server has no model")
        return found

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
                    raise ChatError(chunk["error"]["message"])
                yield chunk
        raise ChatError("the connection ended in the middle of the answer")

    def _line(self, reply: http.client.HTTPResponse) -> bytes:
        try:
            return reply.readline()
        except (OSError, http.client.HTTPException) as error:
            raise ChatError(f"the connection broke in the middle of the answer: {error}") from error

    def _reply(self, method: str, path: str, body: dict[str, Any] | None) -> http.client.HTTPResponse:
        try:
            parts = urlsplit(self.url if "//" in self.url else f"http://{self.url}")
            if parts.scheme not in ("http", "https") or not parts.hostname or not 0 < (parts.port or 80) < 65536:
                raise ValueError
        except ValueError as error:
            raise ChatError(f"{self.url!r} is no address; give one like http://127.0.0.1:8000") from error
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
            raise ChatError(f"{self.url} answers, but is no web server; {ADDRESS}") from error
        except (OSError, http.client.HTTPException) as error:
            raise ChatError(f"cannot reach {self.url}: {error}; is `thimble up` running?") from error
        except UnicodeError as error:
            raise ChatError("OPENAI_API_KEY or the address has letters that no request can have") from error
        if reply.status != 200:
            with reply:
                raise ChatError(_error_message(reply.status, reply.read()))
        return reply


def _error_message(status: int, body: bytes) -> str:
    try:
        return f"{json.loads(body)['error']['message']} (status {status})"
    except (ValueError, KeyError, TypeError):
        return f"the server answered with status {status}"


@dataclass
class Conversation:
    server: Server
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, text: str, show: "Screen") -> Answer:
        """Send one user turn, show the answer as it comes and keep both. Interrupted, it keeps what has come."""
        answer = Answer()
        turn = [*self.messages, {"role": "user", "content": text}]
        started = time.monotonic()
        try:
            for chunk in self.server.stream({"model": self.model, "messages": turn} | self.options):
                self._take(chunk, answer, show, started)
        except KeyboardInterrupt:
            answer.finish_reason = STOPPED
        finally:
            show.end()
        answer.total_s = time.monotonic() - started
        self.messages = [*turn, {"role": "assistant", "content": answer.content}]
        return answer

    def _take(self, chunk: dict[str, Any], answer: Answer, show: "Screen", started: float) -> None:
        for choice in chunk.get("choices", []):
            delta = choice.get("delta", {})
            thought, said = delta.get("reasoning_content") or "", delta.get("content") or ""
            if (thought or said) and not answer.first_token_s:
                answer.first_token_s = time.monotonic() - started
            show.thinking(thought)
            show.saying(said)
            answer.thinking += thought
            answer.content += said
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        if usage := chunk.get("usage"):
            answer.prompt_tokens = usage["prompt_tokens"]
            answer.completion_tokens = usage["completion_tokens"]
            answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


class Screen:
    """Writes as it comes; thinking is dimmed on a terminal and put in brackets elsewhere."""

    def __init__(self, colour: bool) -> None:
        self._before, self._after = (DIM, PLAIN) if colour else ("[", "]")
        self._thinking = False
        self._written = False

    def thinking(self, text: str) -> None:
        if text and not self._thinking:
            text, self._thinking = self._before + text, True
        self._write(text)

    def saying(self, text: str) -> None:
        if text:
            self._stop_thinking()
        self._write(text)

    def end(self) -> None:
        self._stop_thinking()
        if self._written:
            self._write("\n")
        self._written = False

    def note(self, text: str) -> None:
        print(f"{self._before}{text}{self._after}", flush=True)

    def _stop_thinking(self) -> None:
        if self._thinking:
            self._write(self._after + "\n")
        self._thinking = False

    def _write(self, text: str) -> None:
        if text:
            self._written = True
            print(text, end="", flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("message", nargs="?", help="ask this, print the answer and end")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--model", help="model id (default: the server's first)")
    parser.add_argument("--think", action="store_true", help="use the model's -think id: it reasons first")
    parser.add_argument("--system", help="system prompt")
    parser.add_argument("--temperature", type=nothing_or_more, help="0 is greedy (default: the model's own)")
    parser.add_argument("--max-tokens", type=whole, help="longest answer")
    parser.add_argument("--seed", type=count, help="same seed, same answer")


def run(args: argparse.Namespace) -> int:
    server = Server(args.url, os.environ.get("OPENAI_API_KEY", ""))
    model = _model(args.model or server.models()[0], args.think)
    wanted = {"temperature": args.temperature, "max_tokens": args.max_tokens, "seed": args.seed}
    options = {name: value for name, value in wanted.items() if value is not None}
    opening = [{"role": "system", "content": args.system}] if args.system else []
    talk = Conversation(server, model, options, list(opening))
    screen = Screen(colour=sys.stdout.isatty())
    if args.message is not None:
        answer = talk.ask(args.message, screen)
        screen.note(answer.summary())
        return INTERRUPTED if answer.finish_reason == STOPPED else 0
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  gives `input` line editing and a history
    screen.note(f"{model} at {args.url}. {HELP}")
    while (text := _line()) is not None:
        if text == "/new":
            talk.messages = list(opening)
        elif text == "/think":
            talk.model = _model(talk.model.removesuffix("-think"), not talk.model.endswith("-think"))
            screen.note(f"now {talk.model}")
        elif text.startswith("/"):
            screen.note(HELP)
        elif text:
            try:
                screen.note(talk.ask(text, screen).summary())
            except ChatError as error:
                screen.note(str(error))
    return 0


def _model(name: str, think: bool) -> str:
    return name if not think or name.endswith("-think") else f"{name}-think"


def _line() -> str | None:
    """The next line typed, without spaces around it; None at the end of the conversation."""
    try:
        text = input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None
    return None if text == "/quit" else text
