"""The scan by chunks, in torch and in Triton: the recurrence up to rounding; the same bits for any cut at a chunk."""

import math
from itertools import pairwise

import pytest
import torch
from gpu_checks import BOUND, DEVICE, here, poisoned, relative_error
from odd_memory import framed, randn
from torch import Tensor

from kernels.mamba import chunk_scan as gpu
from kernels.mamba import reference
from kernels.mamba.chunks import CHUNK, chunk_scan
from kernels.mamba.gpu import Sizes

TINY = Sizes(heads=2, head_dim=5, state=7, groups=1)
SMALL = Sizes(heads=4, head_dim=12, state=20, groups=2)
WIDE = Sizes(heads=2, head_dim=64, state=64, groups=1)  # two parts of a head, two slices of a state, as in the demo
SIZES = pytest.mark.parametrize("sizes", [SMALL, WIDE], ids=["odd", "wide"])
# Both are float32; the sums of a chunk have another order, and its decays one rounding instead of many.
CHUNK_BOUND = 3e-6


class Inputs:
    """Of a scan, and the state before it; steps from 0.001 to 2, so that some heads forget at once and some never."""

    def __init__(self, tokens: int, sizes: Sizes) -> None:
        self.x = randn(tokens, sizes.heads, sizes.head_dim, seed=1)
        self.dt = randn(tokens, sizes.heads, seed=2, scale=2.0) - 2.0
        self.b, self.c = (randn(tokens, sizes.groups, sizes.state, seed=seed) for seed in (3, 4))
        self.a = -torch.logspace(-2, 2, sizes.heads)
        self.d, self.dt_bias = randn(sizes.heads, seed=6), randn(sizes.heads, seed=7)
        self.state = randn(sizes.heads, sizes.head_dim, sizes.state, seed=8)

    def piece(self, start: int, end: int) -> tuple[Tensor, ...]:
        rows = (framed(tensor[start:end]) for tensor in (self.x, self.dt, self.b, self.c))
        return (*rows, self.a, self.d, self.dt_bias)


def in_torch(inputs: Inputs, sizes: Sizes, cuts: list[int], first: int) -> tuple[Tensor, Tensor]:
    """y [M, heads, P] and the state behind it; `cuts` begin with 0 and end with the number of tokens."""
    state = inputs.state.clone()
    parts = [chunk_scan(*inputs.piece(start, end), state, first + start) for start, end in pairwise(cuts)]
    return torch.cat(parts), state


def in_triton(inputs: Inputs, sizes: Sizes, cuts: list[int], first: int) -> tuple[Tensor, Tensor]:
    state, parts = here(inputs.state.clone()), []
    workspace = gpu.Workspace(cuts[-1], sizes.heads, DEVICE)
    workspace.steps.fill_(math.nan)
    for start, end in pairwise(cuts):
        x, dt, b, c, a, d, dt_bias = inputs.piece(start, end)
        rows = (here(framed(tensor.flatten(1))) for tensor in (x, dt, b, c))
        out = poisoned(end - start, sizes.inner)
        gpu.chunk_scan(*rows, here(a), here(d), here(dt_bias), state, first + start, sizes, workspace, out)
        parts.append(out.view(end - start, sizes.heads, sizes.head_dim).cpu())
    return torch.cat(parts), state.cpu()


def recurrence(inputs: Inputs, tokens: int) -> tuple[Tensor, Tensor]:
    state = inputs.state.clone()
    return reference.selective_scan(*inputs.piece(0, tokens), state), state


PATHS = pytest.mark.parametrize("path", [in_torch, in_triton], ids=["torch", "triton"])


