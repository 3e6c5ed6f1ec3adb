"""The life of a stream: headers at once, pings, failures inside it, clients that go away."""

import contextlib
import json
import logging
import time
from collections.abc import Callable
from typing import Any

import grpc
import httpx
import openai
import pytest
from running_api import RunningApi
from scripted_engine import Failure, ScriptedEngine
from timing import in_time

from services.api.errors import ClientGone

BODY = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}


def test_headers_and_role_come_before_the_prompt_is_read(api: RunningApi, engine: ScriptedEngine) -> None:
    engine.prompt_s = 120
    with api.client.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as answer:
        first = next(answer.iter_text())
        assert '"role":"assistant"' in first


@pytest.mark.parametrize("interval_s", [0.1, 0.0])
def test_pings_while_nothing_comes(
    start_api: Callable[..., RunningApi], engine: ScriptedEngine, interval_s: float
) -> None:
    api = start_api(ping_interval_s=interval_s)
    engine.prompt_s = 120 if interval_s else 1
    began, raw = time.monotonic(), ""
    with api.client.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as answer:
        for text in answer.iter_text():
            raw += text
            if raw.count(": ping\n\n") >= 3:
                engine.hurry.set()
    assert (3 <= raw.count(": ping\n\n") <= (time.monotonic() - began) / 0.1) if interval_s else ": ping" not in raw
    assert raw.endswith("data: [DONE]\n\n")
    with api.openai() as client:  # comments do not disturb it
        chunks = client.chat.completions.create(**BODY, stream=True)  # type: ignore[call-overload]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello there, friend."


def test_a_failure_inside_the_stream_is_an_event(api: RunningApi, engine: ScriptedEngine) -> None:
    engine.failure = Failure(grpc.StatusCode.INTERNAL, "the step broke", "step_failed", after_tokens=2)
    with api.client.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as answer:
        assert answer.status_code == 200
        lines = answer.read().decode().strip().split("\n\n")
    error = json.loads(lines[-1].removeprefix("data: "))["error"]
    assert (error["code"], error["message"]) == ("engine_failed", "the step broke")
    assert "[DONE]" not in "".join(lines), "a broken answer looks whole"
    engine.failure = Failure(grpc.StatusCode.UNAVAILABLE, after_tokens=2)
    with api.openai() as client, pytest.raises(openai.APIError, match="engine"):
        list(client.chat.completions.create(**BODY, stream=True))  # type: ignore[call-overload]
    engine.failure = Failure(grpc.StatusCode.INTERNAL, "the step broke", "step_failed", after_tokens=2)
    assert api.client.post("/v1/chat/completions", json=BODY).status_code == 500


def test_an_engine_that_dies_inside_the_stream(api: RunningApi, engine: ScriptedEngine) -> None:
    engine.token_s, engine.script = 0.2, engine.script * 100
    with api.client.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as answer:
        text = answer.iter_text()
        next(text)
        engine.close()
        rest = "".join(text)
    assert '"code":"engine_unavailable"' in rest


def test_an_engine_that_ends_without_finishing(api: RunningApi, engine: ScriptedEngine) -> None:
    engine.failure = Failure(grpc.StatusCode.CANCELLED, "going", "cancelled", after_tokens=1)
    answer = api.client.post("/v1/chat/completions", json=BODY)
    assert answer.status_code == 503


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["prompt", "tokens"])
def test_a_client_that_goes_away_frees_the_sequence(
    api: RunningApi, engine: ScriptedEngine, stream: bool, phase: str
) -> None:
    engine.script = engine.script * 100
    engine.prompt_s, engine.token_s = (120, 0) if phase == "prompt" else (0, 0.2)
    with api.begin({**BODY, "stream": stream}) as connection:
        assert in_time(lambda: bool(engine.calls) and (phase == "prompt" or engine.calls[0].sent_tokens > 2))
        if stream:
            assert connection.recv(1), "it has begun"
    assert engine.calls[0].cancelled.wait(20), "the engine goes on"
    assert in_time(lambda: api.metric("client_disconnects_total") == 1)
    assert in_time(lambda: api.metric("answers_in_progress") == 0)


