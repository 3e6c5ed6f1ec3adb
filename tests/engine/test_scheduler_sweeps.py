"""Reading in slices: its order, who shares a chunk, what a cancel and a failure cost, and what is told meanwhile."""

import time
from collections.abc import Generator
from itertools import pairwise

import pytest
from scripted_network import LAYERS, Asked, Bench, LayeredModel
from torch import Tensor
from toy_engine import Gate, answer, soon, toy

from services.engine import sequence
from services.engine.errors import CancelledError, StepError, StoppingError
from services.engine.messages import message_of
from services.engine.model import Segment
from services.engine.reading import PROGRESS_S, SLICE_S, shares
from services.engine.request import Event, Failed, Finish, Progress, Request, Token

A, B, C = tuple(range(1, 31)), tuple(range(5, 17)), (20, 21) * 9
WHOLE = ["layer"] * LAYERS


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more than eight tokens are long ones here, so that prompts can be short."""
    monkeypatch.setattr(sequence, "DECODED_TOKENS", 8)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time stands still but for what a test adds to it."""
    now = [1000.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def answering(bench: Bench) -> Asked:
    """One that has had its first token, of many."""
    asked = bench.ask(7, 7, 7, max_tokens=500)
    bench.step()
    assert len(asked.tokens) == 1
    bench.model.log.clear()
    return asked


def test_an_answer_goes_on_between_two_layers() -> None:
    bench = Bench()
    first = answering(bench)
    second = bench.ask(*A)
    log = bench.step(9)
    assert log == [
        *("token 1", "read 16", "token 1", "layer", "token 1", "layer", "token 1", "layer", "token 1", "layer", "done"),
        *("token 1", "read 14", "token 1", "layer", "token 1", "layer", "token 1", "layer"),
    ]
    bench.step(8)
    first.sequence.stopping = True
    bench.run()
    assert first.tokens == answer([7, 7, 7], len(first.tokens))
    assert second.tokens == answer(list(A), 3)


def test_with_time_enough_it_would_stand_still() -> None:
    """The control of the test above."""
    bench = Bench(slice_s=60.0)
    answering(bench)
    bench.ask(*A)
    assert bench.step(2) == ["token 1", "read 16", *WHOLE, "done", "token 1", "read 14", *WHOLE, "done"]


@pytest.mark.parametrize(("waits", "slice_s"), [(False, 0.0), (True, 60.0)], ids=["nobody waits", "time is left"])
def test_a_reading_goes_on_to_its_end_while(waits: bool, slice_s: float) -> None:
    bench = Bench(slice_s=slice_s)
    bench.busy = waits
    bench.ask(*A)
    assert bench.step() == ["read 16", *WHOLE, "done"]


def test_it_stops_for_other_work_even_if_nobody_answers() -> None:
    """The control of the test above."""
    bench = Bench()
    bench.busy = True
    bench.ask(*A)
    assert [bench.step() for _ in range(3)] == [["read 16"], ["layer"], ["layer"]]


def test_a_slice_is_a_tenth_of_a_second_and_the_pause_is_counted(clock: list[float]) -> None:
    bench = Bench(slice_s=SLICE_S)
    bench.model.layers = 12
    first = answering(bench)
    bench.ask(*A)

    def passes(layer: int) -> None:
        clock[0] += 0.04

    bench.model.at_layer = passes
    assert [bench.step().count("layer") for _ in range(5)] == [3, 3, 3, 3, 3]
    assert bench.stall("count") == 5
    assert bench.stall("sum") == pytest.approx(5 * 0.12)
    assert len(first.tokens) == 6


def test_prompts_share_a_chunk_and_a_short_one_does_not_wait_for_a_long_one() -> None:
    bench = Bench(pages=128)
    long = bench.ask(*(A * 30))
    bench.step()
    short = bench.ask(*B, user="other")
    log = bench.step(2)
    assert [entry for entry in log if entry.startswith("read")] == ["read 8+8", "read 4+12"]
    assert short.tokens == answer(list(B), 1)
    assert not long.tokens
    bench.run()
    assert (short.tokens, long.tokens) == (answer(list(B), 3), answer(list(A * 30), 3))


def test_users_share_and_then_the_prompts_of_a_user() -> None:
    bench = Bench(chunk_tokens=24)
    for user in "aaab":
        bench.ask(*A, user=user)
    assert bench.step()[0] == "read 4+4+4+12"


@pytest.mark.parametrize(
    ("total", "wanted", "given"),
    [
        (10, [100], [10]),
        (10, [3, 100], [3, 7]),
        (10, [100, 100, 100], [4, 3, 3]),
        (2, [5, 5, 5], [1, 1, 0]),
        (30, [4, 5, 6], [4, 5, 6]),
        (20, [100, 1, 100, 2], [9, 1, 8, 2]),
        (5, [], []),
    ],
)
def test_shares(total: int, wanted: list[int], given: list[int]) -> None:
    assert shares(total, wanted) == given
    assert sum(given) == min(total, sum(wanted))


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 64])
def test_the_kind_of_a_piece_does_not_depend_on_the_chunk(chunk_tokens: int) -> None:
    """Cuts at 9, 17 and 26 of 30: pieces of 9, 8, 9 and 4 tokens, of which more than eight make a long one."""
    bench = Bench(chunk_tokens=chunk_tokens)
    bench.ask(*A, snapshot_at=(9, 17, 26), max_tokens=1)
    bench.run()
    segments = bench.model.segments
    kinds = [segment.sweep for segment in segments for _ in segment.ids]
    assert kinds == [True] * 9 + [False] * 8 + [True] * 9 + [False] * 4
    assert [id_ for segment in segments for id_ in segment.ids] == list(A)
    assert any(segment.sweep != (len(segment.ids) > 8) for segment in segments) == (chunk_tokens < 9), "the control"


