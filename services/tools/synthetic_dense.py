"""Random values for every dense tensor of a model, in its own format, at the speed of a copy.

Owns how large they are: as a trained model's, so that activations stay finite through all layers. Large tensors are
cut out of a few pools at random places; a pool's length is odd, so that no two rows of a matrix are alike.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.engine.gpu.ledger import Layout
from services.engine.tensorfile import DTYPES

Bytes = npt.NDArray[np.uint8]

POOL = (1 << 24) + 43  # elements
PIECE_BYTES = 16 << 20
FP8_RMS = 64.0  # of an FP8 weight's codes
NVFP4_RMS = 2.9 * 1.2  # of an NVFP4 weight's code times its group's scale, both as drawn here
# mean and standard deviation, by the end of a plain tensor's name
PLAIN = {
    "embeddings.weight": (0.0, 1.0),
    "conv1d.weight": (0.0, 0.5),
    "conv1d.bias": (0.0, 0.1),
    "A_log": (1.0, 0.7),
    "D": (1.0, 0.2),
    "dt_bias": (-3.0, 1.0),
    "e_score_correction_bias": (0.0, 0.01),
    "norm.weight": (1.0, 0.1),
    "norm_f.weight": (1.0, 0.1),
}


class RandomDense:
    """Values for the tensors of one layout, from one seed. `pool` is the length of a pool, in elements."""

    def __init__(self, layout: Layout, seed: int, pool: int = POOL) -> None:
        self._layout = layout
        self._generator = torch.Generator().manual_seed(seed)
        self._places = np.random.default_rng([seed, 1])
        self._pool = pool
        self._pools: dict[tuple[str, float, float], Bytes] = {}

    def pieces(self, name: str) -> Iterator[Bytes]:
        """A tensor's bytes in order, some at a time."""
        dtype, shape = self._layout[name]
        element = DTYPES[dtype].itemsize
        count = int(np.prod(shape, dtype=np.int64))
        if not shape:
            yield _bytes(torch.tensor(self._scale(name)))
            return
        mean, std = self._distribution(name, dtype, shape)
        if count <= self._pool:
            yield _bytes(self._draw(count, dtype, mean, std))
            return
        key = dtype, mean, std
        if key not in self._pools:
            self._pools[key] = _bytes(self._draw(self._pool, dtype, mean, std))
        yield from _run(self._pools[key], int(self._places.integers(self._pool)) * element, count * element)

    def _distribution(self, name: str, dtype: str, shape: tuple[int, ...]) -> tuple[float, float]:
        if dtype == "U8" or name.endswith("weight_scale"):
            return 0.0, 0.0  # uniform codes
        if dtype == "F8_E4M3":
            return 0.0, FP8_RMS
        for end, found in PLAIN.items():
            if name.endswith(end):
                return found
        return 0.0, float(shape[-1]) ** -0.5  # a linear in a float format, and the gate

    def _scale(self, name: str) -> float:
        """Of a whole tensor: its weights' standard deviation is that of a linear that keeps an input's size."""
        dtype, shape = self._layout[name.rpartition(".")[0] + ".weight"]
        columns = shape[-1] * (2 if dtype == "U8" else 1)
        return float(columns**-0.5 / (NVFP4_RMS if dtype == "U8" else FP8_RMS))

    def _draw(self, count: int, dtype: str, mean: float, std: float) -> Tensor:
        if dtype == "U8":
            return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=self._generator)
        if not std:  # E4M3 codes from 0.5 to 1.9
            return torch.randint(0x30, 0x40, (count,), dtype=torch.uint8, generator=self._generator)
        values = torch.randn(count, generator=self._generator).mul_(std).add_(mean)
        return (values.clamp_(-448, 448) if dtype == "F8_E4M3" else values).to(DTYPES[dtype])


def _run(pool: Bytes, start: int, count: int) -> Iterator[Bytes]:
    """`count` bytes of a pool that goes round."""
    while count:
        size = min(count, len(pool) - start, PIECE_BYTES)
        yield pool[start : start + size]
        start, count = (start + size) % len(pool), count - size


def _bytes(tensor: Tensor) -> Bytes:
    return np.asarray(tensor.reshape(-1).view(torch.uint8).numpy())
