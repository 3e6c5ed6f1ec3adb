"""The engine's door when things go wrong behind it or before it: clients that never come back, that come with several
requests or late, a grammar that is refused again and again, an end that fails."""

import asyncio
import traceback
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
from test_line import ANSWER_S, Door, full
from toy_engine import INFO, Gate, toy

from services.engine.errors import EngineError, QueueFullError, StepError
from services.engine.request import Form, Grammar, Request

DEMO = Path(__file__).parents[2] / "demo"
PLACES, QUEUE = 2, 4


def test_a_line_of_who_never_comes_back_keeps_no_seat_empty() -> None:
    """They were told a time and have given up: the next one who asks is let in to wait, as there is nobody else."""
    door = Door(PLACES, QUEUE)
    inside = [door.enter(f"early {number}") for number in range(PLACES + 2 * QUEUE)]
    for number in range(50):
        door.wait_s(f"gone {number}")
    for sequence in inside[: 2 * QUEUE]:
        door.leave(sequence)
    door.enter("newcomer")  # the seats are taken, and nobody would be there for the next
    with pytest.raises(QueueFullError, match=r"^3 requests are .* waiting, and places are kept for 50 users who asked"):
        door.enter("another")
    door.leave(inside[-1])
    door.enter("another")


@pytest.mark.parametrize("queue_limit", [0, 1])
def test_no_more_come_in_than_there_is_room_for(queue_limit: int) -> None:
    door, inside = full(PLACES, queue_limit)
    door.wait_s("x")
    assert len(door.admission) == PLACES + 2 * queue_limit == len(inside)


def test_each_of_a_user_s_requests_may_come_when_it_was_told_to() -> None:
    door, inside = full(places=1, queue_limit=2, answer_s=30.0)
    assert door.wait_s("first") == 30
    door.admission._answer_s = ANSWER_S  # others' answers are quicker than thought
    assert door.wait_s("first") == 1
    door.now += 30
    door.leave(inside[0])
    door.wait_s("newcomer")
    door.enter("first")


def test_a_long_prompt_is_in_time() -> None:
    """It was sent when it was told to, and then cut into tokens."""
    door, inside = full()
    told_s = door.wait_s("first")
    door.leave(inside[0])
    door.now += told_s + 5
    with pytest.raises(QueueFullError):
        door.enter("newcomer")
    door.enter("first")


@pytest.mark.parametrize(("vocab_size", "refusal"), [(4096, "is not usable"), (50, "follows no grammars")])
def test_a_grammar_that_is_refused_again_and_again_keeps_nothing_of_who_asked(vocab_size: int, refusal: str) -> None:
    """The refusal is kept with the grammar, and one for all grammars where their vocabulary cannot be read."""
    request = Request("r", (1, 2), 3, stop_ids=frozenset({1}), grammar=Grammar(Form.REGEX, "("))
    depths = []
    with toy(replace(INFO, vocab_size=vocab_size), tokenizer_file=DEMO / "tokenizer.json") as t:
        for _ in range(20):
            asyncio.run(t.engine.prepare(request))
            with pytest.raises(EngineError, match=refusal) as caught:
                t.engine.submit(request, lambda event: None)
            depths.append(len(traceback.extract_tb(caught.value.__traceback__)))
    assert depths[-1] <= depths[1], depths


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_whose_end_fails_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a file is to be read for a gauge and no more can be opened: the process waits for `ended`."""

    def fails() -> NoReturn:
        raise OSError("Too many open files")

    with toy(sound=False) as t:
        gate = t.model.before = Gate()
        ask = t.ask(Request("r", (1, 2, 3), 3))
        gate.hold(1)
        monkeypatch.setattr(t.metrics, "glance", fails)
        gate.open()
        assert isinstance(ask.fail().error, StepError)
        assert isinstance(t.engine.ended.exception(timeout=10), OSError)
        assert t.experts.closed
