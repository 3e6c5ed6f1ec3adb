"""Whether there is a GPU that can be used, and what is missing if not. It imports neither kernels nor Triton, which an
engine that computes on the CPU starts without.
"""

import os
import shutil
import sysconfig
from pathlib import Path

import torch

from services.engine.errors import DeviceError, MemoryPlanError
from services.engine.gpu import limits


def usable_device() -> torch.device:
    """The current CUDA device, in a context that sets no more aside than our kernels need. Raises DeviceError, which
    says what is missing, or MemoryPlanError if the card has no room for a context."""
    if not torch.cuda.is_available():
        built = torch.version.cuda
        reason = (
            "this PyTorch was built without CUDA: install the CUDA build of the same version"
            if built is None
            else f"no NVIDIA GPU or a driver too old for CUDA {built}: look at nvidia-smi"
        )
        raise DeviceError(f"no usable GPU: {reason}; or set THIMBLE_ENGINE_DEVICE=cpu")
    # Else the allocator rounds every tensor of the weights up to its own sizes: 1 % of the card.
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < (8, 0):
        raise DeviceError(
            f"{torch.cuda.get_device_name()} has compute capability {major}.{minor}; the kernels need 8.0 (RTX 30 "
            "series) or later; set THIMBLE_ENGINE_DEVICE=cpu"
        )
    check_build_tools()
    _make_context()
    return torch.device("cuda", torch.cuda.current_device())


def _make_context() -> None:
    """Before anybody looks at what is free: the engine plans with that."""
    try:
        torch.cuda.synchronize()  # makes it; nothing has been computed
    except torch.AcceleratorError as error:
        if "out of memory" not in str(error):
            raise DeviceError(f"the GPU does not work: {error}") from error
        raise MemoryPlanError(f"the GPU has no room for a program: {error}; close what else uses the card") from error
    limits.lower()


def check_build_tools() -> None:
    """Triton compiles launchers in C, with Python's headers. Raises DeviceError for what is missing."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        raise DeviceError("no usable GPU: its kernels need a C compiler at first use: install gcc")
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # where Triton looks, too
    header = Path(sysconfig.get_path("include", scheme), "Python.h")
    if not header.exists():
        raise DeviceError(
            f"no usable GPU: its kernels need Python's headers at first use, and {header.name} is not there: install "
            "python3-dev (for another Python than the system's, its own development package)"
        )
