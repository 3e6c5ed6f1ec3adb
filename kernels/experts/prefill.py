"""The routed experts of a sweep on a GPU (or in Triton's interpreter): sorting, tables, launches.

Owns the order of lookups by expert, the tables that tell a launch its experts, and the fixed tiles. The kernels are
prefill_kernels.py, the definition is prefill_reference.py. The caller owns the ring and what orders copies into it, x,
h and y.

For each group of at most MOST_ITEMS experts whose blocks have arrived: `up`, then `down`; after the last group
`combine`. A *lookup* is a token's choice of an expert, numbered token * top_k + rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.block import BlockLayout
from kernels.experts.prefill_kernels import FIELDS, combine_kernel, down_kernel, up_kernel

Tensor = torch.Tensor

MOST_ITEMS = 16  # of a launch


@dataclass(frozen=True)
class Tiles:
    """A program's part of a product, `rows` lookups by `outputs`; `step`: how many of the inputs it adds at a time."""

    rows: int
    outputs: int
    step: int
    warps: int = 4
    stages: int = 3


# For every number of rows. A program of one row takes as long as one of 64: little beside a block's way over PCIe.
UP = Tiles(64, 128, 64)
DOWN = Tiles(64, 64, 64)
COMBINE_TILE = 512
COMBINE_WARPS = 2
FINGERPRINT = "triton-f16 " + " ".join(
    f"{name}{tiles.rows}x{tiles.outputs}x{tiles.step}x{tiles.warps}" for name, tiles in (("up", UP), ("down", DOWN))
)


@dataclass(frozen=True)
class Order:
    """rows int32 [T * top_k]: lookups sorted by expert, within an expert ascending; starts int32 [experts + 1]: where
    each expert's begin."""

    rows: Tensor
    starts: Tensor
    top_k: int


@dataclass(frozen=True)
class Item:
    """Lookups `first` to `first + most` of an expert, or up to its last one, in one launch.

    `slot` of the ring holds its block; `h_row` is the row of h for the first of them.
    """

    expert: int
    slot: int
    h_row: int
    first: int = 0
    most: int = 2**31 - 1


class Items:
    """Tables of items on a device, filled by the host without waiting: at most `tables` of them in use at a time."""

    def __init__(self, tables: int, device: torch.device) -> None:
        shape = (tables, MOST_ITEMS, FIELDS)
        self._there = torch.zeros(shape, dtype=torch.int32, device=device)
        self._here = torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._copied: list[torch.cuda.Event | None] = [None] * tables
        self._turn = 0

    def put(self, items: list[Item]) -> Tensor:
        """int32 [items, 5] on the device, whose copy is queued on the current stream; overwritten `tables` puts later,
        by then in the order of that put's stream. Waits for the copy of `tables` puts ago, since it reads host memory.
        """
        assert 1 <= len(items) <= MOST_ITEMS
        turn, self._turn = self._turn, (self._turn + 1) % len(self._copied)
        copied = self._copied[turn]
        if copied is not None:
            copied.synchronize()
        here, there = self._here[turn, : len(items)], self._there[turn, : len(items)]
        here.copy_(torch.tensor([[i.expert, i.slot, i.h_row, i.first, i.most] for i in items], dtype=torch.int32))
        there.copy_(here, non_blocking=True)
        if there.is_cuda:
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
            self._copied[turn] = copied
        return there


def order(ids: Tensor, experts: int) -> Order:
    """The lookups of ids int32 [T, top_k], each below `experts`, sorted. Queued on the current stream; allocates."""
    sorted_ids, rows = torch.sort(ids.flatten(), stable=True)
    boundaries = torch.arange(experts + 1, dtype=ids.dtype, device=ids.device)
    starts = torch.searchsorted(sorted_ids, boundaries, out_int32=True)
    return Order(rows.to(torch.int32), starts, ids.shape[1])


def up(
    ring: Tensor,
    layout: BlockLayout,
    items: Tensor,
    most_rows: int,
    order: Order,
    x: Tensor,
    scale_2: Tensor,
    h: Tensor,
    tiles: Tiles = UP,
) -> None:
    """Queue h = relu(x_row W_up^T scale_2)^2 for the items' lookups; no other row of h is written.

    ring uint8 [slots, block_bytes]; items int32 [n, 5] of `Items.put`; most_rows: at least the lookups of every item;
    x float16 [T, latent]; scale_2 float32 [experts], of `up`; h float16 [rows, width], 2^-6 of what it stands for.
    `tiles` are for measurements.
    """
    check_up(ring, layout, x, scale_2, h)
    _check_items(items)
    if most_rows:
        constants, options = up_words(layout, order.top_k, x, tiles)
        up_kernel[(triton.cdiv(layout.width, tiles.outputs), triton.cdiv(most_rows, tiles.rows), len(items))](
            ring,
            items,
            order.starts,
            order.rows,
            x,
            scale_2,
            h,
            **constants,
            **options,
        )


