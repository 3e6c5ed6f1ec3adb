"""Idle work: a prompt is read ahead for its snapshot while there is nothing else to do, and gives way to everything."""

import logging
from dataclasses import replace
from typing import Any

import pytest
from toy_engine import INFO, Call, Gate, Toy, answer, soon, toy

from services.engine.errors import CancelledError, QueueFullError, SamplingError
from services.engine.request import Request, Restore, Source, Token

PROMPT = (1, 2, 3, 4, 5) * 5
IDLE = Request("idle", PROMPT, 0, idle=True, snapshot_answer=True)
CHAT = Request("chat", (9, 8, 7), 4)


def ask(t: Toy, **more: Any) -> Call:
    return t.ask(replace(IDLE, **more))


def test_it_reads_the_prompt_and_takes_its_state() -> None:
    with toy() as t:
        call = ask(t)
        finish = call.finish()
        (snapshot,) = finish.snapshots
        assert (snapshot.state.tokens, finish.executed_tokens, finish.generated_tokens) == (25, 25, 0)
        assert t.model.calls == [[8], [8], [8], [1]]
        assert call.tokens == []
        chat = t.ask(Request("next", (*PROMPT, 6, 7), 5, offers=(snapshot.state,)))
        assert chat.finish().cached_tokens == 25
        assert chat.tokens == answer([*PROMPT, 6, 7], 5)
        assert t.value("idle_tokens_total") == 25
        assert t.value("prompt_tokens_total") == 2
        assert t.value("request_success_total", finished_reason="length") == 1, "idle work is no request of a client's"


def test_it_gives_way_within_a_chunk_and_begins_again_from_where_it_began() -> None:
    with toy() as t:
        first = t.ask(Request("r", PROMPT[:13], 2, snapshot_answer=True))
        (held,) = first.finish().snapshots
        first.handle.cancel()
        t.model.calls.clear()
        ids = (*PROMPT[:13], *first.tokens[:1], *range(20))
        gate = Gate()
        t.model.before = gate
        idle = ask(t, ids=ids, offers=(held.state,))
        gate.hold(2)  # one chunk is read; the second is computed when the request comes
        chat = t.ask(CHAT)
        gate.open()
        chat.finish()
        assert chat.tokens == answer(list(CHAT.ids), 4)
        finish = idle.finish()
        assert t.model.calls == [[8], [8], [3], [1], [1], [1], [8], [8], [4]]
        assert (finish.cached_tokens, finish.executed_tokens) == (14, 20)
        assert [event.source for event in idle.events if isinstance(event, Restore)] == [Source.HOT], "told once"
        assert t.value("idle_put_off_total") == 1
        (snapshot,) = finish.snapshots
        after = t.ask(Request("next", (*ids, 3), 5, offers=(snapshot.state,)))
        after.finish()
        assert after.tokens == answer([*ids, 3], 5), "nothing of the chunk that was broken off is left"


SNAPSHOT, PASSING, HEADS = {"snapshot_at": (8,)}, {"passing_at": (8,)}, {"passing_at": (8,), "heads_only": True}


@pytest.mark.parametrize("kind", [SNAPSHOT, PASSING, HEADS], ids=str)
@pytest.mark.parametrize("hot_bytes", [1 << 20, 0])
def test_what_was_taken_before_it_gave_way_is_owed_once(kind: dict[str, Any], hot_bytes: int) -> None:
    """It is read again, and taken again. What the client hears of is held; without room nothing is that is not sent."""
    with toy(hot_bytes=hot_bytes, transit_bytes=1 << 20) as t:
        gate = Gate()
        t.model.before = gate
        idle = ask(t, snapshot_answer=False, **kind)
        gate.hold(2)  # the state behind the first eight is taken
        chat = t.ask(CHAT)
        gate.open()
        chat.finish()
        finish = idle.finish()
        assert finish.executed_tokens == 25
        assert [snapshot.state.tokens for snapshot in finish.snapshots] == [8] * bool(hot_bytes or kind != HEADS)
        idle.handle.cancel()
        chat.handle.cancel()
        if hot_bytes:
            after = t.ask(Request("next", PROMPT, 2, offers=(finish.snapshots[0].state,)))
            assert after.finish().cached_tokens == 8
            assert after.tokens == answer(list(PROMPT), 2)
        assert soon(lambda: t.hot.used_bytes <= hot_bytes)


def test_it_waits_until_nothing_runs() -> None:
    with toy() as t:
        gate = Gate()
        t.model.before = gate
        chat = t.ask(CHAT)
        gate.hold(1)
        idle = ask(t)
        later = t.ask(replace(CHAT, low_priority=True))
        gate.open()
        chat.finish(), later.finish(), idle.finish()
        assert t.model.calls[-4:] == [[8], [8], [8], [1]]
        assert later.tokens == answer(list(CHAT.ids), 4)


def test_it_takes_no_place_and_no_page_from_others() -> None:
    """Two places and two pages: the idle prompt has one of each when two chats come that need all."""
    with toy(pages=2) as t:
        gate = Gate()
        t.model.before = gate
        idle = ask(t)
        gate.hold(2)
        chats = [t.ask(CHAT), t.ask(replace(CHAT, ids=(7, 7)))]
        gate.open()
        for chat in chats:
            chat.finish()
            assert chat.tokens == answer(list(chat.request.ids), 4)
        assert idle.finish().executed_tokens == 25


def test_many_do_not_make_the_queue_full() -> None:
    with toy(replace(INFO, max_sequences=1, queue_limit=0)) as t:
        gate = Gate()
        t.model.before = gate
        idles = [ask(t) for _ in range(16)]
        with pytest.raises(QueueFullError):
            ask(t)
        chat = t.ask(CHAT)
        gate.open()
        chat.finish()
        for idle in idles:
            idle.finish()


def test_it_can_be_cancelled_while_it_is_computed() -> None:
    with toy() as t:
        gate = Gate()
        t.model.before = gate
        idle = ask(t)
        gate.hold(2)
        idle.handle.cancel()
        gate.open()
        assert isinstance(idle.fail().error, CancelledError)
        assert soon(lambda: t.pool.free == t.pool.total)
        assert len(t.model.calls) == 2


def test_one_whose_beginning_is_gone_ends(caplog: pytest.LogCaptureFixture) -> None:
    """It is given up, which is no failure: nobody is told of one."""
    with toy(hot_bytes=2500) as t:
        first = t.ask(Request("r", PROMPT[:13], 2, snapshot_answer=True))
        (held,) = first.finish().snapshots
        first.handle.cancel()
        gate = Gate()
        t.model.before = gate
        idle = ask(t, ids=(*PROMPT[:13], *first.tokens[:1], *range(20)), offers=(held.state,))
        gate.hold(gate._arrived + 1)
        chat = t.ask(replace(CHAT, snapshot_answer=True))
        gate.open()
        chat.until(Token)
        assert isinstance(idle.fail().error, CancelledError)
        assert t.value("request_failures_total", code="cancelled") == 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_it_samples_nothing() -> None:
    with toy() as t:
        with pytest.raises(SamplingError, match="give 0"):
            ask(t, max_tokens=1)
        with pytest.raises(SamplingError, match="at least one"):
            ask(t, idle=False)
