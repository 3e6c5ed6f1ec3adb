"""`thimble bench decode-disk STORE`: whole tokens on the GPU with a part of the experts in RAM, the rest on a drive.

Synthetic: weights of `thimble synth`, routing made up by traces/generators.py, guesses at the next layer's experts as
good as published and no better. The drive is emulated, so that its speed is that of a home PC's: memory whose readers
copy at a drive's rate, on cores that those who compute leave alone. One sequence. Missing experts are computed by the
processor as they arrive, for the published method too, which is kinder to it than its own way, a copy to the card
first.

Beside each time stands what the planner's formula makes of rates taken in the same run: the drive's from a few steps on
an empty cache, a layer's from tokens that miss nothing. Which blocks are missing, and which are read ahead, comes from
a replay of the routing; what is kept in the card's memory it leaves out.

How much of the drive's time is hidden: a token that misses blocks takes longer than one that misses none, by less than
reading them takes. A card and a processor that are quick beside the drive cannot hide more than a token takes without
it, which stands beside.

A run can be ended and started again: cases that --done names are left out. With --minutes a case that will not be done
by then is left out as well, and a line says so.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import triton

from kernels.experts.device.rates import ReadRates
from kernels.experts.device.turns import SharedSlots
from kernels.experts.host.binding import PIECE_BYTES, Host
from kernels.experts.host.drives import EmulatedDrive
from kernels.experts.host.replay import Clock, Routing
from kernels.workers.pool import Workers, default_threads
from services.engine.experts.store import Store
from services.engine.experts.streamer import catalog
from services.engine.gpu.decoder import Decoder, Placement, Row
from services.engine.gpu.memory import DevicePool, DeviceState
from services.engine.gpu.open import AWAKE_US, usable_device
from services.engine.gpu.token import Replay
from services.engine.gpu.weights import DeviceWeights
from services.engine.pages import pages_for
from services.tools import figures, measure
from services.tools.bench_experts import PUBLISHED
from services.tools.cells import Cells, Value
from services.tools.decode_rig import READERS, mid_dialog
from services.tools.drive_reads import DriveReads
from services.tools.hardware import STEP_OVER_READING
from services.tools.measure import Reads
from services.tools.predict import GB, SUPER, Method
from services.tools.synthetic_blocks import SyntheticBlocks
from services.tools.traces.generators import generate
from services.tools.traces.kept import without_hottest
from services.tools.traces.steady import steady

CONTEXT_TOKENS = 2048
HEADING = (
    f"{'method':<20}{'in RAM':>7}{'GB/s':>6}{'all hits':>9}{'a read':>8}{'late us':>8}{'planned':>9}"
    f"{'wrong':>7}{'ms':>8}{'tok/s':>7}{'misses':>8}{'needed':>8}{'waited':>8}{'hidden':>8}{'missing':>8}{'at most':>9}"
    f"{'late':>6}"
)
FIRST_CASE_S = 120.0  # assumed; a later one takes no longer than the longest before it
HIT_EXPERTS = 3  # times a token's: of a layer, which tokens that miss nothing name
HIT_TOKENS = 15


@dataclass(frozen=True)
class Way:
    name: str
    placement: Placement
    prefetch: str
    in_vram: bool = False  # the hottest experts are in the card's memory


OURS = Way("ours", Placement(guesses=True), "on")
PLAIN = Way("ours, no prefetch", Placement(), "off")
VRAM = Way("ours, some in VRAM", Placement(guesses=True), "on", in_vram=True)
THEIRS = Way(
    "published",
    Placement(
        PUBLISHED[0].route, PUBLISHED[0].share, waves=PUBLISHED[0].waves, whole_groups=True, splits=PUBLISHED[0].splits,
        lanes=PUBLISHED[0].lanes, guesses=True,
    ),
    "on",
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """Of a token, on average, in milliseconds. `hits_ms`: one without a miss; `planned_ms`: from that and `reads`;
    `waited_ms`: of it the host had nothing to compute, while the GPU may have."""

    hits_ms: float
    reads: Reads
    planned_ms: float
    token_ms: float
    drive: DriveReads
    waited_ms: float
    late: int

    @property
    def exposed_ms(self) -> float:
        """What the token takes longer, for whatever reason that comes with its reads."""
        return max(0.0, self.token_ms - self.hits_ms)

    @property
    def hidden(self) -> float:
        return self.drive.hidden(self.exposed_ms)

    @property
    def hidden_of_missing(self) -> float:
        return self.drive.hidden_of_missing(self.exposed_ms)

    @property
    def most_hidden(self) -> float:
        """Were the drive never idle, and never waited for but for what it takes longer than the rest of a token."""
        return min(1.0, self.hits_ms / self.drive.needed_ms) if self.drive.needed else 1.0

    @property
    def error(self) -> float:
        return abs(self.planned_ms / self.token_ms - 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", type=Path, help="folder that `thimble synth` wrote")
    parser.add_argument("--share", type=numbers, default=[0.24, 0.33], help="of all experts in RAM (default 0.24,0.33)")
    parser.add_argument("--disk", type=numbers, default=[7.0, 12.0], metavar="GB/S", help="emulated (default 7,12)")
    parser.add_argument("--trace", default="calibrated", help="generator of the routing (default calibrated)")
    parser.add_argument("--quick", action="store_true", help="two cases, ours without prefetch and the published one")
    parser.add_argument("--piece", type=int, default=PIECE_BYTES, metavar="BYTES", help="of a block, read at once")
    parser.add_argument("--vram", type=float, default=0.0, metavar="GB", help="for experts in the card's memory, too")
    parser.add_argument("--warm", type=int, default=100, help="tokens that fill the cache first (default 100)")
    parser.add_argument("--tokens", type=int, default=40, help="timed tokens (default 40)")
    parser.add_argument(
        "--threads",
        type=int,
        default=max(1, default_threads() - READERS),
        help="that compute (default: cores less two and less the drive's readers)",
    )
    parser.add_argument("--minutes", type=float, help="leave out what will not be done by then (default: nothing)")
    parser.add_argument("--done", type=Path, help="file that remembers finished cases")
    parser.add_argument("--out", type=Path, help="append the figures to this CSV file (its name names the machine)")


def numbers(text: str) -> list[float]:
    return [float(word) for word in text.split(",")]


def run(args: argparse.Namespace) -> int:
    cells = Cells(args.minutes, args.done)
    store = Store.open(args.store)
    if not torch.cuda.is_available():
        print("bench decode-disk needs a CUDA device; bench misses measures the processor alone", file=sys.stderr)
        return 2
    device = usable_device()
    torch.set_num_threads(1)
    memory = np.fromfile(store.experts_path, np.uint8)
    weights = DeviceWeights.load(store.dense(), store.config, device)
    weights.embeddings.read_through()
    pool = DevicePool(store.config, device, places=1, pages=pages_for(CONTEXT_TOKENS))
    state = mid_dialog(weights, pool, CONTEXT_TOKENS)
    routing = generate(args.trace, args.warm + args.tokens)
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
            expert_ns = hit_ns(slots, way)
            found = measured(Tokens(store, weights, state, slots, way, routing), slots, args, disk, reads, expert_ns)
        tell(args, way, share, disk, found)
        cells.finish(*cell, value=found.error)
        longest_s = max(longest_s, time.monotonic() - begun)
    tell_errors(args, cells)
    return 0


def cases(args: argparse.Namespace) -> list[tuple[float, float, Way]]:
    """Share in RAM, GB/s of the drive, method: first those that the plan is held against."""
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
    return (args.store.name, way.name, share, disk, *options)


def tell_errors(args: argparse.Namespace, cells: Cells) -> None:
    """Of all cases that are done, by runs before this one too."""
    errors = [(way, cells.done(*case_name(args, share, disk, way))) for share, disk, way in cases(args)]
    done = [(way, error) for way, error in errors if error is not None]
    plain = [error for way, error in done if way is PLAIN]
    if not plain:
        return
    worst = 100 * max(error for _, error in done)
    print(f"the plan was wrong by at most {100 * max(plain):.1f} % in {len(plain)} cases without guesses, ", end="")
    print(f"{worst:.1f} in all {len(done)}")
    if args.out:
        note = (
            f"synthetic, whole tokens on the GPU, emulated drive, {args.trace} routing, {len(plain)} cases of ours "
            f"without prefetch, {worst:.1f} % in all {len(done)}, torch {torch.__version__}, "
            f"triton {triton.__version__}"
        )
        figures.append(args.out, "plan.error_max", max(plain), "", note)


def hit_ns(slots: SharedSlots, way: Way) -> float:
    """Of one expert among many that are in RAM, from how fast both sides read at once, or the link alone."""
    if way is THEIRS:
        return Method.GROUPS.expert_bytes(SUPER) / ReadRates(slots).copy()
    return Method.SPLIT.expert_bytes(SUPER) * STEP_OVER_READING / sum(ReadRates(slots).together())


def plan_ms(
    routing: Routing, warm: int, slots: int, hits_ms: float, expert_ns: float, reads: Reads, prefetch: str = "off"
) -> float:
    """A token as the planner has it. Its layers without a miss are what was measured, however they divide."""
    layer_ns, top_k = hits_ms * 1e6 / routing.layers, routing.ids.shape[1]
    expert_ns = min(expert_ns, layer_ns / top_k)
    late_ns = reads.late_ns + reads.alone_ns - expert_ns
    clock = Clock(layer_ns - top_k * expert_ns, expert_ns, reads.read_ns, prefetch=prefetch, late_ns=late_ns)
    return steady(routing, warm, slots, clock).ms


def few_experts(routing: Routing, tokens: int) -> Routing:
    """So many tokens of a model of that shape, all of whose layers name only HIT_EXPERTS times top_k experts: each of
    them within the first HIT_EXPERTS tokens."""
    top_k, random = routing.ids.shape[1], np.random.default_rng(1)
    orders = [np.arange(HIT_EXPERTS * top_k, dtype=np.int32).reshape(HIT_EXPERTS, top_k)]
    orders += [random.permutation(HIT_EXPERTS * top_k)[:top_k].astype(np.int32)[None] for _ in range(tokens)]
    ids = np.repeat(np.concatenate(orders)[:tokens], routing.layers, axis=0)
    steps = len(ids)
    layer = np.tile(np.arange(routing.layers, dtype=np.int32), tokens)
    return Routing(routing.layers, routing.experts, layer, np.arange(steps + 1, dtype=np.int64), ids, (ids,))


@contextmanager
def host(
    store: Store, memory: npt.NDArray[np.uint8], share: float, disk: float, way: Way, args: argparse.Namespace
) -> Iterator[SharedSlots]:
    """Slots that the GPU reads, empty, behind a drive of `disk` GB/s."""
    slots = int(share * sum(map(len, store.blocks)))
    workers, drive = Workers(args.threads, AWAKE_US), EmulatedDrive(memory, gb_s=disk)
    opened = Host(
        catalog(store),
        workers,
        slots=slots,
        readers=READERS,
        prefetch=way.prefetch,
        piece_bytes=args.piece,
        drives=[drive],
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


class Tokens:
    """One sequence's tokens, routed as `routing` says."""

    def __init__(
        self, store: Store, weights: DeviceWeights, state: DeviceState, slots: SharedSlots, way: Way, routing: Routing
    ) -> None:
        config, layers = store.config, routing.layers
        self.routing, self.state, self.way = routing, state, way
        guessed = way.placement.guesses
        device = state.conv.device
        shape = (layers, 2, 1, config.experts_per_token) if guessed else (layers, 1, config.experts_per_token)
        self.replay = Replay(
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.zeros(layers, 1, config.latent_size, device=device),
        )
        self.x = SyntheticBlocks(store.layout, 1, 1).inputs(64 * layers, seed=1).view(64, layers, 1, -1)
        self.decoder = Decoder(weights, state.pool, slots, 1, CONTEXT_TOKENS, way.placement, self.replay)
        self.decoder.compile([state])
        self.decoder.capture()

    def step(self, token: int, routing: Routing | None = None) -> float:
        """-> milliseconds by the wall clock."""
        routing = routing or self.routing
        layers = routing.layers
        rows = slice(token * layers, (token + 1) * layers)
        ids = torch.from_numpy(routing.ids[rows])
        if self.replay.ids.dim() == 4:
            # What layer i posts behind its own ids is the guess that was made there at layer i + 1.
            guesses = torch.from_numpy(routing.guesses[0][rows])
            ids = torch.stack([ids, guesses], dim=1)
        self.replay.ids.copy_(ids.view(self.replay.ids.shape))
        self.replay.x.copy_(self.x[token % len(self.x)])
        torch.cuda.synchronize()
        begun = time.perf_counter()
        self.decoder.run([Row(self.state, 0)])
        return (time.perf_counter() - begun) * 1e3


