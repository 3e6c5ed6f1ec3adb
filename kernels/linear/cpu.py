"""A linear layer in C++: bit for bit kernels/linear/reference.py, for any rows, threads and instruction set."""

import ctypes
import functools
import logging

import torch
from torch import Tensor

from kernels.build import BuildError
from kernels.linear import reference
from kernels.workers.pool import Workers, default_workers, isa_number, native

log = logging.getLogger(__name__)


@functools.cache
def _function() -> "ctypes._NamedFuncPointer | None":
    try:
        function = native().thimble_linear
    except BuildError as error:
        log.warning("linear layers run through torch, the same bits but slower: %s", error)
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = (pointer, ctypes.c_int, pointer, pointer, pointer, size, size, size)
    return function


def linear(x: Tensor, weight: Tensor, workers: Workers | None = None, isa: str | None = None) -> Tensor:
    """float32 x [M, K], weight [N, K] -> float32 [M, N].

    `workers`: the process's shared pool if None; `isa`: an instruction set by name, the best here if None. Without a
    library it is the reference. Raises ValueError on other shapes or dtypes.
    """
    reference.check(x, weight)
    function = _function()
    if function is None:
        return reference.linear(x, weight)
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32)
    pool = workers or default_workers()
    pointers = x.data_ptr(), weight.data_ptr(), out.data_ptr()
    if not function(pool.handle, isa_number(isa), *pointers, *x.shape, weight.shape[0]):
        raise ValueError(f"this build of the library has no linear layer for {isa}")
    return out
