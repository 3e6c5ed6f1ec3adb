"""Triton: the elementary functions of reference.py in float32, within three units in the last place of the exact value.

Written out in roundings that IEEE 754 fixes, since a card's own approximations differ from generation to generation.
"""

import os

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN2_HIGH = tl.constexpr(0.693359375)  # 10 bits: exact times any exponent
_LN2_LOW = tl.constexpr(-2.12194440e-4)
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: added and taken away, it rounds to the nearest integer


@triton.jit
def power_of_two(exponent):
    """int32 within -126..127 -> float32 2^exponent."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exp(x):
    """e^x: zero for -inf, inf above 88.73, NaN for NaN. x = n ln2 + r, e^r by its Taylor series, 2^n by its bits."""
    inside = tl.where(x == x, tl.minimum(tl.maximum(x, -110.0), 90.0), 0.0)
    n = (inside * _LOG2_E + _ROUND) - _ROUND
    r = tl.fma(n, -_LN2_LOW, tl.fma(n, -_LN2_HIGH, inside))
    series = tl.fma(r, 1.0 / 5040, 1.0 / 720)
    series = tl.fma(series, r, 1.0 / 120)
    series = tl.fma(series, r, 1.0 / 24)
    series = tl.fma(series, r, 1.0 / 6)
    series = tl.fma(series, r, 0.5)
    series = tl.fma(series, r * r, r) + 1.0
    exponent = n.to(tl.int32)
    half = exponent >> 1
    return tl.where(x == x, series * power_of_two(half) * power_of_two(exponent - half), x)


@triton.jit
def sigmoid(x):
    return tl.div_rn(1.0, 1.0 + exp(-x))


@triton.jit
def silu(x):
    return tl.div_rn(x, 1.0 + exp(-x))


@triton.jit
def softplus(x):
    """log(1 + e^x) = max(x, 0) + log1p(t), t = e^-|x| in (0, 1]; log1p(t) = 2 atanh(s), s = t / (2 + t) <= 1/3."""
    t = exp(-tl.abs(x))
    s = tl.div_rn(t, t + 2.0)
    square = s * s
    series = tl.fma(square, 2.0 / 15, 2.0 / 13)
    series = tl.fma(series, square, 2.0 / 11)
    series = tl.fma(series, square, 2.0 / 9)
    series = tl.fma(series, square, 2.0 / 7)
    series = tl.fma(series, square, 2.0 / 5)
    series = tl.fma(series, square, 2.0 / 3)
    series = tl.fma(series, square, 2.0)
    return tl.where(x == x, tl.fma(series, s, tl.maximum(x, 0.0)), x)


@triton.jit
def inverse_root(mean, eps):
    """1 / sqrt(mean + eps)."""
    return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))


@triton.jit
def bfloat16(x):
    """float32 -> bfloat16, to the nearest, ties to even. The interpreter's own conversion rounds otherwise."""
    if _INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, rounded, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def float16(x):
    """float32 -> float16, to the nearest, ties to even; what is finite stays so, at most 65504."""
    limited = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
    finite = tl.abs(x) < float("inf")
    return tl.where(finite, limited, x).to(tl.float16)


@triton.jit
def rounded_to(x, out):
    """float32 -> what can be stored to `out`, a pointer to float16, bfloat16 or float32."""
    KIND: tl.constexpr = out.dtype.element_ty
    if tl.bfloat16 == KIND:
        x = bfloat16(x)
    if tl.float16 == KIND:
        x = float16(x)
    return x
