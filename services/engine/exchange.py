"""Files in which a client on the same machine lends its payloads: read where they lie, instead of coming through gRPC.
Owns the folder's mark, by which a client knows that it sees the same folder, and the reading of what clients name.

They are read and not mapped: a client that cuts its file short must not end the engine.
"""

import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from services.engine.errors import PayloadError

_NAME = re.compile(r"[a-z0-9-]{1,80}")


def mark(folder: Path) -> str:
    """Makes the mark and returns its name. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"engine-{secrets.token_hex(8)}"
    (folder / name).touch(mode=0o644)
    return name


class _File:
    """Open as long as somebody has it."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


class Lent:
    """One chunk. Its bytes may change once the client was told that it was taken."""

    def __init__(self, file: _File, offset: int, size: int) -> None:
        self._file, self._offset, self._size = file, offset, size

    def __len__(self) -> int:
        return self._size

    def read(self, view: memoryview, at: int) -> None:
        """Fill the memory with its bytes from this one on. Raises PayloadError."""
        try:
            count = os.preadv(self._file.descriptor, [view], self._offset + at)
        except OSError as error:
            raise PayloadError(f"snapshot: the lent file cannot be read: {error}") from error
        if count != len(view):
            raise PayloadError(f"snapshot: the lent file ends {len(view) - count} bytes too early")


class LentFiles:
    """The file of one call: only one is read. `folder` None: there is none, and every file is refused."""

    def __init__(self, folder: Path | None, most_bytes: int) -> None:
        self._folder = folder
        self._most_bytes = most_bytes  # of a chunk
        self._name = ""
        self._file: _File | None = None

    def chunks(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> list[Lent]:
        """Raises PayloadError."""
        if self._file is None:
            if self._folder is None or not _NAME.fullmatch(name):
                raise PayloadError("snapshot: this engine has no exchange folder, or no such file can be in it")
            try:
                self._file, self._name = _File(self._folder / name), name
            except OSError as error:
                raise PayloadError(f"snapshot: the lent file cannot be opened: {error}") from error
        sound = name == self._name and len(offsets) == len(sizes) and all(0 < s <= self._most_bytes for s in sizes)
        if not sound:
            raise PayloadError("snapshot: what was said of the lent file does not fit")
        return [Lent(self._file, at, size) for at, size in zip(offsets, sizes, strict=True)]
