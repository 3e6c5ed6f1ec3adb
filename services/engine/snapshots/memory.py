"""The memory that own parts of payloads are kept in: each in one piece, used again once nobody reads it any more.

In one piece, because a large copy runs at nearly twice the speed of many of a chunk's size (it goes past the caches);
used again, because fresh memory is several times slower than memory whose pages are there. Owns no content.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from services.engine.snapshots.payload import CHUNK_BYTES

Piece = npt.NDArray[np.uint8]
Fresh = Callable[[int], Piece]  # new memory of so many bytes
SLACK = 32  # a piece is larger by this fraction of what it is for: the next state of a dialog is a little larger


def fresh(size_bytes: int) -> Piece:
    """What is in it is of no meaning."""
    return np.empty(size_bytes, np.uint8)


class OwnPart(Sequence[bytes]):
    """As a sequence it is the chunks, each copied when it is asked for. Filled once, by whoever took it; from then on
    any thread may read it."""

    def __init__(self, memory: "Memory", piece: Piece, size_bytes: int) -> None:
        self._memory, self._piece = memory, piece
        self.data = piece.data[:size_bytes]

    def __len__(self) -> int:
        return -(-len(self.data) // CHUNK_BYTES)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[bytes, ...]: ...
    def __getitem__(self, index: int | slice) -> bytes | tuple[bytes, ...]:
        if isinstance(index, slice):
            return tuple(self[number] for number in range(*index.indices(len(self))))
        if not 0 <= index < len(self):
            raise IndexError(index)
        return bytes(self.data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])

    def __iter__(self) -> Iterator[bytes]:
        return (self[number] for number in range(len(self)))

    def __del__(self) -> None:
        self._memory.give_back(self._piece)


class Memory:
    """Keeps at most one piece that nobody uses, so it never takes more than was in use at a time."""

    def __init__(self, fresh: Fresh = fresh) -> None:
        self._fresh = fresh
        self._spare: deque[Piece] = deque(maxlen=1)  # given back by whichever thread was the last to read it

    def take(self, size_bytes: int) -> OwnPart:
        """Its content is whatever was there."""
        try:
            piece = self._spare.pop()
        except IndexError:
            piece = np.empty(0, np.uint8)
        if not size_bytes <= len(piece) <= 2 * size_bytes:
            del piece  # before there is another one
            piece = self._fresh(size_bytes + size_bytes // SLACK)
        return OwnPart(self, piece, size_bytes)

    def give_back(self, piece: Piece) -> None:
        self._spare.append(piece)