def test_a_client_that_goes_away_while_the_request_waits(
    api: RunningApi, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the engine has said anything: the call that is being opened is given up too."""
    monkeypatch.setattr("services.api.client.ADMISSION_S", 0.5)
    engine.admission_s = 120
    with api.begin(BODY):
        assert in_time(lambda: bool(engine.calls))
    assert engine.calls[0].cancelled.wait(20)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_is_gone_before_the_first_event(
    api: RunningApi, engine: ScriptedEngine, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generator that was never begun runs no cleanup of its own."""

    async def gone_at_once(receive: Any, work: Any) -> None:
        work.close()
        raise ClientGone("at once")

    for module in ("serving", "sse"):
        monkeypatch.setattr(f"services.api.{module}.until_gone", gone_at_once)
    engine.prompt_s = 30
    with httpx.Client(base_url=api.url, timeout=2) as client, contextlib.suppress(httpx.HTTPError):
        client.post("/v1/chat/completions", json={**BODY, "stream": stream})
    assert in_time(lambda: bool(engine.calls))
    assert engine.calls[0].cancelled.wait(20)


def test_an_answer_may_not_take_for_ever(start_api: Callable[..., RunningApi], engine: ScriptedEngine) -> None:
    api = start_api(request_timeout_s=1.0)
    engine.prompt_s = 30
    answer = api.client.post("/v1/chat/completions", json=BODY)
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "engine_timeout"


def test_the_log_has_the_request_and_not_its_text(
    api: RunningApi, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    api.client.post(
        "/v1/chat/completions",
        json={"model": "demo", "messages": [{"role": "user", "content": "a secret wish"}]},
        headers={"X-Request-Id": "wish-1"},
    )
    lines: list[logging.LogRecord] = []

    def logged() -> bool:  # behind the response
        lines[:] = [record for record in caplog.records if record.name == "services.api.access"]
        return bool(lines)

    assert in_time(logged)
    assert lines[-1].fields["request_id"] == "wish-1"  # type: ignore[attr-defined]
    assert lines[-1].fields["status"] == 200  # type: ignore[attr-defined]
    assert "secret wish" not in caplog.text
    assert "Hello there" not in caplog.text
    assert engine.calls[0].start.request_id == "wish-1"


def test_metrics_count_what_was_done(api: RunningApi, engine: ScriptedEngine) -> None:
    usages: list[Any] = [api.chat("Hi")["usage"], api.chat("Hi", max_tokens=2)["usage"]]
    api.client.post("/v1/chat/completions", json={"model": "demo"})
    text = api.client.get("/metrics").text
    assert api.metric("answers_total", finish_reason="stop") == 1
    assert api.metric("answers_total", finish_reason="length") == 1
    assert api.metric("prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
    assert api.metric("completion_tokens_total") == sum(usage["completion_tokens"] for usage in usages)
    assert api.metric("time_to_first_token_seconds_count") == 2
    assert api.metric("inter_token_latency_seconds_count") == sum(usage["completion_tokens"] for usage in usages) - 2
    assert api.metric("errors_total", code="invalid_request") == 1
    assert 'thimble_api_http_requests_total{method="POST",route="/v1/chat/completions",status="200"} 2.0' in text
    assert 'thimble_api_http_requests_total{method="POST",route="/v1/chat/completions",status="400"} 1.0' in text
    assert "thimble_api_build_info{" in text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_progress_of_the_prompt_if_it_is_asked_for(api: RunningApi, engine: ScriptedEngine, path: str) -> None:
    def told(**more: Any) -> list[dict[str, Any]]:
        body = {"model": "demo", "stream": True, **more}
        body |= {"prompt": "Hi there"} if path == "/v1/completions" else BODY
        raw = api.client.post(path, json=body).text
        chunks = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
        assert all(chunk["choices"] for chunk in chunks), "no chunk without choices but the usage"
        return [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]

    engine.prompt_s = 0.2
    found = told(return_progress=True)
    total = len(engine.calls[-1].start.ids)
    assert len(found) == 3
    assert [(one["total"], one["cache"]) for one in found] == [(total, 0)] * 3
    assert [one["processed"] for one in found] == [0, 0, total]
    assert found[0]["time_ms"] == 0
    assert [one["left_ms"] for one in found] == [0, 200, 0]
    assert 50 <= found[-1]["time_ms"] < 15_000, "0.2 s by the engine's clock"
    assert told() == told(return_progress=False) == []
