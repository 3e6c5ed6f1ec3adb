"""The products of one group of a sweep's blocks after the other, with little for the host to do for each.

A fast link carries a group in the time that a few of Triton's own launches take, so what these work out each time is
worked out once. What the kernels compute and how prefill.py launches them otherwise is the same, bit for bit.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton

from kernels.block import BlockLayout
from kernels.experts import prefill
from kernels.experts.prefill import Order
from kernels.experts.prefill_kernels import FIELDS, down_kernel, up_kernel

Tensor = torch.Tensor


class Launches:
    """Of one kernel, whose first tensors are the ring and the table of items.

    Triton compiles a kernel for the types of its arguments, its constants and which addresses 16 divides. The first
    launch of each kind goes through Triton; later ones give the compiled kernel addresses, in the order of its
    arguments. In the interpreter nothing is compiled, and every launch is a first one.
    """

    def __init__(self, kernel: Any, constants: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self._kernel, self._words = kernel, {**constants, **options}
        self._constants = [constants[name] for name in kernel.arg_names if name in constants]
        self._compiled: dict[tuple[bool, ...], Any] = {}

    def bind(self, *tensors: Tensor) -> None:
        """What the next launches read and write, of the same types always; it is kept until others are bound."""
        assert all(tensor.is_contiguous() for tensor in tensors)
        self._tensors = tensors
        self._ring, self._items, *self._rest = (tensor.data_ptr() for tensor in tensors)
        # Of the table of items alone Triton does not ask.
        self._kind = tuple(address % 16 == 0 for address in (self._ring, *self._rest))

    def queue(self, grid: tuple[int, int], first: int, items: int, stream: int) -> None:
        """On `stream`, which is the current one: `grid` programs for each of `items` items from `first` on."""
        compiled = self._compiled.get(self._kind)
        if compiled is None:
            ring, table, *rest = self._tensors
            compiled = self._kernel[(*grid, items)](ring, table[first : first + items], *rest, **self._words)
            if compiled is not None:
                self._compiled[self._kind] = compiled
            return
        at = self._items + first * FIELDS * 4
        compiled[(*grid, items)](self._ring, at, *self._rest, *self._constants, stream=stream)


class Products:
    """`up` and `down` as in prefill.py, between buffers that stay.

    ring uint8 [slots, block_bytes]; items int32 [any, FIELDS], of which a launch gets some; h float16 [rows, width];
    y float16, at least [T * top_k, latent].
    """

    def __init__(self, ring: Tensor, layout: BlockLayout, items: Tensor, top_k: int, h: Tensor, y: Tensor) -> None:
        self.ring, self.layout, self.items, self.h, self.y = ring, layout, items, h, y
        self._up = Launches(up_kernel, *prefill.up_words(layout, top_k, h, prefill.UP))
        self._down = Launches(down_kernel, *prefill.down_words(layout, h, prefill.DOWN))
        self._up_programs = triton.cdiv(layout.width, prefill.UP.outputs)
        self._down_programs = triton.cdiv(layout.latent, prefill.DOWN.outputs)

    def bind(self, order: Order, x: Tensor, up_scales: Tensor, down_scales: Tensor) -> None:
        """A layer: x float16 [T, latent], scales float32 [experts]."""
        prefill.check_up(self.ring, self.layout, x, up_scales, self.h)
        prefill.check_down(self.ring, self.layout, self.h, down_scales, self.y)
        assert len(order.rows) <= len(self.y)
        inputs = self.ring, self.items, order.starts, order.rows
        self._up.bind(*inputs, x, up_scales, self.h)
        self._down.bind(*inputs, self.h, down_scales, self.y)

    def queue(self, first: int, items: int, most_rows: int, stream: int) -> None:
        """Both products of so many items' lookups, of each at most `most_rows`, on `stream`, the current one."""
        self._up.queue((self._up_programs, triton.cdiv(most_rows, prefill.UP.rows)), first, items, stream)
        self._down.queue((self._down_programs, triton.cdiv(most_rows, prefill.DOWN.rows)), first, items, stream)
