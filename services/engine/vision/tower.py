"""C-RADIOv4-H: a plain vision transformer over all patches of one picture. Owns the order of operations, no weight.

Blocks come one at a time from an iterator, wherever it has them from: a file, page-locked memory, a ring of slots on a
GPU. Between two blocks the caller gets the word, so that a picture does not hold up those who are answering.

    x = [class rows; patches W + positions]
    x = x + proj(attention(norm1(x)));  x = x + fc2(gelu(fc1(norm2(x))))     32 times
    features = final_norm(x without the class rows)
"""

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention

from kernels.linear.cpu import linear

EPS = 1e-6
_MLP_ROWS = 2048  # bounds what the MLP's hidden values take
_POSITIONS = 1024  # worked out at once


@dataclass(frozen=True)
class Block:
    """One block's weights, float32. Linears are [outputs, inputs]; qkv's rows are queries, keys, values."""

    norm1_weight: Tensor
    norm1_bias: Tensor
    qkv_weight: Tensor
    qkv_bias: Tensor
    proj_weight: Tensor
    proj_bias: Tensor
    norm2_weight: Tensor
    norm2_bias: Tensor
    fc1_weight: Tensor
    fc1_bias: Tensor
    fc2_weight: Tensor
    fc2_bias: Tensor
    layer_scale1: Tensor | None = None
    layer_scale2: Tensor | None = None


def embed(patches: Tensor, embedder: Tensor, class_tokens: Tensor, positions: Tensor) -> Tensor:
    """patches [n, 3 patch^2], positions [n, width] (`position_window`) -> [class rows + n, width]."""
    return torch.cat([class_tokens, linear(patches, embedder) + positions])


def forward(blocks: Iterable[Block], x: Tensor, heads: int) -> Generator[None, None, Tensor]:
    """x [class rows + n, width], float32, is changed in place and returned. Yields after every block."""
    for block in blocks:
        attended = _attention(block, _norm(x, block.norm1_weight, block.norm1_bias), heads)
        x += attended if block.layer_scale1 is None else attended * block.layer_scale1
        for start in range(0, len(x), _MLP_ROWS):
            rows = x[start : start + _MLP_ROWS]
            hidden = _linear(_norm(rows, block.norm2_weight, block.norm2_bias), block.fc1_weight, block.fc1_bias)
            widened = _linear(gelu(hidden), block.fc2_weight, block.fc2_bias)
            rows += widened if block.layer_scale2 is None else widened * block.layer_scale2
        yield
    return x


def position_window(table: Tensor, grid: tuple[int, int]) -> Tensor:
    """Positions of a grid's patches: table [side, side, width] -> float32 [rows * columns, width].

    As if the table were resized to a square as large as the grid's longer side (bilinear, half-pixel centres) and its
    top left corner cut out; only what is in the corner is worked out.
    """
    window = torch.empty(grid[0] * grid[1], table.shape[2])
    for begin, rows in positions(table, 0, len(table), grid):
        window[begin : begin + len(rows)] = rows
    return window


def positions(lines: Tensor, first: int, stop: int, grid: tuple[int, int]) -> Iterator[tuple[int, Tensor]]:
    """A part of the window, from a part of the table: the patches whose upper neighbours are its lines `first` to
    before `stop`. `lines` [some, side, width] begins with `first` and has the one at `stop` too, if the table does.

    Gives pieces of bounded size: the number of their first patch, and float32 [patches, width].
    """
    rows, columns = grid
    longest, side = max(grid), lines.shape[1]
    upper, lower, down = places(rows, longest, side)
    left, right, across = places(columns, longest, side)
    begin, end = lines_of(upper, first, stop)
    upper, lower, down = ((upper - first).to(lines.device), (lower - first).to(lines.device), down.to(lines.device))
    left, right, across = (each.to(lines.device) for each in (left, right, across))
    for start in range(begin * columns, end * columns, _POSITIONS):
        patches = torch.arange(start, min(start + _POSITIONS, end * columns), device=lines.device)
        row, column = patches // columns, patches % columns
        above, below, near, far, share = upper[row], lower[row], left[column], right[column], down[row, None]
        at_left = torch.lerp(lines[above, near].float(), lines[below, near].float(), share)
        at_right = torch.lerp(lines[above, far].float(), lines[below, far].float(), share)
        yield start, torch.lerp(at_left, at_right, across[column, None])


def lines_of(upper: Tensor, first: int, stop: int) -> tuple[int, int]:
    """Of a grid's rows, those whose upper neighbours (`places`) are the table's lines `first` to before `stop`."""
    begin, end = torch.searchsorted(upper, torch.tensor([first, stop]))
    return int(begin), int(end)


def places(count: int, longest: int, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """The two neighbours of each place in the table, and how far it is from the first to the second."""
    source = ((torch.arange(count, dtype=torch.float64) + 0.5) * (side / longest) - 0.5).clamp_(min=0)
    first = source.long().clamp_(max=side - 1)
    return first, (first + 1).clamp_(max=side - 1), (source - first).float()


def features(x: Tensor, prefix: int, weight: Tensor, bias: Tensor) -> Tensor:
    """The last block's output -> [patches, width], behind the final norm that the Super family has."""
    return _norm(x[prefix:], weight, bias)


def _attention(block: Block, x: Tensor, heads: int) -> Tensor:
    """Every patch attends to every patch and class row; no position enters."""
    query, key, value = (
        part.view(len(x), heads, -1).transpose(0, 1)[None]
        for part in _linear(x, block.qkv_weight, block.qkv_bias).chunk(3, dim=1)
    )
    attended = scaled_dot_product_attention(query, key, value)[0].transpose(0, 1).flatten(1)
    return _linear(attended, block.proj_weight, block.proj_bias)


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return linear(x, weight).add_(bias)


def _norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return layer_norm(x, weight.shape, weight, bias, EPS)
