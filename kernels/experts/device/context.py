"""The CUDA context that the native code is to work in: torch's own."""

import ctypes

import torch


def current_context() -> int:
    """The CUDA context that torch uses in this thread."""
    torch.cuda.synchronize()
    context = ctypes.c_void_p()
    ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context))
    return context.value or 0
