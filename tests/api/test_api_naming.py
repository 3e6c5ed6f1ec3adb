"""A next turn that comes within milliseconds finds what the last one left, however long naming it takes."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from running_api import RunningApi
from scripted_engine import ScriptedEngine

from services.api import naming
from services.api.embedded import EmbeddedStore

SYSTEM = {"role": "system", "content": "You are a very patient assistant who explains things slowly, in many words."}
DIALOG = [SYSTEM, {"role": "user", "content": "Please tell me what you can do for me today."}]
OTHER = [SYSTEM, {"role": "user", "content": "And something else."}]


def next_turn(reply: Any) -> list[dict[str, Any]]:
    answer = {"role": "assistant", "content": reply["choices"][0]["message"]["content"]}
    return [*DIALOG, answer, {"role": "user", "content": "And what else?"}]


class Held:
    """The rendering of answers' ends: under way when `began` is set, and held until `go` is."""

    def __init__(self) -> None:
        self.began, self.go = threading.Event(), threading.Event()


@pytest.fixture
def api(start_api: Callable[..., RunningApi], store: EmbeddedStore) -> RunningApi:
    return start_api(redis_url=store.url, read_ahead=False)


@pytest.fixture
def held(api: RunningApi, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    one, template = Held(), api.app.state.chats.folder.template
    real = template.answered

    def answered(messages: Any, *args: Any) -> Any:
        if len(messages) == len(DIALOG) + 1 and messages[1]["content"] == DIALOG[1]["content"]:
            one.began.set()
            assert one.go.wait(30)
        return real(messages, *args)

    monkeypatch.setattr(template, "answered", answered)
    yield one
    one.go.set()


def cached(reply: Any) -> int:
    return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


def soon(api: RunningApi, held: Held, seconds: float = 0.4) -> Any:
    """The next turn's reply, asked for while the last answer's end is being rendered, which goes on after a while."""
    reply = api.chat(*DIALOG)
    assert held.began.wait(10)
    timer = threading.Timer(seconds, held.go.set)
    timer.start()
    try:
        return api.chat(*next_turn(reply))
    finally:
        timer.join()


def test_a_next_turn_waits_for_the_names_of_the_last_one(api: RunningApi, engine: ScriptedEngine, held: Held) -> None:
    found = soon(api, held)
    assert engine.calls[-1].source == "HOT"
    read = found["usage"]["prompt_tokens"] - cached(found)
    assert 0 < read < len(engine.calls[0].start.ids) < cached(found)


def test_without_waiting_it_finds_nothing(api: RunningApi, held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(self: naming.Naming, keys: Any) -> None:
        pass

    monkeypatch.setattr(naming.Naming, "ended", at_once)
    assert cached(soon(api, held, 2.0)) == 0


def test_other_dialogs_do_not_wait(api: RunningApi, held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(naming, "LONGEST_S", 60.0)
    api.chat(*DIALOG)
    assert held.began.wait(10)
    api.chat(*OTHER)
    assert not held.go.is_set()


def test_it_waits_for_so_long_and_no_longer(api: RunningApi, held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(naming, "LONGEST_S", 0.3)
    reply = api.chat(*DIALOG)
    assert held.began.wait(10)
    api.chat(*next_turn(reply))
    assert not held.go.is_set()


def test_nothing_is_left_of_names_that_were_given(api: RunningApi, held: Held) -> None:
    soon(api, held)
    api.saved()
    assert api.app.state.chats.saving._naming._under_way == {}
