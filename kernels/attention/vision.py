"""Attention among all rows of one picture, on a GPU (or in the interpreter): flash attention for odd head sizes.

Definition: `attend_all` in reference.py. A head of 80 numbers is walked as 64 and 16, each a power of two as matrix
products want them, so that none of the work is padding. Products take BF16 and sum in float32; keys come in tiles of a
fixed size in their order, and nothing is chosen by the number of rows: the same picture has the same bits.
"""

import math
import os

import torch
import triton
import triton.language as tl

from kernels.elementary.gpu import bfloat16

Tensor = torch.Tensor

ROWS = 128
KEYS = 64
WARPS = 8
STAGES = 3
LEAST_SIZE = 16  # of a head
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def _operand(x):
    """BF16 as a product of matrices takes it; the interpreter's take float32."""
    return x.to(tl.float32) if _INTERPRETED else x


@triton.jit
def _walk(
    q, q_rest, best, total, mixed, mixed_rest, keys, start, tokens, score_factor, at, rest_at, rest_there,
    KV_STRIDE: tl.constexpr, VALUES: tl.constexpr, HIGH: tl.constexpr, REST: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One tile of keys more; `best` is in units of log2. What is beyond the rows repeats the last one, with a share
    of exactly zero."""
    key = start + tl.arange(0, KEYS)
    there = key < tokens
    row = keys + tl.minimum(key, tokens - 1) * KV_STRIDE
    scores = tl.dot(q, _operand(tl.load(row[None, :] + at[:, None])))
    if REST:
        rest = tl.load(row[None, :] + rest_at[:, None], mask=rest_there[:, None], other=0.0)
        scores = tl.dot(q_rest, _operand(rest), scores)
    scores = tl.where(there[None, :], scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, axis=1) * score_factor)
    shares = tl.exp2(tl.fma(scores, score_factor, -new_best[:, None]))
    decay = tl.exp2(best - new_best)
    total = tl.fma(total, decay, tl.sum(shares, axis=1))
    rounded = _operand(bfloat16(shares))
    mixed = tl.dot(rounded, _operand(tl.load(row[:, None] + (VALUES + at)[None, :])), mixed * decay[:, None])
    if REST:
        rest = tl.load(row[:, None] + (VALUES + rest_at)[None, :], mask=rest_there[None, :], other=0.0)
        mixed_rest = tl.dot(rounded, _operand(rest), mixed_rest * decay[:, None])
    return new_best, total, mixed, mixed_rest


@triton.jit(do_not_specialize=["tokens"])
def vision_attend_kernel(
    query,
    kv,
    out,
    tokens,
    score_factor,
    Q_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    VALUES: tl.constexpr,
    SIZE: tl.constexpr,
    HIGH: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (tile of rows, head). `out` may be `query`: nobody else reads what a program replaces."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < tokens)[:, None]
    at = tl.arange(0, HIGH)
    rest_at = HIGH + tl.arange(0, REST if REST else 16)
    rest_there = rest_at < SIZE
    place = (tl.minimum(row, tokens - 1) * Q_STRIDE + tl.program_id(1) * SIZE)[:, None]
    q = _operand(tl.load(query + place + at[None, :]))
    q_rest = q
    mixed_rest = tl.zeros([ROWS, REST if REST else 16], tl.float32)
    if REST:
        q_rest = _operand(tl.load(query + place + rest_at[None, :], mask=rest_there[None, :], other=0.0))
    keys = kv + tl.program_id(1) * SIZE
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, HIGH], tl.float32)
    for start in tl.range(0, tokens, KEYS, num_stages=STAGES):
        best, total, mixed, mixed_rest = _walk(
            q, q_rest, best, total, mixed, mixed_rest, keys, start, tokens, score_factor, at, rest_at, rest_there,
            KV_STRIDE, VALUES, HIGH, REST, KEYS,
        )  # fmt: skip
    inverse = tl.div_rn(1.0, total)[:, None]
    target = out + (row * Q_STRIDE + tl.program_id(1) * SIZE)[:, None]
    tl.store(target + at[None, :], bfloat16(mixed * inverse), mask=inside)
    if REST:
        tl.store(target + rest_at[None, :], bfloat16(mixed_rest * inverse), mask=inside & rest_there[None, :])


def attend(query: Tensor, kv: Tensor, heads: int, out: Tensor) -> None:
    """Queue out = softmax(q k / sqrt(size)) v, each row over all rows; one launch.

    query and out bfloat16 [T, heads * size], which may be the same memory; kv bfloat16 [T, 2 heads * size], keys before
    values. All contiguous, T at least 1, size at least LEAST_SIZE.
    """
    tokens, width = query.shape
    size = width // heads
    assert query.dtype == kv.dtype == out.dtype == torch.bfloat16
    assert width == heads * size
    assert size >= LEAST_SIZE
    assert out.shape == query.shape
    assert kv.shape == (tokens, 2 * width)
    assert tokens
    assert kv.numel() < 1 << 31
    assert all(tensor.is_contiguous() for tensor in (query, kv, out))
    high = 1 << size.bit_length() - 1
    rest = max(16, triton.next_power_of_2(size - high)) if size > high else 0
    vision_attend_kernel[(triton.cdiv(tokens, ROWS), heads)](
        query,
        kv,
        out,
        tokens,
        math.log2(math.e) / math.sqrt(size),
        Q_STRIDE=width,
        KV_STRIDE=2 * width,
        VALUES=width,
        SIZE=size,
        HIGH=high,
        REST=rest,
        ROWS=ROWS,
        KEYS=KEYS,
        STAGES=STAGES,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
