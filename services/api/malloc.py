"""glibc's malloc, told to give memory back. Owns that and nothing else; with another C library nothing is done.

By itself it moves the size from which a block is mapped on its own, and so returned when it is freed, up to the largest
that was freed: after the first snapshot, whose pieces are 1 MiB, all of them are cut out of arenas, of which there are
eight for each core, and freed pieces lie between small blocks that stay.
"""

import ctypes

# mallopt(3)
TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8
MAPPED_FROM_BYTES = 128 * 1024  # where it begins; said aloud, it stays there
ARENAS = 2


def give_back() -> None:
    """To be called before there are threads."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    for option, value in (
        (MMAP_THRESHOLD, MAPPED_FROM_BYTES),
        (TRIM_THRESHOLD, MAPPED_FROM_BYTES),
        (ARENA_MAX, ARENAS),
    ):
        mallopt(option, value)
