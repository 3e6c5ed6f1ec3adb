"""Snapshots inside the engine: taken where asked, restored to the bit, refused when wrong, never beyond the budget."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from toy_engine import INFO, Call, Gate, Toy, answer, soon, toy

from services.engine.request import Progress, Request, Restore, Snapshot, Source, StateRef
from services.engine.snapshots.memory import Memory

PROMPT = (1, 2, 3, 4, 5) * 5
SIZE = 1744 + 20 * 13  # bytes of the toy's payload after 13 tokens


def ask(t: Toy, *ids: int, max_tokens: int = 6, **more: object) -> Call:
    return t.ask(Request("r", ids, max_tokens, **more))  # type: ignore[arg-type]


def restores(call: Call) -> list[tuple[Source, int]]:
    events = [event for event in call.events if isinstance(event, Restore)]
    return [(event.source, event.state.tokens if event.state else 0) for event in events]


def snapshots(t: Toy, *ids: int, **more: object) -> tuple[Snapshot, ...]:
    call = ask(t, *ids, **more)
    found = call.finish().snapshots
    call.handle.cancel()
    let_go = threading.Event()
    call.handle.then(let_go.set)
    assert let_go.wait(20)
    return found


def test_snapshots_are_where_they_were_asked_for() -> None:
    with toy() as t:
        found = snapshots(t, *PROMPT, snapshot_at=(5, 13), snapshot_answer=True)
        assert [s.state.tokens for s in found] == [5, 13, 30], "the last of 6 sampled tokens was not fed"
        assert [s.state.size_bytes for s in found] == [sum(map(len, s.chunks)) for s in found]
        assert found[1].state.size_bytes == SIZE
        assert t.model.calls[:4] == [[5], [8], [8], [4]], "chunks are cut at the positions"
        assert len({s.state.state_id for s in found}) == 3


def test_without_being_asked_nothing_is_kept() -> None:
    with toy() as t:
        assert snapshots(t, *PROMPT) == ()
        assert len(t.hot) == 0


def test_a_hot_state_is_restored_without_bytes_and_to_the_bit() -> None:
    with toy() as t:
        first = ask(t, *PROMPT, snapshot_answer=True)
        (snapshot,) = first.finish().snapshots
        first.handle.cancel()
        turn = (*PROMPT, *first.tokens, 7, 8)
        second = ask(t, *turn, offers=(replace(snapshot.state, size_bytes=0),))
        finish = second.finish()
        assert restores(second) == [(Source.HOT, 30)]
        assert (finish.cached_tokens, finish.executed_tokens) == (30, 3)
        assert second.tokens == answer(list(turn), 6)
        assert [e.done_tokens for e in second.events if isinstance(e, Progress)] == [33]
        assert t.model.calls[-6] == [3], "only the tail was run"


def test_positions_within_a_restored_state_are_left_out() -> None:
    with toy() as t:
        (snapshot,) = snapshots(t, *PROMPT, snapshot_at=(13,))
        found = snapshots(t, *PROMPT, offers=(snapshot.state,), snapshot_at=(5, 13, 20))
        assert [s.state.tokens for s in found] == [20]


def sent(t: Toy, snapshot: Snapshot, *ids: int, chunks: tuple[bytes, ...] | None = None, refusal: str = "") -> Call:
    """A request whose offer the engine does not hold, with the payload it then gets."""
    call = ask(t, *ids, offers=(snapshot.state,))
    event = call.until(Restore)
    assert isinstance(event, Restore)
    assert (event.source, event.state) == (Source.SEND, snapshot.state)
    for chunk in snapshot.chunks if chunks is None else chunks:
        call.handle.restore(chunk)
    if refusal:
        call.handle.restore(b"", refusal)
    call.finish()
    return call


def test_a_sent_payload_is_restored_by_another_engine_and_then_hot() -> None:
    with toy() as one:
        (snapshot,) = snapshots(one, *PROMPT, snapshot_at=(13,))
    with toy() as other:
        call = sent(other, snapshot, *PROMPT)
        assert restores(call) == [(Source.SEND, 13), (Source.SENT, 13)]
        assert call.tokens == answer(list(PROMPT), 6)
        assert sum(map(sum, other.model.calls[:2])) == 12
        again = ask(other, *PROMPT, offers=(snapshot.state,))
        again.finish()
        assert restores(again) == [(Source.HOT, 13)]


def damaged(snapshot: Snapshot, at: int) -> tuple[bytes, ...]:
    data = bytearray(b"".join(snapshot.chunks))
    data[at] ^= 1
    return (bytes(data),)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("bit", "checksum does not match"),
        ("short", "went away"),
        ("empty", "a chunk of 0 bytes"),
        ("other state", "another state than the one that was offered"),
        ("client", "evicted"),
    ],
)
def test_a_refused_payload_costs_a_prefill_and_nothing_else(kind: str, reason: str) -> None:
    with toy() as one:
        longer, shorter = reversed(snapshots(one, *PROMPT, snapshot_at=(5, 13)))
    chunks = {
        "bit": damaged(longer, -30),
        "short": (longer.chunks[0][:-9],),
        "empty": (b"",),
        "other state": shorter.chunks,
        "client": (),
    }[kind]
    with toy() as t:
        told = {"client": "the payload was evicted", "short": "the client went away"}
        call = sent(t, longer, *PROMPT, chunks=chunks, refusal=told.get(kind, ""))
        assert restores(call) == [(Source.SEND, 13), (Source.REFUSED, 13)]
        assert reason in call.events[1].reason  # type: ignore[union-attr]
        assert call.tokens == answer(list(PROMPT), 6)
        assert sum(map(sum, t.model.calls[:4])) == 25, "all of the prompt was run"
        assert len(t.hot) == 0


def test_a_payload_of_a_longer_state_gets_no_room_beyond_the_requests_own() -> None:
    """A card's tables have places for the pages of one context and no more: reading would fail later, for all."""
    with toy() as one:
        (offered,) = snapshots(one, *PROMPT, snapshot_at=(13,))
        (longer,) = snapshots(one, *range(1, 50), *range(1, 50), *range(1, 50), snapshot_at=(140,))
    with toy() as t:
        pages: list[int] = []
        t.model.before = lambda segments: pages.extend(len(segment.state.pages) for segment in segments)
        call = sent(t, offered, *PROMPT, chunks=(*longer.chunks, *longer.blocks))
        assert restores(call) == [(Source.SEND, 13), (Source.REFUSED, 13)]
        assert call.tokens == answer(list(PROMPT), 6)
        assert set(pages) == {1}


