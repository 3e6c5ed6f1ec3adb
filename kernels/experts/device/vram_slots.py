"""Expert blocks in a card's own memory: those that decode names most often, on cards with room for some.

Owns that memory and the copies into it; which blocks, and who uses them, is vram_slots.cpp's and turns.cpp's. A block
that is there is computed there and needs neither RAM nor PCIe, as far as the step has items for such; a prompt's sweep
takes its blocks from RAM as ever. The bits are the same. Filled while tokens run, a few blocks between two of them.
"""

import ctypes
import functools

import numpy as np
import numpy.typing as npt
import torch

from kernels.experts.host.binding import Host
from kernels.workers.pool import native

FILLED_AT_ONCE = 16  # blocks between two tokens while there is room: 2 ms at 28 GB/s
CHANGED_AT_ONCE = 4  # later, for hotter ones
CHANGED_EVERY = 4  # tokens


@functools.cache
def _library() -> ctypes.CDLL:
    lib = native()
    pointer = ctypes.c_void_p
    lib.thimble_vram_open.restype = pointer
    lib.thimble_vram_open.argtypes = (pointer, ctypes.c_uint64, ctypes.c_int)
    lib.thimble_vram_close.argtypes = lib.thimble_vram_end.argtypes = (pointer,)
    lib.thimble_vram_begin.argtypes = (pointer, ctypes.c_int, pointer, pointer)
    lib.thimble_vram_held.argtypes = (pointer, pointer)
    return lib


class VramSlots:
    """`slots` blocks on `device`, beside `host`'s slots, which must be page-locked if that is a GPU. Used by the thread
    that serves turns, between two graphs; `held` by any. `close` after the turns that use it."""

    def __init__(self, host: Host, slots: int, device: torch.device) -> None:
        block_bytes = host.catalog.layout.block_bytes
        self.memory = torch.zeros(slots, block_bytes, dtype=torch.uint8, device=device)
        start, size_bytes = host.memory()
        there = (ctypes.c_uint8 * size_bytes).from_address(start)  # the host library's, which outlives this
        self._ram, self._start = torch.frombuffer(there, dtype=torch.uint8).view(-1, block_bytes), start
        self._places = np.zeros(FILLED_AT_ONCE, np.int32)
        self._from = np.zeros(FILLED_AT_ONCE, np.uint64)
        self._improved = 0
        self._held = np.empty(0, np.int32)
        self.slots, self.copied = slots, 0  # blocks, since the start
        self.handle = ctypes.c_void_p(_library().thimble_vram_open(host.address, self.memory.data_ptr(), slots))

    def improve(self) -> None:
        """After a token: bring hotter blocks, if there are any in RAM."""
        self._improved += 1
        full = len(self._held) == self.slots
        if full and self._improved % CHANGED_EVERY:
            return
        most = min(self.slots, CHANGED_AT_ONCE if full else FILLED_AT_ONCE)
        count = _library().thimble_vram_begin(self.handle, most, self._places.ctypes.data, self._from.ctypes.data)
        for place, address in zip(self._places[:count].tolist(), self._from[:count].tolist(), strict=True):
            self.memory[place].copy_(self._ram[(address - self._start) // self.memory.shape[1]], non_blocking=True)
        if count and self.memory.is_cuda:
            torch.cuda.current_stream().synchronize()
        _library().thimble_vram_end(self.handle)
        self.copied += count
        keys = np.empty(self.slots, np.int32)
        self._held = keys[: _library().thimble_vram_held(self.handle, keys.ctypes.data)]

    @property
    def copied_bytes(self) -> int:
        return self.copied * self.memory.shape[1]

    def held(self) -> npt.NDArray[np.int32]:
        """The blocks that are there as layer * experts + expert, the coldest first."""
        return self._held

    def close(self) -> None:
        _library().thimble_vram_close(self.handle)
