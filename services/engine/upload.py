"""One payload on its way in: chunks in order, of bounded size and number. Owns their memory until it is complete.

Says nothing about what the bytes mean; snapshots/payload.py does. Used by the server's event loop only.
"""

from collections.abc import Callable

from services.engine.request import StateRef
from services.engine.snapshots.payload import CHUNK_BYTES

MOST_CHUNKS = 4096  # bounds what tiny chunks cost beside their bytes

Done = Callable[[tuple[bytes, ...], str], None]


class Upload:
    """Calls `done` once: with the whole payload, or without it and the reason. What comes after that is ignored."""

    def __init__(self, ref: StateRef, done: Done) -> None:
        self._size_bytes = ref.size_bytes
        self._done: Done | None = done
        self._chunks: list[bytes] = []
        self._received_bytes = 0

    def add(self, index: int, data: bytes) -> None:
        expected = len(self._chunks)
        total = self._received_bytes + len(data)
        if self._done is None:
            return
        if index != expected:
            self.refuse(f"chunk {index} came where chunk {expected} was due")
        elif not 0 < len(data) <= CHUNK_BYTES:
            self.refuse(f"chunk {index} has {len(data)} bytes, expected 1 to {CHUNK_BYTES}")
        elif total > self._size_bytes or expected == MOST_CHUNKS:
            self.refuse(f"chunk {index} goes beyond the {self._size_bytes} bytes or {MOST_CHUNKS} chunks of this state")
        else:
            self._chunks.append(data)
            self._received_bytes = total
            if total == self._size_bytes:
                self._end(tuple(self._chunks), "")

    def refuse(self, reason: str) -> None:
        """End it without a payload, if it has not ended."""
        self._end((), reason)

    def end_of_stream(self) -> None:
        """The client has nothing more to send."""
        self.refuse(f"the client sent {self._received_bytes} of {self._size_bytes} bytes")

    def _end(self, chunks: tuple[bytes, ...], refusal: str) -> None:
        done, self._done, self._chunks = self._done, None, []
        if done is not None:
            done(chunks, refusal)
