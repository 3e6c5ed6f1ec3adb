"""An emulated drive whose bytes are in a GPU's memory: its copy engine writes the slots, as a drive's controller would,
so that the drive costs no core anything. For benchmarks. The drive's model is the host library's (emulated_drive.h).
"""

import ctypes
import functools

import torch

from kernels.experts.host.drives import EmulatedDrive, EmulatedModel
from kernels.workers.pool import native


def current_context() -> int:
    """The CUDA context that torch uses in this thread."""
    torch.cuda.synchronize()
    context = ctypes.c_void_p()
    ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context))
    return context.value or 0


@functools.cache
def _library() -> ctypes.CDLL:
    lib = native()
    lib.thimble_drive_on_device.restype = ctypes.c_void_p
    numbers = (ctypes.c_int64, ctypes.c_double, ctypes.c_double, ctypes.c_int64, ctypes.c_int)
    lib.thimble_drive_on_device.argtypes = (
        *(ctypes.c_uint64, ctypes.c_void_p, *numbers),
        *(ctypes.c_char_p, ctypes.c_int64),
    )
    return lib


class DeviceDrive(EmulatedDrive):
    """`memory` (uint8 [bytes], on a GPU, one block after another) as a drive; the rest as EmulatedDrive has it.

    Raises DriveError if there is no driver.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        *,
        gb_s: float,
        lane_gb_s: float | None = None,
        latency_us: float = 100.0,
        depth: int = 64,
    ) -> None:
        if memory.dim() != 1 or memory.dtype != torch.uint8 or not memory.is_contiguous() or not memory.is_cuda:
            raise ValueError(f"drive on a GPU: {memory.dtype} {tuple(memory.shape)} on {memory.device}")
        model = EmulatedModel(len(memory), gb_s, lane_gb_s, latency_us, depth)
        self._open(memory, _library().thimble_drive_on_device, (memory.data_ptr(), current_context()), model)
