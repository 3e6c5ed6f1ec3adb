"""Attention of many tokens of one or more prompts at once, on a GPU (or in the interpreter), over KV pages.

    store_kv   keys and values of new tokens, rounded into the pages as decode rounds them
    attend     flash attention: a tile of tokens with all heads of one KV head, its pages walked in order

A tile's tokens are TOKENS neighbours from an absolute multiple of TOKENS on, and TOKENS divides a page: all rows of a
tile walk the same pages, to the one page that holds them all, and a token stands at the same row of its tile however
its prompt was cut. So its bits depend on its own query and on the positions up to its own, on nothing else; there is no
page that is hidden from a row but walked for its neighbours. (A row of a matrix product does not depend on the others.)

Products of matrices take BF16 (query and shares rounded, the pages exact) and sum in float32; the exponential is the
card's own, far finer than the shares' rounding. What is in the pages: pages.py, whose memory is the caller's.
"""

import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.attention.gpu import _from_page, check
from kernels.attention.pages import Pages, to_bf16, to_e4m3

Tensor = torch.Tensor

ROWS = 128  # of a tile: tokens times heads of a KV head
WARPS = 8
STAGES = 2
STORED_TOKENS = 8  # a program
STORE_WARPS = 4
FINGERPRINT = f"triton-bf16 sweep{ROWS}x{WARPS}"
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


class Segment(NamedTuple):
    """`rows` tokens: rows `row`.. of the batch, positions `first`.. of a sequence whose pages are tables[`table`]."""

    row: int
    rows: int
    first: int
    table: int


class Segments:
    """The segments of one batch, here and on the device: made once, read by every layer."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        assert segments
        assert all(each.rows > 0 and each.first >= 0 for each in segments)
        self.each = tuple(segments)
        self.table = torch.tensor(self.each, dtype=torch.int32).to(device, non_blocking=True)

    def check(self, rows: int, tables: Tensor, page_tokens: int) -> None:
        """Our own bugs: a segment outside the batch's rows, or beyond its sequence's pages."""
        for each in self.each:
            assert 0 <= each.row <= rows - each.rows
            assert 0 <= each.table < len(tables)
            assert each.first + each.rows <= tables.shape[1] * page_tokens


@triton.jit
def _bf16(x):
    """float32 -> what a product of matrices takes: BF16; the interpreter's take float32, so there the rounded value."""
    return (to_bf16(x) << 16).to(tl.float32, bitcast=True) if _INTERPRETED else x.to(tl.bfloat16)


