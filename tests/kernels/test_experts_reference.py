"""The definition of the expert arithmetic: unlimited integers agree, its bounds are exact, bad input is defined."""

import math
import struct

import numpy as np
import pytest
import torch
from expert_blocks import LARGEST_SCALE, PackedExpert, constant_expert, random_expert

from kernels.block import BlockLayout
from kernels.experts import reference

LAYOUTS = [BlockLayout(32, 16), BlockLayout(96, 48), BlockLayout(160, 112)]
SUPER = BlockLayout(1024, 2688)
E2M1_TWICE = [0, 1, 2, 3, 4, 6, 8, 12]


def float32(value: float) -> float:
    """A double rounded to float32, by the C library rather than by torch."""
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def code(nibble: int) -> int:
    return -E2M1_TWICE[nibble - 8] if nibble > 7 else E2M1_TWICE[nibble]


def scale_integer(byte: int) -> int:
    exponent, mantissa = byte >> 3, byte & 7
    return (mantissa | 8) << (exponent - 1) if exponent else mantissa


def nibbles(row: np.ndarray) -> list[int]:
    return [code(n) for byte in row.tolist() for n in (byte & 15, byte >> 4)]


def quantise_in_python(values: list[float]) -> tuple[list[int], int]:
    largest = max(abs(v) for v in values)
    if largest == 0:
        return [0] * len(values), 0
    e = min(15 - math.frexp(largest)[1], 80)
    return [max(-32767, min(32767, round(math.ldexp(v, e)))) for v in values], e


