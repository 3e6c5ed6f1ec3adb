"""One instruction set's integer sums, called directly: for tests and measurements. The engine goes through the host."""

import ctypes
import functools

import numpy as np
import numpy.typing as npt

from kernels.block import BlockLayout
from kernels.workers.pool import isa_number, native

Int64 = npt.NDArray[np.int64]
MOST_TOKENS = 4


def sizes(layout: BlockLayout) -> Int64:
    """What C++ is told of a block: latent, width, four offsets, bytes."""
    offsets = (layout.up_values, layout.up_scales, layout.down_values, layout.down_scales)
    return np.array([layout.latent, layout.width, *offsets, layout.block_bytes], np.int64)


@functools.cache
def _functions() -> "tuple[ctypes._NamedFuncPointer, ctypes._NamedFuncPointer]":
    up, down = native().thimble_up_sums, native().thimble_down_sums
    number, pointer = ctypes.c_int, ctypes.c_void_p
    up.argtypes = (number, pointer, pointer, pointer, number, number, number, pointer)
    down.argtypes = (number, pointer, pointer, pointer, number, pointer, number, number, number, pointer)
    return up, down


def up_sums(
    isa: str, layout: BlockLayout, block: npt.NDArray[np.uint8], values: npt.NDArray[np.int16], begin: int, end: int
) -> Int64:
    """S of neurons begin <= n < end for values int16 [tokens <= 4, latent] -> int64 [tokens, end - begin]."""
    assert block.shape == (layout.block_bytes,)
    assert block.flags.c_contiguous
    values = np.ascontiguousarray(values, np.int16)
    tokens, of_block = len(values), sizes(layout)
    out = np.full((tokens, end - begin), -(1 << 62), np.int64)
    pointers = (of_block.ctypes.data, block.ctypes.data, values.ctypes.data)
    assert _functions()[0](isa_number(isa), *pointers, tokens, begin, end, out.ctypes.data)
    return out


def down_sums(
    isa: str,
    layout: BlockLayout,
    block: npt.NDArray[np.uint8],
    rows: npt.NDArray[np.int32],
    values: npt.NDArray[np.int16],
    begin: int,
    end: int,
) -> Int64:
    """T of outputs begin <= j < end, multiples of 32, for alive rows [count] and their values int16 [tokens, count]."""
    assert block.shape == (layout.block_bytes,)
    assert block.flags.c_contiguous
    rows, values = np.ascontiguousarray(rows, np.int32), np.ascontiguousarray(values, np.int16)
    tokens, of_block = len(values), sizes(layout)
    out = np.full((tokens, end - begin), -(1 << 62), np.int64)
    pointers = (of_block.ctypes.data, block.ctypes.data, rows.ctypes.data, len(rows), values.ctypes.data)
    assert _functions()[1](isa_number(isa), *pointers, tokens, begin, end, out.ctypes.data)
    return out
