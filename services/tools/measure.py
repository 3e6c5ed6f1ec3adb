"""This machine's rates for a plan: RAM, the processor's expert kernels, disk, and a CUDA card if there is one.

In seconds, not minutes: a plan needs them within some percent. Owns the measuring; blocks are synthetic.
"""

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kernels.block import BlockLayout
from kernels.experts.host.binding import Catalog, Host, open_drives, read_rate
from kernels.experts.host.drives import Drive, choose_depth
from kernels.workers.pool import Workers, native
from services.tools.hardware import MIB, Card
from services.tools.predict import GB, Method, Shape
from services.tools.synthetic_blocks import SyntheticBlocks

PASSES = 3
READ_BYTES = 1 << 30  # of RAM; several times any cache of a home PC
BLOCKS = 160  # half a gigabyte of experts
STEPS = 24
READ_ROUNDS = 6
COPY_BYTES = 256 << 20


def best_gb_s(work: Callable[[], int]) -> float:
    """`work` returns the bytes it moved. The best of some passes: what disturbs only makes slower."""
    best = 0.0
    for _ in range(PASSES):
        begun = time.perf_counter()
        moved = work()
        best = max(best, moved / (time.perf_counter() - begun) / GB)
    return best


def dram_gb_s(workers: Workers) -> float:
    """Plain reading by all workers."""
    memory = np.ones(READ_BYTES, np.uint8)

    def read() -> int:
        native().thimble_read(
            ctypes.c_void_p(workers.handle), ctypes.c_uint64(memory.ctypes.data), ctypes.c_int64(READ_BYTES)
        )
        return READ_BYTES

    return best_gb_s(read)


def cpu_gb_s(
    workers: Workers, catalog: Catalog, blocks: SyntheticBlocks, shape: Shape, drives: Sequence[Drive] | None = None
) -> float:
    """Expert bytes (`up` and alive rows of `down`) that the host library's step gets through with all in RAM."""
    experts, top_k = blocks.experts, shape.experts_per_token
    host = Host(catalog, workers, slots=experts, readers=4, drives=drives)
    order = torch.from_numpy(np.random.default_rng(0).permutation(experts).astype(np.int32))
    batches = [order[begin : begin + top_k][None] for begin in range(0, experts - top_k + 1, top_k)]
    weights, x = torch.ones(1, top_k), blocks.inputs(1, seed=1)
    try:
        for ids in batches:
            host.step(0, ids.contiguous(), weights, x)

        def steps() -> int:
            for number in range(STEPS):
                host.step(0, batches[number % len(batches)].contiguous(), weights, x)
            return int(STEPS * top_k * Method.CPU.expert_bytes(shape))

        return best_gb_s(steps)
    finally:
        host.close()


def again(workers: Workers, catalog: Catalog, blocks: SyntheticBlocks, shape: Shape) -> float:
    """What a second token of the same experts adds to their step, in shares of the first one's time; with all in RAM.
    Both in turns, each time other experts, so that no cache holds them."""
    top_k = shape.experts_per_token
    host = Host(catalog, workers, slots=blocks.experts, readers=4)
    order = torch.from_numpy(np.random.default_rng(0).permutation(blocks.experts).astype(np.int32))
    batches = [order[begin : begin + top_k] for begin in range(0, blocks.experts - top_k + 1, top_k)]
    x = blocks.inputs(2, seed=1)
    found: dict[int, list[float]] = {1: [], 2: []}
    try:
        for number in range(len(batches) + 2 * STEPS):
            rows = 1 + number % 2
            ids = batches[number % len(batches)].expand(rows, top_k).contiguous()
            begun = time.perf_counter()
            host.step(0, ids, torch.ones(rows, top_k), x[:rows].contiguous())
            if number >= len(batches):  # the first of each are read
                found[rows].append(time.perf_counter() - begun)
    finally:
        host.close()
    return max(0.0, float(np.median(found[2]) / np.median(found[1])) - 1)


@dataclass(frozen=True)
class Reads:
    """Of missing blocks, in nanoseconds: each, where many are missing; what a layer that misses any waits beside; and
    computing the last one, alone."""

    read_ns: float
    late_ns: float
    alone_ns: float


def reads(host: Host, x: torch.Tensor, top_k: int) -> Reads:
    """By steps of layer 0, of whose experts `host` must hold none, and have room for READ_ROUNDS * (top_k + 1)."""

    def step_ns(first: int, count: int) -> float:
        ids = torch.arange(first, first + count, dtype=torch.int32).view(1, -1)
        begun = time.perf_counter_ns()
        host.step(0, ids, torch.ones(1, count), x)
        return time.perf_counter_ns() - begun

    many, one, none = [], [], []
    before = host.counters()["misses"]
    rounds = min(READ_ROUNDS, host.shape[1] // (top_k + 1))
    for first in range(0, rounds * (top_k + 1), top_k + 1):
        many.append(step_ns(first, top_k))
        one.append(step_ns(first + top_k, 1))
        none.append(step_ns(first + top_k, 1))
    assert host.counters()["misses"] - before == rounds * (top_k + 1)
    one_ns, alone_ns = float(np.median(one)), float(np.median(none))
    read_ns = (float(np.median(many)) - one_ns) / (top_k - 1)
    return Reads(read_ns, max(0.0, one_ns - alone_ns - read_ns), alone_ns)


def late_us(workers: Workers, catalog: Catalog, blocks: SyntheticBlocks, shape: Shape, readers: int) -> float:
    """Of the disk that holds `catalog`: predict.py's Rates."""
    host = Host(catalog, workers, slots=blocks.experts, readers=readers, prefetch="off")
    try:
        return reads(host, blocks.inputs(1, seed=1), shape.experts_per_token).late_ns / 1e3
    finally:
        host.close()


def disk_gb_s(catalog: Catalog) -> tuple[float, int]:
    """Random verified blocks past the page cache, and how many reads in flight that took."""
    drives = open_drives(catalog)
    depth, rates = choose_depth(lambda depth: read_rate(catalog, drives, depth, seed=depth))
    return rates[depth], depth


def synthetic(folder: Path, layout: BlockLayout) -> tuple[SyntheticBlocks, Catalog, Path]:
    """A file of blocks in `folder`, for the disk and for the processor. To be removed by the caller."""
    blocks = SyntheticBlocks(layout, layers=1, experts=BLOCKS)
    path = folder / "thimble-plan.blocks"
    return blocks, blocks.write(path), path


def card() -> tuple[Card, float, float] | None:
    """The CUDA card of this machine with its measured memory and link, GB/s; None without one."""
    if not torch.cuda.is_available():
        return None
    here = torch.zeros(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    there, other = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))

    def done(copy: Callable[[], object], moved: int) -> Callable[[], int]:
        def work() -> int:
            for _ in range(4):
                copy()
            torch.cuda.synchronize()
            return 4 * moved

        work()
        return work

    square = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    tflops = best_gb_s(done(lambda: square @ square, 2 * 4096**3)) / 1e3
    pcie = best_gb_s(done(lambda: there.copy_(here, non_blocking=True), COPY_BYTES))
    vram = best_gb_s(done(lambda: other.copy_(there), 2 * COPY_BYTES))
    found = torch.cuda.get_device_properties(0)
    return Card(found.name, found.total_memory // MIB, vram, (0, 0), tflops), vram, pcie