def test_the_longest_useful_offer_is_taken() -> None:
    with toy() as t:
        a, b = (s.state for s in snapshots(t, *PROMPT, snapshot_at=(5, 13)))
        (other,) = (s.state for s in snapshots(t, *[9] * 20, snapshot_at=(13,)))
        foreign = replace(b, state_id=bytes(32))
        whole = replace(b, tokens=25)
        unsendable = StateRef(t.hot.name(PROMPT[:20]).state_id, 20, 0)
        call = ask(t, *PROMPT, offers=(whole, unsendable, other, foreign, b, a))
        call.finish()
        assert restores(call) == [(Source.HOT, 13)], "of another text, another model, or out of reach: passed over"
        none = ask(t, *PROMPT, offers=(whole, unsendable, other, foreign))
        none.finish()
        assert restores(none) == [(Source.NONE, 0)]


def test_an_engine_of_other_arithmetic_takes_no_offer() -> None:
    with toy() as one:
        (snapshot,) = snapshots(one, *PROMPT, snapshot_at=(13,))
    with toy(replace(INFO, arithmetic_fingerprint="beef")) as other:
        call = ask(other, *PROMPT, offers=(snapshot.state,))
        call.finish()
        assert restores(call) == [(Source.NONE, 0)]


def test_others_go_on_while_a_payload_is_awaited() -> None:
    with toy() as one:
        (snapshot,) = snapshots(one, *PROMPT, snapshot_at=(13,))
    with toy() as t:
        waiting = ask(t, *PROMPT, offers=(snapshot.state,))
        waiting.until(Restore)
        assert ask(t, *PROMPT).finish()
        waiting.handle.cancel()
        waiting.fail()
        assert t.pool.free == t.pool.total
        waiting.handle.restore(snapshot.chunks[0])  # too late: nothing happens
        assert ask(t, *PROMPT).finish()


def test_the_budget_holds_and_the_longest_unused_leaves() -> None:
    with toy(hot_bytes=2 * SIZE) as t:
        prompts = [(n,) * 20 for n in (1, 2, 3)]
        refs = [snapshots(t, *prompts[n], snapshot_at=(13,))[0].state for n in (0, 1)]
        assert ask(t, *prompts[0], offers=(refs[0],)).finish().cached_tokens == 13  # used: the other is older now
        snapshots(t, *prompts[2], snapshot_at=(13,))
        offers = [replace(ref, size_bytes=0) for ref in refs]
        assert ask(t, *prompts[0], offers=(offers[0],)).finish().cached_tokens == 13
        assert ask(t, *prompts[1], offers=(offers[1],)).finish().cached_tokens == 0
        assert t.value("hot_state_bytes") == 2 * SIZE


