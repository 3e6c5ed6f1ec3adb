"""Tower and projector on a card that has no room for their weights. Owns the arithmetic there and its working memory.

The same operations as tower.py and projector.py, for the pieces that ring.py brings: matrix products in BF16 with sums
in float32, the residual stream and all norms in float32. All values per patch lie in one piece of memory, taken at
construction; what is worked out from many patches goes by runs of rows, so that the peak is known beforehand:

    tower       residual [n, width] float32 | keys and values [n, 2 width] | one run: normed, hidden or queries, result
    projector   hidden [tokens, projector]                                 | shuffled rows, then the result
"""

import math
from collections.abc import Generator, Iterator
from contextlib import closing, nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import layer_norm, rms_norm, scaled_dot_product_attention

from services.engine.errors import DeviceError, MemoryPlanError
from services.engine.vision import projector, tower
from services.engine.vision.config import VisionConfig
from services.engine.vision.embedding import embed, run, without_gradients
from services.engine.vision.looks import Work
from services.engine.vision.pieces import ALIGNED_BYTES, Pieces
from services.engine.vision.ring import SLOTS, Ring
from services.engine.vision.weights import VisionWeights

RUN_ROWS = 2048
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
        dtype: torch.dtype = torch.bfloat16,
        resident: bool = False,
        slots: int = SLOTS,
    ) -> None:
        """Takes all memory there will be, and runs once for what libraries take. Raises MemoryPlanError."""
        self.weights, self.device, self.dtype = weights, device, dtype
        self.pieces = Pieces.of(weights)
        try:
            self.memory = torch.zeros(working_bytes(weights.config, dtype), dtype=torch.uint8, device=device)
            self.ring = Ring(self.pieces, device, resident=resident, slots=slots)
            if device.type == "cuda":
                torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # sums stay float32
                self._warm()
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
        config, dtype = self.weights.config, self.dtype
        rows = config.prefix + len(patches)
        x, place = self._at(0, (rows, config.width), torch.float32)
        kv, place = self._at(place, (rows, 2 * config.width), dtype)
        room, _ = self._at(place, (_run_elements(config, rows),), dtype)
        with closing(self.ring.pieces()) as pieces:
            self._begin(pieces, x, room, patches, grid)
            yield
            for _ in range(config.blocks):
                self._attention(next(pieces), x, kv, room)
                self._mlp(next(pieces), x, room)
                yield
            found = yield from self._project(pieces, x, grid)
        return found

    def _begin(
        self, pieces: Iterator[Tensors], x: Tensor, room: Tensor, patches: Tensor, grid: tuple[int, int]
    ) -> None:
        """x = [class rows; patches W + positions]."""
        prefix = self.weights.config.prefix
        for piece in self.pieces.positions:
            found = next(pieces)
            if "embedder" in found:
                x[:prefix] = found["class_tokens"]
                weight = found["embedder"].to(self.dtype)
                for first, stop in _runs(len(patches)):
                    some = patches[first:stop].to(self.device, self.dtype)
                    out = _part(room, len(some), x.shape[1])
                    x[prefix + first : prefix + stop] = torch.mm(some, weight.T, out=out)
            for first, window in tower.positions(found["lines"], piece.first, piece.stop, grid):
                x[prefix + first : prefix + first + len(window)] += window

    def _attention(self, piece: Tensors, x: Tensor, kv: Tensor, room: Tensor) -> None:
        """x += proj(attention(norm1(x))): keys and values of all rows first, then run after run."""
        width, heads = x.shape[1], self.weights.config.heads
        linear = {name: piece[name].to(self.dtype) for name in piece if name[:4] in ("qkv.", "proj")}
        query, key_value = ((linear["qkv.weight"][rows], linear["qkv.bias"][rows]) for rows in _thirds(width))
        for first, stop in _runs(len(x)):
            _linear(self._normed(piece, "norm1", x[first:stop], room), *key_value, out=kv[first:stop])
        keys, values = (part.view(1, len(x), heads, -1).transpose(1, 2) for part in torch.split(kv, width, 1))
        for first, stop in _runs(len(x)):
            normed = self._normed(piece, "norm1", x[first:stop], room)
            rest = room[normed.numel() :]
            queries = _linear(normed, *query, out=_part(rest, *normed.shape))
            queries = queries.view(1, len(normed), heads, -1).transpose(1, 2)
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if x.is_cuda else nullcontext():
                attended = scaled_dot_product_attention(queries, keys, values)
            attended = attended[0].transpose(0, 1).reshape(normed.shape)
            out = _linear(attended, linear["proj.weight"], linear["proj.bias"], out=normed)
            _add(x[first:stop], out, piece)

    def _mlp(self, piece: Tensors, x: Tensor, room: Tensor) -> None:
        """x += fc2(gelu(fc1(norm2(x))))."""
        fc1, fc2 = ((piece[f"{name}.weight"].to(self.dtype), piece[f"{name}.bias"].to(self.dtype)) for name in _FC)
        for first, stop in _runs(len(x)):
            normed = self._normed(piece, "norm2", x[first:stop], room)
            hidden = _linear(normed, *fc1, out=_part(room[normed.numel() :], len(normed), len(fc1[0])))
            _add(x[first:stop], _linear(torch.ops.aten.gelu_(hidden), *fc2, out=normed), piece)

    def _normed(self, piece: Tensors, name: str, x: Tensor, room: Tensor) -> Tensor:
        """At the start of `room`."""
        weight, bias = (piece[f"{name}.{kind}"].float() for kind in ("weight", "bias"))
        return _part(room, *x.shape).copy_(layer_norm(x, weight.shape, weight, bias, tower.EPS))

    def _project(self, pieces: Iterator[Tensors], x: Tensor, grid: tuple[int, int]) -> Work:
        """The final norm, then norm(x) up, relu squared, down, a few rows of the two matrices at a time."""
        config, tokens = self.weights.config, grid[0] * grid[1] // 4
        hidden, place = self._at(0, (tokens, config.projector), self.dtype)  # over x, once that is shuffled
        place = max(place, _aligned(x.nbytes))
        shuffled, _ = self._at(place, (tokens, 4 * config.width), self.dtype)
        out, _ = self._at(place, (tokens, config.hidden), self.dtype)  # over the shuffled rows
        for number, piece in enumerate((*self.pieces.up, *self.pieces.down)):
            found = next(pieces)
            if "projector.norm" in found:
                self._shuffle(found, x[config.prefix :], shuffled, grid)
            if "up" in found:
                some = hidden[:, piece.first : piece.stop]
                torch.mm(shuffled, found["up"].to(self.dtype).T, out=some)
                some.relu_().square_()
            else:
                torch.mm(hidden, found["down"].to(self.dtype).T, out=out[:, piece.first : piece.stop])
            if number % _PIECES_AT_ONCE:
                yield
        return out.cpu().float()

    def _shuffle(self, piece: Tensors, x: Tensor, out: Tensor, grid: tuple[int, int]) -> None:
        """Some pairs of the grid's rows at a time: their features, two by two in one row, normed -> `out`."""
        columns = grid[1]
        weight, bias, norm = (piece[name].float() for name in ("final_norm.weight", "final_norm.bias", _NORM))
        lines = max(1, RUN_ROWS // (2 * columns)) * 2
        for first in range(0, grid[0], lines):
            count = min(lines, grid[0] - first)
            rows = x[first * columns : (first + count) * columns]
            rows = projector.shuffle(layer_norm(rows, weight.shape, weight, bias, tower.EPS), (count, columns))
            begin = first * columns // 4
            out[begin : begin + len(rows)] = rms_norm(rows, norm.shape, norm, projector.EPS)

    def _at(self, place: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, int]:
        """A tensor in the memory, and the next place behind it."""
        end = place + math.prod(shape) * dtype.itemsize
        return self.memory[place:end].view(dtype).view(shape), _aligned(end)

    def _warm(self) -> None:
        """The largest picture once: libraries load what they need, and the allocator keeps what passes."""
        config = self.weights.config
        rows = max(2, math.isqrt(config.most_patches) // 2 * 2)
        grid = rows, max(2, config.most_patches // rows // 2 * 2)
        run(self.embed(torch.zeros(grid[0] * grid[1], 3 * config.patch**2), grid))


_FC = ("fc1", "fc2")
_NORM = "projector.norm"


def working_bytes(config: VisionConfig, dtype: torch.dtype = torch.bfloat16) -> int:
    """Of `DeviceTower.memory`, for the largest picture."""
    rows, tokens, width = config.most_patches + config.prefix, config.most_patches // 4, config.width
    x = _aligned(4 * rows * width)
    in_tower = x + _aligned(2 * rows * width * dtype.itemsize) + _run_elements(config, rows) * dtype.itemsize
    hidden = _aligned(tokens * config.projector * dtype.itemsize)
    return max(in_tower, max(hidden, x) + tokens * max(4 * width, config.hidden) * dtype.itemsize)


def card_bytes(weights: VisionWeights) -> int:
    """What pictures take of a card, but for what only libraries know of: ring, working memory, and what passes."""
    pieces, config = Pieces.of(weights), weights.config
    passing = 3 * 4 * RUN_ROWS * config.width  # of the allocator: three float32 values a row of a run
    other = {part.dtype for piece in pieces.order for part in piece.parts if len(part.shape) > 1} - {"BF16"}
    passing += pieces.most_bytes if other else 0  # such weights are rounded there
    return SLOTS * pieces.most_bytes + working_bytes(config) + passing


def _run_elements(config: VisionConfig, rows: int) -> int:
    """Of one run: its normed rows, which give way to the result, beside the MLP's hidden values or the queries."""
    return min(RUN_ROWS, rows) * (config.width + max(config.width, config.inner))


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNED_BYTES) * ALIGNED_BYTES


def _runs(rows: int) -> Generator[tuple[int, int], None, None]:
    for first in range(0, rows, RUN_ROWS):
        yield first, min(first + RUN_ROWS, rows)


def _thirds(width: int) -> tuple[slice, slice]:
    """Of the rows of qkv: queries; keys and values."""
    return slice(0, width), slice(width, 3 * width)


def _part(memory: Tensor, rows: int, columns: int) -> Tensor:
    return memory[: rows * columns].view(rows, columns)


def _linear(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor) -> Tensor:
    return torch.addmm(bias, x, weight.T, out=out)


def _add(x: Tensor, out: Tensor, piece: Tensors) -> None:
    if "layer_scale" in piece:
        out.mul_(piece["layer_scale"])
    x.add_(out)
