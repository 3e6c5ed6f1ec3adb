"""Linear layers of a prompt's sweep on a GPU (or in the interpreter): any number of rows at once, on tensor cores.

Owns the tiles, how weights get into a product and what happens to a result before it is stored; unpack.py makes
numbers of their codes. gpu.py owns the packed weights (`Linear`) and decode's products; both read the same bytes. All
activations are in plain order.

A row's bits depend on the row and the weights alone: tiles, the order along K and instructions go by format, never by
the number of rows. Products are of F16 or BF16 numbers, as the activations are, sums float32. Weights lose nothing: an
E2M1 value has 2 significant bits and an E4M3 block scale 4, so their product has at most 6 of F16's 11 or BF16's 8,
inside the exponents of both; E4M3 has 4. Only BF16 weights below 2^-14 lose, as F16, what is under 2^-25. The tensor's
scale is applied to the float32 sum. With `precise` float32 activations count with 16 bits, as the sum of two
BF16 numbers; so do F32 and, exactly, F16 weights beside BF16 ones. Beside F16 activations they are F16.

Weights are the left operand, which the tensor cores of sm_90 take from registers, where it is unpacked; activations go
through shared memory. A program's result is hence [BN, BM]. Consecutive programs share their weights, which are read
from memory once; the activations come from the L2 cache.
"""

import os
from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

from kernels.elementary.gpu import bfloat16, float16, rounded_to
from kernels.linear.gpu import Linear
from kernels.linear.unpack import float_of, fp4_pair, fp8_pair, scale_pair