def test_a_piece_begins_where_reading_began() -> None:
    bench = Bench()
    first = bench.ask(*A, snapshot_at=(24,), max_tokens=1)
    bench.run()
    assert isinstance(first.end, Finish)
    bench.model.segments.clear()
    bench.ask(*A, 3, 3, 3, 3, offers=(first.end.snapshots[0].state,))
    bench.run()
    assert [(len(segment.ids), segment.sweep) for segment in bench.model.segments] == [(10, True)]


def test_short_pieces_and_long_ones_are_not_read_together() -> None:
    bench = Bench()
    bench.ask(*A)
    bench.ask(1, 2, 3, user="other")
    bench.ask(4, 5, user="third")
    assert [entry for entry in bench.step(3) if entry.startswith("read")] == ["read 16", "read 3+2", "read 14"]


def test_low_priority_shares_with_its_kind_only() -> None:
    bench = Bench()
    bench.ask(*A, low_priority=True)
    bench.ask(*A, low_priority=True, user="other")
    assert bench.step()[0] == "read 8+8"
    chat = bench.ask(*B)
    assert bench.step()[0] == "read 12"
    bench.run()
    assert chat.tokens == answer(list(B), 3)


def test_a_cancel_takes_effect_at_the_next_layer() -> None:
    bench = Bench(slice_s=60.0)
    gone = bench.ask(*A)

    def leaves(layer: int) -> None:
        gone.sequence.unwanted |= layer == 1

    bench.model.at_layer = leaves
    assert bench.step() == ["read 16", "layer", "layer", "closed"]
    assert isinstance(gone.end, Failed)
    assert isinstance(gone.end.error, CancelledError)
    assert bench.pool.free == bench.pool.total
    bench.run()


def test_who_is_dropped_between_two_slices_takes_a_reading_of_its_own_along() -> None:
    bench = Bench()
    bench.busy = True
    gone = bench.ask(*A)
    bench.step(2)
    bench.scheduler.drop(gone.sequence, StepError("late"))
    assert bench.model.log == ["read 16", "layer", "closed"]
    bench.run()


def test_others_in_it_go_on_and_the_state_stays_the_readings_until_its_end() -> None:
    bench = Bench()
    bench.busy = True
    gone, stays = bench.ask(*A), bench.ask(*B, user="other")
    bench.step(2)
    used = bench.pool.free
    bench.scheduler.drop(gone.sequence, StepError("late"))
    assert isinstance(gone.end, Failed)
    assert bench.pool.free == used, "its pages are still written to"
    assert bench.step() == ["layer"]
    assert bench.pool.free == used
    bench.run()
    assert (stays.tokens, gone.tokens) == (answer(list(B), 3), [])
    assert "closed" not in bench.model.log


def test_the_last_one_to_leave_closes_it() -> None:
    bench = Bench()
    bench.busy = True
    one, two = bench.ask(*A), bench.ask(*B, user="other")
    bench.step(2)
    for asked in (one, two):
        assert bench.model.log[-1] == "layer"
        bench.scheduler.drop(asked.sequence, StepError("late"))
    assert bench.model.log[-1] == "closed"
    bench.run()


def test_a_failure_costs_all_in_it_and_nobody_else() -> None:
    bench = Bench()
    first = answering(bench)
    mates = [bench.ask(*A), bench.ask(*B, user="other")]

    def fails(layer: int) -> None:
        if layer == 2:
            raise OSError("disk gone")

    bench.model.at_layer = fails
    log = bench.step(4)
    assert log[-2:] == ["layer", "failed"]
    for mate in mates:
        assert isinstance(mate.end, Failed)
        assert "disk gone" in str(mate.end.error)
    assert bench.scheduler.under_way is None
    bench.model.at_layer = lambda layer: None
    last = bench.ask(*C)
    first.sequence.stopping = True
    bench.run()
    assert last.tokens == answer(list(C), 3)
    assert first.tokens == answer([7, 7, 7], len(first.tokens))


