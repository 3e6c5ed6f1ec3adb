"""What a CUDA context sets aside for programs that are not here: less of it. Needs the driver, and a context.

A stack for each thread that a card can run at once (1 KiB each), and room for printing and allocating in kernels. Ours
use no stack, on any card (tests/kernels/test_gpu_compile.py); for a kernel that does, the driver makes room when it is
first launched. On an H200 198 MiB come back (vram.limits_mib), as the stacks of its 132 x 2048 threads would say; by
the same reckoning 34 MiB on a card of 30 multiprocessors with 1536 threads.
"""

import ctypes

STACK, PRINTED, ALLOCATED = 0, 1, 2  # CUlimit
LEAST_BYTES = {STACK: 256, PRINTED: 1 << 16, ALLOCATED: 1 << 16}


def lower(driver: ctypes.CDLL | None = None) -> bool:
    """In the current context; whether the driver did all of it."""
    cuda = driver or ctypes.CDLL("libcuda.so.1")
    statuses = [cuda.cuCtxSetLimit(ctypes.c_int(limit), ctypes.c_size_t(size)) for limit, size in LEAST_BYTES.items()]
    return not any(statuses)
