"""Convolution and scan of a sweep in Triton: the reference, decode's bits, the same bits for any cut of a prompt."""

from itertools import pairwise

import pytest
import torch
import triton
import triton.language as tl
from gpu_checks import BOUND, DEVICE, here, poisoned, relative_error
from odd_memory import framed, randn
from torch import Tensor

from kernels.mamba import reference, sweep
from kernels.mamba.gpu import Sizes, _convolve, update

ODD = Sizes(heads=4, head_dim=12, state=20, groups=2)
WIDE = Sizes(heads=2, head_dim=20, state=128, groups=1)  # two programs a head
SIZES = pytest.mark.parametrize("sizes", [ODD, WIDE], ids=["odd", "wide"])
SLOTS, LAYER, ROW = 4, 1, 2  # states of three layers; what is before the first segment is nobody's
Found = tuple[Tensor, Tensor, Tensor, Tensor]  # projected, y, convolution states, SSM states


class Layer:
    """Weights, and the projections and states before a sweep."""

    def __init__(self, sizes: Sizes, tokens: int, taps: int = 4) -> None:
        self.sizes, self.tokens = sizes, tokens
        self.weight, self.bias = randn(sizes.channels, taps, seed=1), randn(sizes.channels, seed=2)
        self.a, self.d = -torch.logspace(-2, 2, sizes.heads), randn(sizes.heads, seed=3)
        self.dt_bias = randn(sizes.heads, seed=4) - 2.0
        self.projected = randn(ROW + tokens + 1, sizes.rows, seed=5)
        self.conv = randn(SLOTS, 3, sizes.channels, taps - 1, seed=6)
        self.ssm = randn(SLOTS, 3, sizes.heads, sizes.head_dim, sizes.state, seed=7)

    def run(self, *launches: list[tuple[int, int, int]], in_place: bool = False, **chosen: int) -> Found:
        """After launches with the given segments; the first row of the prompts is ROW."""
        sizes = self.sizes
        projected = here(framed(self.projected))
        y = projected[:, sizes.inner : 2 * sizes.inner] if in_place else poisoned(len(projected), sizes.inner)
        conv, ssm = here(self.conv.clone()), here(self.ssm.clone())
        workspace = sweep.Workspace(len(projected), sizes.heads, DEVICE)
        workspace.steps.fill_(torch.nan)
        for segments in launches:
            table = here(torch.tensor([(ROW + first, rows, slot) for first, rows, slot in segments], dtype=torch.int32))
            sweep.convolve(projected, sizes, here(self.weight), here(self.bias), conv[:, LAYER], table)
            weights = here(self.a), here(self.d), here(self.dt_bias)
            sweep.scan(projected, sizes, *weights, ssm[:, LAYER], table, workspace, y, **chosen)
        return projected.cpu(), y.cpu(), conv.cpu(), ssm.cpu()

    def expected(self, first: int, rows: int, slot: int) -> Found:
        """projected and y of a segment's rows, its two states, by the reference."""
        sizes, at = self.sizes, slice(ROW + first, ROW + first + rows)
        z, xbc, dt = self.projected[at].split([sizes.inner, sizes.channels, sizes.heads], dim=1)
        conv, ssm = self.conv[slot, LAYER].clone(), self.ssm[slot, LAYER].clone()
        xbc = reference.causal_conv(xbc, conv, self.weight, self.bias)
        group = sizes.groups * sizes.state
        x, b, c = xbc.split([sizes.inner, group, group], dim=1)
        shape = (rows, sizes.groups, sizes.state)
        y = reference.selective_scan(
            x.view(rows, sizes.heads, -1), dt, b.view(shape), c.view(shape), self.a, self.d, self.dt_bias, ssm
        )
        return torch.cat([z, xbc, dt], dim=1), y.flatten(1), conv, ssm


def same(found: Found, other: Found, rows: slice = slice(None), slots: slice = slice(None)) -> bool:
    pairs = zip((rows, rows, slots, slots), found, other, strict=True)
    return all(torch.equal(one[at].nan_to_num(7e7), two[at].nan_to_num(7e7)) for at, one, two in pairs)


