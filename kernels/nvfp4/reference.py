"""NVFP4 in plain torch: the definition of what a checkpoint's packed weights mean, and how ours are made.

    W[n, k] = E2M1[code[n, k]] * e4m3(weight_scale[n, k // 16]) * weight_scale_2        (ModelOpt's layout)

The code of an even k is the low nibble of byte k // 2, of an odd k the high one; bit 3 of a code is its sign. The
product of code and block scale is exact in float32 (2 + 4 significant bits), so dequantising rounds once, in the last
product. Owns no expert block layout (kernels/block.py) and no file format.
"""

from typing import Literal

import torch
from torch import Tensor

GROUP = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.float32)

# How far from the scale that just fits a block's largest weight the search looks, in E4M3 steps (8 steps = a factor
# of 2). Below it the largest weights are cut off; above it a block may prefer to put its largest weight on 4 or 3.
_SEARCH_STEPS = tuple(sorted(range(-8, 9), key=abs))
_LARGEST_CODE = 126  # E4M3 448; codes are ordered as their values are
_SMALLEST_CODE = 1  # E4M3 2^-9
_ROWS_AT_ONCE_WEIGHTS = 1 << 22

Choice = Literal["mse", "max"]


def unpack_codes(weight: Tensor) -> Tensor:
    """uint8 [N, K/2] packed -> uint8 [N, K] codes 0..15."""
    return torch.stack((weight & 15, weight >> 4), dim=-1).flatten(-2)


def pack_codes(codes: Tensor) -> Tensor:
    """uint8 [N, K] codes 0..15 -> uint8 [N, K/2] packed."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def dequantise(weight: Tensor, weight_scale: Tensor, weight_scale_2: Tensor | float) -> Tensor:
    """float32 [N, K] from weight uint8 [N, K/2], weight_scale [N, K/16] (E4M3 or its bytes) and a scalar scale_2."""
    scale = weight_scale.view(torch.float8_e4m3fn).to(torch.float32).repeat_interleave(GROUP, dim=-1)
    scale_2 = torch.as_tensor(weight_scale_2, dtype=torch.float32).reshape(())
    return E2M1[unpack_codes(weight).int()] * scale * scale_2


def nearest(values: Tensor) -> Tensor:
    """The nearest E2M1 values of float32 values; ties to the even code, as IEEE rounding does; beyond 6 to 6."""
    size = values.abs().clamp(max=E2M1_MAX)
    # Between neighbours the step is 0.5 up to 2, 1 up to 4, then 2; half-to-even on steps is half-to-even on codes.
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.copysign(torch.round(size / step) * step, values)


def encode(values: Tensor) -> Tensor:
    """uint8 codes of values that are exactly E2M1 values; the sign of a zero is kept."""
    magnitudes = torch.searchsorted(E2M1[:8], values.abs(), out_int32=True).to(torch.uint8)
    return magnitudes | torch.signbit(values).to(torch.uint8) << 3


def quantise(weights: Tensor, choose: Choice = "mse") -> tuple[Tensor, Tensor, Tensor]:
    """float [N, K] -> weight uint8 [N, K/2], weight_scale E4M3 [N, K/16], weight_scale_2 float32 [].

    weight_scale_2 = max|W| / (6 * 448) (1 for an all-zero tensor). A block's scale is the E4M3 value, within
    [2^-9, 448], nearest to max|block| / 6 (`max`), or the one of its neighbours with the least squared error (`mse`);
    an all-zero block has scale 1. Raises ValueError if K is not a multiple of 16 or a weight is not finite.
    """
    if weights.dim() != 2 or weights.shape[1] % GROUP:
        raise ValueError(f"shape {tuple(weights.shape)}: expected [N, K] with K a multiple of {GROUP}")
    weights = weights.to(torch.float32)
    largest = weights.abs().amax() if weights.numel() else torch.tensor(0.0)
    if not torch.isfinite(largest):
        raise ValueError("a weight is not finite")
    scale_2 = largest / (E2M1_MAX * E4M3_MAX) if largest > 0 else torch.tensor(1.0)
    rows = max(1, _ROWS_AT_ONCE_WEIGHTS // weights.shape[1])
    parts = [_quantise_rows(part, scale_2, choose) for part in torch.split(weights, rows)]
    return torch.cat([codes for codes, _ in parts]), torch.cat([scales for _, scales in parts]), scale_2


def _quantise_rows(weights: Tensor, scale_2: Tensor, choose: Choice) -> tuple[Tensor, Tensor]:
    blocks = weights.reshape(weights.shape[0], -1, GROUP)
    scales = block_scales(blocks, scale_2, choose)
    codes = encode(nearest(blocks / (scales.to(torch.float32) * scale_2).unsqueeze(-1)))
    return pack_codes(codes.reshape(weights.shape)), scales


def block_scales(blocks: Tensor, scale_2: Tensor, choose: Choice) -> Tensor:
    """weight_scale E4M3 [..., groups] of float32 [..., groups, 16], as `quantise` chooses it; on any device.

    scale_2 float32 [], or of a shape that spreads over [..., groups] where several tensors are done at once.
    """
    largest = blocks.abs().amax(dim=-1)
    fitting = (largest / E2M1_MAX / scale_2).clamp(2.0**-9, E4M3_MAX)
    fitting = torch.where(largest == 0, 1.0, fitting)
    scales = fitting.to(torch.float8_e4m3fn)
    return _least_squares(blocks, scales, scale_2) if choose == "mse" else scales


def _least_squares(blocks: Tensor, fitting: Tensor, scale_2: Tensor) -> Tensor:
    """The scale near `fitting` with the least squared error of each block; among equals the nearest to `fitting`."""
    first = fitting.view(torch.uint8).int()
    best, best_error = fitting.view(torch.uint8).clone(), torch.full(fitting.shape, torch.inf, device=blocks.device)
    for step in _SEARCH_STEPS:
        candidate = (first + step).clamp(_SMALLEST_CODE, _LARGEST_CODE).to(torch.uint8)
        scale = (candidate.view(torch.float8_e4m3fn).to(torch.float32) * scale_2).unsqueeze(-1)
        error = (nearest(blocks / scale) * scale - blocks).square().sum(dim=-1)
        better = (error < best_error) & (blocks != 0).any(dim=-1) | (best_error == torch.inf)
        best, best_error = torch.where(better, candidate, best), torch.where(better, error, best_error)
    return best.view(torch.float8_e4m3fn)
