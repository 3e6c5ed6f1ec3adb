"""The scheduler around the GPU's model: prompts read together, by sweeps or token by token, with a cancel, a snapshot,
idle work and drafts on the way, give the words and the states that each gives alone. In Triton's interpreter.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
import torch
from device_bench import DeviceBench, tiny_store
from interpreted_step import interpreted
from scripted_network import Asked

from services.engine import reading, sequence
from services.engine.errors import CancelledError
from services.engine.experts.store import Store
from services.engine.messages import message_of
from services.engine.model import Segment
from services.engine.request import Failed, Finish, Request
from services.engine.sequence import Sequence

pytestmark = [
    pytest.mark.usefixtures(interpreted.__name__),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="kernels run on the GPU, whole engines there are its own tests"
    ),
]

PROMPT, GONE, AHEAD = (1, 17, 30, 4, 9, 31, 25, 16, 10), (8, 8, 5, 1, 27, 14, 6), (2, 20, 7, 7, 11)
CUT = 5  # a long piece here, and then a short one
WHOLE = Request("whole", PROMPT, 5, snapshot_at=(CUT,), snapshot_answer=True)
IDLE = Request("ahead", AHEAD, 0, idle=True, snapshot_answer=True)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return tiny_store(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def all_is_told_and_short_pieces_are_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PROGRESS_S", 0.0)
    monkeypatch.setattr(sequence, "DECODED_TOKENS", 4)


@pytest.fixture(params=[0, 8], ids=["token by token", "by sweeps"])
def bench(store: Store, request: pytest.FixtureRequest) -> Iterator[DeviceBench]:
    made = DeviceBench(store, request.param)
    yield made
    made.experts.close()


class Told:
    """Drafts of an answer that is known: every second is wrong."""

    kind, costly = "ngram", False

    def __init__(self, ids: tuple[int, ...], answer: list[int]) -> None:
        self.ids, self.answer, self.tried = ids, answer, 0

    def draft(self, sequences: Seq[Sequence]) -> list[int | None]:
        return [self._one(each) for each in sequences]

    def _one(self, sequence: Sequence) -> int | None:
        if sequence.request.ids != self.ids:
            return None
        self.tried += 1
        return self.answer[sequence.generated_tokens] ^ (self.tried % 2)


def kept(asked: Asked) -> list[tuple[int, bytes]]:
    """The snapshots that it ended with, to the bit."""
    assert isinstance(asked.end, Finish), asked.end
    return [(snapshot.state.tokens, b"".join(snapshot.chunks)) for snapshot in asked.end.snapshots]


def progress_is_in_order(asked: Asked) -> None:
    done = 0
    for event in asked.progress:
        message_of(event)  # which has no negative numbers
        assert done <= event.done_tokens <= event.total_tokens
        done = event.done_tokens
    assert done == len(asked.sequence.request.ids)


def test_together_they_say_and_leave_what_each_does_alone(bench: DeviceBench) -> None:
    whole, ahead = bench.alone(WHOLE), bench.alone(IDLE)
    assert isinstance(whole.end, Finish)
    begun = whole.end.snapshots[0]
    scheduler = bench.scheduler(Told(PROMPT, whole.tokens))
    assert scheduler.hot.keep(begun.state, begun.chunks, {})
    idle = Asked(scheduler, IDLE)
    scheduler.step()
    assert scheduler.under_way is not None, "idle reading is in the midst of it when the others come"
    asked = [
        Asked(scheduler, replace(WHOLE, user="a")),
        Asked(scheduler, Request("gone", GONE, 4, user="b")),
        Asked(scheduler, replace(WHOLE, user="c", offers=(begun.state,))),
    ]
    again, gone, restored = asked
    shared = 0

    def leaves() -> None:
        nonlocal shared
        together = scheduler.under_way.sequences if scheduler.under_way else []
        if gone.sequence in together and len(together) > 1 and not gone.sequence.over:
            shared += 1
            gone.sequence.unwanted = True
            scheduler.drop(gone.sequence, CancelledError("the client has gone"))

    bench.run(scheduler, leaves)
    assert shared, "it left in the midst of a reading with another's prompt"
    assert isinstance(gone.end, Failed)
    assert isinstance(restored.end, Finish)
    assert restored.end.cached_tokens == CUT
    assert again.tokens == restored.tokens == whole.tokens
    assert [tokens for tokens, _ in kept(whole)] == [CUT, len(PROMPT) + len(whole.tokens) - 1]
    assert kept(again) == kept(whole)
    assert kept(restored) == kept(whole)[1:]
    assert kept(idle) == kept(ahead)
    drafts = scheduler.speculation.judgements["ngram"]
    assert 0 < drafts.accepted < drafts.tried, "right ones and wrong ones"
    for each in (whole, again, restored):
        progress_is_in_order(each)
    assert any(0 < event.done_tokens < CUT for event in whole.progress), "it was told on the way"


def test_a_state_that_is_touched_on_the_way_would_show(bench: DeviceBench) -> None:
    """The control of the test above."""
    request = Request("r", PROMPT[: CUT + 1], 1, snapshot_at=(CUT,))
    ((_, expected),) = kept(bench.alone(request))

    def touches(segments: Seq[Segment]) -> None:
        segments[0].state.ssm[-1] += 1.0

    bench.at_stop = touches
    ((_, found),) = kept(bench.alone(request))
    assert found != expected