@SIZES
def test_is_the_reference(sizes: Sizes) -> None:
    layer = Layer(sizes, 9)
    projected, y, conv, ssm = layer.run([(0, 9, 2)])
    expected = layer.expected(0, 9, 2)
    assert relative_error(projected[ROW : ROW + 9], expected[0]) < BOUND
    assert relative_error(y[ROW : ROW + 9], expected[1]) < BOUND
    assert torch.equal(conv[2, LAYER], expected[2])
    assert relative_error(ssm[2, LAYER], expected[3]) < BOUND
    layer.dt_bias += 0.01
    assert relative_error(y[ROW : ROW + 9], layer.expected(0, 9, 2)[1]) > 10 * BOUND, "the time step must show"


@triton.jit
def decode_convolution(
    x, state, weight, bias, out, FIRST: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, TAPS: tl.constexpr
):
    """One token of one sequence: decode's own function on a row of projections."""
    row = tl.program_id(0) * 32 + tl.arange(0, 32)
    mask = (row < ROWS)[None, :]
    y = tl.load(x + row[None, :], mask=mask, other=0.0)
    at = state + tl.zeros([1, 1], tl.int64)
    behind, last = tl.zeros([1, 1], tl.int32), tl.full([1, 1], 1, tl.int1)
    y = _convolve(y, row, mask, behind, last, at, weight, bias, FIRST, CHANNELS, TAPS)
    tl.store(out + row[None, :], y, mask=mask)


@pytest.mark.parametrize(("tokens", "taps"), [(66, 4), (2, 4), (1, 4), (3, 2)])
def test_convolution_has_the_bits_of_decode(tokens: int, taps: int) -> None:
    sizes = Sizes(heads=1, head_dim=9, state=4, groups=1)
    layer = Layer(sizes, tokens, taps)
    projected, conv = here(framed(layer.projected)), here(layer.conv.clone())
    table = here(torch.tensor([(ROW, tokens, 1)], dtype=torch.int32))
    sweep.convolve(projected, sizes, here(layer.weight), here(layer.bias), conv[:, LAYER], table)
    out, state = here(layer.projected.clone()), here(layer.conv[1, LAYER].clone())
    for row in range(ROW, ROW + tokens):
        decode_convolution[(triton.cdiv(sizes.rows, 32),)](
            out[row],
            state,
            here(layer.weight),
            here(layer.bias),
            out[row],
            FIRST=sizes.inner,
            CHANNELS=sizes.channels,
            ROWS=sizes.rows,
            TAPS=taps,
            num_warps=1,
            enable_fp_fusion=False,
        )
    assert torch.equal(projected, out)
    assert torch.equal(conv[1, LAYER], state)
    assert not torch.equal(out, here(layer.projected)), "the control: something was convolved"


@SIZES
def test_scan_has_the_bits_of_decode(sizes: Sizes) -> None:
    """The state's always; the outputs' on a GPU at the real model's state size. NumPy adds in another order."""
    tokens = 8
    layer = Layer(sizes, tokens)
    projected, y, _, ssm = layer.run([(0, tokens, 3)])
    state, slots = here(layer.ssm.clone()), here(torch.tensor([3], dtype=torch.int32))
    decoded, out = poisoned(tokens, sizes.inner), poisoned(1, sizes.inner)
    arrived = torch.zeros(1, sizes.groups, dtype=torch.int32, device=DEVICE)
    weights = here(layer.a), here(layer.d), here(layer.dt_bias)
    for token in range(tokens):
        row = here(projected[ROW + token : ROW + token + 1].contiguous())
        ones, at = here(torch.ones(sizes.inner)), decoded[token : token + 1]
        update(row, sizes, *weights, state[:, LAYER], slots, ones, 1e-5, at, arrived, out)
    assert torch.equal(ssm, state.cpu())
    assert relative_error(y[ROW : ROW + tokens], decoded) < BOUND
    if DEVICE.type == "cuda" and sizes.state == 128:
        assert torch.equal(y[ROW : ROW + tokens], decoded.cpu())
    assert not torch.equal(ssm, layer.ssm), "the control: something was added"


