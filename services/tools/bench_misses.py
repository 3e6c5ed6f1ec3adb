"""`thimble bench misses`: expert layers on the processor with a cache that does not hold all experts, from an emulated
drive or this machine's disk, held against what the planner says of the same run.

Synthetic: the full shape's routing is made up (traces/generators.py) and a few blocks stand for all experts. Between
two layers it waits as long as a card would take for the dense part. The emulated drive's readers copy on cores that
those who compute leave alone, as a drive's controller would need none. A plan knows the processor's rate measured here
with all in RAM, how long missing blocks take on an idle machine, and which blocks a replay of the routing misses; a
token's time is compared.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from kernels.block import BlockLayout
from kernels.experts.host.binding import Catalog, Host, open_drives, read_rate
from kernels.experts.host.drives import Drive, EmulatedDrive
from kernels.experts.host.replay import Clock, Routing, hinted
from kernels.workers.pool import Workers, default_threads
from services.tools import figures, measure
from services.tools.amounts import amounts, count, whole
from services.tools.drive_reads import DriveReads
from services.tools.measure import Reads
from services.tools.predict import SUPER, Method
from services.tools.synthetic_blocks import SyntheticBlocks
from services.tools.traces.generators import generate
from services.tools.traces.steady import steady

LAYOUT = BlockLayout(SUPER.latent, SUPER.width)
TRACES = ("calibrated", "zipf", "markov")  # those without prompts
SPIN_US = 2000  # workers stay awake between the layers of a token
READERS = 8
CARRIED_MS = 18.6 + 0.8  # of a token: dense weights on an RTX 5060, and hand-offs, as `thimble plan` has them


@dataclass(frozen=True)
class Measured:
    """A token's, in milliseconds: `gap_ms` outside of the steps, `waited_ms` with nothing to compute but missing blocks
    on their way."""

    token_ms: float
    gap_ms: float
    drive: DriveReads
    waited_ms: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--share", type=amounts, default=[0.24, 0.33], help="of all experts in RAM (default 0.24,0.33)")
    parser.add_argument("--disk", type=amounts, default=[7.0, 12.0], metavar="GB/S", help="emulated (default 7,12)")
    parser.add_argument("--folder", type=Path, help="this machine's disk instead, with a file made here")
    parser.add_argument("--physical", type=whole, default=1031, help="blocks that stand for all, 3.1 MB each (1031)")
    parser.add_argument("--tokens", type=whole, default=60, help="timed (default 60)")
    parser.add_argument(
        "--warm", type=count, default=200, help="tokens before them, which fill the cache (default 200)"
    )
    parser.add_argument(
        "--trace", choices=TRACES, default="calibrated", help="generator of the routing (default calibrated)"
    )
    parser.add_argument(
        "--threads", type=count, default=0, help="that compute (default: cores less two and less the readers)"
    )
    parser.add_argument("--out", type=Path, help="append the figures to this CSV file (its name names the machine)")


def run(args: argparse.Namespace) -> int:
    workers = Workers(args.threads or max(1, default_threads() - READERS), SPIN_US)
    routing = generate(args.trace, args.warm + args.tokens)
    blocks = SyntheticBlocks(LAYOUT, routing.layers, routing.experts)
    errors = []
    with drives(args, blocks) as (catalog, rates):
        cpu = processor(workers, blocks)
        print(f"{workers.threads} threads, experts at {cpu:.1f} GB/s with all in RAM; routing: {args.trace}; synthetic")
        print(
            f"{'share':>6}{'disk':>7}{'a read':>8}{'late us':>9}{'prefetch':>10}"
            f"{'misses':>9}{'ms':>8}{'planned':>9}{'hidden':>8}{'missing':>8}"
        )
        for share, (disk, drive) in product(args.share, rates):
            for prefetch in ("off", "auto"):
                slots = max(routing.ids.shape[1], int(share * SUPER.blocks))
                with opened(catalog, workers, slots, prefetch, drive) as host:
                    reads = measure.reads(host, blocks.inputs(1, seed=1), routing.ids.shape[1])
                    found = replayed(host, routing, args, blocks, disk)
                planned = plan_ms(routing, args.warm, slots, cpu, reads, found.gap_ms)
                if prefetch == "off":
                    errors.append(abs(planned / found.token_ms - 1))
                hidden, of_missing = (of(found.waited_ms) for of in (found.drive.hidden, found.drive.hidden_of_missing))
                print(
                    f"{share:>6.2f}{disk:>7.1f}{reads.read_ns / 1e6:>8.3f}{reads.late_ns / 1e3:>9.0f}{prefetch:>10}"
                    f"{found.drive.missing:>9.1f}{found.token_ms:>8.1f}"
                    f"{planned if prefetch == 'off' else float('nan'):>9.1f}{hidden:>8.0%}"
                    f"{of_missing:>8.0%}",
                    flush=True,
                )
                if args.out:
                    what = f"{disk:.1f} GB/s {kind(args)}, prefetch {prefetch}"
                    note = (
                        f"experts on the processor, {share:.2f} of them in RAM, {what}, {args.trace} routing, synthetic"
                    )
                    figures.append(args.out, "misses.ms_token", found.token_ms, "ms", note)
                    figures.append(args.out, "misses.hidden_share", hidden, "", note)
                    figures.append(args.out, "misses.hidden_of_missing", of_missing, "", note)
    print(f"the plan was wrong by at most {100 * max(errors):.1f} %")
    if args.out:
        where = kind(args)
        what = f"{where}, {len(errors)} configurations, prefetch off, synthetic"
        note = f"expert layers on the processor with misses, {what}"
        figures.append(args.out, "plan.error_max", max(errors), "", note)
    return 0


@contextmanager
def drives(args: argparse.Namespace, blocks: SyntheticBlocks) -> Iterator[tuple[Catalog, list[tuple[float, Drive]]]]:
    """The catalog of all experts, and drives with their rates in GB/s."""
    if args.folder is None:
        memory, catalog = blocks.memory(args.physical)
        yield catalog, [(rate, EmulatedDrive(memory, gb_s=rate)) for rate in args.disk]
        return
    with tempfile.NamedTemporaryFile(dir=args.folder, prefix="thimble-bench-", suffix=".blocks") as file:
        catalog = blocks.write(Path(file.name), args.physical)
        opened = open_drives(catalog)
        yield catalog, [(read_rate(catalog, opened, READERS, 1_000_000_000), opened[0])]


def kind(args: argparse.Namespace) -> str:
    return "disk" if args.folder else "emulated drive"


@contextmanager
def opened(catalog: Catalog, workers: Workers, slots: int, prefetch: str, drive: Drive) -> Iterator[Host]:
    host = Host(catalog, workers, slots=slots, readers=READERS, prefetch=prefetch, drives=[drive])
    try:
        yield host
    finally:
        host.close()


def processor(workers: Workers, blocks: SyntheticBlocks) -> float:
    """GB/s of expert bytes with all in RAM, through the same calls as below."""
    alone = SyntheticBlocks(blocks.layout, 1, measure.BLOCKS)
    memory, catalog = alone.memory(measure.BLOCKS)
    return measure.cpu_gb_s(workers, catalog, alone, SUPER, [EmulatedDrive(memory, gb_s=100.0)])


def replayed(host: Host, routing: Routing, args: argparse.Namespace, blocks: SyntheticBlocks, disk: float) -> Measured:
    """The routing's tokens one after the other; the last `tokens` of them are timed."""
    weights, x = torch.ones(1, routing.ids.shape[1]), blocks.inputs(1, seed=1)
    gap_s, stepping_s = CARRIED_MS / 1e3 / routing.layers, 0.0
    begin_step = args.warm * routing.layers
    begun, before = time.perf_counter(), host.counters()
    for step, (layer, row) in enumerate(zip(routing.layer.tolist(), routing.ids, strict=True)):
        if step == begin_step:
            begun, before, stepping_s = time.perf_counter(), host.counters(), 0.0
        if layer + 1 < routing.layers:  # as the engine hints
            host.prefetch(layer + 1, routing.guesses[0][step, : hinted(routing.ids.shape[1])])
        entered = time.perf_counter()
        host.step(layer, torch.from_numpy(row)[None], weights, x)
        stepping_s += time.perf_counter() - entered
        if step >= begin_step:
            pause(gap_s)
    seconds, after = time.perf_counter() - begun, host.counters()
    tokens = args.tokens
    return Measured(
        token_ms=1e3 * seconds / tokens,
        gap_ms=1e3 * (seconds - stepping_s) / tokens,
        drive=DriveReads.between(before, after, blocks.layout.block_bytes, disk, tokens),
        waited_ms=(after["disk_wait_ns"] - before["disk_wait_ns"]) / 1e6 / tokens,
    )


def pause(seconds: float) -> None:
    """Sleep, and watch the clock for the last piece: a sleep alone is late by a tenth of a layer."""
    begun = time.perf_counter()
    time.sleep(max(0.0, seconds - 150e-6))
    while time.perf_counter() - begun < seconds:
        pass


def plan_ms(routing: Routing, warm: int, slots: int, cpu: float, reads: Reads, gap_ms: float) -> float:
    """A token after the first `warm` ones as the planner has it. Which blocks are missing comes from a replay, layer by
    layer, not from the run: what the whole routing takes less what its beginning takes."""
    clock = Clock(
        gap_ns=gap_ms * 1e6 / routing.layers,
        expert_ns=Method.CPU.expert_bytes(SUPER) / cpu,
        read_ns=reads.read_ns,
        late_ns=reads.late_ns + reads.alone_ns - Method.CPU.expert_bytes(SUPER) / cpu,
    )
    return steady(routing, warm, slots, clock).ms