def down(
    ring: Tensor,
    layout: BlockLayout,
    items: Tensor,
    most_rows: int,
    order: Order,
    h: Tensor,
    scale_2: Tensor,
    y: Tensor,
    tiles: Tiles = DOWN,
) -> None:
    """Queue y[lookup] = h_row W_down^T scale_2 for the items' lookups, from the h that `up` made of the same items.

    scale_2 float32 [experts], of `down`; y float16 [T * top_k, latent], 2^-6 of what it stands for; no other row of it
    is written.
    """
    check_down(ring, layout, h, scale_2, y)
    _check_items(items)
    assert len(y) == len(order.rows)
    if most_rows:
        constants, options = down_words(layout, h, tiles)
        down_kernel[(triton.cdiv(layout.latent, tiles.outputs), triton.cdiv(most_rows, tiles.rows), len(items))](
            ring,
            items,
            order.starts,
            order.rows,
            h,
            scale_2,
            y,
            **constants,
            **options,
        )


def combine(y: Tensor, weights: Tensor, out: Tensor) -> None:
    """Queue out[t] = 64 * sum over r, in ascending order, of weights[t, r] * y[t * top_k + r]: float32, every product
    and every sum rounded. y float16 [T * top_k, latent], weights float32 [T, top_k], out float16, bfloat16 or float32
    [T, latent].
    """
    tokens, top_k = weights.shape
    latent = y.shape[1]
    assert y.is_contiguous()
    assert weights.is_contiguous()
    assert out.is_contiguous()
    assert y.shape[0] == tokens * top_k
    assert out.shape == (tokens, latent)
    if tokens:
        combine_kernel[(triton.cdiv(latent, COMBINE_TILE), tokens)](
            y,
            weights,
            out,
            LATENT=latent,
            TOP_K=top_k,
            TILE=COMBINE_TILE,
            num_warps=COMBINE_WARPS,
            enable_fp_fusion=False,  # a product and a sum that became one would round once
        )


def up_words(layout: BlockLayout, top_k: int, inputs: Tensor, tiles: Tiles) -> tuple[dict[str, Any], dict[str, Any]]:
    """up_kernel's constants, and the options that it is compiled with."""
    constants = {
        "BLOCK_BYTES": layout.block_bytes,
        "UP_SCALES": layout.up_scales,
        "LATENT": layout.latent,
        "WIDTH": layout.width,
        "TOP_K": top_k,
        "ROWS": tiles.rows,
        "NEURONS": tiles.outputs,
        "INPUTS": tiles.step,
        "OPERAND": _operand(inputs),
    }
    return constants, _options(tiles)


def down_words(layout: BlockLayout, inputs: Tensor, tiles: Tiles) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same of down_kernel."""
    constants = {
        "BLOCK_BYTES": layout.block_bytes,
        "DOWN_VALUES": layout.down_values,
        "DOWN_SCALES": layout.down_scales,
        "LATENT": layout.latent,
        "WIDTH": layout.width,
        "ROWS": tiles.rows,
        "OUTPUTS": tiles.outputs,
        "NEURONS": tiles.step,
        "OPERAND": _operand(inputs),
    }
    return constants, _options(tiles)


def check_up(ring: Tensor, layout: BlockLayout, x: Tensor, scale_2: Tensor, h: Tensor) -> None:
    _check(ring, layout, x, scale_2, h)
    assert x.shape[1] == layout.latent
    assert h.shape[1] == layout.width


def check_down(ring: Tensor, layout: BlockLayout, h: Tensor, scale_2: Tensor, y: Tensor) -> None:
    _check(ring, layout, h, scale_2, y)
    assert h.shape[1] == layout.width
    assert y.shape[1] == layout.latent


def _check(ring: Tensor, layout: BlockLayout, inputs: Tensor, scale_2: Tensor, outputs: Tensor) -> None:
    assert ring.dtype == torch.uint8
    assert ring.shape[1] == layout.block_bytes
    assert inputs.dtype == outputs.dtype == torch.float16
    assert scale_2.dtype == torch.float32
    assert all(tensor.is_contiguous() for tensor in (ring, inputs, scale_2, outputs))


def _check_items(items: Tensor) -> None:
    assert 1 <= len(items) <= MOST_ITEMS
    assert items.is_contiguous()


def _operand(inputs: Tensor) -> tl.dtype:
    """The interpreter sums products of halves as halves; the same values in float32 have the same products."""
    return tl.float16 if inputs.is_cuda else tl.float32


def _options(tiles: Tiles) -> dict[str, Any]:
    return {"num_warps": tiles.warps, "num_stages": tiles.stages, "enable_fp_fusion": False}
