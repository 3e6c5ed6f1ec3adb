"""Calls into the native library for the small kernels. Owns how tensors become pointers; owns no operation.

A kernel's cpu.py asks for its function at each call. Without a compiler there is none, and the caller uses its
reference: the same bits, only slower (the linear layer has said so by then).
"""

import ctypes
import functools

import torch
from torch import Tensor

from kernels.build import BuildError
from kernels.workers.pool import native

POINTER, SIZE, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


@functools.cache
def bind(name: str, *arguments: type) -> "ctypes._NamedFuncPointer | None":
    """The library's function, which returns nothing; None without a library. Builds the library if it must."""
    try:
        function: ctypes._NamedFuncPointer = native()[name]
    except BuildError:
        return None
    function.argtypes = arguments
    function.restype = None
    return function


def rows_of(tensor: Tensor) -> Tensor:
    """float32 whose rows (all dimensions but the first) are contiguous; they may lie further apart than that."""
    assert tensor.dtype == torch.float32
    inner = 1
    for dim in range(tensor.dim() - 1, 0, -1):
        if tensor.stride(dim) != inner and tensor.shape[dim] != 1:
            return tensor.contiguous()
        inner *= tensor.shape[dim]
    return tensor


def whole(tensor: Tensor) -> int:
    """The address of a contiguous float32 tensor: a weight or a state, which must be passed as it lies."""
    assert tensor.dtype == torch.float32
    assert tensor.is_contiguous()
    return tensor.data_ptr()
