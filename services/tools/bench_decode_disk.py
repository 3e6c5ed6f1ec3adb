"""`thimble bench decode-disk STORE`: whole tokens on the GPU with a part of the experts in RAM, the rest on a drive.

Synthetic: weights of `thimble synth`, routing made up by traces/generators.py, guesses at the next layer's experts as
good as published and no better. The drive is emulated, so that its speed is that of a home PC's: memory whose readers
copy at a drive's rate, on cores that those who compute leave alone; with --own it is the one that the store is on. One
sequence. Missing experts are computed by the processor as they arrive, for the published method too, which is kinder to
it than its own way, a copy to the card first.

Beside each time stands what the planner's formula makes of rates taken in the same run: the drive's from a few steps on
an empty cache, a layer's from tokens that miss nothing, and what of it is not experts, behind which the drive may read
but nothing is computed, from tokens that compute none. Which blocks are missing, and which are read ahead, comes from a
replay of the routing; what is kept in the card's memory it leaves out.

How much of the drive's time is hidden: a token that misses blocks takes longer than one that misses none, by less than
reading them takes. A card and a processor that are quick beside the drive cannot hide more than a token takes without
it, which stands beside.

With --home the same at a home PC's pace: before each layer the card waits until its dense weights have taken as long as
an RTX 5060's would, and reads all experts that are in RAM itself, over its link, which takes about as long as both
sides of a PC take at 60 GB/s. Late ones are computed by the processor.

A run can be ended and started again: cases that --done names are left out. With --minutes a case that will not be done
by then is left out as well, and a line says so.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kernels.experts.device.turns import SharedSlots
from kernels.experts.host.binding import PIECE_BYTES, Host, open_drives, read_rate
from kernels.experts.host.drives import EmulatedDrive
from kernels.experts.host.replay import Clock, Routing
from kernels.workers.pool import Workers, default_threads
from services.engine.experts.store import Store
from services.engine.experts.streamer import catalog
from services.engine.gpu.ledger import dense_bytes, stored_layout
from services.engine.gpu.memory import DevicePool
from services.engine.gpu.open import AWAKE_US
from services.engine.gpu.usable import usable_device
from services.engine.gpu.weights import DeviceWeights
from services.engine.model_config import ModelConfig
from services.engine.pages import pages_for
from services.tools import measure
from services.tools.amounts import amount, amounts, count, nothing_or_more, whole
from services.tools.cells import Cells, Value
from services.tools.decode_rig import READERS, mid_dialog
from services.tools.disk_report import HEADING, REPLY_TOKENS, Found, tell, tell_errors, tell_restart
from services.tools.disk_tokens import (
    CONTEXT_TOKENS,
    HIT_EXPERTS,
    HOME,
    OURS,
    PLAIN,
    THEIRS,
    VRAM,
    Tokens,
    Way,
    few_experts,
)
from services.tools.drive_reads import DriveReads
from services.tools.hardware import CARDS, box
from services.tools.measure import Reads
from services.tools.plan import shape_of
from services.tools.predict import GB, Method, layer_of
from services.tools.synthetic_blocks import SyntheticBlocks
from services.tools.traces.generators import generate
from services.tools.traces.kept import without_hottest
from services.tools.traces.steady import first_tokens, steady

FIRST_CASE_S = 120.0  # assumed; a later one takes no longer than the longest before it
HIT_TOKENS, IDLE_TOKENS = 15, 9
HOME_CARD, HOME_GB_S = "rtx5060", 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", type=Path, help="folder that `thimble synth` wrote")
    parser.add_argument("--share", type=amounts, default=[0.24, 0.33], help="of all experts in RAM (default 0.24,0.33)")
    parser.add_argument("--disk", type=amounts, default=[7.0, 12.0], metavar="GB/S", help="emulated (default 7,12)")
    parser.add_argument("--own", action="store_true", help="the drive that the store is on instead of emulated ones")
    parser.add_argument("--trace", default="calibrated", help="generator of the routing (default calibrated)")
    parser.add_argument("--quick", action="store_true", help="two cases, ours without prefetch and the published one")
    parser.add_argument("--home", action="store_true", help="instead of all cases ours at a home PC's pace")
    parser.add_argument(
        "--restart",
        type=amount,
        metavar="S",
        help="after the first case of ours, read its experts for so long, and go on",
    )
    parser.add_argument(
        "--hints", type=count, default=0, metavar="N", help="of a token's guesses (default: as the engine)"
    )
    parser.add_argument("--piece", type=whole, default=PIECE_BYTES, metavar="BYTES", help="of a block, read at once")
    parser.add_argument(
        "--vram", type=nothing_or_more, default=0.0, metavar="GB", help="for experts in the card's memory, too"
    )
    parser.add_argument("--warm", type=count, default=100, help="tokens that fill the cache first (default 100)")
    parser.add_argument("--tokens", type=whole, default=40, help="timed tokens (default 40)")
    parser.add_argument(
        "--threads",
        type=count,
        default=0,
        help="that compute (default: cores less two, and less an emulated drive's readers)",
    )
    parser.add_argument("--minutes", type=amount, help="leave out what will not be done by then (default: nothing)")
    parser.add_argument("--done", type=Path, help="file that remembers finished cases")
    parser.add_argument("--out", type=Path, help="append the figures to this CSV file (its name names the machine)")


def run(args: argparse.Namespace) -> int:
    cells = Cells(args.minutes, args.done)
    store = Store.open(args.store)
    if not torch.cuda.is_available():
        print("bench decode-disk needs a CUDA device; bench misses measures the processor alone", file=sys.stderr)
        return 2
    device = usable_device()
    torch.set_num_threads(1)
    args.threads = args.threads or max(1, default_threads() - (0 if args.own else READERS))
    memory = None if args.own else np.fromfile(store.experts_path, np.uint8)
    if args.own:
        blocks = catalog(store)
        args.disk = [read_rate(blocks, open_drives(blocks), READERS)]
    weights = DeviceWeights.load(store.dense(), store.config, device)
    weights.embeddings.read_through()
    home_ms = carried_ms(args.store, store.config)
    pool = DevicePool(store.config, device, places=1, pages=pages_for(CONTEXT_TOKENS))
    state = mid_dialog(weights, pool, CONTEXT_TOKENS)
    routing = generate(args.trace, args.warm + args.tokens + REPLY_TOKENS)
    restart_s = args.restart
    print(f"synthetic, {args.trace} routing, {args.threads} threads\n{HEADING}", flush=True)
    longest_s = 0.0
    for share, disk, way in cases(args):
        cell = case_name(args, share, disk, way)
        if cells.done(*cell) is not None:
            continue
        if not cells.fits(f"{way.name:<20}{share:>7.2f}{disk:>6.1f}", longest_s or FIRST_CASE_S):
            continue
        begun = time.monotonic()
        with host(store, memory, share, disk, way, args) as slots:
            inputs = SyntheticBlocks(store.layout, 1, 1).inputs(1, seed=1)
            reads = measure.reads(slots.host, inputs, store.config.experts_per_token)
            tokens = Tokens(store, weights, state, slots, way, routing)
            found = measured(tokens, slots, args, disk, reads, home_ms)
            known = slots.host.resident()
        tell(args, way, share, disk, found)
        if restart_s is not None and way.name in (OURS.name, HOME.name):
            with host(store, memory, share, disk, way, args) as slots:
                slots.host.warm(known)
                until = time.monotonic() + restart_s
                again = Tokens(store, weights, state, slots, way, routing)
                again.slow(tokens.slowed_ns)
                tell_restart(args, way, share, disk, found, first_reply(again, until, args.warm + args.tokens))
            restart_s = None
        cells.finish(*cell, value=found.error)
        longest_s = max(longest_s, time.monotonic() - begun)
    errors = [(way, cells.done(*case_name(args, share, disk, way))) for share, disk, way in cases(args)]
    tell_errors(args, [(way, error) for way, error in errors if error is not None])
    return 0


def cases(args: argparse.Namespace) -> list[tuple[float, float, Way]]:
    """Share in RAM, GB/s of the drive, method: first those that the plan is held against."""
    if args.home:
        home = replace(HOME, placement=replace(HOME.placement, hints=args.hints))
        return [(share, disk, home) for share in args.share for disk in args.disk]
    if args.quick:
        ends = ((min(args.share), min(args.disk)), (max(args.share), max(args.disk)))
        return [(share, disk, way) for share, disk in ends for way in (PLAIN, THEIRS)]
    slowest = (THEIRS, OURS, *((VRAM,) if args.vram else ()))
    found = [(share, disk, PLAIN) for share in args.share for disk in args.disk]
    for disk in args.disk:
        found += [(share, disk, way) for share in args.share for way in (slowest if disk == args.disk[0] else (OURS,))]
    return found


def case_name(args: argparse.Namespace, share: float, disk: float, way: Way) -> tuple[Value, ...]:
    options = (args.trace, args.warm, args.tokens, args.threads, args.piece, args.vram if way is VRAM else 0.0)
    return (args.store.name, way.name, share, "own" if args.own else disk, *options, way.placement.hints)


def carried_ms(folder: Path, config: ModelConfig) -> float:
    """A home PC's dense weights and hand-offs, as it is planned."""
    shape = shape_of(config, dense_bytes(config, stored_layout(folder)))
    there = box(CARDS[HOME_CARD], 32.0, HOME_GB_S, 7.0)
    return layer_of(shape, there.rates, Method.SPLIT).gap_ns * shape.moe_layers / 1e6