Tensor = torch.Tensor
Finish = Literal["store", "relu2", "gelu", "add"]

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
_UNPACKED = {torch.bfloat16: 2.0**10, torch.float16: 2.0**8}  # what unpacking NVFP4 leaves out of a weight: unpack.py
_VIEWS = {"NVFP4": torch.uint8, "FP8": torch.int16, "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True)
class Tiles:
    """A program's outputs, `bm` activation rows by `bn` weight rows; `bk` columns a step, of which `stages` fly."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int


_WHOLE = {"NVFP4": Tiles(128, 128, 64, 8, 3), "FP8": Tiles(128, 128, 64, 8, 3), "BF16": Tiles(128, 128, 32, 8, 4)}
_HALVED = Tiles(64, 64, 32, 4, 3)  # where an operand is the sum of two numbers


def tiles(form: str, precise: bool) -> Tiles:
    """The fixed configuration; others are timed by `thimble bench sweep-kernels --tiles`."""
    return _HALVED if precise else _WHOLE.get(form, _HALVED)


FINGERPRINT = "triton-f16 sweep " + " ".join(
    f"{form}:{made.bn}x{made.bm}x{made.bk}" for form, made in [*_WHOLE.items(), ("halved", _HALVED)]
)


@triton.jit
def _halves(x):
    """float32 -> two bfloat16 whose sum has its first 16 bits; of infinity the second is zero, of NaN both are NaN."""
    bits = x.to(tl.int32, bitcast=True)
    rest = tl.where(tl.abs(x) == float("inf"), 0.0, x - float_of(bits & -0x10000))
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), bfloat16(rest)


@triton.jit
def _bytes(words):
    """int32 [BN, 1] -> int32 [BN, 4], the lowest byte first; nothing moves between threads."""
    even = tl.join(words & 0xFF, (words >> 16) & 0xFF)
    odd = tl.join((words >> 8) & 0xFF, (words >> 24) & 0xFF)
    return tl.reshape(tl.join(even, odd), [words.shape[0], 4])


@triton.jit
def _dot(weights, x, total):
    """total [BN, BM] + weights [BN, BK] times x [BM, BK]. The interpreter's own product takes no halves."""
    if _INTERPRETED:
        return tl.dot(weights.to(tl.float32), tl.trans(x.to(tl.float32)), total, input_precision="ieee")
    return tl.dot(weights, tl.trans(x), total)


@triton.jit
def _load(pointers, inside, WHOLE: tl.constexpr):
    return tl.load(pointers) if WHOLE else tl.load(pointers, mask=inside, other=0)


@triton.jit(do_not_specialize=["tokens"])
def sweep_kernel(
    x,
    weight,
    scales,
    factor,
    bias,
    out,
    tokens,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr,
    FINISH: tl.constexpr,
    PRECISE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One tile of out [tokens, ROWS] from x [tokens, K]; weight [ROWS, K / PACKED], scales uint8 [ROWS, K / 16]."""
    PACKED: tl.constexpr = 2 if FORMAT == "NVFP4" or FORMAT == "FP8" else 1
    WHOLE: tl.constexpr = K % BK == 0
    KIND: tl.constexpr = tl.bfloat16 if PRECISE else x.dtype.element_ty
    WORDS: tl.constexpr = FORMAT == "NVFP4" and WHOLE and BK == 64  # a step's four scales of a row are one number
    program = tl.program_id(0)
    first = (program % tl.cdiv(tokens, BM)) * BM
    token = first + tl.arange(0, BM)
    row = (program // tl.cdiv(tokens, BM)) * BN + tl.arange(0, BN)
    # Rows beyond the last repeat it: nobody stores what they give.
    x_rows = x + tl.minimum(token, tokens - 1)[:, None] * K
    weight_row = (row if ROWS % BN == 0 else tl.minimum(row, ROWS - 1))[:, None]
    weight_rows = weight + weight_row * (K // PACKED)
    if WORDS:
        scales = scales.to(tl.pointer_type(tl.int32), bitcast=True)
    scales_rows = scales + weight_row * (K // 64 if WORDS else K // 16)
    total = tl.zeros([BN, BM], tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        column = (start + tl.arange(0, BK))[None, :]
        values = _load(x_rows + column, column < K, WHOLE)
        place = (start // PACKED + tl.arange(0, BK // PACKED))[None, :]
        codes = _load(weight_rows + place, place < K // PACKED, WHOLE)
        if FORMAT == "NVFP4":
            if WORDS:
                scale = _bytes(tl.load(scales_rows + start // 64))
            else:
                block = (start // 16 + tl.arange(0, BK // 16))[None, :]
                scale = _load(scales_rows + block, block < K // 16, WHOLE)
            scale = tl.broadcast_to(scale_pair(scale, KIND)[:, :, None], [BN, BK // 16, 8])
            low, high = fp4_pair(codes, tl.reshape(scale, [BN, BK // 2]), KIND)
            weights = tl.reshape(tl.join(low, high), [BN, BK])
        elif FORMAT == "FP8":
            low, high = fp8_pair(codes, KIND)
            weights = tl.reshape(tl.join(low, high), [BN, BK])
        elif FORMAT == "BF16":
            weights = codes if tl.bfloat16 == KIND else codes.to(tl.float32).to(KIND)
        elif tl.float16 == KIND:
            weights = float16(codes.to(tl.float32))
        else:
            weights, weights_rest = _halves(codes.to(tl.float32))
        if PRECISE:
            values, values_rest = _halves(values)
            total = _dot(weights, values_rest, total)
        if (FORMAT == "F16" or FORMAT == "F32") and tl.bfloat16 == KIND:
            total = _dot(weights_rest, values, total)
        total = _dot(weights, values, total)
    total *= factor
    if bias is not None:
        total += tl.load(bias + tl.minimum(row, ROWS - 1)).to(tl.float32)[:, None]
    if FINISH == "relu2":
        total = tl.where(total <= 0.0, 0.0, total * total)  # NaN stays NaN
    if FINISH == "gelu":
        total = total * 0.5 * (1.0 + tl.erf(total * 0.7071067811865476))
    target = out + first.to(tl.int64) * OUT_STRIDE + tl.arange(0, BM)[None, :] * OUT_STRIDE + row[:, None]
    present = (token < tokens)[None, :] & (row < ROWS)[:, None]
    if FINISH == "add":
        total = tl.load(target, mask=present, other=0.0) + total
    tl.store(target, rounded_to(total, out), mask=present)


def linear(
    x: Tensor,
    weights: Linear,
    out: Tensor,
    finish: Finish = "store",
    precise: bool = False,
    configuration: Tiles | None = None,
    bias: Tensor | None = None,
    gain: float = 1.0,
) -> None:
    """Queue out = finish(gain * x @ W^T + bias) in one launch; nothing is allocated.

    x [M, K] contiguous, float16 or bfloat16, or float32 with `precise`; any M. `gain` is a power of two that keeps
    large results in float16's range, and is taken back where they are used. out [M, N] with any row stride, float16,
    bfloat16 or float32, for the finishes
      store   rounded to out's type, finite results to at most 65504 in float16;
      relu2   positive results squared, others zero;
      gelu    x Phi(x) of a result x, with the card's own error function;
      add     added to what out, float32, holds.
    `bias` [N], contiguous, of any float type. A row that is not finite spoils no other row. `configuration` replaces
    the fixed one, for measurements.
    """
    tokens, columns = x.shape
    assert x.dtype == torch.float32 if precise else x.dtype in (torch.float16, torch.bfloat16)
    assert x.is_contiguous()
    assert weights.columns == columns
    assert out.shape == (tokens, weights.rows)
    assert out.stride(1) == 1
    assert out.dtype == torch.float32 or (out.dtype in (torch.float16, torch.bfloat16) and finish != "add")
    assert max(x.numel(), weights.rows * columns) < 1 << 31
    assert bias is None or (bias.shape == (weights.rows,) and bias.is_contiguous())
    if tokens == 0:
        return
    made = configuration or tiles(weights.format, precise)
    unpacked = _UNPACKED[torch.bfloat16 if precise else x.dtype]
    sweep_kernel[(triton.cdiv(tokens, made.bm) * triton.cdiv(weights.rows, made.bn),)](
        x,
        weights.weight.view(_VIEWS[weights.format]),
        weights.scales.view(torch.uint8),
        weights.scale * gain * (unpacked if weights.format == "NVFP4" else 1.0),
        bias,
        out,
        tokens,
        K=columns,
        ROWS=weights.rows,
        OUT_STRIDE=out.stride(0),
        FORMAT=weights.format,
        FINISH=finish,
        PRECISE=precise,
        BM=made.bm,
        BN=made.bn,
        BK=made.bk,
        STAGES=made.stages,
        num_warps=made.warps,
        enable_fp_fusion=False,
    )
