"""`thimble bench experts-cpu`: the routed experts on this processor, every instruction set it has, in one run.

Synthetic: random NVFP4 blocks at the real model's shape, more than the caches hold, all of them in RAM, 92.5 % zeros
with an alive set of its own for every token and expert. What is compared is a plain read: all threads read the same
slots and compute nothing. A step's bytes are all of `up`, and of `down` the rows of alive neurons and the scales of
their groups. Bits are compared with the definition's before anything is timed. Reads and steps take turns.
"""

import argparse
import ctypes
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kernels.block import GROUP, BlockLayout, Bytes
from kernels.experts import reference
from kernels.experts.cpu.sums import sizes, up_sums
from kernels.experts.host.binding import Catalog, Host
from kernels.workers.pool import Workers, available_isas, default_threads, isa_number, native
from services.tools import figures
from services.tools.amounts import whole
from services.tools.synthetic_blocks import SyntheticBlocks

LAYOUT = BlockLayout(1024, 2688)
TOP_K = 22
WIDE = 64  # tokens of a prefill step
SPIN_US = 1000


@dataclass(frozen=True)
class Given:
    """A step's arguments and the bytes that it reads."""

    ids: torch.Tensor
    weights: torch.Tensor
    x: torch.Tensor
    read_bytes: int = 0
    alive: float = 0.0
    touched: float = 0.0


@dataclass(frozen=True)
class Rates:
    """Medians of one instruction set and number of threads."""

    read_gbs: float
    up_gbs: float  # of `up` alone on one core
    step_us: float
    step_gbs: float
    wide_us: float  # of a step of WIDE tokens, a token
    again: float  # what a second token of the same experts adds to a step, of the first one's time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="append the figures to this CSV file (its name names the machine)")
    parser.add_argument("--blocks", type=whole, default=256, help="blocks in RAM, 3.1 MB each (default 256)")
    parser.add_argument("--rounds", type=whole, default=30, help="timed steps of each (default 30)")
    parser.add_argument("--threads", help="numbers of threads, comma separated (default 1 and all but two)")
    parser.add_argument("--isa", help="instruction sets, comma separated (default all that there are)")
    parser.add_argument("--clustered", action="store_true", help="alive neurons keep together in groups")


def run(args: argparse.Namespace) -> int:
    isas = args.isa.split(",") if args.isa else available_isas()
    threads = [int(n) for n in args.threads.split(",")] if args.threads else sorted({1, default_threads()})
    blocks = SyntheticBlocks(LAYOUT, 1, args.blocks, args.clustered)
    with tempfile.TemporaryDirectory() as folder:
        catalog = blocks.write(Path(folder) / "experts.bin")
        steps = [given(blocks, catalog, 1, seed) for seed in range(args.rounds)]
        alive, touched = (statistics.mean(getattr(one, name) for one in steps) for name in ("alive", "touched"))
        print(f"{args.blocks} synthetic blocks, {alive:.3f} of the neurons alive, {touched:.3f} of the groups touched")
        named = f"{'':<20}{'read':>9}{'up, 1 core':>12}{'step of 22':>12}{'':>9}{'of read':>9}"
        print(f"{named}{f'{WIDE} tokens':>14}{'again':>8}")
        for isa in isas:
            for count in threads:
                rates = measure(blocks, catalog, steps, isa, count, args.rounds)
                print(line(isa, count, rates), flush=True)
                if args.out:
                    note = (
                        f"{isa}, {count} threads, synthetic blocks, {alive:.3f} alive, {touched:.3f} of groups touched"
                    )
                    write(args.out, rates, note)
    return 0


def line(isa: str, threads: int, rates: Rates) -> str:
    return (
        f"{f'{isa}, {threads} threads':<20}{rates.read_gbs:>5.1f} GB/s{rates.up_gbs:>7.1f} GB/s{rates.step_us:>9.0f} us"
        f"{rates.step_gbs:>5.1f} GB/s{rates.step_gbs / rates.read_gbs:>9.2f}{rates.wide_us:>7.0f} us/token"
        f"{rates.again:>8.2f}"
    )


def write(path: Path, rates: Rates, note: str) -> None:
    figures.append(path, "experts_cpu.read", rates.read_gbs, "GB/s", note)
    figures.append(path, "experts_cpu.up_one_core", rates.up_gbs, "GB/s", note)
    figures.append(path, "experts_cpu.step", rates.step_us, "us", f"22 hits, {note}")
    figures.append(path, "experts_cpu.step_rate", rates.step_gbs, "GB/s", f"22 hits, {note}")
    figures.append(path, "experts_cpu.step_over_read", rates.step_gbs / rates.read_gbs, "ratio", f"22 hits, {note}")
    figures.append(path, "experts_cpu.again", rates.again, "ratio", f"a second token of the same 22 experts, {note}")
    figures.append(path, "experts_cpu.prefill_token", rates.wide_us, "us", f"step of {WIDE} tokens, {note}")


