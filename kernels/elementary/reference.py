"""Sums and elementary functions whose bits depend on nothing but their input. Owns no layer of the model.

A torch reduction or `exp` may take another instruction path for another shape, thread count or vector width, and then
a prompt read at once differs in the last bit from the same prompt read token by token. Here every result is a fixed
sequence of additions, multiplications, divisions and square roots, each rounded as IEEE 754 says, so that batching,
chunking, threads and the machine cannot change it. The functions work in float64 and round once to float32: they are
within one unit in the last place of the exact value.
"""

import math

import torch
from torch import Tensor

LOG2_E = 1.0 / math.log(2.0)
EXP_TERMS = 11  # Taylor terms for |r| <= ln(2)/2: the first one left out is below 2e-13
LOG_TERMS = 10  # of atanh(s)/s for s <= 1/3: the first one left out is below 2e-11


def total(x: Tensor, dim: int) -> Tensor:
    """The sum over `dim` (at least one element), which disappears. Float32 or float64.

    Folds the upper half onto the lower half of the next power of two until one is left; what is missing counts as zero.
    So zeros that follow the last element change nothing: a sum over 100 and over the same 100 and 28 zeros are equal.
    """
    size = x.shape[dim]
    assert size > 0
    half = (1 << (size - 1).bit_length()) // 2
    while half:
        low, high = x.narrow(dim, 0, half), x.narrow(dim, half, size - half)
        if high.shape[dim] == half:
            x = low + high
        else:
            x = low.clone()
            x.narrow(dim, 0, high.shape[dim]).add_(high)
        size, half = half, half // 2
    return x.squeeze(dim) + 0.0  # a negative zero becomes zero, as it would next to a padding zero


def sqrt(x: Tensor) -> Tensor:
    """The square root, float32, correctly rounded.

    torch.sqrt may go through a vector library that is not. In float64 it is within one unit, 2^-52, of the exact root,
    and that lies at least 2^-51 from where a float32 rounds the other way (x has 24 bits, such a place squared 50).
    """
    return torch.sqrt(x.double()).float()


def exp(x: Tensor) -> Tensor:
    """e^x, float32. Zero for -inf, inf above 88.73, NaN for NaN."""
    return _exp(x).float()


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), float32."""
    return _exp(-x).add_(1.0).reciprocal_().float()


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), float32."""
    return (x.double() / _exp(-x).add_(1.0)).float()


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), float32: max(x, 0) + log1p(t) with t = e^-|x| in (0, 1], and log1p(t) = 2 atanh(t / (2 + t))."""
    t = _exp(-x.abs())
    s = t / (t + 2.0)
    square = s * s
    series = torch.full_like(s, 1.0 / (2 * LOG_TERMS - 1))
    for k in range(LOG_TERMS - 2, -1, -1):
        series.mul_(square).add_(1.0 / (2 * k + 1))
    return (series.mul_(s).mul_(2.0) + x.double().clamp(min=0.0)).float()


def _exp(x: Tensor) -> Tensor:
    """e^x in float64, for |x| beyond 200 that of 200: x = n ln2 + r, e^r by its Taylor series, 2^n by its bits."""
    x = x.double().clamp(-200.0, 200.0)
    n = (x * LOG2_E).round_()
    r = x.sub_(n * math.log(2.0))
    series = torch.full_like(r, 1.0 / math.factorial(EXP_TERMS - 1))
    for k in range(EXP_TERMS - 2, -1, -1):
        series.mul_(r).add_(1.0 / math.factorial(k))
    power = ((n.long() + 1023) << 52).view(torch.float64)
    return series.mul_(power)
