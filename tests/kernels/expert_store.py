"""A file of random expert blocks on disk, as the host library and the reference see it."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash
from expert_blocks import PackedExpert, random_expert

from kernels.block import BlockLayout
from kernels.experts import reference
from kernels.experts.host.binding import Catalog

LAYOUT = BlockLayout(160, 80)


@dataclass(frozen=True)
class BlocksOnDisk:
    path: Path
    layers: int
    experts: int
    packed: tuple[PackedExpert, ...]

    @property
    def layout(self) -> BlockLayout:
        return self.packed[0].layout

    def offset(self, layer: int, expert: int) -> int:
        return (layer * self.experts + expert) * self.layout.block_bytes

    def catalog(self) -> Catalog:
        shape = (self.layers, self.experts)
        offsets = np.arange(self.layers * self.experts, dtype=np.int64) * self.layout.block_bytes
        checksums = np.array([xxhash.xxh64_intdigest(one.block.tobytes()) for one in self.packed], np.uint64)
        up = np.array([one.up_scale for one in self.packed], np.float32)
        down = np.array([one.down_scale for one in self.packed], np.float32)
        arrays = (array.reshape(shape) for array in (offsets, checksums, up, down))
        return Catalog(self.path, self.layout, *arrays)

    def expected(self, layer: int, ids: torch.Tensor, weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return reference.step(ids, weights, x, lambda id: self.packed[layer * self.experts + id].unpacked)


def write_blocks(folder: Path, layers: int, experts: int, layout: BlockLayout = LAYOUT, seed: int = 0) -> BlocksOnDisk:
    """Scales in the middle of the range, so that some but not all neurons die and no output overflows."""
    packed = tuple(random_expert(layout, seed * 100_000 + at, (0x20, 0x60)) for at in range(layers * experts))
    path = folder / "experts.bin"
    with path.open("wb") as file:
        for one in packed:
            file.write(one.block.tobytes())
    return BlocksOnDisk(path, layers, experts, packed)


def batch(blocks: BlocksOnDisk, rows: int, top_k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random ids (no id twice in a row), weights and inputs of a step."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(blocks.experts, generator=generator)[:top_k] for _ in range(rows)])
    weights = torch.rand(rows, top_k, generator=generator)
    x = torch.randn(rows, blocks.layout.latent, generator=generator)
    return ids.to(torch.int32), weights, x


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal bit for bit; NaNs are equal to each other."""
    nan = found.isnan()
    return bool((nan == expected.isnan()).all()) and torch.equal(
        torch.where(nan, -1, found.view(torch.int32)), torch.where(nan, -1, expected.view(torch.int32))
    )