def expert_in_python(x: list[float], expert: PackedExpert) -> list[float]:
    """The contract with Python's unlimited integers, one weight at a time: nothing here can round by accident."""
    layout = expert.layout
    up, up_scales, down, down_scales = layout.unpack(expert.block)
    xq, e = quantise_in_python(x)
    h = []
    for n in range(layout.width):
        codes = nibbles(up[n])
        total = sum(codes[k] * scale_integer(int(up_scales[n, k // 16])) * xq[k] for k in range(layout.latent))
        v = float32(float32(total) * float32(math.ldexp(expert.up_scale, -(e + 10))))
        h.append(float32(v * v) if v > 0 else 0.0)
    hq, f = quantise_in_python(h)
    y = []
    for j in range(layout.latent):
        codes = nibbles(down[j])
        total = sum(codes[n] * scale_integer(int(down_scales[j, n // 16])) * hq[n] for n in range(layout.width))
        y.append(float32(float32(total) * float32(math.ldexp(expert.down_scale, -(f + 10)))))
    return y


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_equals_unlimited_integers(layout: BlockLayout) -> None:
    expert = random_expert(layout, seed=1)
    x = torch.randn(3, layout.latent, generator=torch.Generator().manual_seed(2))
    x[1] *= 1e-30
    x[2, ::3] = -0.0
    y, overflowed = reference.apply_expert(x, expert.unpacked)
    assert not overflowed.any()
    expected = torch.tensor([expert_in_python(row, expert) for row in x.tolist()])
    assert torch.equal(y, expected)


def test_one_changed_bit_is_seen() -> None:
    """The control of every equality here: a single flipped weight bit, a swapped scale, another power of two."""
    layout = LAYOUTS[1]
    expert = random_expert(layout, seed=3, scale_codes=(0x30, 0x50))
    x = torch.randn(1, layout.latent, generator=torch.Generator().manual_seed(4))
    y, _ = reference.apply_expert(x, expert.unpacked)
    for offset, size in (
        (layout.up_values, 64),
        (layout.up_scales, 64),
        (layout.down_values, 64),
        (layout.down_scales, 1),
    ):
        seen = 0
        for at in range(offset, offset + size):
            block = expert.block.copy()
            block[at] ^= 1
            changed = PackedExpert(layout, block, expert.up_scale, expert.down_scale)
            seen += not torch.equal(reference.apply_expert(x, changed.unpacked)[0], y)
        assert seen > size // 4, offset  # not all: a dead neuron's bits change nothing
    shifted = PackedExpert(layout, expert.block, expert.up_scale, expert.down_scale * 2)
    assert not torch.equal(reference.apply_expert(x, shifted.unpacked)[0], y)


def test_sums_stay_exact_at_the_largest_values() -> None:
    """Every code 6, every scale 448, every activation 32767: the largest sums there can be, against Python integers."""
    for layout in (SUPER, BlockLayout(64, 4096)):
        expert = constant_expert(layout, up_code=7, down_code=7, scale_code=LARGEST_SCALE).unpacked
        xq = torch.full((1, layout.latent), 32767.0, dtype=torch.float64)
        hq = torch.full((1, layout.width), 32767.0, dtype=torch.float64)
        assert int((xq @ expert.up.T)[0, 0]) == 12 * 229376 * 32767 * layout.latent
        assert int((hq @ expert.down.T)[0, 0]) == 12 * 229376 * 32767 * layout.width
    assert 12 * 229376 * 32767 * SUPER.latent < 2**47
    assert 12 * 229376 * 32767 * SUPER.width < 2**50
    assert 12 * 229376 * 32767 * reference.MOST_INPUTS < 2**51 < 12 * 229376 * 32767 * 2 * reference.MOST_INPUTS
    assert 16 * 12 * 32767 < 2**23  # a group's dot product, the int32 of the fast paths


def test_order_of_sums_does_not_matter() -> None:
    layout = BlockLayout(320, 64)
    expert = random_expert(layout, seed=5).unpacked
    xq, _ = reference.quantise(torch.randn(1, layout.latent, generator=torch.Generator().manual_seed(6)))
    order = torch.randperm(layout.latent, generator=torch.Generator().manual_seed(7))
    assert torch.equal(xq @ expert.up.T, xq[:, order] @ expert.up[:, order].T)
    # The control: the same sums in float32 do depend on their order.
    a, b = xq.float(), expert.up.float()
    assert not torch.equal((a * b).sum(1), (a * b)[:, order].flip(1).cumsum(1)[:, -1])


def test_quantise_at_its_edges() -> None:
    values = torch.tensor(
        [
            [1.0, -1.0, 0.5, 2.0**-14],
            [0.0, -0.0, 0.0, 0.0],
            [0.99999994, 2.0**-16, 3 * 2.0**-16, -(2.0**-16)],  # 32768 clamps; halves go to even
            [2.0**-149, 2.0**-81, -(2.0**-80), 2.0**-66],  # too small for a scale of its own
            [3.4028235e38, -3.4028235e38, 1.0, 0.0],
        ]
    )
    xq, e = reference.quantise(values)
    assert xq.tolist() == [
        [16384, -16384, 8192, 1],
        [0, 0, 0, 0],
        [32767, 0, 2, 0],
        [0, 0, -1, 16384],
        [32767, -32767, 0, 0],
    ]
    assert e.tolist() == [14, 0, 15, 80, -113]


def test_close_to_plain_float64() -> None:
    """The int16 activations cost little against unquantised arithmetic."""
    layout = BlockLayout(512, 512)
    expert = random_expert(layout, seed=8, scale_codes=(0x30, 0x48)).unpacked
    x = torch.randn(4, layout.latent, generator=torch.Generator().manual_seed(9))
    y, _ = reference.apply_expert(x, expert)
    h = (x.double() @ expert.up.T * expert.up_scale * 2.0**-10).relu().square()
    exact = h @ expert.down.T * expert.down_scale * 2.0**-10
    error = ((y - exact).square().mean() / exact.square().mean()).sqrt()
    assert 1e-6 < error < 2e-4


def test_nan_inf_and_overflow_make_the_row_nan() -> None:
    layout = LAYOUTS[1]
    experts = [random_expert(layout, seed).unpacked for seed in (10, 11)]
    x = torch.randn(5, layout.latent, generator=torch.Generator().manual_seed(12))
    clean = reference.step(torch.tensor([[0, 1]] * 5, dtype=torch.int32), torch.ones(5, 2), x, lambda i: experts[i])
    x[0, 3], x[1, 0], x[2, 5], x[3] = math.nan, math.inf, -math.inf, x[3] * 1e25
    out = reference.step(torch.tensor([[0, 1]] * 5, dtype=torch.int32), torch.ones(5, 2), x, lambda i: experts[i])
    assert out[:4].isnan().all()
    assert torch.equal(out[4], clean[4])
    assert clean.isfinite().all()


def test_step_adds_in_rank_order_and_counts_duplicates() -> None:
    layout = LAYOUTS[0]
    experts = [random_expert(layout, seed).unpacked for seed in range(20, 24)]
    x = torch.randn(1, layout.latent, generator=torch.Generator().manual_seed(13))
    ids, weights = torch.tensor([[2, 0, 2, 3]]), torch.tensor([[0.1, 0.7, 1e-9, -3.0]])
    out = reference.step(ids, weights, x, lambda i: experts[i])
    y = {i: reference.apply_expert(x, experts[i])[0][0].tolist() for i in (0, 2, 3)}
    for j in range(layout.latent):
        total = 0.0
        for id, weight in zip(ids[0].tolist(), weights[0].tolist(), strict=True):
            total += weight * y[id][j]
        assert out[0, j].item() == float32(total)
    asked: list[int] = []
    reference.step(ids, weights, x, lambda i: asked.append(i) or experts[i])
    assert asked == [2, 0, 3]


@pytest.mark.parametrize("byte", [0x7F, 0x80, 0xFF])
def test_refuses_scales_that_are_negative_or_nan(byte: int) -> None:
    layout = LAYOUTS[0]
    expert = random_expert(layout, seed=14)
    for at in (layout.up_scales, layout.down_scales):
        block = expert.block.copy()
        block[at] = byte
        with pytest.raises(ValueError, match="negative or NaN"):
            reference.unpack_expert(block, layout, 1.0, 1.0)
    for scale in (0.0, -1.0, math.nan, math.inf, 2.0**-130):
        with pytest.raises(ValueError, match="normal float32"):
            reference.unpack_expert(expert.block, layout, 1.0, scale)
