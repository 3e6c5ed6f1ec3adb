"""Several engines behind one api: each dialog has its own, any other goes on with it, and none is lost with one."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from running_api import RunningApi
from scripted_engine import Failure, ScriptedEngine
from timing import in_time

from services.api import engines as routing
from services.api.embedded import EmbeddedStore
from services.api.engines import Engines, owner_of
from services.api.model_folder import ModelFolder

SYSTEM = {"role": "system", "content": "You are a very patient assistant who explains things slowly, in many words."}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answered(reply: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": reply["choices"][0]["message"]["content"]}


@pytest.fixture
def other(folder: ModelFolder) -> Iterator[ScriptedEngine]:
    scripted = ScriptedEngine()
    scripted.script = folder.tokenizer.encode("Hello there, friend.")
    yield scripted
    scripted.close()


@pytest.fixture
def api(
    start_api: Callable[..., RunningApi], engine: ScriptedEngine, other: ScriptedEngine, store: EmbeddedStore
) -> RunningApi:
    return start_api(engines=f"{engine.address},{other.address}", redis_url=store.url)


def test_dialogs_are_spread_and_each_stays_where_it_is(
    api: RunningApi, engine: ScriptedEngine, other: ScriptedEngine
) -> None:
    for number in range(12):
        before = len(engine.calls), len(other.calls)
        dialog = [SYSTEM, user(f"Question number {number}")]
        for _ in range(3):
            reply = api.chat(*dialog)
            api.saved()
            dialog += [answered(reply), user("And then?")]
        grown = len(engine.calls) - before[0], len(other.calls) - before[1]
        assert sorted(grown) == [0, 3]
    assert min(len(engine.calls), len(other.calls)) >= 3 * 2
    assert {call.source for one in (engine, other) for call in one.calls if len(call.start.ids) > 60} == {"HOT"}


def owned_by(api: RunningApi, wanted: ScriptedEngine) -> tuple[list[dict[str, Any]], Any]:
    """A dialog that this engine has answered."""
    for number in range(50):
        before = len(wanted.calls)
        dialog = [SYSTEM, user(f"Question number {number}")]
        reply = api.chat(*dialog)
        api.saved()
        if len(wanted.calls) > before:
            return dialog, reply
    raise AssertionError("no dialog goes there")


def test_a_killed_engine_loses_no_dialog(api: RunningApi, engine: ScriptedEngine, other: ScriptedEngine) -> None:
    dialog, reply = owned_by(api, engine)
    engine.close()
    for turn in range(3):
        dialog += [answered(reply), user(f"And then {turn}?")]
        reply = api.chat(*dialog)
        api.saved()
        assert reply["choices"][0]["message"]["content"] == "Hello there, friend."
        call = other.calls[-1]
        assert call.source == ("HOT" if turn else "SENT"), "what the one that is gone had stored"
        assert len(call.executed) < 30


def test_an_engine_that_is_back_gets_its_dialogs_back(
    api: RunningApi, engine: ScriptedEngine, other: ScriptedEngine, folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.api.client.FAILED_S", 0.1)
    dialog, reply = owned_by(api, engine)
    engine.close()
    dialog += [answered(reply), user("And then?")]
    reply = api.chat(*dialog)
    api.saved()
    again = ScriptedEngine(engine.port)
    again.script = folder.tokenizer.encode("Hello there, friend.")
    try:

        def comes_back() -> bool:
            nonlocal dialog, reply
            dialog = [*dialog, answered(reply), user("And then?")]
            reply = api.chat(*dialog)
            api.saved()
            return bool(again.calls)

        assert in_time(comes_back)
        assert again.calls[-1].source == "SENT"
    finally:
        again.close()


def test_a_full_engine_passes_its_dialogs_on(api: RunningApi, engine: ScriptedEngine, other: ScriptedEngine) -> None:
    dialog, reply = owned_by(api, engine)
    engine.failure = Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, code="queue_full")
    calls = len(other.calls)
    api.chat(*dialog, answered(reply), user("And then?"))
    assert len(other.calls) == calls + 1


@pytest.mark.parametrize("waits_s", [("7", "30"), ("30", "7"), ("7", None), (None, "7")])
def test_with_all_engines_full_a_client_hears_of_the_one_with_room_first(
    api: RunningApi, engine: ScriptedEngine, other: ScriptedEngine, waits_s: tuple[str | None, str | None]
) -> None:
    """None: gone."""
    for one, wait_s in zip((engine, other), waits_s, strict=True):
        full = Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", "queue_full", retry_after_s=wait_s)
        one.failure = full if wait_s else Failure(grpc.StatusCode.UNAVAILABLE)
    body = {"model": "demo", "messages": [user("Hello")]}
    answer = api.client.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")


def test_a_client_s_mistake_is_not_passed_on(api: RunningApi, engine: ScriptedEngine, other: ScriptedEngine) -> None:
    """The control: only an engine that is gone or full is passed over."""
    dialog, _ = owned_by(api, engine)
    engine.failure = Failure(grpc.StatusCode.INVALID_ARGUMENT, code="bad_sampling")
    calls = len(other.calls)
    answer = api.client.post("/v1/chat/completions", json={"model": "demo", "messages": dialog})
    assert answer.status_code == 400
    assert len(other.calls) == calls


def test_with_no_engine_left_it_says_so(api: RunningApi, engine: ScriptedEngine, other: ScriptedEngine) -> None:
    engine.close()
    other.close()
    answer = api.client.post("/v1/chat/completions", json={"model": "demo", "messages": [user("Hello")]})
    assert answer.status_code == 503


def test_one_engine_more_moves_only_what_goes_to_it() -> None:
    owners = [owner_of([user(str(number))], []) for number in range(300)]

    def preferred(addresses: list[str]) -> list[str]:
        engines = Engines(addresses)
        return [engines._ranked(addresses, owner)[0].address for owner in owners]

    async def both() -> tuple[list[str], list[str]]:
        return preferred(["10.0.0.1:1", "10.0.0.2:1"]), preferred(["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"])

    two, three = asyncio.run(both())
    moved = {after for before, after in zip(two, three, strict=True) if before != after}
    assert moved == {"10.0.0.3:1"}
    assert 60 < three.count("10.0.0.3:1") < 140
    assert 110 < two.count("10.0.0.1:1") < 190


def test_a_name_stands_for_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def addresses(name: str) -> list[str]:
        return await routing._resolve(name)

    assert asyncio.run(addresses("127.0.0.1:8600")) == ["127.0.0.1:8600"]
    assert asyncio.run(addresses("localhost:8600")) == ["127.0.0.1:8600"]
    assert asyncio.run(addresses("no.such.name.invalid:8600")) == ["no.such.name.invalid:8600"]

    async def found(self: Any, host: str, port: int, **options: Any) -> list[Any]:
        return [(2, 1, 6, "", (f"10.0.0.{n}", port)) for n in (2, 1, 2)] + [(10, 1, 6, "", ("::1", port, 0, 0))]

    monkeypatch.setattr("asyncio.base_events.BaseEventLoop.getaddrinfo", found)
    assert asyncio.run(addresses("engine:8600")) == ["10.0.0.1:8600", "10.0.0.2:8600"]


def test_the_owner_is_known_from_the_first_question_on() -> None:
    assert owner_of([SYSTEM, user("a")], []) == owner_of([SYSTEM, user("a")], [])
    others = {owner_of([SYSTEM, user("b")], []), owner_of([user("a")], []), owner_of([SYSTEM, user("a")], [1])}
    assert len(others | {owner_of([SYSTEM, user("a")], [])}) == 4
