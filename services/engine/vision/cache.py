"""Embeddings of pictures, kept in RAM within a budget: the longest unused leave first, those a prompt waits for stay.

A picture is found by what it shows (a hash of its pixels) and its grid; requests name it by its handle, a hash of the
embeddings themselves. So equal handles mean equal rows, on whatever machine they were worked out. Safe to use from
several threads; rows never change.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from services.engine.errors import PictureError, PictureGoneError, QueueFullError
from services.engine.request import Picture

Key = tuple[bytes, tuple[int, int]]  # hash of the pixels, grid


@dataclass
class Entry:
    """`rows` float32 [tokens, hidden]. `pins` counts the prompts that still need them."""

    handle: bytes
    rows: Tensor = field(repr=False)
    pins: int = 0


class Held:
    """The pictures of one prompt. `release` them as soon as the prompt is read; twice is no error."""

    def __init__(self, cache: "PictureCache", entries: list[tuple[int, Entry]]) -> None:
        self._cache = cache
        self._entries = entries

    def rows(self, begin: int, end: int) -> list[Tensor]:
        """Rows of the prompt's positions from `begin` to before `end` that are pictures', in order."""
        found = []
        for position, entry in self._entries:
            first, last = max(begin, position), min(end, position + len(entry.rows))
            if first < last:
                found.append(entry.rows[first - position : last - position])
        return found

    def release(self) -> None:
        entries, self._entries = self._entries, []
        self._cache.unpin(entry for _, entry in entries)


class PictureCache:
    """`used_bytes` never exceeds `budget_bytes`."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._entries: OrderedDict[Key, Entry] = OrderedDict()
        self._by_handle: dict[bytes, Key] = {}
        self._lock = threading.Lock()

    def find(self, key: Key) -> Entry | None:
        """Counts as used."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def put(self, key: Key, rows: Tensor) -> Entry:
        """Keep new rows. Raises PictureError if they can never be kept, QueueFullError if others are needed now."""
        if rows.nbytes > self.budget_bytes:
            raise PictureError(
                f"a picture of {len(rows)} tokens takes {rows.nbytes} bytes, more than the {self.budget_bytes} that "
                "are kept of pictures: send a smaller one, or raise THIMBLE_ENGINE_PICTURE_CACHE_GB"
            )
        handle = hashlib.blake2b(rows.numpy().data, digest_size=32).digest()
        with self._lock:
            if key in self._entries:
                return self._entries[key]
            if handle in self._by_handle:  # other pixels that come to the same: one entry is enough
                return self._entries[self._by_handle[handle]]
            self._make_room(rows.nbytes)
            entry = self._entries[key] = Entry(handle, rows)
            self._by_handle[handle] = key
            self.used_bytes += rows.nbytes
            return entry

    def hold(self, pictures: Iterable[Picture]) -> Held:
        """Keep these until they are released. Raises PictureGoneError, and PictureError if a size is wrong."""
        found: list[tuple[int, Entry]] = []
        with self._lock:
            for picture in pictures:
                key = self._by_handle.get(picture.handle)
                if key is None:
                    raise PictureGoneError("a picture is not held here any more: send it again")
                entry = self._entries[key]
                if len(entry.rows) != picture.tokens:
                    raise PictureError(
                        f"a picture at position {picture.position} has {len(entry.rows)} tokens, not {picture.tokens}"
                    )
                found.append((picture.position, entry))
            for _, entry in found:
                entry.pins += 1
        return Held(self, found)

    def unpin(self, entries: Iterable[Entry]) -> None:
        with self._lock:
            for entry in entries:
                entry.pins -= 1

    def check(self) -> None:
        """Conservation: the sizes add up. Raises AssertionError with the numbers."""
        with self._lock:
            held = sum(entry.rows.nbytes for entry in self._entries.values())
            assert held == self.used_bytes <= self.budget_bytes, (held, self.used_bytes, self.budget_bytes)
            assert len(self._entries) == len(self._by_handle)

    def _make_room(self, size_bytes: int) -> None:
        pinned_bytes = sum(entry.rows.nbytes for entry in self._entries.values() if entry.pins)
        if pinned_bytes + size_bytes > self.budget_bytes:
            raise QueueFullError("the pictures of other requests take all the room there is: ask again later")
        for key, entry in list(self._entries.items()):
            if self.used_bytes + size_bytes <= self.budget_bytes:
                break
            if not entry.pins:
                del self._entries[key], self._by_handle[entry.handle]
                self.used_bytes -= entry.rows.nbytes
