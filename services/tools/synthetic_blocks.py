"""Random expert blocks of any shape, for benchmarks: real arithmetic on them leaves a given share of neurons alive.

Owns how the zeros come about. Weights have random magnitudes and signs; a weight is negative a little more often than
positive and the inputs lean to the positive side, so that a neuron's sum is usually negative and ReLU makes it an
exact zero. Which neurons live differs from expert to expert and token to token. `clustered` lets the 16 neurons of a
group resemble each other, so that the same number of alive neurons touches fewer groups. Every figure measured on such
blocks is synthetic and must say so.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from kernels.block import GROUP, BlockLayout, Bytes
from kernels.experts.host.binding import Catalog

ALIVE = 0.075  # published for the real model: 92.5 % zeros after ReLU^2
NEGATIVE = 0.60  # of weights
LEAN = {False: 0.337, True: 0.343}  # mean of an input, in standard deviations; chosen so that ALIVE of the neurons live
RESEMBLANCE = 0.7  # of a clustered neuron's weights that are its group's
DISTINCT = 16  # blocks made at random; the others are these with their neuron groups rotated


@dataclass(frozen=True)
class SyntheticBlocks:
    """Blocks for `layers` x `experts` experts of `layout`."""

    layout: BlockLayout
    layers: int
    experts: int
    clustered: bool = False
    seed: int = 0

    def inputs(self, rows: int, seed: int) -> torch.Tensor:
        """float32 [rows, latent]: what the expert step gets."""
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(rows, self.layout.latent, generator=generator)
        return noise - noise.mean(dim=1, keepdim=True) + LEAN[self.clustered]

    def write(self, path: Path, physical: int | None = None) -> Catalog:
        """The blocks as a store's file would hold them, and where they are. With `physical`, only so many blocks, that
        stand for all experts by turns: a model's whole shape on a small disk."""
        count = physical or self.layers * self.experts
        checksums = np.zeros(count, np.uint64)
        with path.open("wb") as file:
            for number, block in enumerate(self._blocks(count)):
                checksums[number] = xxhash.xxh64_intdigest(block.data)
                file.write(block.data)
        return self._catalog(path, checksums)

    def memory(self, physical: int) -> tuple[Bytes, Catalog]:
        """So many blocks in memory, for an EmulatedDrive, and a catalog in which they stand for all experts by turns.
        An odd number, so that the same expert of two layers is not the same block."""
        held = np.empty(physical * self.layout.block_bytes, np.uint8)
        checksums = np.zeros(physical, np.uint64)
        for number, block in enumerate(self._blocks(physical)):
            held[number * len(block) :][: len(block)] = block
            checksums[number] = xxhash.xxh64_intdigest(block.data)
        return held, self._catalog(Path("memory"), checksums)

    def _catalog(self, path: Path, checksums: npt.NDArray[np.uint64]) -> Catalog:
        shape = (self.layers, self.experts)
        number = np.arange(self.layers * self.experts, dtype=np.int64).reshape(shape) % len(checksums)
        scales = np.full(shape, 1e-4, np.float32)
        return Catalog(path, self.layout, number * self.layout.block_bytes, checksums[number], scales, scales.copy())

    def _blocks(self, count: int) -> Iterator[Bytes]:
        originals = [self.original(number) for number in range(min(count, DISTINCT))]
        return (self.block(originals, number) for number in range(count))

    def block(self, originals: list[Bytes], number: int) -> Bytes:
        """The first DISTINCT blocks are made at random, the others are those with their neuron groups rotated."""
        return self.layout.rotate_neurons(
            originals[number % DISTINCT], number // DISTINCT % (self.layout.width // GROUP)
        )

    def original(self, number: int) -> Bytes:
        rng = np.random.default_rng([self.seed, number])
        latent, width = self.layout.latent, self.layout.width

        def codes(rows: int, columns: int, negative: float) -> npt.NDArray[np.uint8]:
            signs = np.where(rng.random((rows, columns), np.float32) < negative, 8, 0).astype(np.uint8)
            return np.asarray(rng.integers(0, 8, (rows, columns), np.uint8) | signs)

        up = codes(width, latent, NEGATIVE)
        if self.clustered:
            of_group = np.repeat(codes(width // GROUP, latent, NEGATIVE), GROUP, axis=0)
            alike = rng.random(up.shape, np.float32) < RESEMBLANCE
            up[alike] = of_group[alike]
        down = codes(latent, width, 0.5)
        up_scale = rng.integers(0x30, 0x40, (width, latent // GROUP), np.uint8)
        down_scale = rng.integers(0x30, 0x40, (latent, width // GROUP), np.uint8)
        return self.layout.pack(_packed(up), up_scale, _packed(down), down_scale)


def _packed(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """[rows, n] codes -> [rows, n/2], the even one in the low nibble."""
    return np.bitwise_or(codes[:, 0::2], np.left_shift(codes[:, 1::2], 4), dtype=np.uint8)
