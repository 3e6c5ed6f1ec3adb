"""Reading ahead: the next turn costs only its own new text, a dialog that goes on is not read twice, old states go."""

from collections.abc import Callable
from typing import Any

import pytest
import redis
from running_api import RunningApi
from scripted_engine import ScriptedEngine
from timing import in_time

from services.api.embedded import EmbeddedStore
from services.api.model_folder import ModelFolder

SYSTEM = {"role": "system", "content": "You are a very patient assistant who explains things slowly, in many words."}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answered(reply: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": reply["choices"][0]["message"]["content"]}


def states(store: EmbeddedStore) -> int:
    with redis.Redis.from_url(store.url) as client:
        return len(client.keys("thimble:*:state:*"))


@pytest.fixture
def api(start_api: Callable[..., RunningApi], store: EmbeddedStore) -> RunningApi:
    return start_api(redis_url=store.url)


def test_the_history_is_read_as_the_next_request_shows_it(
    api: RunningApi, engine: ScriptedEngine, folder: ModelFolder
) -> None:
    engine.script = folder.tokenizer.encode("I think a lot about it.\n</think>\nFour, I would say.")
    reply = api.chat(SYSTEM, user("2+2?"), model="demo-think")
    api.saved()
    (idle,) = engine.idle_calls
    dialog = [SYSTEM, user("2+2?"), answered(reply), user("And?")]
    prompt = folder.template.prompt(dialog, None, {"enable_thinking": True})
    assert prompt.history_end is not None
    before = folder.tokenizer.encode(prompt.text[: prompt.text.rindex("<|im_start|>user")])
    assert list(idle.start.ids) == before
    assert (idle.start.max_tokens, idle.start.snapshot_answer, idle.start.idle) == (0, True, True)
    assert idle.source == "HOT"
    assert len(idle.executed) == len(
        folder.tokenizer.encode("<|im_start|>assistant\n<think></think>Four, I would say.<|im_end|>\n")
    )
    assert api.metric("tokens_read_ahead_total") == len(idle.executed)
    api.chat(*dialog)
    assert engine.calls[-1].restored_tokens == len(before)


def test_the_end_is_stored_once_and_not_the_answer_too(api: RunningApi, store: EmbeddedStore) -> None:
    api.chat(SYSTEM, user("Hello, how are you today?"))
    api.saved()
    assert api.metric("reads_ahead_total", result="done") == 1
    assert api.metric("snapshot_writes_total", result="stored") == 3, "first turn, before the answer, end"
    assert states(store) == 3


def test_a_dialog_that_goes_on_is_not_read_ahead_any_more(api: RunningApi, engine: ScriptedEngine) -> None:
    engine.does_idle_work = False
    reply = api.chat(SYSTEM, user("Hello"))
    assert in_time(lambda: len(engine.idle_calls) == 1)
    api.chat(SYSTEM, user("Something else"))
    assert not engine.idle_calls[0].cancelled.is_set(), "another dialog is no reason"
    api.chat(SYSTEM, user("Hello"), answered(reply), user("And now?"))
    assert engine.idle_calls[0].cancelled.wait(5)
    assert api.metric("reads_ahead_total", result="overtaken") == 1
    engine.does_idle_work = True


def test_an_engine_that_never_gets_to_it_costs_nothing(
    start_api: Callable[..., RunningApi], store: EmbeddedStore, engine: ScriptedEngine
) -> None:
    engine.does_idle_work = False
    api = start_api(redis_url=store.url)
    dialog = [SYSTEM, user("Hello")]
    for number in range(3):
        reply = api.chat(*dialog)
        dialog += [answered(reply), user("And now?")]
        assert in_time(lambda number=number: len(engine.idle_calls) == number + 1)
    assert engine.calls[-1].source == "HOT", "the end of the answer is hot all the same"


def test_older_states_of_a_dialog_go(api: RunningApi, engine: ScriptedEngine, store: EmbeddedStore) -> None:
    dialog = [SYSTEM, user("Number 0?")]
    counts = []
    for number in range(6):
        reply = api.chat(*dialog)
        api.saved()
        counts.append(states(store))
        dialog += [answered(reply), user(f"And number {number + 1}?")]
    assert max(counts) <= 5, "first turn, and the newest four: two turns, before and after the answer"
    assert api.metric("snapshots_replaced_total") >= 2 * 3
    engine.hot.clear()
    edited = [*dialog[:-3], user("Quite another question")]
    api.chat(*edited)
    assert engine.calls[-1].source == "SENT", "the last message may be edited"
    assert engine.calls[-1].restored_tokens > len(engine.calls[-2].start.ids) - 60


def test_without_it_nothing_is_read_ahead(
    start_api: Callable[..., RunningApi], store: EmbeddedStore, engine: ScriptedEngine
) -> None:
    api = start_api(redis_url=store.url, read_ahead=False)
    api.chat(SYSTEM, user("Hello"))
    api.saved()
    assert engine.idle_calls == []


def test_tasks_of_chat_programs_are_not_read_ahead(api: RunningApi, engine: ScriptedEngine) -> None:
    api.chat(user("### Task:\nSuggest a title.\n<chat_history>\nUSER: Hi\n</chat_history>"))
    api.saved()
    assert engine.calls[-1].start.low_priority
    assert engine.idle_calls == []