def test_what_a_client_is_owed_stays_and_new_states_do_not_push_it_out() -> None:
    with toy(hot_bytes=SIZE) as t:
        slow = ask(t, *[1] * 20, snapshot_at=(13,))
        (owed,) = slow.finish().snapshots
        assert snapshots(t, *[2] * 20, snapshot_at=(13,)) == (), "no room: not kept, and the answer is fine"
        assert t.value("snapshots_total", result="dropped") == 1
        assert ask(t, *[1] * 20, offers=(replace(owed.state, size_bytes=0),)).finish().cached_tokens == 13
        slow.handle.cancel()  # its client has it
        assert len(snapshots(t, *[2] * 20, snapshot_at=(13,))) == 1


def test_with_heads_only_names_come_without_payloads_and_nothing_is_pinned() -> None:
    with toy(hot_bytes=SIZE) as t:
        call = ask(t, *[1] * 20, snapshot_at=(13,), heads_only=True)
        (head,) = call.finish().snapshots
        assert (head.chunks, head.state.size_bytes) == ((), SIZE)
        assert ask(t, *[1] * 20, offers=(replace(head.state, size_bytes=0),)).finish().cached_tokens == 13
        assert len(snapshots(t, *[2] * 20, snapshot_at=(13,))) == 1


def test_a_state_already_held_is_not_taken_again() -> None:
    with toy() as t:
        first = snapshots(t, *PROMPT, snapshot_at=(13,))
        second = snapshots(t, *PROMPT[:13], 40, 41, snapshot_at=(13,))
        assert first[0].chunks is second[0].chunks
        assert [t.value("snapshots_total", result=r) for r in ("taken", "held", "dropped")] == [1, 1, 0]


def test_a_cancelled_request_owes_nothing() -> None:
    with toy(hot_bytes=SIZE) as t:
        gate = Gate()
        t.model.before = gate
        call = ask(t, *[1] * 20, snapshot_at=(13,))
        gate.hold(3)  # the position is behind it
        call.handle.cancel()
        gate.open()
        call.fail()
        assert len(snapshots(t, *[2] * 20, snapshot_at=(13,))) == 1


def test_without_a_budget_snapshots_still_reach_the_client_and_nothing_stays() -> None:
    with toy(hot_bytes=0, transit_bytes=2 * SIZE) as t:
        call = ask(t, *[1] * 20, snapshot_at=(13,), snapshot_answer=False)
        (snapshot,) = call.finish().snapshots
        assert sum(map(len, snapshot.chunks)) == SIZE
        assert soon(lambda: t.value("hot_state_bytes") == SIZE)
        call.handle.cancel()
        assert soon(lambda: len(t.hot) == 0), "nobody is owed anything: there is no budget for it"
        assert snapshots(t, *[1] * 20, snapshot_at=(13,), heads_only=True) == (), "and none to keep one"
        other = sent(t, snapshot, *[1] * 20)
        assert restores(other) == [(Source.SEND, 13), (Source.SENT, 13)]


LONG = tuple(n % 40 for n in range(200))
BLOCK = 64 * 2 * 2 * 4  # tokens x (key, value) x head_dim x float32


def test_states_of_one_dialog_share_their_blocks() -> None:
    with toy() as t:
        first, second = (s for s in snapshots(t, *LONG, snapshot_at=(150, 199)))
        assert [len(s.blocks) for s in (first, second)] == [2, 3]
        assert first.state.blocks == second.state.blocks[:2]
        assert all(mine is theirs for mine, theirs in zip(first.blocks, second.blocks, strict=False)), "held once"
        own = first.state.size_bytes + second.state.size_bytes
        assert soon(lambda: t.value("hot_state_bytes") == own + 3 * BLOCK)
        t.hot.check()


