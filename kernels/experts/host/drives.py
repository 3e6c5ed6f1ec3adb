"""Drives for the host library: files on disks, and memory that behaves like a disk of a given speed (for benchmarks).

Also how many reads they want in flight, measured. What a drive is: drive.h; the emulation's model: emulated_drive.h.
"""

import ctypes
import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kernels.workers.pool import native

DEPTHS = (1, 2, 4, 8, 16)  # reads in flight that are tried
ENOUGH = 0.95  # of the best rate: more reads in flight than that needs only cost threads and make each block come later
LIMIT_NS = 120_000_000  # of a try
_MESSAGE_BYTES = 2000


class DriveError(RuntimeError):
    """A drive cannot be opened. The message says why."""


@functools.cache
def _library() -> ctypes.CDLL:
    lib = native()
    lib.thimble_drive_file.restype = lib.thimble_drive_emulated.restype = ctypes.c_void_p
    lib.thimble_drive_file.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64)
    numbers = (ctypes.c_int64, ctypes.c_double, ctypes.c_double, ctypes.c_int64, ctypes.c_int)
    lib.thimble_drive_emulated.argtypes = (ctypes.c_void_p, *numbers)
    lib.thimble_drive_emulated_counts.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    lib.thimble_drive_close.argtypes = (ctypes.c_void_p,)
    return lib


class FileDrive:
    """A file of blocks, read with O_DIRECT where its filesystem has it. Raises DriveError if it cannot be opened."""

    def __init__(self, path: Path) -> None:
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        self.handle: int | None = _library().thimble_drive_file(str(path).encode(), message, _MESSAGE_BYTES)
        if not self.handle:
            raise DriveError(message.value.decode())
        weakref.finalize(self, _library().thimble_drive_close, self.handle)


@dataclass(frozen=True)
class EmulatedCounts:
    """`busy_s`: some read was being served. `late_s`: by how much memory was slower than the drive, in sum."""

    reads: int
    read_bytes: int
    busy_s: float
    late_s: float


class EmulatedDrive:
    """`memory` (uint8, one block after another) as a drive of `gb_s`, whose single reads get at most `lane_gb_s`; the
    reading thread copies, on a core of its own.

    For benchmarks and tests. The defaults are a consumer NVMe drive's: two large random reads in flight saturate it,
    the first byte of one takes 100 us. Many hosts may share one, also several drives the same memory.
    """

    def __init__(
        self,
        memory: npt.NDArray[np.uint8],
        *,
        gb_s: float,
        lane_gb_s: float | None = None,
        latency_us: float = 100.0,
        depth: int = 64,
    ) -> None:
        if memory.ndim != 1 or not memory.flags.c_contiguous:
            raise ValueError(f"emulated drive: memory of shape {memory.shape}, expected bytes in a row")
        if gb_s <= 0 or depth < 1 or latency_us < 0:
            raise ValueError(f"emulated drive: {gb_s} GB/s, {depth} reads at once, {latency_us} us")
        self._memory = memory  # read by the library as long as this lives
        lane_gb_s = 0.6 * gb_s if lane_gb_s is None else lane_gb_s
        self.handle: int | None = _library().thimble_drive_emulated(
            memory.ctypes.data, len(memory), gb_s * 1e9, lane_gb_s * 1e9, int(latency_us * 1000), depth
        )
        weakref.finalize(self, _library().thimble_drive_close, self.handle)

    def counts(self) -> EmulatedCounts:
        values = np.zeros(4, np.int64)
        _library().thimble_drive_emulated_counts(self.handle, values.ctypes.data)
        reads, read_bytes, busy_ns, late_ns = values.tolist()
        return EmulatedCounts(reads, read_bytes, busy_ns * 1e-9, late_ns * 1e-9)


Drive = FileDrive | EmulatedDrive


def choose_depth(rate: Callable[[int], float], depths: Sequence[int] = DEPTHS) -> tuple[int, dict[int, float]]:
    """The fewest reads in flight whose `rate` is nearly the best of all tried, and the rates.

    Stops trying when twice as many reads have gained nothing two times in a row.
    """
    rates: dict[int, float] = {}
    for depth in depths:
        rates[depth] = rate(depth)
        if len(rates) > 2 and max(rates.values()) in list(rates.values())[:-2]:
            break
    best = max(rates.values())
    return next(depth for depth, found in rates.items() if found >= ENOUGH * best), rates
