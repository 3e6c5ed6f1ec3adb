"""A whole step on the GPU's path, in the interpreter: tokens of one sequence as rows of a step have the same bits."""

import pytest
import torch
from interpreted_step import BEFORE, IDS, Sequences, interpreted, weights
from torch import Tensor

from services.engine.gpu.weights import DeviceWeights

pytestmark = pytest.mark.usefixtures(interpreted.__name__)


@pytest.fixture(scope="module")
def dense() -> DeviceWeights:
    return weights()


class OneByOne:
    """What each sequence's ids give in steps of one row."""

    def __init__(self, dense: DeviceWeights) -> None:
        self.sequences = Sequences(dense, [1])
        self.logits: list[list[Tensor]] = [[] for _ in BEFORE]
        self.states: list[list[list[Tensor]]] = [[] for _ in BEFORE]

    def after(self, number: int, tokens: int) -> tuple[Tensor, list[Tensor]]:
        for id_ in IDS[number][len(self.logits[number]) : tokens]:
            self.logits[number].append(self.sequences.read([(number, [id_])])[0])
            self.states[number].append(self.sequences.left(number))
        return torch.stack(self.logits[number][:tokens]), self.states[number][tokens - 1]


@pytest.fixture(scope="module")
def one_by_one(dense: DeviceWeights) -> OneByOne:
    return OneByOne(dense)


@pytest.mark.parametrize("split", [(4,), (2, 1, 1), (1, 3), (2, 2)], ids=str)
def test_rows_of_a_sequence_have_the_bits_of_steps_of_their_own(
    split: tuple[int, ...], dense: DeviceWeights, one_by_one: OneByOne
) -> None:
    sequences = Sequences(dense, [1, 4])
    wanted = [(number, IDS[number][:tokens]) for number, tokens in enumerate(split)]
    found = torch.split(sequences.read(wanted), split)
    assert [each._tokens for each in sequences.model.decoders] == [0, 1], "one step"
    for number, tokens in enumerate(split):
        logits, left = one_by_one.after(number, tokens)
        assert logits.isfinite().all()
        assert torch.equal(found[number], logits)
        for one, other in zip(sequences.left(number), left, strict=True):
            assert torch.equal(one, other)
    if len(split) == 1:
        assert not torch.equal(found[0][1:], found[0][:-1]), "another token must show"


def test_ids_that_fill_no_step_go_by_fewer_rows(dense: DeviceWeights, one_by_one: OneByOne) -> None:
    sequences = Sequences(dense, [1, 2])
    found = sequences.read([(0, IDS[0][:3])])
    assert [each._tokens for each in sequences.model.decoders] == [1, 1]
    logits, _ = one_by_one.after(0, 3)
    assert torch.equal(found, logits)
    other = Sequences(dense, [1, 2]).read([(0, [IDS[0][1], IDS[0][0], IDS[0][2]])])
    assert not torch.equal(other[2], logits[2]), "in another order the last is another"
