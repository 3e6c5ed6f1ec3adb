"""Random experts for tests: packed blocks with every code, scale and extreme that the format allows."""

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernels.block import GROUP, BlockLayout
from kernels.experts.reference import Expert, unpack_expert

LARGEST_SCALE = 0x7E  # E4M3 448; 0x7f is NaN


@dataclass(frozen=True)
class PackedExpert:
    layout: BlockLayout
    block: npt.NDArray[np.uint8]
    up_scale: float
    down_scale: float

    @functools.cached_property
    def unpacked(self) -> Expert:
        return unpack_expert(self.block, self.layout, self.up_scale, self.down_scale)


def random_expert(layout: BlockLayout, seed: int, scale_codes: tuple[int, int] = (0, LARGEST_SCALE)) -> PackedExpert:
    """Uniform codes and E4M3 scale codes (inclusive range), subnormal and zero scales among them."""
    rng = np.random.default_rng(seed)
    low, high = scale_codes
    block = layout.pack(
        rng.integers(0, 256, (layout.width, layout.latent // 2), dtype=np.uint8),
        rng.integers(low, high + 1, (layout.width, layout.latent // GROUP), dtype=np.uint8),
        rng.integers(0, 256, (layout.latent, layout.width // 2), dtype=np.uint8),
        rng.integers(low, high + 1, (layout.latent, layout.width // GROUP), dtype=np.uint8),
    )
    up_scale, down_scale = rng.uniform(1e-4, 1e-2, 2).astype(np.float32)
    return PackedExpert(layout, block, float(up_scale), float(down_scale))


def constant_expert(layout: BlockLayout, up_code: int, down_code: int, scale_code: int) -> PackedExpert:
    """Every weight the same code, every scale the same."""
    shape = (layout.width, layout.latent)
    up = np.full((shape[0], shape[1] // 2), up_code * 17, np.uint8)
    down = np.full((shape[1], shape[0] // 2), down_code * 17, np.uint8)
    up_scales = np.full((shape[0], shape[1] // GROUP), scale_code, np.uint8)
    down_scales = np.full((shape[1], shape[0] // GROUP), scale_code, np.uint8)
    return PackedExpert(layout, layout.pack(up, up_scales, down, down_scales), 2.0**-20, 2.0**-20)
