"""How large a picture is to the model: its grid of patches, and how several pictures share what a prompt may hold.

The family's rule of dynamic resolution, as transformers 5.24 and vLLM 0.33 have it. Knows sizes only, no pixels.
"""

import math
from collections.abc import Sequence

MERGED = 2  # patches a side that become one token
_ROUNDS = 10


def patch_grid(width: int, height: int, patch: int, least: int, most: int) -> tuple[int, int]:
    """Rows and columns of patches of a picture of `width` x `height` pixels, both even.

    `least` and `most` patches are wanted in all; only a picture of extreme aspect has more than `most`.
    """
    rows, columns = (round(side / patch + 0.5) for side in (height, width))  # a tie goes to the even number
    shrink = min(1.0, math.sqrt(most / (rows * columns)))
    rows, columns = (max(1, math.floor(shrink * side)) for side in (rows, columns))
    if most > least > rows * columns:
        grow = math.sqrt(least / (rows * columns))
        rows, columns = math.ceil(grow * rows), math.ceil(grow * columns)
    rows = _even(rows, columns, most)
    return rows, _even(columns, rows, most)


def _even(side: int, other: int, most: int) -> int:
    if side % MERGED == 0:
        return side
    return side + 1 if (side + 1) * other <= most else max(MERGED, side - 1)


def tokens(grid: tuple[int, int]) -> int:
    """What a picture of this grid takes of a prompt, without the two tags around it."""
    return grid[0] * grid[1] // MERGED**2


def share(
    sizes: Sequence[tuple[int, int]], patch: int, least: int, most: Sequence[int], room_tokens: int
) -> list[tuple[int, int]]:
    """Grids of several pictures (width, height) that shall fit into `room_tokens` together.

    Each may have at most its own `most` patches. While all together have too many, each gets its share of what there
    is; none gets less than `least`, so in the end they may not fit: that is for the caller to refuse.
    """
    room = max(room_tokens * MERGED**2, least * len(sizes))
    limits = [max(least, min(own, room)) for own in most]
    for _ in range(_ROUNDS):
        grids = [patch_grid(*size, patch, least, limit) for size, limit in zip(sizes, limits, strict=True)]
        counts = [rows * columns for rows, columns in grids]
        if sum(counts) <= room:
            break
        wanted = [max(least, int(count * room / sum(counts))) for count in counts]
        limits = wanted if any(new < old for new, old in zip(wanted, limits, strict=True)) else [least] * len(sizes)
    return grids