def test_a_sink_that_fails_on_the_way_costs_its_own_request(clock: list[float]) -> None:
    bench = Bench(slice_s=60.0)
    bad, good = bench.ask(*A), bench.ask(*B, user="other")

    def sink(event: Event) -> None:
        if isinstance(event, Progress):
            raise ValueError("a bug of the caller")

    bad.sequence.sink = sink

    def passes(layer: int) -> None:
        clock[0] += PROGRESS_S

    bench.model.at_layer = passes
    bench.run()
    assert bad.sequence.over
    assert good.tokens == answer(list(B), 3)


def test_progress_is_told_every_second_with_what_is_left(clock: list[float]) -> None:
    """32 tokens in two chunks of ten layers, 0.6 s each: told at every second layer, and at the end of a chunk."""
    bench = Bench(slice_s=60.0)
    bench.model.layers = 10

    def passes(layer: int) -> None:
        clock[0] += 0.6

    bench.model.at_layer = passes
    asked = bench.ask(*range(1, 33))
    bench.run()
    told = asked.progress
    assert [event.done_tokens for event in told] == [3, 6, 9, 12, 16, 19, 22, 25, 28, 32]
    for event in told:
        spent_s = event.done_tokens / 32 * 12.0
        assert event.left_ms == pytest.approx(1000 * (12.0 - spent_s), abs=3000 if event.done_tokens < 9 else 1000)
    assert told[-1].left_ms == 0
    assert all(one.left_ms > other.left_ms for one, other in pairwise(told[1:]))


def test_progress_of_a_network_that_feeds_its_states_as_it_goes(clock: list[float]) -> None:
    """As a card does that has no room to read in chunks: token by token. None is told of twice."""
    bench = Bench(slice_s=60.0)
    model = bench.model

    def reading(segments: list[Segment]) -> Generator[float, None, Tensor]:
        (segment,) = segments
        for number, id_ in enumerate(segment.ids):
            clock[0] += 0.6
            logits = model._run([Segment(segment.state, [id_])])
            yield (number + 1) / len(segment.ids)
        return logits

    model.reading = reading  # type: ignore[method-assign]
    asked = bench.ask(*range(1, 33))
    bench.run()
    assert [event.done_tokens for event in asked.progress][:4] == [2, 4, 6, 8]
    assert [event.done_tokens for event in asked.progress][-1] == 32
    for event in asked.progress:
        assert event.left_ms == pytest.approx(600 * (32 - event.done_tokens), abs=1000)
        message_of(event)  # which has no negative numbers


def test_idle_reading_breaks_off_at_a_layer_and_is_read_again() -> None:
    bench = Bench(slice_s=60.0)
    idle = bench.ask(*A, max_tokens=0, idle=True, snapshot_answer=True)
    presses = [False]
    bench.scheduler.pressing = lambda: presses[0]

    def comes(layer: int) -> None:
        presses[0] = layer == 2

    bench.model.at_layer = comes
    assert bench.step() == ["read 16", "layer", "layer", "layer", "closed"]
    bench.model.at_layer = lambda layer: None
    presses[0] = False
    chat = bench.ask(*B)
    bench.run()
    assert chat.tokens == answer(list(B), 3)
    assert isinstance(idle.end, Finish)
    assert idle.end.executed_tokens == 30


def test_idle_reading_between_two_slices_gives_way_too() -> None:
    bench = Bench()
    bench.busy = True
    bench.ask(*A, max_tokens=0, idle=True)
    bench.step(2)
    bench.ask(*B)
    assert bench.step() == ["closed", "read 12"]
    bench.run()


def test_the_engine_answers_and_stops_while_a_long_reading_is_under_way() -> None:
    """Each of the three readings alone would take minutes."""
    with toy(slice_s=0.01) as t:
        model = LayeredModel(t.experts)
        model.before = gate = Gate()
        t.scheduler.model = model
        chat = t.ask(Request("chat", (9, 8, 7), 1000))
        chat.until(Token)
        model.layers, model.at_layer = 100_000, lambda layer: time.sleep(0.002)
        long = t.ask(Request("long", A, 3))
        gate.hold(6)
        for _ in range(5):
            chat.until(Token)
        long.handle.cancel()
        chat.handle.cancel()
        gate.open()
        assert isinstance(long.fail().error, CancelledError)
        chat.fail()
        alone, mate = t.ask(Request("alone", A, 3)), t.ask(Request("mate", A, 3))
        assert soon(lambda: model.log[-1] == "layer")
        mate.handle.cancel()
        mate.fail()
        assert soon(lambda: model.log[-1] == "layer")
        t.engine.close(0.0)
        assert isinstance(alone.fail().error, StoppingError)


def test_a_place_is_free_only_when_a_shared_reading_has_let_go_of_it() -> None:
    """As many states as places: who was dropped keeps one until the others' reading has ended."""
    bench = Bench(places=2)
    bench.busy = True
    gone, mate = bench.ask(*A), bench.ask(*B)
    bench.step(2)
    bench.scheduler.drop(gone.sequence, StepError("late"))
    third = bench.ask(*C)
    while bench.scheduler.under_way is not None and gone.sequence.state is not None:
        assert third.sequence.state is None, "three states for two places"
        bench.step()
    bench.busy = False
    bench.run()
    assert mate.tokens
    assert third.tokens