@SIZES
def test_a_prompt_may_be_cut_anywhere(sizes: Sizes) -> None:
    tokens = 13
    layer = Layer(sizes, tokens)
    whole = layer.run([(0, tokens, 0)])
    for cuts in ([0, 1, 2, 3, tokens], [0, 7, 12, tokens]):
        assert same(layer.run(*([(start, end - start, 0)] for start, end in pairwise(cuts))), whole)
    half = layer.run([(7, 6, 0)])  # the control: without what came before
    assert not torch.equal(half[1][ROW + 7 :], whole[1][ROW + 7 :])
    assert torch.equal(half[2], whole[2]), "the convolution forgets, so only the scan can tell"
    assert not torch.equal(half[3], whole[3])


def test_a_long_prompt_may_be_cut_anywhere() -> None:
    """Over several tiles of the convolution, whose edges are those of the piece."""
    sizes, tokens = Sizes(heads=1, head_dim=4, state=4, groups=1), 132
    layer = Layer(sizes, tokens)
    whole = layer.run([(0, tokens, 0)])
    for cuts in ([0, 63, 130, tokens],):
        assert same(layer.run(*([(start, end - start, 0)] for start, end in pairwise(cuts))), whole)
    assert relative_error(whole[1][ROW : ROW + tokens], layer.expected(0, tokens, 0)[1]) < BOUND


@SIZES
def test_sequences_of_one_launch_do_not_see_each_other(sizes: Sizes) -> None:
    """Nor does a row or a state that is in no segment change. Segments of any order; one is empty."""
    segments = [(9, 3, 0), (0, 8, 2), (12, 1, 3), (5, 0, 1)]
    layer = Layer(sizes, 13)
    together = layer.run(segments)
    assert torch.equal(together[0][:ROW], layer.projected[:ROW])
    for row in (0, 1, ROW + 8, ROW + 13):
        assert torch.equal(together[0][row], layer.projected[row])
        assert together[1][row].isnan().all()
    for first, rows, slot in segments[:3]:
        at = slice(ROW + first, ROW + first + rows)
        assert same(layer.run([(first, rows, slot)]), together, at, slice(slot, slot + 1))
        assert together[1][at].isfinite().all()
    for states, before in ((together[2], layer.conv), (together[3], layer.ssm)):
        assert torch.equal(states[1], before[1]), "the empty segment's"
        assert torch.equal(states[:, 0], before[:, 0])
        assert torch.equal(states[:, 2], before[:, 2])
        assert not torch.equal(states[2, LAYER], before[2, LAYER])

    layer.projected[ROW + 9, sizes.inner :] = torch.nan
    poisoned_one = layer.run(segments)
    assert same(poisoned_one, together, slice(ROW, ROW + 8), slice(2, 4))
    assert poisoned_one[1][ROW + 9 : ROW + 12].isnan().all(), "the control: its own rows show it"


def test_y_may_take_the_place_of_x() -> None:
    layer, inner = Layer(ODD, 5), ODD.inner
    apart, here_too = layer.run([(0, 5, 0)]), layer.run([(0, 5, 0)], in_place=True)
    rows = slice(ROW, ROW + 5)
    assert torch.equal(apart[1][rows], here_too[0][rows, inner : 2 * inner])
    assert torch.equal(apart[0][:, :inner], layer.projected[:, :inner]), "z"
    assert torch.equal(apart[0][:, -ODD.heads :], layer.projected[:, -ODD.heads :]), "dt"
    assert torch.equal(apart[0][:, 2 * inner :], here_too[0][:, 2 * inner :])
    assert torch.equal(apart[3], here_too[3])


def test_bits_do_not_go_by_the_configuration() -> None:
    layer = Layer(WIDE, 6)
    usual = layer.run([(0, 6, 0)])
    for part, warps, stages in ((8, 1, 2), (32, 4, 4)):
        assert same(layer.run([(0, 6, 0)], part=part, warps=warps, stages=stages), usual)
    layer.d += 0.5
    assert not same(layer.run([(0, 6, 0)]), usual), "the control"