def plan_ms(
    routing: Routing,
    warm: int,
    slots: int,
    idle_ms: float,
    hits_ms: float,
    reads: Reads,
    prefetch: str = "off",
    hints: int = 0,
) -> float:
    """A token as the planner has it. Its layers without a miss are what was measured."""
    gap_ns = min(idle_ms, hits_ms) * 1e6 / routing.layers
    expert_ns = (hits_ms * 1e6 / routing.layers - gap_ns) / routing.ids.shape[1]
    late_ns = reads.late_ns + reads.alone_ns - expert_ns
    clock = Clock(gap_ns, expert_ns, reads.read_ns, prefetch=prefetch, ranks=hints, late_ns=late_ns)
    return steady(routing, warm, slots, clock).ms


@contextmanager
def host(
    store: Store, memory: npt.NDArray[np.uint8] | None, share: float, disk: float, way: Way, args: argparse.Namespace
) -> Iterator[SharedSlots]:
    """Slots that the GPU reads, empty, behind a drive of `disk` GB/s; without `memory` behind the store's own."""
    slots = int(share * sum(map(len, store.blocks)))
    workers = Workers(args.threads, AWAKE_US)
    drives = None if memory is None else [EmulatedDrive(memory, gb_s=disk)]
    opened = Host(
        catalog(store),
        workers,
        slots=slots,
        readers=READERS,
        prefetch=way.prefetch,
        piece_bytes=args.piece,
        drives=drives,
    )
    try:
        shared = SharedSlots(opened)
        try:
            if way.in_vram:
                shared.keep_in_vram(int(args.vram * GB / store.layout.block_bytes), torch.device("cuda"))
            yield shared
        finally:
            torch.cuda.synchronize()
            shared.close()
    finally:
        opened.close()


