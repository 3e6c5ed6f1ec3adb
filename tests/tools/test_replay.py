"""Replayed routing: what is named, how often again, and that inputs leave the published share of neurons alive."""

import pytest
import torch

from kernels.experts import reference
from services.tools import replay
from services.tools.synthetic_blocks import ALIVE, SyntheticBlocks
from services.tools.synthetic_shapes import SMALL, SUPER


@pytest.mark.parametrize(("rows", "resident"), [(1, 64), (3, 512), (1, 35)])
def test_a_row_names_different_experts_of_those_that_are_there(rows: int, resident: int) -> None:
    trace = replay.make(SUPER, 5, rows, resident, seed=1)
    assert trace.ids.shape == (5, 40, rows, 22)
    assert trace.ids.dtype == torch.int32
    assert trace.x.shape == (5, 40, rows, 1024)
    assert 0 <= int(trace.ids.min()) < int(trace.ids.max()) == resident - 1
    ordered = trace.ids.sort(-1).values
    assert (ordered[..., 1:] > ordered[..., :-1]).all()


def test_the_published_share_is_named_again() -> None:
    trace = replay.make(SUPER, 12, 2, 128, seed=2)
    assert trace.repeated() == pytest.approx(0.4, abs=0.01)
    other = replay.make(SUPER, 12, 2, 128, seed=3)
    mixed = replay.Trace(torch.stack([trace.ids[0], other.ids[0]]), trace.x, 128)
    assert mixed.repeated() < 0.25, "two traces that know nothing of each other"


def test_sequences_know_nothing_of_each_other() -> None:
    ids = replay.make(SUPER, 3, 2, 512, seed=4).ids
    common = (ids[:, :, 0, :, None] == ids[:, :, 1, None, :]).any(-1).float().mean()
    assert float(common) == pytest.approx(22 / 512, abs=0.02)


def test_tokens_of_one_sequence_at_once() -> None:
    trace = replay.make(SUPER, 9, 2, 512, seed=4)
    joined = trace.joined(4)
    assert joined.ids.shape == (2, 40, 4, 22)
    for token in range(8):
        assert torch.equal(joined.ids[token // 4, :, token % 4], trace.ids[token, :, 0])
        assert torch.equal(joined.x[token // 4, :, token % 4], trace.x[token, :, 0])
    assert trace.joined(1).union() == 22
    assert trace.joined(2).union() == pytest.approx(22 * 1.6, rel=0.02)
    assert 22 * 2 < joined.union() < 22 * 2.8
    assert trace.union() == pytest.approx(22 * 2 - 22 * 22 / 512, rel=0.02), "two sequences share only by chance"


def test_a_seed_is_a_trace() -> None:
    one, two, other = (replay.make(SMALL, 4, 1, 32, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(one.ids, two.ids)
    assert torch.equal(one.x, two.x)
    assert not torch.equal(one.ids, other.ids)


def test_inputs_leave_few_neurons_alive() -> None:
    blocks = SyntheticBlocks(SUPER.block, 1, 1)
    expert = reference.unpack_expert(blocks.original(0), SUPER.block, 1e-4, 1e-4)

    def alive(x: torch.Tensor) -> float:
        return float(((reference.quantise(x)[0] @ expert.up.T) > 0).float().mean())

    x = replay.make(SUPER, 4, 1, 64, seed=7).x.flatten(0, 2)[:64]
    assert alive(x) == pytest.approx(ALIVE, abs=0.03)
    assert alive(x - x.mean(1, keepdim=True)) > 0.3, "inputs that do not lean"


@pytest.mark.parametrize("resident", [34, 513])
def test_too_few_or_too_many(resident: int) -> None:
    with pytest.raises(ValueError, match=f"{resident} resident experts a layer: give 35 to 512"):
        replay.make(SUPER, 2, 1, resident, seed=0)
