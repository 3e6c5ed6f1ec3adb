"""Every instruction set's integer sums equal the definition's, for odd shapes, extremes, tiles and shared experts."""

import functools

import numpy as np
import pytest
import torch
from expert_blocks import LARGEST_SCALE, PackedExpert, constant_expert, random_expert

from kernels.block import BlockLayout
from kernels.experts.cpu.sums import MOST_TOKENS, down_sums, up_sums
from kernels.workers.pool import available_isas

LAYOUTS = [
    BlockLayout(32, 16),
    BlockLayout(96, 48),
    BlockLayout(128, 128),
    BlockLayout(416, 80),
    BlockLayout(1024, 208),
    BlockLayout(1120, 32),  # more outputs than are summed at a time
]
EXTREMES = np.array([0, 1, -1, 127, 128, 255, 256, -256, 32767, -32767, 32640, -32640, 32512], np.int16)

pytestmark = pytest.mark.parametrize("isa", available_isas())


def exact_sums(expert: torch.Tensor, values: np.ndarray) -> np.ndarray:
    return (torch.from_numpy(values).double() @ expert.T).to(torch.int64).numpy()


def some_values(shape: tuple[int, int], seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = rng.integers(-32767, 32768, shape, dtype=np.int16)
    return np.where(rng.random(shape) < 0.3, rng.choice(EXTREMES, shape), values)


@functools.cache
def expert_of(layout: BlockLayout) -> PackedExpert:
    return random_expert(layout, seed=layout.latent + layout.width)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_up(layout: BlockLayout, isa: str) -> None:
    expert = expert_of(layout)
    for tokens in range(1, MOST_TOKENS + 1):
        values = some_values((tokens, layout.latent), seed=tokens)
        expected = exact_sums(expert.unpacked.up, values)
        assert np.array_equal(up_sums(isa, layout, expert.block, values, 0, layout.width), expected)
        for begin, end in ((0, 1), (1, 4), (3, 16), (layout.width - 5, layout.width)):
            assert np.array_equal(up_sums(isa, layout, expert.block, values, begin, end), expected[:, begin:end])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("share", [0.0, 0.075, 0.5, 1.0], ids=lambda s: f"alive{s}")
def test_down(layout: BlockLayout, share: float, isa: str) -> None:
    expert = expert_of(layout)
    rng = np.random.default_rng(3)
    for tokens in range(1, MOST_TOKENS + 1):
        dense = np.abs(some_values((tokens, layout.width), seed=7))
        dense[rng.random(dense.shape) >= share] = 0
        rows = np.flatnonzero(dense.any(axis=0)).astype(np.int32)
        expected = exact_sums(expert.unpacked.down, dense)
        for begin, end in ((0, layout.latent), (0, 32), (layout.latent - 32, layout.latent)):
            found = down_sums(isa, layout, expert.block, rows, dense[:, rows], begin, end)
            assert np.array_equal(found, expected[:, begin:end])


@pytest.mark.parametrize("up_code", [7, 15])
@pytest.mark.parametrize("value", [32767, -32767])
def test_the_largest_sums_do_not_overflow(up_code: int, value: int, isa: str) -> None:
    """Every weight +-6, every scale 448, every activation at its limit, at the real model's size."""
    layout = BlockLayout(1024, 2688)
    expert = constant_expert(layout, up_code, 15, LARGEST_SCALE)
    values = np.full((MOST_TOKENS, layout.latent), value, np.int16)
    sign = 1 if up_code == 7 else -1
    found = up_sums(isa, layout, expert.block, values, 0, 9)
    assert (found == sign * 12 * 229376 * value * layout.latent).all()
    rows = np.arange(layout.width, dtype=np.int32)
    values = np.full((MOST_TOKENS, layout.width), 32767, np.int16)
    found = down_sums(isa, layout, expert.block, rows, values, 32, 96)
    assert (found == -12 * 229376 * 32767 * layout.width).all()


def test_the_comparison_can_fail(isa: str) -> None:
    """One flipped bit of a code or of a scale, and one activation off by one, change some sum."""
    layout = BlockLayout(416, 80)
    expert = random_expert(layout, seed=1, scale_codes=(0x08, 0x70))
    values = some_values((1, layout.latent), seed=2)
    values[values == 0] = 5
    before = up_sums(isa, layout, expert.block, values, 0, layout.width)
    for at in (layout.up_values + 100, layout.up_scales + 9):
        block = expert.block.copy()
        block[at] ^= 1
        assert (up_sums(isa, layout, block, values, 0, layout.width) != before).sum() == 1
    values[0, 0] += 1
    assert (up_sums(isa, layout, expert.block, values, 0, layout.width) != before).any()
    rows, alive = np.array([3, 17, 18], np.int32), np.array([[1, 32767, 2]], np.int16)
    before = down_sums(isa, layout, expert.block, rows, alive, 0, layout.latent)
    for at in (layout.down_values + 17 * layout.latent // 2 + 5, layout.down_scales + layout.latent + 3):
        block = expert.block.copy()
        block[at] ^= 1
        assert (down_sums(isa, layout, block, rows, alive, 0, layout.latent) != before).sum() == 1
