"""The boundary: what is refused, what a cancel and a failure cost, and how the engine stops."""

import gc
import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from toy_engine import INFO, Call, Gate, answer, soon, toy

from services.engine.errors import (
    CancelledError,
    ContextError,
    DeviceError,
    EngineError,
    IdsError,
    PositionError,
    QueueFullError,
    RequestError,
    SamplingError,
    StepError,
    StoppingError,
    StoreError,
)
from services.engine.model import Segment
from services.engine.request import Finish, Request, StateRef, Token

PROMPT = (1, 2, 3, 4, 5) * 5
GOOD = Request("r", PROMPT, 6)
OFFER = StateRef(b"x", 3, 0)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"ids": ()}, IdsError, "ids is empty"),
        ({"ids": (1, 50)}, IdsError, "ids has 50, but the vocabulary is 0 to 49"),
        ({"ids": (1, -1)}, IdsError, "ids has -1"),
        ({"stop_ids": frozenset({4096})}, IdsError, "stop_ids has 4096"),
        ({"max_tokens": 0}, SamplingError, "max_tokens is 0"),
        ({"max_tokens": 1000}, ContextError, "a prompt of 25 tokens and an answer of up to 1000 .* context of 1024"),
        ({"temperature": -0.1}, SamplingError, "temperature is -0.1"),
        ({"temperature": math.nan}, SamplingError, "temperature is nan"),
        ({"temperature": math.inf}, SamplingError, "temperature is inf"),
        ({"top_p": 0.0}, SamplingError, "top_p is 0.0"),
        ({"top_p": 1.01}, SamplingError, "top_p is 1.01"),
        ({"top_p": math.nan}, SamplingError, "top_p is nan"),
        ({"snapshot_at": (0,)}, PositionError, "positions ascend from 1 to 24"),
        ({"snapshot_at": (25,)}, PositionError, "positions ascend from 1 to 24"),
        ({"snapshot_at": (5, 5)}, PositionError, r"snapshot_at \[5, 5\]"),
        ({"snapshot_at": tuple(range(1, 18))}, PositionError, "17 snapshot positions: at most 16"),
        ({"passing_at": (5, 5)}, PositionError, r"passing_at \[5, 5\]"),
        ({"passing_at": (25,)}, PositionError, "passing_at .* from 1 to 24"),
        ({"offers": (OFFER,) * 65}, PositionError, "65 states offered: at most 64"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_request_is_named_before_any_work(
    change: dict[str, object], kind: type[RequestError], message: str
) -> None:
    with toy() as t:
        with pytest.raises(kind, match=message):
            t.ask(replace(GOOD, **change))  # type: ignore[arg-type]
        assert t.model.calls == []
        assert t.ask(GOOD).finish(), "the control: unchanged, it is answered"


def test_the_edges_are_good_requests() -> None:
    with toy() as t:
        edge = replace(GOOD, max_tokens=1024 - 25, snapshot_at=(1, 24), top_p=1.0, stop_ids=frozenset(range(50)))
        assert t.ask(edge).finish().generated_tokens == 1


def test_beyond_the_queue_requests_are_refused() -> None:
    with toy() as t:  # two places, three may wait
        gate = Gate()
        t.model.before = gate
        calls = [t.ask(GOOD) for _ in range(5)]
        with pytest.raises(QueueFullError, match="5 requests are under way or waiting"):
            t.ask(GOOD)
        gate.open()
        assert {call.finish().generated_tokens for call in calls} == {6}
        assert t.ask(GOOD).finish(), "places are free again"


@pytest.mark.parametrize("call_number", [2, 6], ids=["while the prompt is read", "while it answers"])
def test_cancel_frees_everything_at_the_next_layer(call_number: int) -> None:
    with toy() as t:
        gate = Gate()
        t.model.before = gate
        call = t.ask(replace(GOOD, max_tokens=50))
        gate.hold(call_number)
        assert t.pool.free < t.pool.total
        call.handle.cancel()
        gate.open()
        assert isinstance(call.fail().error, CancelledError)
        assert len(t.model.calls) == call_number
        assert t.experts.now.hits == sum(sum(ids) for ids in t.model.calls[:-1]), "the call under way broke off"
        assert t.pool.free == t.pool.total
        assert t.value("request_failures_total", code="cancelled") == 1
        call.handle.cancel()  # twice is no error
        assert t.ask(GOOD).finish()


def test_a_step_that_others_need_goes_on() -> None:
    with toy() as t:
        gate = Gate()
        t.model.before = gate
        gone, stays = (t.ask(replace(GOOD, max_tokens=20)) for _ in range(2))
        gate.hold(12)
        assert t.model.calls[-1] == [1, 1], "both answer"
        gone.handle.cancel()
        gate.open()
        gone.fail()
        assert stays.finish()
        assert stays.tokens == answer(list(PROMPT), 20)
        assert t.experts.now.hits == sum(sum(ids) for ids in t.model.calls), "nothing was computed twice or left out"


def test_a_waiting_request_can_be_cancelled_and_its_neighbours_go_on() -> None:
    with toy(replace(INFO, max_sequences=1)) as t:
        gate = Gate()
        t.model.before = gate
        first, second, third = (t.ask(GOOD) for _ in range(3))
        gate.hold(1)
        second.handle.cancel()
        gate.open()
        second.fail()
        assert first.finish()
        assert third.finish()
        assert first.tokens == third.tokens == answer(list(PROMPT), 6)
        assert not second.tokens


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (StoreError("block 7: the checksum does not match"), StoreError, "block 7"),
        (RuntimeError("out of luck"), StepError, r"RuntimeError: out of luck\): its log says more"),
        (MemoryError(), StepError, "MemoryError"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB"), StepError, "CUDA out of memory"),
    ],
    ids=["named", "foreign", "memory", "graphics memory"],
)
def test_a_failed_step_costs_its_requests_only(error: Exception, kind: type[Exception], message: str) -> None:
    """The prompt's chunk fails; the answer beside it goes on, and the next request is served."""

    def fail(segments: list[Segment]) -> None:
        if any(49 in segment.ids for segment in segments):
            raise error

    with toy() as t:
        t.model.before = fail
        good = t.ask(replace(GOOD, max_tokens=40))
        good.until(Token)
        bad = t.ask(replace(GOOD, ids=(*PROMPT, 49)))
        failed = bad.fail()
        assert isinstance(failed.error, kind)
        with pytest.raises(kind, match=message):
            raise failed.error
        assert good.finish()
        assert good.tokens == answer(list(PROMPT), 40)
        assert t.ask(GOOD).finish()


