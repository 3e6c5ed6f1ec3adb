"""Where in a picture its things and letters are: boxes, and what they are on the patches that a tower sees.

What a tower is told of every patch is learnt far sooner than what it is told of the whole picture alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from services.tools.train_vision.scenes import COLOURS, SHAPES

CHARACTERS = "_abcdefghijklmnopqrstuvwxyz0123456789"  # _: none
SYMBOLS = (*CHARACTERS, *SHAPES)  # the first: nothing here
SIDE_BY_SIDE = 2  # letters in a patch
PER_PATCH = SIDE_BY_SIDE + 1
_NUMBER = {name: number for number, name in enumerate(SYMBOLS)}


@dataclass(frozen=True)
class Mark:
    """A box in pixels, what is in it (a shape or a letter), and its colour."""

    left: float
    top: float
    right: float
    bottom: float
    name: str
    colour: str

    def moved(self, x: float, y: float) -> "Mark":
        return replace(self, left=self.left + x, right=self.right + x, top=self.top + y, bottom=self.bottom + y)


def on_patches(marks: Sequence[Mark], size: tuple[int, int], grid: tuple[int, int]) -> npt.NDArray[np.int8]:
    """[rows, columns, PER_PATCH] of a picture of `size` (width, height): what is in each part of a patch (of SYMBOLS),
    left to right, and of which colour the patch's thing is (of COLOURS, from 1)."""
    rows, columns = grid
    symbols = np.zeros((rows, columns * SIDE_BY_SIDE), np.int8)
    colours = np.zeros((rows, columns, 1), np.int8)
    for mark in marks:
        if mark.name not in _NUMBER:  # points, spaces
            continue
        down = _covered(mark.top * rows / size[1], mark.bottom * rows / size[1], rows)
        across = _covered(
            mark.left * columns * SIDE_BY_SIDE / size[0],
            mark.right * columns * SIDE_BY_SIDE / size[0],
            columns * SIDE_BY_SIDE,
        )
        symbols[down, across] = _NUMBER[mark.name]
        colours[down, slice(across.start // SIDE_BY_SIDE, (across.stop - 1) // SIDE_BY_SIDE + 1)] = 1 + COLOURS.index(
            mark.colour
        )
    return np.concatenate((symbols.reshape(rows, columns, SIDE_BY_SIDE), colours), axis=2)


def _covered(low: float, high: float, count: int) -> slice:
    """Of so many cells of length 1: those whose middle is between, or the one where the middle between is."""
    first, stop = max(0, int(np.ceil(low - 0.5))), min(count, int(np.ceil(high - 0.5)))
    if stop <= first:
        first = min(max(0, int((low + high) / 2)), count - 1)
        stop = first + 1
    return slice(first, stop)
