"""One layer's expert blocks for a device that reads a prompt: each touched expert once, leased in its page-locked slot.

What comes in which order, and how a feed goes with steps that run meanwhile: feed.h. Owns no memory and copies nothing.

    feed.guess(layer)  # or not
    feed.begin(layer, counts, tokens)
    while (blocks := feed.take(16)) is not None:
        copy each; release those whose copies an event says are done (at the latest when take gives an empty list)
    feed.end()
"""

import ctypes
import functools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.experts.host.binding import BlockError, Host, HostError
from kernels.workers.pool import native

AHEAD = 64  # blocks leased at once: half of them read, so that many reads are in flight and some have arrived
MOST_TAKEN = 256  # feed_abi.cpp's
TIMEOUT_S = 60.0  # for the next block: a disk that recovers from an error may take half of that
_MESSAGE_BYTES = 2000


class Block(NamedTuple):
    """`address` of the block's bytes, which stay there until `number` is given to release()."""

    expert: int
    address: int
    number: int


@functools.cache
def _library() -> ctypes.CDLL:
    lib = native()
    pointer, number, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    lib.thimble_feed_begin.argtypes = (pointer, number, pointer, long, number)
    lib.thimble_feed_take.argtypes = (pointer, number, long, pointer, ctypes.c_char_p, long)
    lib.thimble_feed_give_back.argtypes = (pointer, pointer, number)
    lib.thimble_feed_end.argtypes = (pointer,)
    lib.thimble_feed_expect.argtypes = (pointer, number, pointer, number)
    return lib


class Feed:
    """The one feed of a host, used by one thread; steps may run between its calls, whatever is out.

    At most `ahead` blocks are leased at once, those on their way included, and at most half of the slots.
    """

    def __init__(self, host: Host, ahead: int = AHEAD) -> None:
        if ahead < 1:
            raise ValueError(f"ahead: {ahead}")
        self.host = host
        self.ahead = ahead
        self.open = False
        self.guessed: int | None = None  # the layer, if no begin() has said yet what it names
        self._message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        self._taken = np.zeros((MOST_TAKEN, 3), np.int64)

    def begin(self, layer: int, counts: npt.ArrayLike, tokens: int) -> None:
        """counts int32 [experts]: how many of the piece's `tokens` name each expert. Returns at once; reads begin.

        Raises HostError if the cache has a single slot, ValueError on a layer or counts that are not of this model.
        """
        assert not self.open or self.guessed == layer, "the last feed has not ended"
        array = np.ascontiguousarray(counts, np.int32)
        layers, experts = self.host.shape
        if not 0 <= layer < layers or array.shape != (experts,):
            raise ValueError(f"feed: layer {layer} and counts {array.shape} of a model {self.host.shape}")
        if _library().thimble_feed_begin(self.host.address, layer, array.ctypes.data, tokens, self.ahead):
            raise HostError("an expert cache of one slot cannot feed a GPU: give it at least two")
        self.open, self.guessed = True, None

    def guess(self, layer: int) -> None:
        """A piece will name all but few of this layer's experts: take() gives those that are in RAM. begin() of the
        same layer then says what is named; of that, nothing that a guess gave comes again.

        Raises HostError if the cache has a single slot, ValueError on a layer that is not of this model.
        """
        assert not self.open, "the last feed has not ended"
        if not 0 <= layer < self.host.shape[0]:
            raise ValueError(f"feed: layer {layer} of a model {self.host.shape}")
        if _library().thimble_feed_begin(self.host.address, layer, None, 0, self.ahead):
            raise HostError("an expert cache of one slot cannot feed a GPU: give it at least two")
        self.open, self.guessed = True, layer

    def take(self, most: int, timeout_s: float = TIMEOUT_S) -> list[Block] | None:
        """Up to `most` blocks, at least one, as soon as there is one; the GIL is released meanwhile.

        An empty list: none can come before some that are out are released. None: there are no more.
        Raises BlockError, naming the layer and the expert, if a block cannot be had; then only end() makes sense.
        """
        assert self.open, "no feed has begun"
        most, timeout_ns = min(most, MOST_TAKEN), int(timeout_s * 1e9)
        count = _library().thimble_feed_take(
            self.host.address, most, timeout_ns, self._taken.ctypes.data, self._message, _MESSAGE_BYTES
        )
        if count == -1:
            raise BlockError(self._message.value.decode())
        if count == 0:
            return None
        return [Block(*row) for row in self._taken[: max(0, count)].tolist()]

    def next(self, timeout_s: float = TIMEOUT_S) -> Block | None:
        """take() of one block, for whoever holds none when it asks."""
        blocks = self.take(1, timeout_s)
        if blocks is None:
            return None
        assert blocks, "all blocks that may be out are: release some first"
        return blocks[0]

    def release(self, *numbers: int) -> None:
        """The bytes of these blocks are needed no more: whoever copied them has seen the copies' end."""
        array = np.array(numbers, np.int64)
        done = _library().thimble_feed_give_back(self.host.address, array.ctypes.data, array.size)
        assert done, f"of the blocks {numbers} one is not out"

    def expect(self, layer: int, experts: npt.ArrayLike) -> None:
        """The sweep will need these experts of its next layer: a hint for an idle disk, in place of earlier ones.

        It takes free slots and those of blocks that a sweep has done with, never the decode set's or what this layer
        still needs. Nothing happens if the host was opened with prefetch="off".
        """
        array = np.ascontiguousarray(experts, np.int32)
        _library().thimble_feed_expect(self.host.address, layer, array.ctypes.data, array.size)

    def end(self) -> None:
        """All leases are given back: no copy may be under way. Also after an error and before the last block.

        If blocks were left, nothing is expected any more.
        """
        if self.open:
            _library().thimble_feed_end(self.host.address)
            self.open, self.guessed = False, None
