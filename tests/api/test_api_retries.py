"""A client that timed out and asks again gets the answer that is under way; any other that leaves ends it."""

import time

import pytest
from openai import OpenAI
from running_api import RunningApi
from scripted_engine import ScriptedEngine
from timing import in_time

BODY = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
FIRST = {"x-stainless-read-timeout": "0.5", "x-stainless-retry-count": "0"}
AGAIN = {"x-stainless-read-timeout": "20", "x-stainless-retry-count": "1"}


def leave_after(api: RunningApi, engine: ScriptedEngine, seconds: float, headers: dict[str, str]) -> float:
    """A client that waits so long for the answer that is under way, its own or the one that it joins. Returns when it
    left, on time.monotonic()'s clock; the api has noticed by then."""
    before, waiting = api.metric("client_disconnects_total"), api.app.state.retries._waiting
    with api.begin(BODY, headers):
        assert in_time(lambda: len(engine.calls) == 1 and not waiting), "it has neither begun nor joined"
        time.sleep(seconds)
        left = time.monotonic()
    assert in_time(lambda: api.metric("client_disconnects_total") > before)
    assert in_time(lambda: bool(waiting) or engine.calls[0].cancelled.is_set()), "neither kept nor ended"
    return left


def test_the_official_client_s_retry_joins(api: RunningApi, engine: ScriptedEngine) -> None:
    api.chat("What comes first takes longer.")
    engine.prompt_s = 2.5
    with OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=9, timeout=1.0) as client:
        reply = client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "Hi"}])
    assert reply.choices[0].message.content == "Hello there, friend."
    assert len(engine.calls) == 2, "it was begun again"
    assert not engine.calls[1].cancelled.is_set()


def test_an_answer_that_is_complete_waits_for_the_retry(api: RunningApi, engine: ScriptedEngine) -> None:
    engine.prompt_s = 120
    leave_after(api, engine, 0.0, FIRST)
    engine.hurry.set()
    assert engine.calls[0].ended.wait(20)
    answer = api.client.post("/v1/chat/completions", json=BODY, headers=AGAIN)
    assert answer.json()["choices"][0]["message"]["content"] == "Hello there, friend."
    assert len(engine.calls) == 1
    api.client.post("/v1/chat/completions", json=BODY, headers=AGAIN)
    assert len(engine.calls) == 2, "an answer is given once"


@pytest.mark.parametrize(
    ("again", "change"),
    [({"x-stainless-retry-count": "0"}, {}), (AGAIN, {"seed": 5}), (AGAIN | {"Authorization": "Bearer other"}, {})],
    ids=["no retry", "another request", "another client"],
)
def test_others_do_not_join(
    api: RunningApi, engine: ScriptedEngine, again: dict[str, str], change: dict[str, int]
) -> None:
    engine.prompt_s = 120
    leave_after(api, engine, 0.0, FIRST)
    engine.hurry.set()
    api.client.post("/v1/chat/completions", json=BODY | change, headers=again)
    assert len(engine.calls) == 2


@pytest.mark.parametrize("headers", [{}, {"x-stainless-read-timeout": "600"}, {"x-stainless-read-timeout": "soon"}])
def test_a_client_that_just_leaves_ends_it(api: RunningApi, engine: ScriptedEngine, headers: dict[str, str]) -> None:
    engine.prompt_s = 120
    leave_after(api, engine, 0.0, headers)
    assert engine.calls[0].cancelled.wait(20)


def test_without_a_retry_it_ends(api: RunningApi, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.api.retries.GRACE_S", 0.5)
    engine.prompt_s = 120
    left = leave_after(api, engine, 0.0, FIRST)
    assert engine.calls[0].cancelled.wait(20)
    assert engine.calls[0].cancelled_at - left >= 0.5


def test_a_retry_that_leaves_too(api: RunningApi, engine: ScriptedEngine) -> None:
    engine.prompt_s = 120
    leave_after(api, engine, 0.0, FIRST)
    leave_after(api, engine, 0.0, FIRST | {"x-stainless-retry-count": "1"})
    engine.hurry.set()
    answer = api.client.post("/v1/chat/completions", json=BODY, headers=AGAIN)
    assert answer.status_code == 200
    assert len(engine.calls) == 1


def test_a_retry_that_leaves_too_is_waited_for_as_long(
    api: RunningApi, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only until the first one's time is over."""
    monkeypatch.setattr("services.api.retries.GRACE_S", 3.0)
    engine.prompt_s = 120
    leave_after(api, engine, 0.0, FIRST)
    left = leave_after(api, engine, 2.5, {"x-stainless-read-timeout": "2.5", "x-stainless-retry-count": "1"})
    assert engine.calls[0].cancelled.wait(20)
    assert engine.calls[0].cancelled_at - left >= 3.0
