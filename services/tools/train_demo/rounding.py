"""Rounding of weights in the forward pass as the published checkpoint will have them, gradients straight through.

A weight is taken as the BF16 number that it is exported as, then rounded by kernels/nvfp4 and kernels/fp8, with scales
of the least squared error. Looking for scales costs more than rounding: they are looked for anew when told to.
"""

import torch
from torch import Tensor

import kernels.fp8.reference as fp8
import kernels.nvfp4.reference as nvfp4

NVFP4 = "NVFP4"
FP8 = "FP8"
_SCALES_OF_NVFP4 = nvfp4.E2M1_MAX * nvfp4.E4M3_MAX


class Rounding:
    """Scales by tensor. Without `fresh()` a tensor keeps those that it had."""

    def __init__(self) -> None:
        self._scales: dict[str, tuple[Tensor, ...]] = {}

    def fresh(self) -> None:
        """Scales are looked for again, each when its tensor is next rounded."""
        self._scales.clear()

    def __call__(self, name: str, weight: Tensor, form: str) -> Tensor:
        """float32 of weight's shape: [N, K], or [experts, N, K] with scales of each expert's own."""
        with torch.no_grad():
            plain = weight.detach().to(torch.bfloat16).to(torch.float32)
            scales = self._scales.get(name)
            if scales is None:
                scales = _nvfp4_scales(plain) if form == NVFP4 else (fp8.quantise(plain)[1],)
                self._scales[name] = scales
            values = _nvfp4(plain, *scales) if form == NVFP4 else fp8.dequantise(fp8.encode(plain, *scales), *scales)
        return weight + (values - weight).detach()


def _nvfp4_scales(weights: Tensor) -> tuple[Tensor, Tensor]:
    """weight_scale float32 [..., N, K / 16] and weight_scale_2 [..., 1, 1], as kernels/nvfp4 chooses them."""
    largest = weights.abs().amax(dim=(-2, -1), keepdim=True)
    scale_2 = torch.where(largest > 0, largest / _SCALES_OF_NVFP4, 1.0)
    return nvfp4.block_scales(torch.unflatten(weights, -1, (-1, nvfp4.GROUP)), scale_2, "mse").to(
        torch.float32
    ), scale_2


def _nvfp4(weights: Tensor, scale: Tensor, scale_2: Tensor) -> Tensor:
    blocks = torch.unflatten(weights, -1, (-1, nvfp4.GROUP))
    codes = nvfp4.nearest(blocks / (scale * scale_2).unsqueeze(-1))
    return (codes * scale.unsqueeze(-1)).flatten(-2) * scale_2
