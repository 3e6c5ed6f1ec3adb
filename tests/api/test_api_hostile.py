"""Clients that mean harm: each gets a clear refusal soon, the api's memory stays bounded, and others are served."""

import gzip
import json
import resource
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_api import RunningApi
from scripted_engine import ScriptedEngine

from services.api.connections import KEEP_ALIVE_S, Connection
from services.api.errors import ContextTooLong, InvalidRequest, ModelFolderError, TemplateRefused
from services.api.fitting import MOST_MESSAGES, refuse_far_too_long
from services.api.model_folder import ModelFolder
from services.api.templates import ChatTemplate

CHAT = "/v1/chat/completions"
MOST_CPU_S = 10.0  # for a refusal; without limits some of these took 30 to 60 s. Processor time: machines are busy
MOST_GROWTH_BYTES = 700_000_000  # and gigabytes


def chat(content: Any) -> bytes:
    return json.dumps({"model": "demo", "messages": [{"role": "user", "content": content}]}).encode()


def beside(field: str, value: str) -> bytes:
    return chat("x")[:-1] + f', "{field}": {value}}}'.encode()


DEEP = "[" * 10_000 + "]" * 10_000
DEEP_SCHEMA = '{"items":' * 10_000 + "{}" + "}" * 10_000
MANY = json.dumps({"model": "demo", "messages": [{"role": "user", "content": "x"}] * (MOST_MESSAGES + 1)}).encode()
BOMBS: dict[str, tuple[str, bytes, str]] = {
    "10 MB of one letter": (CHAT, chat("a" * 10_000_000), "context_length_exceeded"),
    "10 MB of words": (CHAT, chat("word " * 2_000_000), "context_length_exceeded"),
    "10 MB of special tokens": (CHAT, chat("<|im_end|>" * 1_000_000), "context_length_exceeded"),
    "10 MB of spaces": (CHAT, chat(" " * 10_000_000), "context_length_exceeded"),
    "10 MB of many scripts": (
        CHAT,
        chat("".join(chr(33 + i * 7919 % 5000) for i in range(3_300_000))),
        "context_length_exceeded",
    ),
    "10 MB to another flavour": (
        "/v1/responses",
        json.dumps({"model": "demo", "input": "word " * 2_000_000}).encode(),
        "context_length_exceeded",
    ),
    "10 MB to complete": (
        "/v1/completions",
        json.dumps({"model": "demo", "prompt": "word " * 2_000_000}).encode(),
        "context_length_exceeded",
    ),
    "10 MB to count": ("/tokenize", json.dumps({"prompt": "word " * 2_000_000}).encode(), "invalid_request"),
    "messages without number": (CHAT, MANY, "invalid_request"),
    "deep content": (CHAT, chat("x").replace(b'"x"', DEEP.encode()), "malformed_json"),
    "deep tools": (CHAT, beside("tools", DEEP), "malformed_json"),
    "deep schema": (
        CHAT,
        beside("response_format", '{"type":"json_schema","json_schema":{"name":"x","schema":' + DEEP_SCHEMA + "}}"),
        "malformed_json",
    ),
    "deep unknown field": (CHAT, beside("whatever", DEEP), "malformed_json"),
    "a number of a million digits": (CHAT, beside("seed", "9" * 1_000_000), "malformed_json"),
    "a compressed body": (CHAT, gzip.compress(chat("a" * 30_000_000)), "malformed_json"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_soon_and_in_little_memory(api: RunningApi, engine: ScriptedEngine, name: str) -> None:
    path, body, code = BOMBS[name]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    headers = {
        "Content-Type": "application/json",
        "Content-Encoding": "gzip" if body[:2] == b"\x1f\x8b" else "identity",
    }
    answer = api.client.post(path, content=body, headers=headers, timeout=120)
    assert time.process_time() - began < MOST_CPU_S
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024 < MOST_GROWTH_BYTES
    assert not engine.calls, "it reached the engine"
    assert len(answer.content) < 2000


def test_what_fits_is_never_refused_early(folder: ModelFolder) -> None:
    """The early look works on a beginning: it may not refuse what the whole text would have passed."""
    for piece in ("word ", "a", " ", "\n", "é", "漢字", "<|im_end|>", "x1 + y2 = z3; ", "International "):
        text = piece * (100_000 // len(piece))
        for cut in (text[:500], text[:5_000], text[:50_000], text):
            count = len(folder.tokenizer.encode(cut))
            refuse_far_too_long(folder.tokenizer, cut, count, "messages")
    with pytest.raises(ContextTooLong):
        refuse_far_too_long(folder.tokenizer, "word " * 20_000, 4096, "messages")


def test_a_panic_of_the_tokenizer_is_the_clients_error(folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    panic = type("PanicException", (BaseException,), {})

    class Panicking:
        def encode(self, text: str, add_special_tokens: bool) -> None:
            raise panic("Onig: Regex search error: retry-limit-in-match over")

    monkeypatch.setattr(folder.tokenizer, "_plain", Panicking())
    with pytest.raises(InvalidRequest, match="cannot split"):
        folder.tokenizer.encode("   ")


TEMPLATES = {
    "class": "{{ ''.__class__ }}",
    "mro": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "by filter": "{{ messages | attr('__class__') | attr('__base__') }}",
    "by map": "{{ [''] | map(attribute='__class__') | list }}",
    "by item": "{{ ''['__class__'] }}",
    "by format": "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
    "by format_map": "{{ '{x.__class__.__mro__}'.format_map({'x': 1}) }}",
    "by a kept format": "{% set f = '{0.__class__.__mro__}'.format %}{{ f(1) }}",
    "globals of a function": "{{ raise_exception.__globals__['__builtins__'] }}",
    "of a filter's": "{{ strftime_now.__globals__.sys }}",
    "cycler": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "joiner": "{{ joiner.__init__.__globals__ }}",
    "lipsum": "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "self": "{{ self.__init__.__globals__ }}",
    "self's environment": "{{ self._TemplateReference__context.environment }}",
    "namespace": "{{ namespace.__init__.__globals__ }}",
    "into a namespace": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "dict": "{{ dict.__class__.__call__.__globals__ }}",
    "undefined": "{{ nothing.__class__.__mro__ }}",
    "a generator's frame": "{{ (messages | map('upper')).gi_frame.f_globals }}",
    "to change what is the client's": "{{ messages.clear() }}",
    "to import": "{% import '/etc/passwd' as x %}{{ x }}",
    "to include": "{% include '/etc/passwd' %}",
    "range without end": "{{ range(10 ** 12) | list }}",
}
TELLTALE = ("<class", "<function", "<built-in", "uid=", "root:", "Environment", "module '", "frame object")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_of_a_checkpoint_cannot_reach_python(folder: ModelFolder, name: str) -> None:
    try:
        text = ChatTemplate(TEMPLATES[name], {}, folder.tokenizer).prompt([{"role": "user", "content": "x"}]).text
    except (TemplateRefused, ModelFolderError):
        return
    assert not any(sign in text for sign in TELLTALE), text


class Raw:
    """A connection that says what it likes."""

    def __init__(self, api: RunningApi) -> None:
        host, port = api.url.removeprefix("http://").split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=60)

    def send(self, data: bytes) -> "Raw":
        self.socket.sendall(data)
        return self

    def rest(self) -> bytes:
        """Until the server closes."""
        found = b""
        try:
            while piece := self.socket.recv(65536):
                found += piece
        except ConnectionResetError:
            pass
        self.socket.close()
        return found


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of a second or two."""
    for name, value in (("patience_s", 1.5), ("look_every_s", 0.2), ("least_bytes_s", 1000)):
        monkeypatch.setattr(Connection, name, value)


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize("sent", [b"", b"POST /v1/ch", HEAD, HEAD + b"Content-Length: 500\r\n\r\n{"])
def test_who_does_not_go_on_is_let_go(hasty: None, api: RunningApi, sent: bytes) -> None:
    began = time.monotonic()
    said = Raw(api).send(sent).rest()
    assert 1.4 < time.monotonic() - began < 30
    assert said.startswith(b"HTTP/1.1 408")
    assert b"did not come to its end in time" in said


def test_drop_by_drop_is_too_slow_and_others_are_served(hasty: None, api: RunningApi) -> None:
    held = [Raw(api) for _ in range(50)]
    over = threading.Event()

    def drip() -> None:
        while not over.wait(0.1):
            for one in held:
                try:
                    one.send(b"X-A: b\r\n")
                except OSError:
                    return

    for one in held:
        one.send(b"GET /health HTTP/1.1\r\n")
    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        assert api.chat("Hi")["choices"][0]["message"]["content"] == "Hello there, friend."
        assert all(b"408" in one.rest()[:20] for one in held)
    finally:
        over.set()
        dripping.join()


def test_a_slow_body_that_keeps_coming_is_taken(hasty: None, api: RunningApi) -> None:
    """Twice as long as patience, at five times the least rate."""
    body = chat("Hi") + b" " * 15_000

    def pieces() -> Any:
        for at in range(0, len(body), 500):
            yield body[at : at + 500]
            time.sleep(0.1)

    answer = api.client.post(CHAT, content=pieces(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 200


def test_a_connection_may_rest_between_requests(hasty: None, api: RunningApi) -> None:
    """Clients keep theirs for 5 s and more: were ours shorter, a request could meet a connection that just closes."""
    with httpx.Client(base_url=api.url) as client:
        assert client.get("/health").status_code == 200
        [ours] = client._transport._pool.connections  # type: ignore[attr-defined]
        time.sleep(2.5)
        assert client.get("/health").status_code == 200
        assert client._transport._pool.connections == [ours]  # type: ignore[attr-defined]
    assert KEEP_ALIVE_S > 60


def test_a_long_answer_is_no_slow_request(hasty: None, api: RunningApi, engine: ScriptedEngine) -> None:
    engine.token_s = 0.3
    assert api.chat("Hi")["choices"][0]["message"]["content"] == "Hello there, friend."


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * 200_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 50_000 + b"\r\n",
        HEAD + b"Content-Length: -5\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"Transfer-Encoding: gzip\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 100,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    ids=["header", "path", "headers", "negative", "two lengths", "chunk", "coding", "TLS", "HTTP/2"],
)
def test_heads_that_are_none_are_refused(api: RunningApi, sent: bytes) -> None:
    connection = Raw(api)
    try:
        connection.send(sent)
    except (ConnectionResetError, BrokenPipeError):
        return
    assert connection.rest()[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 404", b"HTTP/1.1 501", b"")
    assert api.client.get("/health").status_code == 200


def test_handles_come_back(hasty: None, start_api: Callable[..., RunningApi]) -> None:
    api = start_api()
    api.client.get("/health")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        held = [Raw(api) for _ in range(60)]
        for one in held:
            one.rest()
    deadline = time.monotonic() + 30
    while len(list(Path("/proc/self/fd").iterdir())) > before + 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_methods_that_a_client_invents_make_no_series(api: RunningApi) -> None:
    for number in range(3):
        assert api.client.request(f"INVENTED{number}", "/health").status_code == 405
        assert api.client.request(f"INVENTED{number}", "/nothing").status_code in (404, 405)
    text = api.client.get("/metrics").text
    assert "INVENTED" not in text
    assert 'method="other",route="other"' in text