def measured(
    tokens: Tokens, slots: SharedSlots, args: argparse.Namespace, disk: float, reads: Reads, expert_ns: float
) -> Found:
    host, routing, way = slots.host, tokens.routing, tokens.way
    few = few_experts(routing, HIT_EXPERTS + 2 + HIT_TOKENS)
    hits = [tokens.step(token, few) for token in range(HIT_EXPERTS + 2 + HIT_TOKENS)][-HIT_TOKENS:]
    if slots.vram is not None:  # what these tokens named is not what is hot
        host.set_heat(np.zeros_like(host.heat()))
    for token in range(args.warm):
        tokens.step(token)
    before, late = host.counters(), tokens.decoder.late
    times = [tokens.step(token) for token in range(args.warm, args.warm + args.tokens)]
    after = host.counters()
    host.check()
    tokens.decoder.close()
    hits_ms = statistics.median(hits)
    named = routing if slots.vram is None else without_hottest(routing, len(slots.vram.held()), args.warm)
    prefetch = way.prefetch if way.placement.guesses else "off"
    return Found(
        hits_ms,
        reads,
        planned_ms=plan_ms(named, args.warm, after["slots_total"], hits_ms, expert_ns, reads, prefetch),
        token_ms=statistics.mean(times),
        drive=DriveReads.between(before, after, host.catalog.layout.block_bytes, disk, args.tokens),
        waited_ms=(after["disk_wait_ns"] - before["disk_wait_ns"]) / 1e6 / args.tokens,
        late=tokens.decoder.late - late,
    )


