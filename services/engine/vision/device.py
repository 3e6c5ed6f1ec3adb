"""Tower and projector on a card that has no room for their weights. Owns the order of work there and its memory.

The same operations as tower.py and projector.py, for the pieces that ring.py brings: matrix products in BF16 with sums
in float32, the residual stream and all norms in float32. The kernels are the project's own, whose bits for a row do
not depend on how many rows there are. Ring and values lie in one piece of memory, which others may use between two
pictures; what is worked out from many rows goes by runs of as many as it holds:

    attention   residual [n, width] float32 | queries [n, width] | keys and values [n, 2 width] | a run's normed rows
    MLP         residual                    | a run's normed rows | its hidden values
    projector   hidden [tokens, projector]  | shuffled rows, then the result
"""

import math
from collections.abc import Generator, Iterator
from contextlib import closing

import torch
from torch import Tensor
from torch.nn.functional import pad

import kernels.attention.vision as attention
import kernels.linear.sweep as dense
import kernels.norm.vision as norm
from kernels.linear.gpu import Linear
from services.engine.errors import DeviceError, MemoryPlanError
from services.engine.gpu.room import Room, aligned
from services.engine.vision import projector, tower
from services.engine.vision.config import VisionConfig
from services.engine.vision.embedding import embed, run, without_gradients
from services.engine.vision.looks import Work
from services.engine.vision.pieces import Pieces
from services.engine.vision.ring import SLOTS, Ring
from services.engine.vision.weights import VisionWeights

RUN_ROWS = 2048  # for which there is room beside the largest picture
_TILE_ROWS = 128  # of a matrix product
_COLUMNS = 8  # of whose multiples matrix products take any number
_PIECES_AT_ONCE = 2  # of the projector, as of a block

Tensors = dict[str, Tensor]