@triton.jit
def _operand(raw, FP8: tl.constexpr):
    """What a page holds -> the same as `_bf16`, exactly.

    On a GPU four E4M3 codes at a time: their bits, read as BF16, are 2^-120 of the value, subnormals included. Said not
    to be pure, so that the compiler unpacks a page once and not in every warp that multiplies by it.
    """
    if FP8 and _INTERPRETED:
        values = _from_page(raw, True) * 256.0
    elif FP8:
        values = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, s, t;
            prmt.b32 a, $2, 0, 0x1404;
            prmt.b32 b, $2, 0, 0x3424;
            and.b32 s, a, 0x80008000;
            and.b32 t, b, 0x80008000;
            shr.b32 a, a, 4;
            shr.b32 b, b, 4;
            and.b32 a, a, 0x07F007F0;
            and.b32 b, b, 0x07F007F0;
            or.b32 a, a, s;
            or.b32 b, b, t;
            mov.b32 s, 0x7B807B80;
            mov.b32 t, 0x80008000;
            fma.rn.bf16x2 $0, a, s, t;
            fma.rn.bf16x2 $1, b, s, t;
            }
            """,
            "=r,=r,r",
            [raw],
            dtype=tl.bfloat16,
            is_pure=False,
            pack=4,
        )
    elif _INTERPRETED:
        values = _from_page(raw.to(tl.int16, bitcast=True), False)
    else:
        values = raw
    return values


@triton.jit
def _walk(
    q, best, total, mixed, keys, values, across, inside, score_factor, position, start, spoilt, OWN: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    """One page more, which begins at `keys` and `values`; `best` is in units of log2.

    OWN is the page of the tile's tokens, positions `start`..: what a row may not see there has a share of exactly zero.
    Values from position `spoilt` on count as zero, since zero times one that is not finite would reach such a row.
    """
    scores = tl.dot(q, _operand(tl.load(keys + across), FP8))
    if OWN:
        visible = (start + tl.arange(0, inside.shape[0]))[None, :] <= position[:, None]
        scores = tl.where(visible, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, axis=1) * score_factor)
    shares = tl.exp2(tl.fma(scores, score_factor, -new_best[:, None]))
    decay = tl.exp2(best - new_best)
    total = tl.fma(total, decay, tl.sum(shares, axis=1))
    if OWN and not FP8:
        value = tl.load(values + inside, mask=(start + tl.arange(0, inside.shape[0]) < spoilt)[:, None], other=0.0)
    else:
        value = tl.load(values + inside)
    mixed = tl.dot(_bf16(shares), _operand(value, FP8), mixed * decay[:, None])
    return new_best, total, mixed


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["tables", "segments"])
def sweep_attend_kernel(
    query,
    keys,
    values,
    tables,
    table_stride,
    segments,
    score_factor,
    value_factor,
    out,
    STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    FP8: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (tile, KV head, segment), a segment's last tile first, since it has the longest way.

    Rows are token-major: PADDED heads a token, of which GROUP are there.
    """
    kv_head = tl.program_id(1)
    segment = segments + tl.program_id(2) * 4
    rows = tl.load(segment + 1)
    first = tl.load(segment + 2)
    tile = (first + rows - 1) // TOKENS - tl.program_id(0)
    if tile >= first // TOKENS:
        row = tl.arange(0, TOKENS * PADDED)
        at = tl.arange(0, SIZE)
        head = row % PADDED
        position = tile * TOKENS + row // PADDED
        batch_row = (tl.load(segment) + tile * TOKENS - first).to(tl.int64)  # of the tile's first token, there or not
        query += batch_row * STRIDE + kv_head * GROUP * SIZE
        column = (head * SIZE)[:, None] + at[None, :]
        there = ((position >= first) & (position < first + rows) & (head < GROUP))[:, None]
        q = _bf16(tl.load(query + ((row // PADDED * STRIDE)[:, None] + column), mask=there, other=0.0))

        own = tile * TOKENS // PAGE
        table = tables + tl.load(segment + 3) * table_stride
        offset = tl.arange(0, PAGE)
        inside = (offset * (KV_HEADS * SIZE))[:, None] + at[None, :]
        across = (offset * (KV_HEADS * SIZE))[None, :] + at[:, None]
        keys += kv_head * SIZE
        values += kv_head * SIZE
        best = tl.full([TOKENS * PADDED], float("-inf"), tl.float32)
        total = tl.zeros([TOKENS * PADDED], tl.float32)
        mixed = tl.zeros([TOKENS * PADDED, SIZE], tl.float32)
        page = tl.load(table)
        for index in tl.range(0, own, num_stages=STAGES):
            place = page.to(tl.int64) * (PAGE * KV_HEADS * SIZE)
            page = tl.load(table + index + 1)  # a step ahead: a page's loads wait for its number
            best, total, mixed = _walk(
                q, best, total, mixed, keys + place, values + place, across, inside, score_factor, position, 0, 0,
                False, FP8,
            )  # fmt: skip
        place = page.to(tl.int64) * (PAGE * KV_HEADS * SIZE)
        start = own * PAGE
        spoilt = start + PAGE
        if not FP8:  # whose codes are all finite
            infinite = (tl.load(values + place + inside).to(tl.int16, bitcast=True) & 0x7F80) == 0x7F80
            spoilt = tl.min(tl.where(tl.max(infinite.to(tl.int32), axis=1) > 0, start + offset, spoilt), axis=0)
            total = tl.where(position >= spoilt, float("nan"), total)
        best, total, mixed = _walk(
            q, best, total, mixed, keys + place, values + place, across, inside, score_factor, position, start, spoilt,
            True, FP8,
        )  # fmt: skip

        first = tl.load(
            segment + 2, volatile=True
        )  # again, so that what says where a row is need not wait in registers
        there = ((position >= first) & (position < first + rows) & (head < GROUP))[:, None]
        out += batch_row * (KV_HEADS * GROUP * SIZE) + kv_head * GROUP * SIZE
        rounded = to_bf16(mixed * tl.div_rn(value_factor, total)[:, None]).to(tl.int16)
        tl.store(out + ((row // PADDED * (KV_HEADS * GROUP * SIZE))[:, None] + column), rounded, mask=there)


@triton.jit
def _store(source, batch_row, stride, pages, place, inverse_scale, mask, column, FP8: tl.constexpr):
    y = tl.load(source + batch_row * stride + column, mask=mask, other=0.0)
    if FP8:
        tl.store(pages + place, to_e4m3(y * inverse_scale).to(tl.uint8), mask=mask)
    else:
        tl.store(pages + place, to_bf16(y).to(tl.int16), mask=mask)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["tables", "segments"])
def sweep_store_kernel(
    key,
    key_stride,
    value,
    value_stride,
    keys,
    values,
    tables,
    table_stride,
    segments,
    inverse_key_scale,
    inverse_value_scale,
    COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGE: tl.constexpr,
    FP8: tl.constexpr,
):
    """Program (TOKENS tokens, key or value, segment)."""
    segment = segments + tl.program_id(2) * 4
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    rows = tl.load(segment + 1)
    there = token < rows
    position = tl.load(segment + 2) + token
    table = tables + tl.load(segment + 3) * table_stride
    page = tl.load(table + position // PAGE, mask=there, other=0).to(tl.int64)
    column = tl.arange(0, PADDED)[None, :]
    place = (page * PAGE + position % PAGE)[:, None] * COLUMNS + column
    mask = there[:, None] & (column < COLUMNS)
    batch_row = (tl.load(segment) + token).to(tl.int64)[:, None]
    if tl.program_id(1) == 0:
        _store(key, batch_row, key_stride, keys, place, inverse_key_scale, mask, column, FP8)
    else:
        _store(value, batch_row, value_stride, values, place, inverse_value_scale, mask, column, FP8)


def store_kv(key: Tensor, value: Tensor, pages: Pages, tables: Tensor, segments: Segments) -> None:
    """Queue the rounding of every segment's keys and values into its pages; one launch.

    key and value float32 [T, kv_heads * size] in plain order, rows contiguous in themselves; tables int32 [sequences,
    most pages], on the device. The pages of the segments' positions belong to their sequences alone.
    """
    _, page_tokens, kv_heads, size = pages.keys.shape
    segments.check(len(key), tables, page_tokens)
    assert key.shape == value.shape == (len(key), kv_heads * size)
    assert key.stride(1) == value.stride(1) == 1
    keys, values = pages.raw()
    most = max(each.rows for each in segments.each)
    sweep_store_kernel[(triton.cdiv(most, STORED_TOKENS), 2, len(segments.each))](
        key,
        key.stride(0),
        value,
        value.stride(0),
        keys,
        values,
        tables,
        tables.stride(0),
        segments.table,
        1.0 / pages.key_scale,
        1.0 / pages.value_scale,
        COLUMNS=kv_heads * size,
        PADDED=triton.next_power_of_2(kv_heads * size),
        TOKENS=STORED_TOKENS,
        PAGE=page_tokens,
        FP8=pages.fp8,
        num_warps=STORE_WARPS,
        enable_fp_fusion=False,
    )


def tile_tokens(group: int, page_tokens: int) -> int:
    """How many tokens share a tile."""
    return min(page_tokens, ROWS // triton.next_power_of_2(group))


def attend(
    query: Tensor,
    pages: Pages,
    tables: Tensor,
    segments: Segments,
    out: Tensor,
    warps: int = WARPS,
    stages: int = STAGES,
) -> None:
    """Queue out = softmax(q k / sqrt(size)) v for every segment's tokens, each over the positions up to its own, which
    `store_kv` (or decode) has filled; one launch.

    query float32 [T, heads * size] in plain order, rows contiguous in themselves; out bfloat16 [T, heads * size],
    contiguous; rows of no segment are left alone. tables as for `store_kv`. `warps` and `stages` are given by
    measurements only. Raises ShapeError.
    """
    _, page_tokens, kv_heads, size = pages.keys.shape
    heads = query.shape[1] // size
    check(heads, kv_heads, size, page_tokens)
    segments.check(len(query), tables, page_tokens)
    assert out.shape == query.shape
    assert out.is_contiguous()
    assert query.stride(1) == 1
    group = heads // kv_heads
    tokens = tile_tokens(group, page_tokens)
    tiles = max((each.first + each.rows - 1) // tokens - each.first // tokens + 1 for each in segments.each)
    sweep_attend_kernel[(tiles, kv_heads, len(segments.each))](
        query,
        pages.raw()[0] if pages.fp8 else pages.keys,
        pages.raw()[1] if pages.fp8 else pages.values,
        tables,
        tables.stride(0),
        segments.table,
        pages.key_scale / math.sqrt(size) * math.log2(math.e),
        pages.value_scale,
        out.view(torch.int16),
        STRIDE=query.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        PADDED=triton.next_power_of_2(group),
        TOKENS=tokens,
        SIZE=size,
        PAGE=page_tokens,
        FP8=pages.fp8,
        STAGES=stages,
        num_warps=warps,
        enable_fp_fusion=False,
    )
