"""`thimble bench vision STORE|--synthetic`: pictures through tower and projector on this GPU, against a floor.

With --free-mib another process holds the card's other memory, and a tensor as large as the resident dense weights takes
its part of the rest: what runs here runs beside the model on a small card. The weights come through the ring, once from
the file (which the system has in its cache after the first picture) and once from page-locked RAM. The floor is the
longer of two times: the weights' bytes at the rate of the link, the operations at that of a large matrix product, both
of this run. A picture's seconds are from its patches to rows in RAM; `cut` is the resize before it, on one core.
`--check` compares with the processor instead.
"""

import argparse
import gc
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from services.engine.errors import StoreError
from services.engine.experts.store import Store
from services.engine.gpu.ledger import MIB, VISION_KERNEL_BYTES, dense_bytes, stored_layout
from services.engine.gpu.usable import usable_device
from services.engine.vision.config import VisionConfig
from services.engine.vision.device import DeviceTower, card_bytes
from services.engine.vision.embedding import embed
from services.engine.vision.embedding import run as run_through
from services.engine.vision.preprocess import patches
from services.engine.vision.weights import VisionWeights
from services.tools import figures, synthetic_vision
from services.tools.amounts import count, whole
from services.tools.ballast import Ballast
from services.tools.synthetic_shapes import SUPER, dense_layout

Grid = tuple[int, int]

# Rows and columns of patches, and what they are: at least as many tokens as the published examples.
PICTURES: dict[str, Grid] = {"as 1047 tokens": (84, 50), "as 2204 tokens": (116, 76), "the largest": (128, 104)}
SQUARE = 4096
COPIES = 64
SMALL = replace(
    synthetic_vision.REAL,
    patch=4,
    width=160,
    heads=2,
    inner=320,
    blocks=3,
    table=16,
    projector=640,
    hidden=64,
    least_patches=16,
    most_patches=1024,
)
CHECKED: dict[str, tuple[VisionConfig, Grid]] = {
    "small tower of 3 blocks": (SMALL, (30, 34)),
    "the real shape": (synthetic_vision.REAL, (28, 36)),
}
MOST_ERROR = 0.05  # of the largest value, in BF16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", type=Path, nargs="?", help="of a model that sees")
    parser.add_argument("--synthetic", action="store_true", help="random weights of the real shape, made for this run")
    parser.add_argument("--out", type=Path, help="append the figures to this CSV file (its name names the machine)")
    parser.add_argument(
        "--free-mib", type=count, default=8151, help="of the card, by ballast (default 8151; 0: all of it)"
    )
    parser.add_argument("--repeats", type=whole, default=5, help="timed readings of each picture (default 5)")
    parser.add_argument("--check", action="store_true", help="compare with the processor, on random weights")


