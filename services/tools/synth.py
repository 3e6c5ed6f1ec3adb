"""`thimble synth FOLDER`: a store of a model's exact shape with random weights, where there is no checkpoint.

For measurements of speed and memory at the real shape, in minutes and within a small disk: dense weights in their own
formats; random expert blocks, fewer in the file than experts in the model (`--physical`), so that several experts are
the same block there while each has its own slot in RAM. Everything about such a store is called synthetic: its
manifest, the name it is served under, every figure.

The manifest is written last and at once: a folder without it is not a store, and is made anew.
"""

import argparse
import fcntl
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kernels.block import PAGE
from services.engine.errors import DiskError
from services.engine.experts import store as layout
from services.engine.experts.store import Block, DenseFile, DraftFile, Store
from services.engine.gpu.ledger import Layout
from services.engine.model_config import ModelConfig
from services.engine.tensorfile import DTYPES, header_bytes, write_file
from services.tools.amounts import count, whole
from services.tools.complaints import refused
from services.tools.demo import CHECKPOINT
from services.tools.progress import Progress
from services.tools.synthetic_blocks import DISTINCT, SyntheticBlocks
from services.tools.synthetic_dense import RandomDense
from services.tools.synthetic_shapes import RECIPES, SHAPES, Recipe, dense_layout, draft_layout

PHYSICAL = 2561  # 7.9 GB of Super's blocks; odd, so that the same expert of two layers is not the same block
SCALE = float(np.float32(1e-4))  # of every block's `up` and `down`
BUFFER_BYTES = 64 << 20
SPARE_BYTES = 64 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="for the store; made if it does not exist")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="super", help="super: 16 GB; small: seconds")
    parser.add_argument("--recipe", choices=RECIPES, default="3.5", help="formats of the dense weights")
    parser.add_argument(
        "--physical",
        type=whole,
        default=PHYSICAL,
        help=f"expert blocks in the file (default {PHYSICAL}, or all if less)",
    )
    parser.add_argument("--seed", type=count, default=0)
    parser.add_argument(
        "--block", action="store_true", help="with a multi-token-prediction block, in BF16 as published"
    )
    parser.add_argument("--replace", action="store_true", help="replace another finished synthetic store that is there")


def run(args: argparse.Namespace) -> int:
    begun = time.monotonic()
    store = synthesise(args.folder, args.shape, args.recipe, args.physical, args.seed, args.replace, args.block)
    size = store.experts_path.stat().st_size + store.dense_file.size_bytes
    size += store.draft_file.file.size_bytes if store.draft_file else 0
    experts = sum(map(len, store.layers))
    print(
        f"{args.folder}: SYNTHETIC store, shape {args.shape}, random weights; {experts} experts are "
        f"{store.physical_blocks} blocks on the disk; {size / 1e9:.2f} GB in {time.monotonic() - begun:.1f} s"
    )
    return 0


def synthesise(
    folder: Path,
    shape: str,
    recipe: Recipe = "3.5",
    physical: int = PHYSICAL,
    seed: int = 0,
    replace: bool = False,
    block: bool = False,
) -> Store:
    """Make, or just open, the synthetic store; `block`: with one that drafts, its experts behind the others. Raises
    DiskError: no space, another store there, too few blocks."""
    config = SHAPES[shape]
    experts = (len(config.moe_layers) + block) * config.experts
    physical = min(physical, experts)
    if physical < config.experts:
        raise DiskError(f"--physical {physical}: a layer has {config.experts} experts, give at least as many blocks")
    source = {
        "folder": f"synthetic-{shape}",
        "synthetic": True,
        "architecture": "NemotronHForCausalLM",
        "recipe": recipe,
        "physical_blocks": physical,
        "seed": seed,
        **({"block": True} if block else {}),
    }
    if (folder / layout.MANIFEST).exists():
        there = Store.open(folder)
        if there.source == source:
            return there
        if not replace or not there.synthetic:
            raise DiskError(
                f"{folder}: holds another finished store; choose another folder, or --replace if it is synthetic"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / layout.MANIFEST).unlink(missing_ok=True)
        _make(folder, config, recipe, source)
    except OSError as error:
        raise DiskError(refused(error, folder)) from error
    return Store.open(folder)