def test_only_the_blocks_that_are_not_held_are_asked_for() -> None:
    with toy() as one:
        first, second = (s for s in snapshots(one, *LONG, snapshot_at=(150, 199)))
    with toy() as other:
        sent_whole = ask(other, *LONG, offers=(first.state,))
        asked = sent_whole.until(Restore)
        assert isinstance(asked, Restore)
        assert asked.need == (0, 1)
        for chunk in (*first.chunks, *first.blocks):
            sent_whole.handle.restore(chunk)
        assert sent_whole.finish().cached_tokens == 150
        later = ask(other, *LONG, offers=(second.state,))
        asked = later.until(Restore)
        assert isinstance(asked, Restore)
        assert asked.need == (2,), "the others are of a state that is hot"
        for chunk in (*second.chunks, second.blocks[2]):
            later.handle.restore(chunk)
        assert later.finish().cached_tokens == 199
        assert later.tokens == sent_whole.tokens == answer(list(LONG), 6)


def test_a_block_that_is_another_one_is_refused() -> None:
    with toy() as one:
        (snapshot,) = snapshots(one, *LONG, snapshot_at=(150,))
    with toy() as other:
        call = ask(other, *LONG, offers=(snapshot.state,))
        call.until(Restore)
        for chunk in (*snapshot.chunks, snapshot.blocks[1]):
            call.handle.restore(chunk)
        call.finish()
        assert restores(call) == [(Source.SEND, 150), (Source.REFUSED, 150)]
        assert call.tokens == answer(list(LONG), 6)


def test_blocks_leave_with_the_last_state_that_has_them() -> None:
    own = 1744 + 4 * 150 + 16 * 3  # about
    with toy(hot_bytes=2 * own + 3 * BLOCK + 2000) as t:
        snapshots(t, *LONG, snapshot_at=(150, 199))
        assert len(t.hot) == 2
        snapshots(t, *[7] * 20, snapshot_at=(13,))
        t.hot.check()
        snapshots(t, *reversed(LONG), snapshot_at=(150, 199))
        t.hot.check()
        assert t.value("hot_state_bytes") <= t.hot.budget_bytes


def test_memory_is_used_again_but_not_while_somebody_reads_it() -> None:
    memory = Memory()
    first = memory.take(1000)
    first.data[:] = bytes([1]) * 1000
    address, reading = np.frombuffer(first.data, np.uint8).ctypes.data, first
    del first
    second = memory.take(1000)
    second.data[:] = bytes([2]) * 1000
    assert list(reading) == [bytes([1]) * 1000], "a client is still being sent it"
    del reading
    third = memory.take(1010)
    assert np.frombuffer(third.data, np.uint8).ctypes.data == address
    assert (len(third.data), list(second)) == (1010, [bytes([2]) * 1000])
    del third
    small = memory.take(100)
    assert np.frombuffer(small.data, np.uint8).ctypes.data != address, "a large piece is not spent on a small state"


def test_of_states_kept_in_passing_the_newest_stays() -> None:
    with toy() as t:
        call = ask(t, *PROMPT, snapshot_at=(5,), passing_at=(8, 13, 20))
        found = call.finish().snapshots
        assert [s.state.tokens for s in found] == [5, 20]
        told = [e.passing.tokens for e in call.events if isinstance(e, Progress) and e.passing]
        assert told == [8, 13, 20]
        assert len(t.hot) == 2
        call.handle.cancel()
        assert call.tokens == answer(list(PROMPT), 6)


def test_a_prompt_that_was_given_up_goes_on_from_the_last_state_kept_in_passing() -> None:
    with toy(hot_bytes=SIZE) as t:
        gate = Gate()
        t.model.before = gate
        call = ask(t, *PROMPT, passing_at=(8, 13))
        gate.hold(3)  # behind the second position
        call.handle.cancel()
        gate.open()
        call.fail()
        (ref,) = [e.passing for e in call.events if isinstance(e, Progress) and e.passing and e.passing.tokens == 13]
        again = ask(t, *PROMPT, offers=(replace(ref, size_bytes=0),))
        assert again.finish().cached_tokens == 13
        assert again.tokens == answer(list(PROMPT), 6)


def test_without_room_for_a_newer_one_the_state_kept_in_passing_stays() -> None:
    with toy(hot_bytes=2 * SIZE) as t:
        other = ask(t, *[9] * 20, snapshot_at=(13,))
        other.finish()  # and its client does not take what it is owed
        call = ask(t, *LONG, passing_at=(13, 150))
        assert [s.state.tokens for s in call.finish().snapshots] == [13], "150 tokens have blocks, too: no room"
        assert [e.passing.tokens for e in call.events if isinstance(e, Progress) and e.passing] == [13]
        t.hot.check()
