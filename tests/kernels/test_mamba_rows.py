"""Consecutive tokens of a sequence in one launch of a Mamba-2 layer have the bits of one launch each, and a token that
is only tried leaves the states as they were, until it is settled."""

import pytest
import torch
from gpu_checks import DEVICE, here, poisoned
from odd_memory import randn
from torch import Tensor

from kernels.linear.gpu import Linear, Norm, Tiling
from kernels.linear.octets import to_octets
from kernels.mamba.gpu import Drafts, Sizes, in_proj, update
from kernels.mamba.settle import settle

SIZES = Sizes(heads=4, head_dim=12, state=20, groups=2)
HIDDEN, EPS, ROWS = 32, 1e-5, 4
WIDE = Tiling(64, 1, False)
SPLITS = [(4,), (3, 1), (1, 3), (2, 2), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 1, 1), (3,), (2, 1)]


class Layer:
    """Random weights. Row r of a launch is always x[r], and the sequence that begins with row r has slot r."""

    def __init__(self, taps: int = 4) -> None:
        self.weight = Linear.pack("BF16", here(randn(SIZES.rows, HIDDEN, seed=1, scale=0.2).bfloat16()))
        self.norm = Norm(here(to_octets(randn(HIDDEN, seed=2) + 1.0)), EPS)
        self.inner_norm = here(randn(SIZES.inner, seed=3) + 1.0)
        self.conv = here(randn(SIZES.channels, taps, seed=4)), here(randn(SIZES.channels, seed=5))
        self.scan = tuple(here(tensor) for tensor in (-randn(4, seed=6).exp(), randn(4, seed=7), randn(4, seed=8)))
        self.states = (
            here(randn(ROWS, SIZES.channels, taps - 1, seed=9)),
            here(randn(ROWS, SIZES.heads, SIZES.head_dim, SIZES.state, seed=10)),
        )
        self.x = here(to_octets(randn(ROWS, HIDDEN, seed=11)))
        self.kept = poisoned(ROWS, 2, SIZES.kept)[:, 1]  # one of two layers'
        self.one_by_one: dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]] = {}

    def fresh(self, slots: set[int]) -> list[Tensor]:
        """Both states of so many sequences; others' are NaN."""
        kept = [torch.full_like(state, torch.nan) for state in self.states]
        for slot in slots:
            for state, whole in zip(kept, self.states, strict=True):
                state[slot] = whole[slot]
        return kept

    def launch(
        self, rows: list[int], slots: list[int], states: list[Tensor], stopped: int = 0, drafts: list[int] | None = None
    ) -> list[Tensor]:
        """projected, y and normed of the rows; which of them are drafts, if any may be."""
        tried = None if drafts is None else Drafts(here(torch.tensor(drafts, dtype=torch.int32)), self.kept)
        stop = torch.full((1,), stopped, dtype=torch.int32, device=DEVICE)
        places = here(torch.tensor(slots, dtype=torch.int32))
        projected, y, out = (poisoned(len(rows), size) for size in (SIZES.rows, SIZES.inner, SIZES.inner))
        arrived = torch.zeros(len(rows), SIZES.groups, dtype=torch.int32, device=DEVICE)
        in_proj(
            self.x[rows], self.norm, self.weight, SIZES, *self.conv, states[0], places, projected, WIDE, stop, tried
        )  # fmt: skip
        update(
            projected, SIZES, *self.scan, states[1], places, self.inner_norm, EPS, y, arrived, out, stop, tried, part=8
        )  # fmt: skip
        assert not arrived.any()
        return [projected, y, out]

    def alone(self, first: int, tokens: int) -> tuple[list[Tensor], list[Tensor]]:
        """The last of so many tokens, each in a launch of its own, and both states then."""
        if tokens == 0:
            return [], self.fresh({first})
        if (first, tokens) not in self.one_by_one:
            states = [state.clone() for state in self.alone(first, tokens - 1)[1]]
            outputs = self.launch([first + tokens - 1], [first], states)
            self.one_by_one[first, tokens] = outputs, states
        return self.one_by_one[first, tokens]


@pytest.fixture(scope="module")
def layer() -> Layer:
    return Layer()


def joined(layer: Layer, split: tuple[int, ...]) -> None:
    """All rows in one launch; everything must be as alone."""
    firsts = [sum(split[:number]) for number in range(len(split))]
    slots = [first for first, tokens in zip(firsts, split, strict=True) for _ in range(tokens)]
    states = layer.fresh(set(firsts))
    outputs = layer.launch(list(range(sum(split))), slots, states)
    for first, tokens in zip(firsts, split, strict=True):
        for token in range(tokens):
            for one, all_of in zip(layer.alone(first, token + 1)[0], outputs, strict=True):
                assert all_of[first + token].isfinite().all()
                assert torch.equal(one[0], all_of[first + token])
        for one, all_of in zip(layer.alone(first, tokens)[1], states, strict=True):
            assert torch.equal(one[first], all_of[first])
    for state in states:
        assert all(state[slot].isnan().all() for slot in range(ROWS) if slot not in firsts)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_every_split_of_the_rows_has_the_bits_of_one_by_one(layer: Layer, split: tuple[int, ...]) -> None:
    joined(layer, split)