def tell(args: argparse.Namespace, way: Way, share: float, disk: float, found: Found) -> None:
    rate, drive = 1e3 / found.token_ms, found.drive
    print(
        f"{way.name:<20}{share:>7.2f}{disk:>6.1f}{found.hits_ms:>9.2f}{found.reads.read_ns / 1e6:>8.3f}"
        f"{found.reads.late_ns / 1e3:>8.0f}{found.planned_ms:>9.2f}{found.error:>7.1%}"
        f"{found.token_ms:>8.2f}{rate:>7.2f}{drive.missing:>8.1f}{drive.needed:>8.1f}{found.waited_ms:>8.2f}{found.hidden:>8.0%}"
        f"{found.hidden_of_missing:>8.0%}{found.most_hidden:>9.0%}{found.late:>6}",
        flush=True,
    )
    if not args.out:
        return
    note = (
        f"synthetic, {args.trace} routing, {way.name}, {args.threads} threads, emulated drive of {disk:g} GB/s, "
        f"{drive.missing:.1f} misses a token, {found.hits_ms:.1f} ms without any, {drive.needed_ms:.1f} ms of needed "
        f"reading, planned {found.planned_ms:.1f} ms, "
        f"{f'{args.vram:g} GB of experts in graphics memory, ' if way is VRAM else ''}"
        f"torch {torch.__version__}, triton {triton.__version__}"
    )
    ram, theirs = f"ram{round(100 * share)}", "published_" if way is THEIRS else ""
    figures.append(args.out, f"decode.{theirs}tok_s_{ram}", rate, "tok/s", note)
    figures.append(args.out, f"decode.{theirs}plan_error_{ram}", found.error, "", note)
    if way is not THEIRS:
        figures.append(args.out, f"decode.hidden_{ram}", found.hidden, "", note)
        figures.append(args.out, f"decode.hidden_of_missing_{ram}", found.hidden_of_missing, "", note)
