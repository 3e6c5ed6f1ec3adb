"""From the tower's features to rows that take the place of token embeddings. Owns the order of operations, no weight.

The hidden layer is worked through in slices, so that a slice of the two large matrices is all that must be there.
"""

from collections.abc import Generator, Iterable

import torch
from torch import Tensor

from kernels.linear.cpu import linear
from kernels.norm.cpu import rms_norm

EPS = 1e-5


def shuffle(features: Tensor, grid: tuple[int, int]) -> Tensor:
    """[rows * columns, width] -> [rows/2 * columns/2, 4 width]: two by two patches become one row, dy slowest."""
    rows, columns = grid
    cut = features.view(rows // 2, 2, columns // 2, 2, features.shape[1])
    return cut.transpose(1, 2).reshape(rows * columns // 4, 4 * features.shape[1])


def project(
    shuffled: Tensor, norm: Tensor, slices: Iterable[tuple[Tensor, Tensor]], hidden: int
) -> Generator[None, None, Tensor]:
    """norm(x) up, relu squared, down -> float32 [tokens, hidden]. Yields after every slice.

    `slices` are rows of `up` [some, 4 width] with the same columns of `down` [hidden, some]; added up in their order.
    """
    x = rms_norm(shuffled, norm, EPS)
    total = torch.zeros(len(x), hidden)
    for up, down in slices:
        total += linear(linear(x, up).relu_().square_(), down)
        yield
    return total