@PATHS
@SIZES
@pytest.mark.parametrize(("tokens", "first"), [(1, 255), (45, 100)])
def test_is_the_recurrence(path, sizes: Sizes, tokens: int, first: int) -> None:
    inputs = Inputs(tokens, sizes)
    found, state = path(inputs, sizes, [0, tokens], first)
    expected, expected_state = recurrence(inputs, tokens)
    assert relative_error(found, expected) < CHUNK_BOUND
    assert relative_error(state, expected_state) < CHUNK_BOUND
    for head in range(sizes.heads):
        assert relative_error(found[:, head], expected[:, head]) < 3 * CHUNK_BOUND
    inputs.x[tokens // 2, sizes.heads - 1, 3] += 0.1
    changed, _ = recurrence(inputs, tokens)
    assert relative_error(found[:, -1], changed[:, -1]) > 3 * CHUNK_BOUND, "one input of many must show"


@PATHS
def test_any_cut_at_a_chunk_gives_the_same_bits(path) -> None:
    """Whole, and in pieces of one chunk, two, and both; first positions in the middle of a chunk too."""
    tokens, first = 181, 77
    inputs = Inputs(tokens, TINY)
    edges = [at - first for at in range(CHUNK, first + tokens, CHUNK)]  # 51 and 179
    whole, whole_state = path(inputs, TINY, [0, tokens], first)
    for cuts in ([0, *edges, tokens], [0, edges[1], tokens]):
        found, state = path(inputs, TINY, cuts, first)
        assert torch.equal(found, whole)
        assert torch.equal(state, whole_state)
    found, state = path(inputs, TINY, [0, 100, tokens], first)
    assert not torch.equal(found, whole), "the control: a cut elsewhere rounds otherwise"
    assert relative_error(found, whole) < CHUNK_BOUND
    assert relative_error(state, whole_state) < CHUNK_BOUND


@PATHS
def test_a_token_depends_on_no_later_one(path) -> None:
    inputs = Inputs(90, TINY)
    before, _ = path(inputs, TINY, [0, 90], 0)
    inputs.x[60] += 1.0
    inputs.dt[61] += 1.0
    after, _ = path(inputs, TINY, [0, 90], 0)
    assert torch.equal(before[:60], after[:60])
    assert not torch.equal(before[60], after[60])


@PATHS
def test_steps_are_not_clamped_and_may_forget_everything(path) -> None:
    """Steps of 1e-6, and steps of hundreds, whose decays are zero and whose sums leave float32's precision."""
    for shift in (-14.0, 300.0):
        inputs = Inputs(140, TINY)
        inputs.dt += shift
        found, state = path(inputs, TINY, [0, 140], 0)
        expected, expected_state = recurrence(inputs, 140)
        assert relative_error(found, expected) < CHUNK_BOUND
        assert relative_error(state, expected_state) < CHUNK_BOUND


@pytest.mark.parametrize("cuts", [[0, 50], [0, 1, 2, 3, 50], [0, 17, 50]], ids=str)
@pytest.mark.parametrize(("channels", "taps"), [(100, 4), (7, 2), (5, 1)])
def test_convolution(channels: int, taps: int, cuts: list[int]) -> None:
    x, weight, bias = randn(50, channels), randn(channels, taps, seed=1), randn(channels, seed=2)
    states = [randn(channels, taps - 1, seed=3) for _ in range(3)]
    expected = reference.causal_conv(x, states[0], weight, bias)

    def convolved(state: Tensor, cuts: list[int]) -> tuple[Tensor, Tensor]:
        state, parts = here(state.contiguous()), []
        for start, end in pairwise(cuts):
            parts.append(poisoned(end - start, channels))
            gpu.conv(here(framed(x[start:end])), state, here(weight), here(bias), parts[-1])
        return torch.cat(parts).cpu(), state.cpu()

    found, state = convolved(states[1], cuts)
    assert relative_error(found, expected) < BOUND
    assert torch.equal(state, states[0])
    whole, _ = convolved(states[2], [0, 50])
    assert torch.equal(found, whole)
    if taps > 1:
        fresh, _ = convolved(torch.zeros(channels, taps - 1), cuts)
        assert not torch.equal(fresh, found), "the control: the state must show"
        assert torch.equal(fresh[taps - 1 :], found[taps - 1 :])
