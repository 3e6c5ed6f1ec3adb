"""FP8 (E4M3, one scale per tensor) in plain torch: the definition of a checkpoint's FP8 weights, and how ours are made.

W[n, k] = e4m3(weight[n, k]) * weight_scale        (ModelOpt's layout; one rounding)
"""

from typing import Literal

import torch
from torch import Tensor

E4M3_MAX = 448.0

# Scales tried for the least squared error, as multiples of the one that just fits. A factor of two gives the same grid
# again but for its ends, so one octave upwards is enough; the few below cut off the largest weights.
_FACTORS = (1.0, *(0.8 + 0.05 * i for i in range(4)), *(1.0 + i / 16 for i in range(1, 16)))

Choice = Literal["mse", "max"]


def dequantise(weight: Tensor, weight_scale: Tensor | float) -> Tensor:
    """float32 of weight's shape, from weight as E4M3 or its bytes and a scalar scale."""
    scale = torch.as_tensor(weight_scale, dtype=torch.float32).reshape(())
    return weight.view(torch.float8_e4m3fn).to(torch.float32) * scale


def quantise(weights: Tensor, choose: Choice = "mse") -> tuple[Tensor, Tensor]:
    """float -> weight E4M3 of the same shape (nearest, ties to even), weight_scale float32 [].

    weight_scale = max|W| / 448 (`max`; 1 for an all-zero tensor), or a multiple of it with less squared error (`mse`).
    Raises ValueError if a weight is not finite.
    """
    weights = weights.to(torch.float32)
    largest = weights.abs().amax() if weights.numel() else torch.tensor(0.0)
    if not torch.isfinite(largest):
        raise ValueError("a weight is not finite")
    fitting = largest / E4M3_MAX if largest > 0 else torch.tensor(1.0)
    scale = fitting
    if choose == "mse":
        errors = [_squared_error(weights, fitting * factor) for factor in _FACTORS]
        scale = fitting * _FACTORS[errors.index(min(errors))]
    return encode(weights, scale), scale


def encode(weights: Tensor, scale: Tensor) -> Tensor:
    """float32 -> E4M3 of the same shape: nearest to weights / scale, ties to even, clamped to the largest."""
    return (weights / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _squared_error(weights: Tensor, scale: Tensor) -> float:
    return float((dequantise(encode(weights, scale), scale) - weights).square().sum(dtype=torch.float64))