@pytest.mark.parametrize("taps", [2, 5])
def test_windows_of_other_lengths(taps: int) -> None:
    joined(Layer(taps), (3, 1))


def test_rows_in_the_wrong_order_show(layer: Layer) -> None:
    states = layer.fresh({0})
    outputs = layer.launch([0, 2, 1], [0, 0, 0], states)
    expected, left = layer.alone(0, 3)
    assert not torch.equal(outputs[0][1], expected[0][0])
    assert not torch.equal(outputs[1][1], expected[1][0])
    assert not any(torch.equal(one[0], other[0]) for one, other in zip(states, left, strict=True))


def test_states_stay_once_the_token_has_stopped(layer: Layer) -> None:
    states = layer.fresh({0, 3})
    layer.launch([0, 1, 2, 3], [0, 0, 0, 3], states, stopped=1)
    for state, before in zip(states, layer.fresh({0, 3}), strict=True):
        assert torch.equal(state.nan_to_num(), before.nan_to_num())


def settled(layer: Layer, slot: int, states: list[Tensor]) -> None:
    """As if the draft of a sequence had been among its tokens."""
    a, _, dt_bias = (each.view(1, -1) for each in layer.scan)
    conv, ssm = (state[slot : slot + 1].clone() for state in states)
    settle(layer.kept[slot : slot + 1].contiguous(), SIZES, a, dt_bias, conv, ssm)
    states[0][slot], states[1][slot] = conv[0], ssm[0]


DRAFTED = [(2,), (2, 2), (3, 1), (1, 1, 2)]


@pytest.mark.parametrize("split", DRAFTED, ids=str)
def test_a_draft_has_the_bits_of_a_token_and_leaves_the_states_alone_until_it_is_settled(
    layer: Layer, split: tuple[int, ...]
) -> None:
    """The last of each sequence that has several; outputs are as without drafts, for it and for all before it."""
    firsts = [sum(split[:number]) for number in range(len(split))]
    slots = [first for first, tokens in zip(firsts, split, strict=True) for _ in range(tokens)]
    drafts = [int(tokens > 1 and token == tokens - 1) for tokens in split for token in range(tokens)]
    states = layer.fresh(set(firsts))
    layer.kept.fill_(torch.nan)
    outputs = layer.launch(list(range(sum(split))), slots, states, drafts=drafts)
    for first, tokens in zip(firsts, split, strict=True):
        for token in range(tokens):
            for one, all_of in zip(layer.alone(first, token + 1)[0], outputs, strict=True):
                assert torch.equal(one[0], all_of[first + token])
        certain = tokens - (tokens > 1)
        for one, all_of in zip(layer.alone(first, certain)[1], states, strict=True):
            assert torch.equal(one[first], all_of[first])
        if tokens == 1:
            assert layer.kept[first].isnan().all()
            continue
        settled(layer, first, states)
        for one, before, all_of in zip(
            layer.alone(first, tokens)[1], layer.alone(first, certain)[1], states, strict=True
        ):
            assert torch.equal(one[first], all_of[first])
            assert not torch.equal(before[first], all_of[first]), "a draft that stays must show"


def test_a_draft_alone_in_a_launch_finds_what_the_tokens_before_it_left(layer: Layer) -> None:
    """A step may have no room for a token and its draft."""
    states = layer.fresh({0})
    layer.launch([0, 1], [0, 0], states, drafts=[0, 0])
    (_, y, _) = layer.launch([2], [0], states, drafts=[1])
    assert torch.equal(y[0], layer.alone(0, 3)[0][1][0])
    assert torch.equal(states[1][0], layer.alone(0, 2)[1][1][0])
    settled(layer, 0, states)
    assert torch.equal(states[0][0], layer.alone(0, 3)[1][0][0])
    assert torch.equal(states[1][0], layer.alone(0, 3)[1][1][0])


def test_a_draft_in_a_token_that_has_stopped_changes_no_state(layer: Layer) -> None:
    states = layer.fresh({0, 2})
    layer.launch([0, 1, 2, 3], [0, 0, 2, 2], states, stopped=1, drafts=[0, 1, 0, 1])
    for state, before in zip(states, layer.fresh({0, 2}), strict=True):
        assert torch.equal(state.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("taps", [2, 5])
def test_drafts_in_windows_of_other_lengths(taps: int) -> None:
    layer = Layer(taps)
    states = layer.fresh({0})
    layer.launch([0, 1], [0, 0], states, drafts=[0, 1])
    settled(layer, 0, states)
    for one, other in zip(layer.alone(0, 2)[1], states, strict=True):
        assert torch.equal(one[0], other[0])
