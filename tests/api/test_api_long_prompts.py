"""Places inside long prompts: what was read of one that is given up or changed is not read again."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_api import RunningApi
from scripted_engine import ScriptedEngine

from services.api.embedded import EmbeddedStore
from services.api.model_folder import ModelFolder
from services.api.places import places

EVERY = 64  # tokens
ROOT = Path(__file__).parents[2]
TEXTS = [ROOT / name for name in ("README.md", "services/api/places.py", "kernels/experts/host/cache.cpp")]
BOOK = "".join(f"In chapter {n} they walk on, past the {n * 37} trees.\nNobody says a word.\n" for n in range(40))


def prompt(end: str = "What is it about?") -> dict[str, Any]:
    return {"role": "user", "content": f"{BOOK}\n{end}"}


def given_up(api: RunningApi, engine: ScriptedEngine, message: dict[str, Any]) -> None:
    """A client that goes away while the prompt is read."""
    engine.prompt_s, count = 30.0, len(engine.calls)
    body = {"model": "demo", "messages": [message], "stream": True, "return_progress": True}
    with httpx.stream("POST", f"{api.url}/v1/chat/completions", json=body, timeout=20) as answer:
        for line in answer.iter_lines():
            told = re.search(r'"processed": ?(\d+)', line)
            if told and len(engine.calls) > count and int(told[1]) >= engine.calls[-1].start.passing_at[-1]:
                break
    assert engine.calls[-1].cancelled.wait(10)
    engine.prompt_s = 0.0


def executed(engine: ScriptedEngine) -> int:
    return len(engine.calls[-1].executed)


@pytest.fixture
def remembering(start_api: Callable[..., RunningApi]) -> RunningApi:
    return start_api(snapshot_min_tokens=1, snapshot_every_tokens=EVERY)


def test_a_prompt_that_was_given_up_goes_on_from_the_last_place(
    remembering: RunningApi, engine: ScriptedEngine
) -> None:
    given_up(remembering, engine, prompt())
    start = engine.calls[-1].start
    steps = [b - a for a, b in zip([0, *start.passing_at], start.passing_at, strict=False)]
    assert len(steps) > 5
    assert max(steps) < 3 * EVERY, "the tokens of this text are shorter than four letters, and not by so much"
    remembering.chat(prompt())
    assert list(engine.calls[-1].start.ids) == list(start.ids)
    assert engine.calls[-1].source == "HOT"
    assert executed(engine) == len(start.ids) - start.passing_at[-1] < 3 * EVERY


def test_a_changed_end_begins_at_the_last_place_and_a_changed_beginning_nowhere(
    remembering: RunningApi, engine: ScriptedEngine
) -> None:
    given_up(remembering, engine, prompt())
    last = engine.calls[-1].start.passing_at[-1]
    remembering.chat(prompt("Who walks there?"))
    assert (engine.calls[-1].source, engine.calls[-1].restored_tokens) == ("HOT", last)
    remembering.chat({"role": "user", "content": f"Once.\n{BOOK}"})
    assert engine.calls[-1].source == "NONE"


def test_what_the_engine_no_longer_has_is_forgotten(remembering: RunningApi, engine: ScriptedEngine) -> None:
    given_up(remembering, engine, prompt())
    places_read = set(engine.calls[-1].start.passing_at)
    engine.hot.clear()
    engine.keeps_hot = engine.keeps_in_passing = False
    for offered in (1, 0):
        remembering.chat(prompt())
        remembering.saved()
        assert len(places_read & {ref.tokens for ref in engine.calls[-1].start.offers}) == offered
        assert engine.calls[-1].source == "NONE"


def test_of_a_prompt_that_was_read_one_place_is_stored(
    start_api: Callable[..., RunningApi], store: EmbeddedStore, engine: ScriptedEngine
) -> None:
    engine.keeps_hot = False
    api = start_api(
        redis_url=store.url, snapshot_min_tokens=1, snapshot_every_tokens=EVERY, read_ahead=False, redis_timeout_ms=5000
    )
    api.chat(prompt())
    api.saved()
    last = engine.calls[-1].start.passing_at[-1]
    assert api.metric("snapshot_writes_total", result="stored") == 4, "and the two ends of turns, and the answer's"
    api.chat(prompt("Who walks there?"))
    assert (engine.calls[-1].source, engine.calls[-1].restored_tokens) == ("SENT", last)


def test_zero_turns_it_off_and_texts_of_one_piece_have_no_places(
    start_api: Callable[..., RunningApi], engine: ScriptedEngine
) -> None:
    api = start_api(snapshot_every_tokens=0)
    api.chat(prompt())
    assert list(engine.calls[-1].start.passing_at) == []
    assert places("x" * 10_000, EVERY, 10_000) == ()
    assert places(BOOK, 0, len(BOOK)) == ()


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_a_place_cuts_no_token(folder: ModelFolder, path: Path) -> None:
    """And is where it was when the text goes on in another way behind it."""
    text, tokenizer = folder.tokenizer.protect(path.read_text()), folder.tokenizer
    found = places(text, 16, len(text))
    assert len(found) > len(text) // 200
    cut = [
        i
        for start, end in zip((0, *found), (*found, len(text)), strict=True)
        for i in tokenizer.encode(text[start:end])
    ]
    assert cut == tokenizer.encode(text)
    odd = [n + 1 for n in found]
    wrong = [
        i for start, end in zip((0, *odd), (*odd, len(text)), strict=True) for i in tokenizer.encode(text[start:end])
    ]
    assert wrong != tokenizer.encode(text), "the control: other places do"
    middle = len(text) // 2
    other = places(text[:middle] + "Something else. " * 100, 16, middle)
    assert [n for n in found if n < middle - 100] == [n for n in other if n < middle - 100]
