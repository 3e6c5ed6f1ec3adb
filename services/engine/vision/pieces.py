"""The vision weights as a line of pieces that a card gets one after the other. Owns which tensors travel together.

    positions.i     lines of the position table; the first piece also has embedder and class rows
    attention.i     the first half of block i, then
    mlp.i           its second half
    up.i            rows of the projector's first matrix; the first piece also has both norms before it
    down.i          rows of its second: whole rows, so that every piece is one run of bytes of the file

No piece is larger than the larger half of a block, but for a row that is.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from services.engine.gpu.room import aligned
from services.engine.tensorfile import DTYPES, Entry
from services.engine.vision.weights import VisionWeights

_TILE = 64  # rows; a result that begins at an odd column is slow to write
_ATTENTION = ("norm1", "qkv", "proj")
_MLP = ("norm2", "fc1", "fc2")


@dataclass(frozen=True)
class Part:
    """A run of a tensor's rows. `offset` counts from the start of the file, `place` from that of the piece."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int
    place: int

    def view(self, memory: Tensor) -> Tensor:
        """This part of a piece that lies in `memory`, uint8."""
        return memory[self.place : self.place + self.size_bytes].view(DTYPES[self.dtype]).view(self.shape)


@dataclass
class Piece:
    """`first` and `stop`: which of the rows of the whole it stands for, where it is one of several."""

    name: str
    first: int = 0
    stop: int = 0
    parts: list[Part] = field(default_factory=list)
    size_bytes: int = 0

    def add(self, name: str, entry: Entry, rows: tuple[int, int] | None = None) -> None:
        first, stop = rows or (0, entry.shape[0])
        row_bytes = entry.size_bytes // entry.shape[0]
        offset, size_bytes = entry.offset + first * row_bytes, (stop - first) * row_bytes
        shape = (stop - first, *entry.shape[1:])
        self.parts.append(Part(name, entry.dtype, shape, offset, size_bytes, self.size_bytes))
        self.size_bytes += aligned(size_bytes)


@dataclass(frozen=True)
class Pieces:
    """All of a file, in the order of the work."""

    path: Path
    positions: tuple[Piece, ...]
    blocks: tuple[tuple[Piece, Piece], ...]
    up: tuple[Piece, ...]
    down: tuple[Piece, ...]

    @property
    def order(self) -> list[Piece]:
        return [*self.positions, *(half for block in self.blocks for half in block), *self.up, *self.down]

    @property
    def most_bytes(self) -> int:
        return max(piece.size_bytes for piece in self.order)

    @property
    def size_bytes(self) -> int:
        return sum(piece.size_bytes for piece in self.order)

    @staticmethod
    def of(weights: VisionWeights) -> "Pieces":
        entries, config = weights.entries, weights.config
        blocks = tuple(
            (_half(entries, index, "attention", _ATTENTION, 1), _half(entries, index, "mlp", _MLP, 2))
            for index in range(config.blocks)
        )
        most_bytes = max(half.size_bytes for block in blocks for half in block)
        table = entries["position"]
        lines = Entry(table.path, table.name, table.dtype, (config.table, config.table, config.width), *_place(table))
        positions: list[Piece] = []
        line_bytes = lines.size_bytes // config.table
        for first, stop in _cut(config.table, max(1, most_bytes // line_bytes - 1)):
            piece = Piece(f"positions.{len(positions)}", first, stop)
            piece.add("lines", lines, (first, min(stop + 1, config.table)))  # the one below is the other neighbour
            positions.append(piece)
        for name in ("embedder", "class_tokens"):
            positions[0].add(name, entries[name])
        up, down = (_rows(entries[f"projector.{name}"], name, most_bytes) for name in ("up", "down"))
        for name in ("final_norm.weight", "final_norm.bias", "projector.norm"):
            up[0].add(name, entries[name])
        return Pieces(table.path, tuple(positions), blocks, up, down)


def _half(entries: dict[str, Entry], block: int, half: str, names: tuple[str, ...], number: int) -> Piece:
    piece = Piece(f"{half}.{block}")
    for name in names:
        for kind in ("weight", "bias"):
            piece.add(f"{name}.{kind}", entries[f"blocks.{block}.{name}.{kind}"])
    if scale := entries.get(f"blocks.{block}.layer_scale{number}"):
        piece.add("layer_scale", scale)
    return piece


def _rows(entry: Entry, name: str, most_bytes: int) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    row_bytes = entry.size_bytes // entry.shape[0]
    for first, stop in _cut(entry.shape[0], max(1, most_bytes // row_bytes)):
        piece = Piece(f"{name}.{len(pieces)}", first, stop)
        piece.add(name, entry, (first, stop))
        pieces.append(piece)
    return tuple(pieces)


def _cut(count: int, most: int) -> list[tuple[int, int]]:
    """As few runs as there can be, of the same length but for the last one, and whole tiles where they may be."""
    step = math.ceil(count / math.ceil(count / most))
    step = min(most, math.ceil(step / _TILE) * _TILE)
    return [(first, min(first + step, count)) for first in range(0, count, step)]


def _place(entry: Entry) -> tuple[int, int]:
    return entry.offset, entry.size_bytes
