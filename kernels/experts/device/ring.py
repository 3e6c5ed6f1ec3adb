"""A feed's blocks on their way to a GPU: one call for each group of blocks, made and ordered by ring.h, which says how.

Owns the tables that tell a launch its lookups; the ring's places are the caller's. On a CPU the same by plain copies.

    feed.guess(layer); ring.ahead()     # if it is all but sure that the layer's experts will be named
    feed.begin(layer, counts, tokens)
    while group := ring.next(counts, stream):
        queue `up` and `down` of each of group.passes
        ring.used(stream)
    ring.drain()
    feed.end()
"""

import ctypes
import functools
import weakref
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kernels.experts.device.context import current_context
from kernels.experts.host.binding import BlockError, Host
from kernels.experts.host.feed import TIMEOUT_S
from kernels.experts.prefill_kernels import FIELDS
from kernels.workers.pool import native

_MESSAGE_BYTES = 2000


class RingError(torch.AcceleratorError):  # which also says that nothing works there any more
    """The GPU has failed, or there is none. The message says what was being done."""


class Pass(NamedTuple):
    """Lookups that are computed together: `items` of the tables from `first` on; `most_rows` of one of them."""

    first: int
    items: int
    most_rows: int


class Group(NamedTuple):
    """So many named blocks, how many of a group were copied only now, and the passes in which their lookups are
    computed, one after the other."""

    blocks: int
    copied: int
    passes: list[Pass]


@functools.cache
def _library() -> ctypes.CDLL:
    lib = native()
    pointer, number, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    message = (ctypes.c_char_p, long)
    lib.thimble_ring_open.restype = pointer
    lib.thimble_ring_open.argtypes = (pointer, number, pointer, pointer, number, number, long, *message)
    lib.thimble_ring_close.argtypes = (pointer,)
    lib.thimble_ring_next.argtypes = (pointer, pointer, long, pointer, pointer, *message)
    lib.thimble_ring_ahead.argtypes = (pointer, *message)
    lib.thimble_ring_used.argtypes = (pointer, pointer, *message)
    lib.thimble_ring_drain.argtypes = (pointer,)
    return lib


class Ring:
    """`places` uint8 [groups * group, block_bytes], on the GPU that reads them or on a CPU; for a GPU `host` has its
    slots page-locked. `most_rows` lookups are computed at once: as many as a piece has tokens, at least. One thread's.

    `tables` int32 [items, FIELDS], where the places are: items of all groups, filled by `next`.
    """

    def __init__(self, host: Host, places: torch.Tensor, groups: int, most_rows: int) -> None:
        group = len(places) // groups
        assert places.shape == (groups * group, host.catalog.layout.block_bytes)
        on_gpu = places.is_cuda
        shape = (groups * 2 * group, FIELDS)  # a group of blocks has at most so many items: fill_table
        self._here = torch.zeros(shape, dtype=torch.int32, pin_memory=on_gpu)
        self.tables = torch.zeros(shape, dtype=torch.int32, device=places.device)
        self._words = np.zeros(2 + 3 * 2 * group, np.int64)
        self._message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        self._places = places  # as long as this
        memory = np.array([places.data_ptr(), self._here.data_ptr(), self.tables.data_ptr()], np.uint64)
        context = current_context() if on_gpu else None
        handle = _library().thimble_ring_open(
            host.address, on_gpu, context, memory.ctypes.data, groups, group, most_rows, *self._text()
        )
        if not handle:
            raise RingError(self._message.value.decode())
        self._handle = ctypes.c_void_p(handle)
        weakref.finalize(self, _library().thimble_ring_close, handle)  # nothing of the host is used then

    def ahead(self) -> int:
        """Begins to copy what the open feed, a guess, has, as far as there is room -> blocks. May raise RingError."""
        copied = int(_library().thimble_ring_ahead(self._handle, *self._text()))
        if copied < 0:
            raise RingError(self._message.value.decode())
        return copied

    def next(self, counts: npt.NDArray[np.int32], stream: int, timeout_s: float = TIMEOUT_S) -> Group | None:
        """The next blocks of the open feed, whose copies `stream` then waits for. None: there are no more.

        counts int32 [experts]: lookups of each, as in Feed.begin. Raises BlockError if a block cannot be had, RingError
        if the GPU fails; then only drain() and the feed's end() make sense.
        """
        count = _library().thimble_ring_next(
            self._handle, counts.ctypes.data, int(timeout_s * 1e9), stream, self._words.ctypes.data, *self._text()
        )
        if count == 0:
            return None
        if count < 0:
            error = BlockError if count == -1 else RingError
            raise error(self._message.value.decode())
        copied, passes, *words = self._words.tolist()
        return Group(count, copied, [Pass(*words[at : at + 3]) for at in range(0, 3 * passes, 3)])

    def used(self, stream: int) -> None:
        """All that reads the blocks of the last `next` is queued on `stream`. Raises RingError if the GPU fails."""
        if _library().thimble_ring_used(self._handle, stream, *self._text()):
            raise RingError(self._message.value.decode())

    def drain(self) -> None:
        """Waits until no copy is under way, and gives all blocks back, those copied ahead too."""
        _library().thimble_ring_drain(self._handle)

    def _text(self) -> tuple[Any, int]:
        return self._message, _MESSAGE_BYTES
