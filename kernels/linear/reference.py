"""A linear layer in float32 whose every output is one fixed sequence of operations: the definition.

    lane[l] = fma(x[16 i + l], w[16 i + l], lane[l]) for i = 0, 1, ...   l = 0 ... 15, from +0, K padded with zeros
    out     = the lanes folded in halves: l + (l + 8), then 4, 2, 1

Each fma rounds once to float32. Nothing else enters an output's bits: not the number of rows, the threads, the tile or
the vector width. torch has no fma, so it is made here from float64: the product is exact there, the sum is rounded to
odd (Boldo and Melquiond, 2008), and rounding that to float32 equals rounding the exact sum.
"""

import torch
from torch import Tensor

LANES = 16
_ELEMENTS_AT_ONCE = 1 << 22


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """float32 x [M, K], weight [N, K] -> float32 [M, N]. Raises ValueError on other shapes or dtypes."""
    check(x, weight)
    at_once = max(1, _ELEMENTS_AT_ONCE // (weight.shape[0] * LANES + 1))
    return (
        torch.cat([_linear(rows, weight) for rows in torch.split(x, at_once)])
        if len(x)
        else x.new_empty((0, weight.shape[0]))
    )


def check(x: Tensor, weight: Tensor) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"linear: x {tuple(x.shape)} and weight {tuple(weight.shape)} must be [M, K] and [N, K]")
    if x.dtype != torch.float32 or weight.dtype != torch.float32:
        raise ValueError(f"linear: x is {x.dtype} and weight {weight.dtype}, both must be float32")


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    padding = -x.shape[1] % LANES
    x, weight = (torch.nn.functional.pad(t, (0, padding)).double() for t in (x, weight))
    lanes = torch.zeros((x.shape[0], weight.shape[0], LANES), dtype=torch.float32)
    for k in range(0, x.shape[1], LANES):
        lanes = _add(x[:, None, k : k + LANES] * weight[None, :, k : k + LANES], lanes.double())
    for half in (8, 4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half : 2 * half]
    return lanes[..., 0]


def _add(a: Tensor, b: Tensor) -> Tensor:
    """float32 of the exact a + b for float64 a, b: the float64 sum rounded to odd, then to float32."""
    total = a + b
    b_part = total - a
    rest = (a - (total - b_part)) + (b - b_part)  # the exact error of the sum (Knuth)
    bits = total.view(torch.int64)
    # An inexact sum with an even last bit moves one step towards the side that was cut off.
    inexact = (rest != 0) & torch.isfinite(total) & (bits & 1 == 0)
    step = torch.where((rest > 0) == (total > 0), 1, -1)
    return torch.where(inexact, bits + step, bits).view(torch.float64).float()
