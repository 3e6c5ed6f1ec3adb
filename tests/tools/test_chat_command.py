"""The terminal client against a server that says exactly what a test wants. The whole way is in tests/e2e."""

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from services.tools import cli
from services.tools.completions import Server, ServerError

MODELS = json.dumps({"data": [{"id": "m"}, {"id": "m-think"}]}).encode()


def event(delta: dict[str, Any] | None = None, **extra: Any) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta}]
    return b"data: " + json.dumps({"choices": choices} | extra).encode() + b"\n\n"


@contextlib.contextmanager
def server(status: int, body: bytes) -> Iterator[tuple[str, list[Any]]]:
    """Answers every chat with `body`; yields its address and the requests it has had."""
    asked: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200, MODELS)

        def do_POST(self) -> None:
            asked.append((self.headers, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.answer(status, body)

        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}", asked
        finally:
            listening.shutdown()
            thread.join()


USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
GOOD = b"".join(
    [
        event({"role": "assistant", "content": ""}),
        b": ping\n\n",
        event({"reasoning_content": "Hm, "}),
        event({"reasoning_content": "well."}),
        event({"content": "For"}),
        event({"content": "ty-two"}),
        event(usage=USAGE),
        b"data: [DONE]\n\n",
    ]
)


def test_thinking_and_answer_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    with server(200, GOOD) as (url, asked):
        assert cli.main(["chat", "--url", url, "--think", "--system", "Be brief.", "--seed", "5", "Well?"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("[Hm, well.]\nForty-two\n")
    assert "4 of 9 prompt tokens from a snapshot" in said
    [(_, body)] = asked
    assert (body["model"], body["seed"], body["stream"]) == ("m-think", 5, True)
    assert [(m["role"], m["content"]) for m in body["messages"]] == [("system", "Be brief."), ("user", "Well?")]
    assert "temperature" not in body


def test_the_key_is_sent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with server(200, GOOD) as (url, asked):
        assert cli.main(["chat", "--url", f"{url}/v1/", "Well?"]) == 0
    assert asked[0][0]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (429, json.dumps({"error": {"message": "too many requests"}}).encode(), "too many requests (status 429)"),
        (502, b"<html>", "answered with status 502"),
        (200, event({"content": "For"}), "ended in the middle"),
        (200, event({"content": "For"}) + b'data: {"error": {"message": "the disk is gone"}}\n\n', "the disk is gone"),
    ],
)
def test_trouble_is_told(status: int, body: bytes, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with server(status, body) as (url, _):
        assert cli.main(["chat", "--url", url, "Well?"]) == 1
    assert told in capsys.readouterr().err


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    with server(200, GOOD) as (url, _):
        pass
    assert cli.main(["chat", "--url", url, "Well?"]) == 1
    assert "is `thimble up` running?" in capsys.readouterr().err


def test_an_answer_that_ctrl_c_stops_ends_with_its_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(self: Server, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield {"choices": [{"index": 0, "delta": {"content": "For"}}]}
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "stream", stopped)
    with server(200, GOOD) as (url, _):
        assert cli.main(["chat", "--url", url, "Well?"]) == 130
    said = capsys.readouterr().out
    assert said.startswith("For\n")
    assert "ended by you" in said


def test_a_whole_answer_by_an_address_with_or_without_v1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    whole = json.dumps({"choices": [{"message": {"content": "Forty-two"}}]}).encode()
    with server(200, whole) as (url, asked):
        for address in (url, f"{url}/v1", f"{url}/v1/"):
            assert Server(address, timeout_s=30).choice({"model": "m"})["message"]["content"] == "Forty-two"
    assert [headers["Authorization"] for headers, _ in asked] == ["Bearer secret"] * 3


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (200, b"<html>", "has sent no chat completion"),
        (200, b"[]", "has sent no chat completion"),
        (200, b'{"choices": []}', "has sent no chat completion"),
        (401, json.dumps({"error": {"message": "no key"}}).encode(), "no key .status 401."),
    ],
)
def test_no_whole_answer_is_told(status: int, body: bytes, told: str) -> None:
    with server(status, body) as (url, _), pytest.raises(ServerError, match=told):
        Server(url, timeout_s=30).choice({"model": "m"})
