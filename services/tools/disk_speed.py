"""How fast a disk copies: a plain sequential read and write of files that are there. Owns the page cache's part in it.

What was read before must come from the disk again, else memory would be measured.
"""

import os
import time
from collections.abc import Iterable
from pathlib import Path

_PIECE_BYTES = 8 << 20
_MOST_BYTES = 8 << 30  # enough to know the speed; a whole checkpoint would need as much free space again


def forget(paths: Iterable[Path]) -> None:
    """Ask the kernel to drop these files from its cache."""
    for path in paths:
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copy_rate(sources: list[Path], target: Path) -> float:
    """Bytes a second of copying `sources` into `target`, one after the other, up to its being on the disk.

    Stops after 8 GiB. `target` is removed. Raises OSError.
    """
    forget(sources)
    begun, size = time.monotonic(), 0
    try:
        with target.open("wb") as output:
            for source in sources:
                with source.open("rb", buffering=0) as file:
                    while size < _MOST_BYTES and (piece := file.read(_PIECE_BYTES)):
                        output.write(piece)
                        size += len(piece)
            output.flush()
            os.fdatasync(output.fileno())
        return size / (time.monotonic() - begun)
    finally:
        target.unlink(missing_ok=True)