class DeviceTower:
    """For pictures of at most `config.most_patches`; a longer one, of extreme aspect, is read by the processor.

    Used by the thread that owns the device, for one picture at a time.
    """

    def __init__(
        self,
        weights: VisionWeights,
        device: torch.device,
        *,
        resident: bool = False,
        slots: int = SLOTS,
        memory: Tensor | None = None,
    ) -> None:
        """Takes all memory there will be, but for `memory` (uint8, at least `card_bytes`) if that is given, and runs
        once, so that all kernels are there. Raises MemoryPlanError."""
        self.weights, self.device = weights, device
        self.pieces = Pieces.of(weights)
        try:
            if memory is None:
                memory = torch.zeros(card_bytes(weights, slots), dtype=torch.uint8, device=device)
            room = Room(memory)
            self.ring = Ring(
                self.pieces, room.take(slots, self.pieces.most_bytes, dtype=torch.uint8), resident=resident
            )
            self._rounding = room.take(_rounding_bytes(self.pieces), dtype=torch.uint8)
            self.memory = room.rest()
            if device.type == "cuda":
                run(self.embed(torch.zeros(4, 3 * weights.config.patch**2), (2, 2)))
        except BaseException as error:
            if hasattr(self, "ring"):
                self.close()
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise MemoryPlanError(f"the GPU's memory ran out while a picture was tried: {error}") from error
            raise

    def embed(self, patches: Tensor, grid: tuple[int, int]) -> Work:
        """As embedding.embed, a block between two yields. The rows are on the host, float32."""
        if len(patches) > self.weights.config.most_patches:
            return embed(self.weights, patches, grid)
        return without_gradients(self._guarded(patches, grid))

    def close(self) -> None:
        """After the last picture."""
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        finally:
            self.ring.close()

    def _guarded(self, patches: Tensor, grid: tuple[int, int]) -> Work:
        try:
            return (yield from self._embed(patches, grid))
        except torch.AcceleratorError as error:
            raise DeviceError(f"the GPU has failed: {error}") from error

    def _embed(self, patches: Tensor, grid: tuple[int, int]) -> Work:
        config = self.weights.config
        room = Room(self.memory)
        x = room.take(config.prefix + len(patches), config.width, dtype=torch.float32)
        rest = room.rest()
        with closing(self.ring.pieces()) as pieces:
            self._begin(pieces, x, rest, patches, grid)
            yield
            for _ in range(config.blocks):
                self._attention(next(pieces), x, rest)
                self._mlp(next(pieces), x, rest)
                yield
            found = yield from self._project(pieces, x, grid)
        return found

    def _begin(
        self, pieces: Iterator[Tensors], x: Tensor, rest: Tensor, patches: Tensor, grid: tuple[int, int]
    ) -> None:
        """x = [class rows; patches W + positions]."""
        prefix = self.weights.config.prefix
        down, across = (tower.places(count, max(grid), self.weights.config.table) for count in grid)
        places = norm.Places(grid, down, across, self.device)
        for piece in self.pieces.positions:
            found = next(pieces)
            if "embedder" in found:
                x[:prefix] = found["class_tokens"]
                weight = self._rounded(found["embedder"], Room(self._rounding))
                spare = -patches.shape[1] % _COLUMNS  # of towers with tiny patches
                cut = Room(rest).take(len(patches), patches.shape[1] + spare).copy_(_wider(patches, spare))
                dense.linear(cut, Linear.pack("BF16", _wider(weight, spare)), x[prefix:])
            begin, end = (row * grid[1] for row in tower.lines_of(down[0], piece.first, piece.stop))
            norm.add_positions(x[prefix:], found["lines"], places, (begin, end), piece.first)

    def _attention(self, piece: Tensors, x: Tensor, rest: Tensor) -> None:
        """x += proj(attention(norm1(x))): what is attended to of all rows first, then each row's queries give way to
        what it finds."""
        (rows, width), room = x.shape, Room(rest)
        queries, kv = room.take(rows, width), room.take(rows, 2 * width)
        normed, rounding = room.rest().view(torch.bfloat16), Room(self._rounding)
        weight, bias = self._rounded(piece["qkv.weight"], rounding), piece["qkv.bias"]
        query, key_value = (Linear.pack("BF16", weight[part]) for part in (slice(0, width), slice(width, 3 * width)))
        for first, stop in _runs(rows, len(normed) // width):
            some = _part(normed, stop - first, width)
            norm.layer_norm(x[first:stop], piece["norm1.weight"], piece["norm1.bias"], tower.EPS, some)
            dense.linear(some, query, queries[first:stop], bias=bias[:width])
            dense.linear(some, key_value, kv[first:stop], bias=bias[width:])
        attention.attend(queries, kv, self.weights.config.heads, queries)
        self._add(piece, "proj", queries, x, rounding, kv)

    def _mlp(self, piece: Tensors, x: Tensor, rest: Tensor) -> None:
        """x += fc2(gelu(fc1(norm2(x))))."""
        (rows, width), inner = x.shape, self.weights.config.inner
        rounding = Room(self._rounding)
        widen = self._linear(piece["fc1.weight"], rounding)
        memory, after = rest.view(torch.bfloat16), rounding.rest()
        for first, stop in _runs(rows, len(memory) // (width + inner)):
            normed = _part(memory, stop - first, width)
            hidden = _part(memory[normed.numel() :], stop - first, inner)
            norm.layer_norm(x[first:stop], piece["norm2.weight"], piece["norm2.bias"], tower.EPS, normed)
            dense.linear(normed, widen, hidden, "gelu", bias=piece["fc1.bias"])
            self._add(piece, "fc2", hidden, x[first:stop], Room(after), normed)

    def _add(self, piece: Tensors, name: str, of: Tensor, x: Tensor, rounding: Room, spare: Tensor) -> None:
        """x += the linear of these rows, by way of `spare` where it has a scale of its own."""
        linear, bias = self._linear(piece[f"{name}.weight"], rounding), piece[f"{name}.bias"]
        if "layer_scale" not in piece:
            dense.linear(of, linear, x, "add", bias=bias)
            return
        out = _part(spare.view(-1), *x.shape)
        dense.linear(of, linear, out, bias=bias)
        x.add_(out.mul_(piece["layer_scale"]))

    def _project(self, pieces: Iterator[Tensors], x: Tensor, grid: tuple[int, int]) -> Work:
        """The final norm, then norm(x) up, relu squared, down, a few rows of the two matrices at a time."""
        config, tokens = self.weights.config, grid[0] * grid[1] // 4
        hidden = Room(self.memory).take(tokens, config.projector)  # over x, once that is shuffled
        behind = self.memory[aligned(max(hidden.nbytes, x.nbytes)) :]
        shuffled = Room(behind).take(tokens, 4 * config.width)
        out = Room(behind).take(tokens, config.hidden)  # over the shuffled rows
        for number, piece in enumerate((*self.pieces.up, *self.pieces.down)):
            found, rounding = next(pieces), Room(self._rounding)
            if _NORM in found:
                final = (found["final_norm.weight"], found["final_norm.bias"], tower.EPS)
                norm.shuffled_norm(x[config.prefix :], grid, *final, found[_NORM], projector.EPS, shuffled)
            if "up" in found:
                dense.linear(
                    shuffled, self._linear(found["up"], rounding), hidden[:, piece.first : piece.stop], "relu2"
                )
            else:
                dense.linear(hidden, self._linear(found["down"], rounding), out[:, piece.first : piece.stop])
            if number % _PIECES_AT_ONCE:
                yield
        return out.cpu().float()

    def _linear(self, weight: Tensor, rounding: Room) -> Linear:
        return Linear.pack("BF16", self._rounded(weight, rounding))

    def _rounded(self, weight: Tensor, rounding: Room) -> Tensor:
        """A weight as matrix products take it; one of another type, which is rare, is rounded into its own memory."""
        return weight if weight.dtype == torch.bfloat16 else rounding.take(*weight.shape).copy_(weight)


_NORM = "projector.norm"


def readable(config: VisionConfig) -> bool:
    """Whether the kernels take a tower of these sizes; trained ones have larger ones."""
    odd = any(size % _COLUMNS for size in (config.width, config.inner, config.projector))
    return not odd and config.width // config.heads >= attention.LEAST_SIZE


def working_bytes(config: VisionConfig) -> int:
    """Of `DeviceTower.memory`, for the largest picture."""
    rows, tokens, width = config.most_patches + config.prefix, config.most_patches // 4, config.width
    x, queries, kv = aligned(4 * rows * width), aligned(2 * rows * width), aligned(4 * rows * width)
    run_rows = min(RUN_ROWS, aligned(rows))
    behind = max(
        queries + kv + 2 * run_rows * width,
        2 * run_rows * (width + config.inner),
        2 * config.most_patches * (3 * config.patch**2 + _COLUMNS),
    )
    projecting = max(aligned(2 * tokens * config.projector), x) + 2 * tokens * max(4 * width, config.hidden)
    return aligned(max(x + behind, projecting))


def card_bytes(weights: VisionWeights, slots: int = SLOTS) -> int:
    """What pictures take of a card beside kernels: ring, and working memory."""
    pieces = Pieces.of(weights)
    return aligned(slots * pieces.most_bytes) + aligned(_rounding_bytes(pieces)) + working_bytes(weights.config)


def _rounding_bytes(pieces: Pieces) -> int:
    """For a piece's matrices, where they are not in BF16 on file."""
    matrices = {part.dtype for piece in pieces.order for part in piece.parts if len(part.shape) == 2}
    return pieces.most_bytes if matrices - {"BF16"} else 0


def _runs(rows: int, most: int) -> Generator[tuple[int, int], None, None]:
    """Of at most so many rows, as few as there can be and of about the same length, in whole tiles if possible."""
    assert most
    step = math.ceil(rows / math.ceil(rows / most))
    step = min(most, math.ceil(step / _TILE_ROWS) * _TILE_ROWS)
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


def _wider(rows: Tensor, spare: int) -> Tensor:
    return pad(rows, (0, spare)) if spare else rows


def _part(memory: Tensor, rows: int, columns: int) -> Tensor:
    return memory[: rows * columns].view(rows, columns)
