"""A whole step on the GPU's path, in the interpreter: a draft has the bits of a token, and leaves nothing behind."""

import pytest
import torch
from interpreted_step import BEFORE, IDS, Sequences, interpreted, weights
from torch import Tensor

from services.engine.gpu.weights import DeviceWeights
from services.engine.model import Segment

pytestmark = pytest.mark.usefixtures(interpreted.__name__)


@pytest.fixture(scope="module")
def dense() -> DeviceWeights:
    return weights()


class Plain:
    """Every sequence's ids in steps of one row, without drafts."""

    def __init__(self, dense: DeviceWeights) -> None:
        self.sequences = Sequences(dense, [1])
        self.logits: list[list[Tensor]] = [[] for _ in BEFORE]
        self.left: list[list[list[Tensor]]] = [[] for _ in BEFORE]

    def after(self, number: int, ids: int) -> tuple[Tensor, list[Tensor]]:
        """The logits after the last of so many ids, and what they left."""
        for id_ in IDS[number][len(self.logits[number]) : ids]:
            self.logits[number].append(self.sequences.read([(number, [id_])])[0])
            self.left[number].append(self.sequences.left(number))
        return self.logits[number][ids - 1], self.left[number][ids - 1]


@pytest.fixture(scope="module")
def plain(dense: DeviceWeights) -> Plain:
    return Plain(dense)


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def step(sequences: Sequences, fed: dict[int, tuple[int, int | None]]) -> dict[int, Tensor]:
    """For each sequence an id, and a draft or none -> its rows of logits."""
    segments = [
        Segment(sequences.states[number], [id_], drafts=() if draft is None else (draft,))
        for number, (id_, draft) in fed.items()
    ]
    logits = sequences.model.forward(segments)
    rows = torch.split(logits, [1 + len(segment.drafts) for segment in segments])
    return dict(zip(fed, rows, strict=True))


def test_right_and_wrong_drafts_of_several_sequences(dense: DeviceWeights, plain: Plain) -> None:
    """Four sequences, two of which draft: one rightly; six rows in steps of four and two. Then the other way round."""
    sequences = Sequences(dense, [1, 2, 4], drafts=True)
    wrong = (IDS[1][1] + 1) % 50
    found = step(
        sequences, {0: (IDS[0][0], IDS[0][1]), 1: (IDS[1][0], wrong), 2: (IDS[2][0], None), 3: (IDS[3][0], None)}
    )
    assert [each._tokens for each in sequences.model.decoders] == [0, 1, 1]
    for number in range(4):
        logits, left = plain.after(number, 1)
        assert torch.equal(found[number][0], logits)
        assert same(sequences.left(number), left), "a draft leaves nothing"
    assert torch.equal(found[0][1], plain.after(0, 2)[0])
    assert not torch.equal(found[1][1], plain.after(1, 2)[0]), "another id must show"
    sequences.model.settle(sequences.states[0], 1)
    sequences.model.settle(sequences.states[1], 0)
    assert same(sequences.left(0), plain.after(0, 2)[1])
    assert same(sequences.left(1), plain.after(1, 1)[1])
    found = step(sequences, {1: (IDS[1][1], IDS[1][2]), 0: (IDS[0][2], 7)})
    assert torch.equal(found[0][0], plain.after(0, 3)[0])
    assert torch.equal(found[1], torch.stack([plain.after(1, ids)[0] for ids in (2, 3)]))
    sequences.model.settle(sequences.states[0], 0)
    sequences.model.settle(sequences.states[1], 1)
    for number in range(2):
        assert same(sequences.left(number), plain.after(number, 3)[1])


def test_a_draft_that_found_no_room_in_its_ids_step(dense: DeviceWeights, plain: Plain) -> None:
    """Steps of one row are enough, if slower; and what is not settled may not go on."""
    sequences = Sequences(dense, [1], drafts=True)
    found = step(sequences, {3: (IDS[3][0], IDS[3][1])})
    assert torch.equal(found[3], torch.stack([plain.after(3, ids)[0] for ids in (1, 2)]))
    state = sequences.states[3]
    for going_on in (lambda: step(sequences, {3: (IDS[3][1], None)}), state.clone):
        with pytest.raises(AssertionError, match="settled"):
            going_on()
    sequences.model.settle(state, 1)
    assert same(sequences.left(3), plain.after(3, 2)[1])
    assert state.ids[-2:] == IDS[3][:2]