@pytest.mark.parametrize(
    "error",
    [
        DeviceError("the GPU has failed: x"),
        torch.AcceleratorError("CUDA error: unspecified launch failure"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    ],
    ids=["named", "torch", "triton"],
)
@pytest.mark.parametrize("where", ["a step", "letting go", "beside the steps"])
def test_a_gpu_that_fails_anywhere_ends_the_engine_which_says_so(
    error: Exception, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process starts again then. Everybody is told, whatever else fails meanwhile."""

    def fail(*args: object) -> None:
        raise error

    with toy(sound=False) as t:
        gate = Gate()
        t.model.before = gate
        calls = [t.ask(GOOD) for _ in range(4)]
        gate.hold(1)
        if where == "a step":
            t.model.before = fail
        elif where == "letting go":
            monkeypatch.setattr(t.scheduler, "drop", dropping(t.scheduler.drop, error))
            calls[0].handle.cancel()
        else:
            monkeypatch.setattr(t.scheduler, "publish", once(t.scheduler.publish, error))
        gate.open()
        told = [call.fail().error for call in calls]
        assert isinstance(t.engine.ended.exception(timeout=60), DeviceError)
        assert all(isinstance(one, DeviceError | StoppingError | CancelledError) for one in told)
        assert any("GPU has failed" in str(one) for one in told)
        with pytest.raises(StoppingError):
            t.ask(GOOD)


def once(call: Callable[[], None], error: Exception) -> Callable[[], None]:
    """Fails the first time."""
    left = [error]

    def run() -> None:
        if left:
            raise left.pop()
        call()

    return run


def dropping(drop: Callable[..., None], error: Exception) -> Callable[..., None]:
    """Lets go of it, and fails, as what frees a GPU's memory does there."""

    def run(sequence: object, told: EngineError) -> None:
        drop(sequence, told)
        raise error

    return run


def test_a_failed_decode_step_costs_all_in_it() -> None:
    """Their states are half-way between two tokens and cannot go on."""

    gate = Gate()

    def fail(segments: list[Segment]) -> None:
        gate(segments)
        if len(segments) == 2:
            raise OSError("disk gone")

    with toy() as t:
        t.model.before = fail
        calls = [t.ask(replace(GOOD, max_tokens=40)) for _ in range(2)]
        gate.open()  # both are there: they come to share a step
        for call in calls:
            assert "disk gone" in str(call.fail().error)
        assert t.ask(GOOD).finish()


def test_unusable_logits_cost_one_request() -> None:
    with toy() as t:
        t.model.poison = 49
        bad, good = t.ask(replace(GOOD, ids=(49,))), t.ask(GOOD)
        assert isinstance(bad.fail().error, StepError)
        assert good.finish()


def test_a_sink_that_fails_costs_its_own_request() -> None:
    with toy() as t:

        def sink(event: object) -> None:
            raise ValueError("a bug of the caller")

        t.engine.submit(GOOD, sink)
        assert t.ask(GOOD).finish()


def test_close_lets_what_runs_finish_and_refuses_the_rest() -> None:
    with toy(replace(INFO, max_sequences=1)) as t:
        gate = Gate()
        t.model.before = gate
        running, waiting = t.ask(GOOD), t.ask(GOOD)
        gate.hold(1)
        closing = threading.Thread(target=t.engine.close, args=(20.0,))
        closing.start()
        assert soon(lambda: t.engine._stop_at is not None)
        gate.open()
        assert running.finish()
        assert isinstance(waiting.fail().error, StoppingError)
        closing.join(timeout=20)
        assert t.engine.ended.done()
        with pytest.raises(StoppingError):
            t.ask(GOOD)
        running.handle.cancel()  # after the end: does nothing


def test_close_ends_what_takes_too_long() -> None:
    with toy() as t:
        gate = Gate()
        t.model.before = gate
        call = t.ask(replace(GOOD, max_tokens=900))
        gate.hold(3)
        closing = threading.Thread(target=t.engine.close, args=(0.0,))
        closing.start()
        assert soon(lambda: t.engine._stop_at is not None)
        gate.open()
        assert isinstance(call.fail().error, StoppingError)
        closing.join(timeout=20)
        assert t.engine.ended.done()


def test_a_broken_ledger_stops_the_engine_loudly(caplog: pytest.LogCaptureFixture) -> None:
    """Conservation is checked when nothing runs; an engine that loses pages must not go on quietly."""
    with toy(sound=False) as t:
        t.pool.allocate(1)  # nobody's
        t.ask(GOOD).finish()
        assert isinstance(t.engine.ended.exception(timeout=20), AssertionError)
        assert "the engine has failed" in caplog.text
        assert "the pool counts" in caplog.text
        with pytest.raises(StoppingError):
            t.ask(GOOD)


def test_three_at_once_are_each_what_they_are_alone() -> None:
    prompts = [PROMPT, (9, 8, 7), (20, 21) * 9]
    with toy(replace(INFO, max_sequences=3)) as t:
        gate = Gate()
        t.model.before = gate  # until all are there
        calls = [t.ask(Request("r", prompt, 20)) for prompt in prompts]
        gate.open()
        for call, prompt in zip(calls, prompts, strict=True):
            call.finish()
            assert call.tokens == answer(list(prompt), 20)
        assert max(map(len, t.model.calls)) == 3, "they did share steps"


def test_many_submitters_from_many_threads() -> None:
    with toy(replace(INFO, queue_limit=100)) as t:
        results: list[Call] = []

        def run() -> None:
            for _ in range(5):
                call = t.ask(GOOD)
                assert isinstance(call.finish(), Finish)
                call.handle.cancel()
                results.append(call)

        threads = [threading.Thread(target=run) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert [call.tokens for call in results] == [answer(list(PROMPT), 6)] * 40


def test_a_request_that_is_over_is_let_go_without_python_s_collector() -> None:
    """Prompts are long; cycles would keep hundreds of them until it runs."""
    with toy() as t:
        gc.disable()
        try:
            gate = Gate()
            t.model.before = gate
            done, left = t.ask(GOOD), t.ask(replace(GOOD, max_tokens=500))
            gate.hold(12)  # both answer
            left.handle.cancel()
            gate.open()
            done.finish()
            left.fail()
            seen = [weakref.ref(call.handle._sequence) for call in (done, left)]
            assert all(one() is not None for one in seen)
            del done, left
            t.ask(GOOD).finish()  # the thread keeps the last one that it had to do with
            assert soon(lambda: all(one() is None for one in seen))
        finally:
            gc.enable()
