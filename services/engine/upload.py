"""One payload on its way in: chunks in order, of bounded size and number, passed on as they come.

Says nothing about what the bytes mean; snapshots/payload.py does. Used by the server's event loop only.
"""

from collections.abc import Callable

from services.engine.request import StateRef
from services.engine.snapshots.payload import CHUNK_BYTES

MOST_CHUNKS = 4096  # of the own part: bounds what tiny chunks cost beside their bytes

Take = Callable[[bytes, str], None]  # a chunk, or the reason why there are no more


class Upload:
    """Gives `take` the chunks of the own part and then `blocks` blocks, a chunk each; or at some point a reason
    instead. What comes after that is ignored."""

    def __init__(self, ref: StateRef, blocks: int, take: Take) -> None:
        self._size_bytes = ref.size_bytes
        self._blocks = blocks
        self._take = take
        self.over = False  # whole or refused
        self._count = 0
        self._received_bytes = 0

    def add(self, index: int, data: bytes) -> None:
        if self.over:
            return
        total = self._received_bytes + len(data)
        own = self._received_bytes < self._size_bytes
        if index != self._count:
            self.refuse(f"chunk {index} came where chunk {self._count} was due")
        elif not 0 < len(data) <= CHUNK_BYTES:
            self.refuse(f"chunk {index} has {len(data)} bytes, expected 1 to {CHUNK_BYTES}")
        elif own and (total > self._size_bytes or self._count == MOST_CHUNKS):
            self.refuse(f"chunk {index} goes beyond the {self._size_bytes} bytes or {MOST_CHUNKS} chunks of this state")
        else:
            self._count += 1
            self._received_bytes = total
            self._blocks -= not own
            self.over = total >= self._size_bytes and not self._blocks
            self._take(data, "")

    def refuse(self, reason: str) -> None:
        """End it, if it has not ended."""
        if not self.over:
            self.over = True
            self._take(b"", reason)

    def end_of_stream(self) -> None:
        """The client has nothing more to send."""
        lacking = f" and lacks {self._blocks} blocks" if self._blocks else ""
        self.refuse(f"the client sent {self._received_bytes} of {self._size_bytes} bytes{lacking}")
