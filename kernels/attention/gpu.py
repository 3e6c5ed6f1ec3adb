"""Attention of a few new tokens on a GPU (or in the interpreter), over KV pages; no positions are encoded.

    attend   one program a token, KV head and run of pages: softmax over that run
    merge    the runs' results, in ascending order

A token sees as much of its pages as its length says: those of one sequence share pages and differ in length. Runs are
cut at fixed places, SPLIT_PAGES pages each, so a token's bits depend neither on the batch nor on how many runs
the launch has room for. Sums are float32; a product of two matrices takes its float32 operand in three TF32 parts, the
pages' values are exact in one. What is in the pages, and how it got there: pages.py.
"""

import math

import torch
import triton
import triton.language as tl

from kernels.attention.pages import Pages
from kernels.elementary.gpu import exp
from kernels.linear.octets import octet_place

Tensor = torch.Tensor

SPLIT_PAGES = 4
WARPS = 8
STAGES = 2
MERGE_WARPS = 4
MERGE_RUNS = 16  # taken at once
SMALLEST_TILE = 16  # rows or columns of a matrix product
MOST_NUMBERS = 64 * 128  # of a page's keys for one KV head: more do not fit a consumer card's shared memory
FINGERPRINT = f"triton-tf32x3 attend{SPLIT_PAGES}x{WARPS} merge{MERGE_RUNS}x{MERGE_WARPS}"


class ShapeError(ValueError):
    """Heads or pages that the kernels cannot take on a GPU. The message says what they can take."""

    code = "attention_shape"


@triton.jit
def _from_page(raw, FP8: tl.constexpr):
    """What a page holds, int16 or uint8, -> float32; E4M3 comes out times 2^-8."""
    code = raw.to(tl.int32)
    if FP8:
        half = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        values = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        values = (code << 16).to(tl.float32, bitcast=True)
    return values


@triton.jit(do_not_specialize_on_alignment=["tables", "lengths"])
def attend_kernel(
    query,
    keys,
    values,
    tables,
    table_stride,
    lengths,
    score_factor,
    mixed_out,
    best_out,
    total_out,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT_PAGES: tl.constexpr,
    FP8: tl.constexpr,
):
    """Program (run, KV head, sequence) -> largest score, sum of shares and mixed values of the run, for GROUP heads.

    ROWS is GROUP or more, as a matrix product needs. A run beyond the sequence's end stores nothing.
    """
    run = tl.program_id(0)
    kv_head = tl.program_id(1)
    token = tl.program_id(2)
    length = tl.load(lengths + token)
    if run * SPLIT_PAGES * PAGE < length:
        row = tl.arange(0, ROWS)
        at = tl.arange(0, SIZE)
        offset = tl.arange(0, PAGE)
        head = (token * KV_HEADS + kv_head) * GROUP + row
        q = tl.load(query + head[:, None] * SIZE + at[None, :], mask=(row < GROUP)[:, None], other=0.0)
        q = q * score_factor
        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, SIZE], tl.float32)
        for index in range(run * SPLIT_PAGES, tl.minimum((run + 1) * SPLIT_PAGES, tl.cdiv(length, PAGE))):
            page = tl.load(tables + token * table_stride + index).to(tl.int64)
            place = ((page * PAGE + offset[:, None]) * KV_HEADS + kv_head) * SIZE + at[None, :]
            visible = index * PAGE + offset < length
            key = _from_page(tl.load(keys + place, mask=visible[:, None], other=0), FP8)
            value = _from_page(tl.load(values + place, mask=visible[:, None], other=0), FP8)
            scores = tl.dot(q, tl.trans(key), input_precision="tf32x3")
            scores = tl.where(visible[None, :], scores, float("-inf"))
            new_best = tl.maximum(best, tl.max(scores, axis=1))
            decay = exp(best - new_best)
            shares = exp(scores - new_best[:, None])
            total = tl.fma(total, decay, tl.sum(shares, axis=1))
            mixed = tl.dot(shares, value, mixed * decay[:, None], input_precision="tf32x3")
            best = new_best
        result = ((token * KV_HEADS + kv_head) * tl.num_programs(0) + run) * GROUP + row
        tl.store(mixed_out + result[:, None] * SIZE + at[None, :], mixed, mask=(row < GROUP)[:, None])
        tl.store(best_out + result, best, mask=row < GROUP)
        tl.store(total_out + result, total, mask=row < GROUP)