def run(args: argparse.Namespace) -> int:
    if not (args.store or args.synthetic or args.check):
        print("bench vision: give a STORE, or --synthetic", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("bench vision needs a CUDA device", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="thimble-vision-") as folder:
        return check(Path(folder)) if args.check else measure(args, Path(folder))


@dataclass(frozen=True)
class Floor:
    link_gb_s: float
    matmul_tflops: float
    weight_bytes: int

    def seconds(self, config: VisionConfig, grid: Grid) -> tuple[float, float]:
        """Of the weights' copy and of the operations; the floor is the longer."""
        return self.weight_bytes / self.link_gb_s / 1e9, operations(config, grid) / self.matmul_tflops / 1e12


def operations(config: VisionConfig, grid: Grid) -> int:
    """Multiplications and additions of one picture: all matrix products, attention's two included."""
    count = grid[0] * grid[1]
    rows, width, tokens = count + config.prefix, config.width, count // 4
    block = 2 * rows * (4 * width**2 + 2 * width * config.inner) + 4 * rows**2 * width
    projector = 2 * tokens * config.projector * (4 * width + config.hidden)
    return 2 * count * 3 * config.patch**2 * width + config.blocks * block + projector


@dataclass(frozen=True)
class Reading:
    """Of one picture, with the weights in RAM or in the file."""

    name: str
    grid: Grid
    resident: bool
    seconds: list[float]
    cut_s: float
    same: bool  # every repeat gave the same bits

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


def measure(args: argparse.Namespace, folder: Path) -> int:
    weights, dense, kind = _weights(args, folder)
    with ExitStack() as stack:
        ballast = stack.enter_context(Ballast(args.free_mib)) if args.free_mib else None
        device = usable_device()
        torch.set_num_threads(1)  # as in the engine
        beside = torch.empty(dense, dtype=torch.uint8, device=device)
        before = torch.cuda.mem_get_info()[0]
        taken = ballast.peak_bytes() if ballast else 0
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {kind}; dense {dense / MIB:.0f} MiB held")
        readings: list[Reading] = []
        peaks: list[int] = []
        for resident in (False, True):
            tower = DeviceTower(weights, device, resident=resident)
            readings += [_read(tower, name, grid, args.repeats) for name, grid in PICTURES.items()]
            peaks.append(ballast.peak_bytes() - taken if ballast else before - torch.cuda.mem_get_info()[0])
            if resident:
                floor = Floor(_link_gb_s(tower), _matmul_tflops(device), tower.pieces.size_bytes)
            tower.close()
            del tower
            gc.collect()
            torch.cuda.empty_cache()
        del beside
    return _report(args, weights, kind, readings, floor, peaks[0])


def _weights(args: argparse.Namespace, folder: Path) -> tuple[VisionWeights, int, str]:
    """Of the store or made up; how large the dense weights beside them are; what to call it."""
    if args.store is None:
        begun = time.perf_counter()
        weights = synthetic_vision.write(folder / "vision.safetensors")
        print(f"random weights written in {time.perf_counter() - begun:.1f} s", flush=True)
        return weights, dense_bytes(SUPER, dense_layout(SUPER)), "synthetic"
    store = Store.open(args.store)
    found = store.vision()
    if found is None:
        raise StoreError(f"{args.store}: this model does not see; give --synthetic instead")
    return found, dense_bytes(store.config, stored_layout(args.store)), "synthetic" if store.synthetic else "a model's"


def _read(tower: DeviceTower, name: str, grid: Grid, repeats: int) -> Reading:
    config, random = tower.weights.config, torch.Generator().manual_seed(grid[0])
    height, width = grid[0] * config.patch - 7, grid[1] * config.patch - 5  # so that it must be resized
    image = torch.randint(256, (height, width, 3), dtype=torch.uint8, generator=random)
    begun = time.perf_counter()
    with torch.inference_mode():
        cut = patches(image, grid, config.patch, config.mean, config.std)
    cut_s = time.perf_counter() - begun
    first = run_through(tower.embed(cut, grid))
    seconds, same = [], bool(torch.isfinite(first).all())
    for _ in range(repeats):
        begun = time.perf_counter()
        rows = run_through(tower.embed(cut, grid))
        seconds.append(time.perf_counter() - begun)
        same &= torch.equal(rows, first)
    return Reading(name, grid, tower.ring.resident, seconds, cut_s, same)


def _link_gb_s(tower: DeviceTower) -> float:
    """Page-locked RAM to the ring's slots, best of three."""
    slot = tower.ring.slots[0]
    buffers = [buffer for buffer in tower.ring.buffers if 2 * len(buffer) >= len(slot)]
    best = 0.0
    for _ in range(3):
        torch.cuda.synchronize()
        begun, moved = time.perf_counter(), 0
        for number in range(COPIES):
            buffer = buffers[number % len(buffers)]
            slot[: len(buffer)].copy_(buffer, non_blocking=True)
            moved += len(buffer)
        torch.cuda.synchronize()
        best = max(best, moved / (time.perf_counter() - begun) / 1e9)
    return best


def _matmul_tflops(device: torch.device) -> float:
    square = torch.randn(SQUARE, SQUARE, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(square)
    best = 0.0
    for _ in range(4):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(8):
            torch.mm(square, square, out=out)
        torch.cuda.synchronize()
        best = max(best, 8 * 2 * SQUARE**3 / (time.perf_counter() - begun) / 1e12)
    return best


def _report(
    args: argparse.Namespace, weights: VisionWeights, kind: str, readings: list[Reading], floor: Floor, peak: int
) -> int:
    planned = card_bytes(weights)
    print(
        f"link {floor.link_gb_s:.1f} GB/s, matrix product {floor.matmul_tflops:.0f} TFLOPS (BF16, {SQUARE}), weights "
        f"{floor.weight_bytes / 1e9:.3f} GB\npeak of the card's memory for pictures {peak / MIB:.0f} MiB: "
        f"{planned / MIB:.0f} planned; {VISION_KERNEL_BYTES / MIB:.0f} more for kernels, which took "
        f"{(peak - planned) / MIB:.0f}"
    )
    print(
        f"{'picture':<16}{'tokens':>7}{'weights in':>12}{'s':>8}{'copy':>8}{'compute':>9}{'of floor':>10}{'cut s':>8}"
    )
    memory = f"ballast to {args.free_mib} MiB" if args.free_mib else "no ballast"
    for reading in readings:
        copy_s, compute_s = floor.seconds(weights.config, reading.grid)
        share = max(copy_s, compute_s) / reading.median_s
        where, tokens = "RAM" if reading.resident else "file", reading.grid[0] * reading.grid[1] // 4
        print(
            f"{reading.name:<16}{tokens:>7}{where:>12}{reading.median_s:>8.3f}{copy_s:>8.3f}{compute_s:>9.3f}"
            f"{100 * share:>9.0f}%{reading.cut_s:>8.3f}{'' if reading.same else '  OTHER BITS'}"
        )
        if args.out:
            note = f"{tokens} tokens ({reading.name}), {kind} weights in {where}, {memory}, torch {torch.__version__}"
            figures.append(args.out, "vision.seconds", reading.median_s, "s", note)
            figures.append(args.out, "vision.floor_share", share, "", note)
    if args.out:
        figures.append(args.out, "vision.peak_mib", peak / MIB, "MiB", f"planned {planned / MIB:.0f}, {kind}, {memory}")
    return 0 if all(reading.same for reading in readings) else 1


def check(folder: Path) -> int:
    """BF16 on the card against float32 on the processor, and the same bits twice."""
    device, wrong = usable_device(), False
    for number, (name, (config, grid)) in enumerate(CHECKED.items()):
        weights = synthetic_vision.write(folder / f"{number}.safetensors", config)
        cut = torch.randn(grid[0] * grid[1], 3 * config.patch**2, generator=torch.Generator().manual_seed(1))
        wanted = run_through(embed(weights, cut, grid))
        card = DeviceTower(weights, device)
        found, again = (run_through(card.embed(cut, grid)) for _ in range(2))
        card.close()
        largest = float((found - wanted).abs().max() / wanted.abs().max())
        whole = float((found - wanted).norm() / wanted.norm())
        same = torch.equal(found, again)
        good = same and largest < MOST_ERROR and float((found - wanted.roll(1, 0)).norm() / wanted.norm()) > 0.1
        wrong |= not good
        print(
            f"{name}, {grid[0]}x{grid[1]} patches: largest error {largest:.2e} of the largest value, {whole:.2e} of "
            f"the whole; the same bits twice: {same}; {'good' if good else 'WRONG'}",
            flush=True,
        )
    return 1 if wrong else 0
