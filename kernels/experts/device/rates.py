"""How fast this machine's CPU and GPU can read the expert slots: alone, and both at once. The floor that expert steps
are held against, and what the first guess at a split comes from; nothing is computed.
"""

import ctypes
import time
from itertools import cycle

import torch

from kernels.experts.device.turns import SharedSlots
from kernels.workers.pool import native

MOST_BYTES = 2 << 30  # of the slots; several times any cache
PIECE_BYTES = 1 << 28


class ReadRates:
    """All rates in GB/s, of the workers that `slots`' host uses. Slots never filled count as what the system gives."""

    def __init__(self, slots: SharedSlots) -> None:
        self.host = slots.host
        found: list[tuple[int, int]] = []
        for start, size_bytes in slots.pieces:
            for at in range(0, size_bytes, PIECE_BYTES):
                found.append((start + at, min(PIECE_BYTES, size_bytes - at)))
        self.pieces = found[: MOST_BYTES // PIECE_BYTES]
        self.size_bytes = sum(size_bytes for _, size_bytes in self.pieces)
        if self.size_bytes < PIECE_BYTES:
            raise ValueError(f"rates are measured on at least {PIECE_BYTES >> 20} MiB of expert slots")
        self.there = torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cuda")
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.library = native()
        self.cpu()

    def cpu(self) -> float:
        begun = time.perf_counter()
        for start, size_bytes in self.pieces:
            self._read(start, size_bytes)
        return self.size_bytes / (time.perf_counter() - begun) / 1e9

    def copy(self) -> float:
        """By the copy engine, host to device."""
        torch.cuda.synchronize()
        begun = time.perf_counter()
        self._copy_all()
        torch.cuda.synchronize()
        return self.size_bytes / (time.perf_counter() - begun) / 1e9

    def together(self) -> tuple[float, float]:
        """CPU and GPU while both read: the CPU goes on reading until the copies are done."""
        torch.cuda.synchronize()
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        begun = time.perf_counter()
        self._copy_all()
        done.record(self.stream)
        read_bytes = 0
        for start, size_bytes in cycle(self.pieces):
            if done.query():  # type: ignore[no-untyped-call]
                break
            self._read(start, size_bytes)
            read_bytes += size_bytes
        seconds = time.perf_counter() - begun
        return read_bytes / seconds / 1e9, self.size_bytes / seconds / 1e9

    def first_share(self, top_k: int) -> float:
        """How many of a layer's `top_k` experts the GPU should take at first, from the rates of both at once: where
        they share a slow memory neither rate is what it was alone. Turns corrects it while running."""
        cpu, gpu = self.together()
        return top_k * gpu / (cpu + gpu)

    def _read(self, address: int, size_bytes: int) -> None:
        self.library.thimble_read(
            ctypes.c_void_p(self.host.workers.handle), ctypes.c_uint64(address), ctypes.c_int64(size_bytes)
        )

    def _copy_all(self) -> None:
        for start, size_bytes in self.pieces:
            _copy_to_device(self.there.data_ptr(), start, size_bytes, self.stream.cuda_stream)


def _copy_to_device(to: int, start: int, size_bytes: int, stream: int) -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    status = driver.cuMemcpyHtoDAsync_v2(
        ctypes.c_uint64(to), ctypes.c_void_p(start), ctypes.c_size_t(size_bytes), ctypes.c_void_p(stream)
    )
    if status:
        raise RuntimeError(f"cuMemcpyHtoDAsync failed with CUDA error {status}")