@triton.jit(do_not_specialize_on_alignment=["lengths"])
def merge_kernel(
    mixed_in,
    best_in,
    total_in,
    lengths,
    value_factor,
    out,
    runs,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    RUN_TOKENS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Program (head, sequence) -> its part of out [M, heads * SIZE] in octet order."""
    head = tl.program_id(0)
    token = tl.program_id(1)
    used = tl.cdiv(tl.load(lengths + token), RUN_TOKENS)
    at = tl.arange(0, SIZE)
    best = float("-inf")
    total = 0.0
    mixed = tl.zeros([SIZE], tl.float32)
    for start in range(0, used, AT_ONCE):
        run = start + tl.arange(0, AT_ONCE)
        there = run < used
        result = ((token * KV_HEADS + head // GROUP) * runs + run) * GROUP + head % GROUP
        bests = tl.load(best_in + result, mask=there, other=float("-inf"))
        new_best = tl.maximum(best, tl.max(bests, axis=0))
        shares = exp(bests - new_best)
        decay = exp(best - new_best)
        totals = tl.load(total_in + result, mask=there, other=0.0)
        parts = tl.load(mixed_in + result[:, None] * SIZE + at[None, :], mask=there[:, None], other=0.0)
        total = tl.fma(total, decay, tl.sum(shares * totals, axis=0))
        mixed = tl.fma(mixed, decay, tl.sum(shares[:, None] * parts, axis=0))
        best = new_best
    heads: tl.constexpr = KV_HEADS * GROUP
    place = octet_place(head * SIZE + at, heads * SIZE)
    tl.store(out + token * heads * SIZE + place, tl.div_rn(mixed, total) * value_factor)


def check(heads: int, kv_heads: int, size: int, page_tokens: int) -> None:
    """Raise ShapeError unless every product of matrices has sides that tensor cores take, and its tiles fit a card.

    The interpreter would take others; they are refused there too, so that tests say what a GPU does.
    """
    for name, side in {"heads of {} numbers": size, "pages of {} tokens": page_tokens}.items():
        if side < SMALLEST_TILE or side & (side - 1):
            raise ShapeError(f"{name.format(side)}: attention takes powers of two, {SMALLEST_TILE} or more")
    if size * page_tokens > MOST_NUMBERS:
        raise ShapeError(
            f"pages of {page_tokens} tokens with heads of {size} numbers: attention takes up to "
            f"{MOST_NUMBERS // size} tokens a page at this head size"
        )
    if kv_heads < 1 or heads % kv_heads or not 1 <= heads // kv_heads <= SMALLEST_TILE:
        raise ShapeError(
            f"{heads} heads on {kv_heads} KV heads: attention takes a whole number of heads, 1 to {SMALLEST_TILE}, "
            "for each KV head"
        )


class Workspace:
    """What `attend` hands to `merge`: for M sequences of at most `tokens` tokens."""

    def __init__(self, sequences: int, heads: int, size: int, tokens: int, page_tokens: int, device: torch.device):
        self.runs = triton.cdiv(tokens, SPLIT_PAGES * page_tokens)
        self.mixed = torch.empty(sequences, heads, self.runs, size, device=device)
        self.best = torch.empty(sequences, heads, self.runs, device=device)
        self.total = torch.empty(sequences, heads, self.runs, device=device)


def attend(
    query: Tensor,
    pages: Pages,
    tables: Tensor,
    lengths: Tensor,
    workspace: Workspace,
    out: Tensor,
    warps: int = WARPS,
    stages: int = STAGES,
) -> None:
    """Queue out = softmax(q k / sqrt(size)) v over each sequence's pages; two launches.

    query float32 [M, heads * size] in plain order, out the same in octet order; tables and lengths as for `qkv`,
    lengths at most what `workspace` was made for. `warps` and `stages` are given by measurements only. Raises
    ShapeError.
    """
    tokens = query.shape[0]
    _, page_tokens, kv_heads, size = pages.keys.shape
    heads = query.shape[1] // size
    check(heads, kv_heads, size, page_tokens)
    group = heads // kv_heads
    keys, values = pages.raw()
    unpacking = 2.0**8 if pages.fp8 else 1.0
    attend_kernel[(workspace.runs, kv_heads, tokens)](
        query,
        keys,
        values,
        tables,
        tables.stride(0),
        lengths,
        pages.key_scale * unpacking / math.sqrt(size),
        workspace.mixed,
        workspace.best,
        workspace.total,
        KV_HEADS=kv_heads,
        GROUP=group,
        ROWS=max(SMALLEST_TILE, triton.next_power_of_2(group)),
        SIZE=size,
        PAGE=page_tokens,
        SPLIT_PAGES=SPLIT_PAGES,
        FP8=pages.fp8,
        num_warps=warps,
        num_stages=stages,
        enable_fp_fusion=False,
    )
    merge_kernel[(heads, tokens)](
        workspace.mixed,
        workspace.best,
        workspace.total,
        lengths,
        pages.value_scale * unpacking,
        out,
        workspace.runs,
        KV_HEADS=kv_heads,
        GROUP=group,
        SIZE=size,
        RUN_TOKENS=SPLIT_PAGES * page_tokens,
        AT_ONCE=MERGE_RUNS,
        num_warps=MERGE_WARPS,
        enable_fp_fusion=False,
    )