def _make(folder: Path, config: ModelConfig, recipe: Recipe, source: dict[str, Any]) -> None:
    layouts = {layout.DENSE: dense_layout(config, recipe)}
    if "block" in source:
        layouts[layout.DRAFT] = draft_layout(config)
    else:
        (folder / layout.DRAFT).unlink(missing_ok=True)  # of what was here before
    dense_bytes = sum(
        int(np.prod(shape, dtype=np.int64)) * DTYPES[dtype].itemsize
        for tensors in layouts.values()
        for dtype, shape in tensors.values()
    )
    physical, seed = source["physical_blocks"], source["seed"]
    expert_bytes = physical * config.block.block_bytes
    free = shutil.disk_usage(folder).free
    if free < dense_bytes + expert_bytes + SPARE_BYTES:
        needed = (dense_bytes + expert_bytes + SPARE_BYTES) / 1e9
        raise DiskError(f"{folder}: {needed:.1f} GB needed, {free / 1e9:.1f} GB free; lower --physical or free space")
    progress = Progress("synth", dense_bytes + expert_bytes)
    checksums = _write_experts(folder / layout.EXPERTS, config, physical, seed, progress)
    files: list[DenseFile] = []
    written = expert_bytes
    for number, (name, tensors) in enumerate(layouts.items()):

        def wrote(size_bytes: int, before: int = written) -> None:
            progress.update(before + size_bytes)

        files.append(_write_dense(folder / name, tensors, seed + number, wrote))
        written += files[-1].size_bytes
    progress.close()
    block_bytes, layers = config.block.block_bytes, len(config.moe_layers)
    blocks = [
        [Block(key % physical * block_bytes, checksums[key % physical], SCALE, SCALE) for key in range(first, last)]
        for first, last in ((i * config.experts, (i + 1) * config.experts) for i in range(layers + len(files) - 1))
    ]
    draft = DraftFile(files[1], tuple(blocks[layers])) if len(files) > 1 else None
    for name in layout.TEXT_FILES:  # the demo's: good enough to talk to random weights
        if (CHECKPOINT / name).exists() and config.vocab_size >= SHAPES["small"].vocab_size:
            shutil.copyfile(CHECKPOINT / name, folder / name)
    unfinished = folder / f"{layout.MANIFEST}.part"
    manifest = layout.manifest_bytes(config, blocks[:layers], files[0], source, draft=draft)
    write_file(unfinished, [manifest])
    os.replace(unfinished, folder / layout.MANIFEST)


def _write_dense(path: Path, tensors: Layout, seed: int, wrote: Callable[[int], None]) -> DenseFile:
    start, order = header_bytes(tensors)
    values = RandomDense(tensors, seed)
    with DirectFile(path) as file:
        file.append(np.frombuffer(start, np.uint8))
        for name in order:
            for piece in values.pieces(name):
                file.append(piece)
            wrote(file.size_bytes)
    return DenseFile(file.size_bytes, file.digest)


def _write_experts(path: Path, config: ModelConfig, physical: int, seed: int, progress: Progress) -> list[int]:
    """The blocks, and the checksum of each."""
    blocks = SyntheticBlocks(config.block, 1, physical, seed=seed)
    with ThreadPoolExecutor(min(DISTINCT, os.cpu_count() or 1)) as pool, DirectFile(path) as file:
        originals = list(pool.map(blocks.original, range(DISTINCT)))

        def made(key: int) -> tuple[npt.NDArray[np.uint8], int]:
            block = blocks.block(originals, key)
            return block, xxhash.xxh64_intdigest(block.data)

        checksums = []
        batch = max(1, BUFFER_BYTES // config.block.block_bytes)
        for first in range(0, physical, batch):
            for block, checksum in pool.map(made, range(first, min(physical, first + batch))):
                file.append(block)
                checksums.append(checksum)
            progress.update(file.size_bytes)
    return checksums


class DirectFile:
    """A file written once from its start, past the page cache where its file system can do that.

    `size_bytes` and `digest` (XXH64) are of all that was appended.
    """

    def __init__(self, path: Path) -> None:
        self.size_bytes = 0
        self._hash = xxhash.xxh64()
        self._buffer = np.frombuffer(mmap(-1, BUFFER_BYTES), np.uint8)  # whole pages, as O_DIRECT wants
        self._filled = 0
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115
        with suppress(OSError):
            fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) | os.O_DIRECT)

    @property
    def digest(self) -> int:
        return int(self._hash.intdigest())

    def append(self, piece: npt.NDArray[np.uint8]) -> None:
        self._hash.update(piece.data)
        self.size_bytes += len(piece)
        while len(piece):
            size = min(len(piece), BUFFER_BYTES - self._filled)
            self._buffer[self._filled : self._filled + size] = piece[:size]
            self._filled += size
            piece = piece[size:]
            if self._filled == BUFFER_BYTES:
                self._write(BUFFER_BYTES)

    def __enter__(self) -> "DirectFile":
        return self

    def __exit__(self, *raised: object) -> None:
        with self._file:
            if raised[0] is None:
                self._write(-(-self._filled // PAGE) * PAGE)  # O_DIRECT takes whole pages; what is too much is cut off
                os.ftruncate(self._file.fileno(), self.size_bytes)
                os.fsync(self._file.fileno())

    def _write(self, size: int) -> None:
        written = 0
        while written < size:
            written += os.write(self._file.fileno(), self._buffer[written:size].data)
        self._filled = 0