def given(blocks: SyntheticBlocks, catalog: Catalog, rows: int, seed: int) -> Given:
    """Random experts and inputs; for one row also what they read, from the real alive set."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(blocks.experts, generator=generator)[:TOP_K] for _ in range(rows)]).int()
    weights, x = torch.rand(rows, TOP_K, generator=generator), blocks.inputs(rows, seed)
    if rows > 1:
        return Given(ids, weights, x)
    alive, touched = 0, 0
    for id in ids[0].tolist():
        neurons = alive_neurons(catalog, id, x)
        alive += int(neurons.sum())
        touched += int(neurons.view(-1, GROUP).any(dim=1).sum())
    read_bytes = TOP_K * LAYOUT.down_values + alive * LAYOUT.latent // 2 + touched * LAYOUT.latent
    return Given(ids, weights, x, read_bytes, alive / TOP_K / LAYOUT.width, touched * GROUP / TOP_K / LAYOUT.width)


def alive_neurons(catalog: Catalog, id: int, x: torch.Tensor) -> torch.Tensor:
    block = read_block(catalog, id)
    xq, e = reference.quantise(x)
    sums = torch.from_numpy(up_sums(available_isas()[-1], LAYOUT, block, xq.numpy(), 0, LAYOUT.width))
    v = reference.rescale(sums.double(), float(catalog.up_scales[0, id]), e)
    return reference.quantise(torch.where(v > 0, v * v, 0.0))[0][0] != 0


def read_block(catalog: Catalog, id: int) -> Bytes:
    offset = int(catalog.offsets[0, id])
    return np.fromfile(catalog.path, np.uint8, LAYOUT.block_bytes, offset=offset)


def measure(
    blocks: SyntheticBlocks, catalog: Catalog, steps: list[Given], isa: str, threads: int, rounds: int
) -> Rates:
    workers = Workers(threads, SPIN_US)
    host = Host(catalog, workers, slots=blocks.experts, readers=4, isa=isa)
    fill(host, blocks)
    check_bits(host, catalog, steps[0])
    wide = given(blocks, catalog, WIDE, 1000)
    start, size_bytes = host.memory()
    read_s, step_s, wide_s, twice_s = [], [], [], []
    for number, one in enumerate(steps):
        # In turns, so that whatever else the machine does touches all alike.
        read_s.append(seconds(lambda: read(workers, start, size_bytes)) / size_bytes)
        step_s.append(seconds(lambda one=one: host.step(0, one.ids, one.weights, one.x)) / one.read_bytes)  # type: ignore[misc]
        other, x = steps[number - 1], blocks.inputs(2, number)
        twice = other.ids.expand(2, -1).contiguous(), other.weights.expand(2, -1).contiguous(), x
        twice_s.append(seconds(lambda twice=twice: host.step(0, *twice)) / other.read_bytes)  # type: ignore[misc]
        if number % (rounds // 3 or 1) == 0:
            wide_s.append(seconds(lambda: host.step(0, wide.ids, wide.weights, wide.x)) / WIDE)
    up_gbs = up_alone(isa, start, blocks.experts, steps[0].x)
    host.close()
    workers.close()
    of_step = statistics.median(step_s)
    read_bytes = statistics.mean(one.read_bytes for one in steps)
    return Rates(
        read_gbs=1e-9 / statistics.median(read_s),
        up_gbs=up_gbs,
        step_us=of_step * read_bytes * 1e6,
        step_gbs=1e-9 / of_step,
        wide_us=statistics.median(wide_s) * 1e6,
        again=statistics.median(twice_s) / of_step - 1,
    )


def fill(host: Host, blocks: SyntheticBlocks) -> None:
    for first in range(0, blocks.experts, TOP_K):
        ids = torch.arange(first, min(first + TOP_K, blocks.experts), dtype=torch.int32)[None]
        host.step(0, ids, torch.ones(ids.shape), torch.ones(1, LAYOUT.latent))


def check_bits(host: Host, catalog: Catalog, one: Given) -> None:
    """No speed of wrong results: three experts against the definition."""

    def expert(id: int) -> reference.Expert:
        scales = float(catalog.up_scales[0, id]), float(catalog.down_scales[0, id])
        return reference.unpack_expert(read_block(catalog, id), LAYOUT, *scales)

    ids, weights = one.ids[:, :3].contiguous(), one.weights[:, :3].contiguous()
    if not torch.equal(host.step(0, ids, weights, one.x), reference.step(ids, weights, one.x, expert)):
        raise RuntimeError("the result differs from the definition: nothing was measured")


def up_alone(isa: str, start: int, blocks: int, x: torch.Tensor) -> float:
    """GB/s of `up` over all blocks in memory, one after another on the calling thread; the best of three."""
    of_block, values = sizes(LAYOUT), reference.quantise(x)[0].to(torch.int16)
    sums = torch.empty(LAYOUT.width, dtype=torch.int64)
    pointers = ctypes.c_void_p(values.data_ptr()), 1, 0, LAYOUT.width, ctypes.c_void_p(sums.data_ptr())
    layout, number = ctypes.c_void_p(of_block.ctypes.data), isa_number(isa)

    def all_blocks() -> None:
        for block in range(blocks):
            address = ctypes.c_void_p(start + block * LAYOUT.block_bytes)
            native().thimble_up_sums(number, layout, address, *pointers)

    return blocks * LAYOUT.down_values / min(seconds(all_blocks) for _ in range(3)) * 1e-9


def read(workers: Workers, start: int, size_bytes: int) -> None:
    native().thimble_read(ctypes.c_void_p(workers.handle), ctypes.c_uint64(start), ctypes.c_int64(size_bytes))


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