def measured(
    tokens: Tokens, slots: SharedSlots, args: argparse.Namespace, disk: float, reads: Reads, home_ms: float
) -> Found:
    host, routing, way = slots.host, tokens.routing, tokens.way
    idle_ms, hits_ms = without_misses(tokens, home_ms if way.home else 0.0)
    if slots.vram is not None:  # what these tokens named is not what is hot
        host.set_heat(np.zeros_like(host.heat()))
    for token in range(args.warm):
        tokens.step(token)
    before, late = host.counters(), tokens.decoder.late
    times = [tokens.step(token) for token in range(args.warm, args.warm + args.tokens)]
    after = host.counters()
    host.check()
    tokens.decoder.close()
    named = first_tokens(routing, args.warm + args.tokens)
    if slots.vram is not None:
        named = without_hottest(named, len(slots.vram.held()), args.warm)
    slots_total, prefetch = after["slots_total"], way.prefetch if way.placement.guesses else "off"
    planned_ms = plan_ms(named, args.warm, slots_total, idle_ms, hits_ms, reads, prefetch, way.placement.hints)
    return Found(
        idle_ms,
        hits_ms,
        reads,
        planned_ms,
        token_ms=statistics.mean(times),
        drive=DriveReads.between(before, after, host.catalog.layout.block_bytes, disk, args.tokens),
        waited_ms=(after["disk_wait_ns"] - before["disk_wait_ns"]) / 1e6 / args.tokens,
        late=tokens.decoder.late - late,
    )


def first_reply(tokens: Tokens, until_s: float, first: int) -> float:
    """A token's milliseconds on average, once that time has come."""
    time.sleep(max(0.0, until_s - time.monotonic()))
    times = [tokens.step(token) for token in range(first, first + REPLY_TOKENS)]
    tokens.decoder.close()
    return statistics.mean(times)


def without_misses(tokens: Tokens, carried_ms: float) -> tuple[float, float]:
    """A token that computes no expert and one that finds all in RAM, in milliseconds. From now on what is not experts
    takes `carried_ms`, if that is longer."""
    few = few_experts(tokens.routing, HIT_EXPERTS + 2 + HIT_TOKENS)
    for token in range(HIT_EXPERTS + 2):
        tokens.step(token, few)

    def idle() -> float:
        found = statistics.median(tokens.step(token, few, nothing=True) for token in range(IDLE_TOKENS))
        tokens.clear()
        return found

    idle_ms = idle()
    if carried_ms > idle_ms:
        tokens.slow((carried_ms - idle_ms) * 1e6 / tokens.routing.layers)
        idle_ms = idle()
    hits = [tokens.step(token, few) for token in range(HIT_EXPERTS + 2, HIT_EXPERTS + 2 + HIT_TOKENS)]
    return idle_ms, statistics.median(hits)
