"""`thimble bench decode STORE`: whole tokens on this machine's GPU and CPU, the published method and ours in one run.

The store is usually synthetic (`thimble synth`): then routing is replayed (replay.py), all of it hits, and every output
says so. With --free-mib another process holds the card's other memory first, so that what fits here fits a small card.
Methods take turns token by token, so that drift touches all alike. Owns the order of work; the engine's parts are
put together by decode_rig.py, what is said comes from decode_report.py.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch
import triton

from kernels.experts.device.rates import ReadRates
from kernels.experts.device.turns import SharedSlots
from kernels.workers.pool import default_threads
from services.engine.experts.store import Store
from services.engine.gpu.ledger import (
    CONTEXT_BYTES,
    MIB,
    MOST_SEQUENCES,
    Ledger,
    Wanted,
    ledger,
    require,
    stored_layout,
)
from services.engine.gpu.memory import DevicePool, DeviceState
from services.engine.gpu.usable import usable_device
from services.engine.gpu.weights import DeviceWeights
from services.engine.pages import pages_for
from services.tools import decode_report, figures, replay
from services.tools.amounts import count, whole
from services.tools.ballast import Ballast
from services.tools.bench_dense import measure_copy
from services.tools.bench_experts import PUBLISHED
from services.tools.decode_report import Floor, Result
from services.tools.decode_rig import DecodeRig, filled_host, mid_dialog
from services.tools.expert_rig import Method
from services.tools.token_parts import parts

OURS = Method("split")
METHODS = {"split": OURS, "published": PUBLISHED[0], "cpu": Method("CPU alone", share=0)}  # for profiles
WARM, TUNING, RECORDED = 6, 8, 3  # tokens
JOINED = (1, 2, 4)  # tokens of one sequence in a step
FEW_THREADS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", type=Path, help="folder that `thimble synth` or `thimble repack` wrote")
    parser.add_argument("--out", type=Path, help="append the figures to this CSV file (its name names the machine)")
    parser.add_argument(
        "--free-mib", type=count, default=8151, help="of the card, by ballast (default 8151; 0: all of it)"
    )
    parser.add_argument("--tokens", type=whole, default=24, help="timed tokens of each method (default 24)")
    parser.add_argument("--resident", type=whole, default=64, help="experts a layer in RAM, that occur (default 64)")
    parser.add_argument(
        "--batches", type=batches, default=[1, 2, 3, 4], help="sequences a step, where they fit (default 1,2,3,4)"
    )
    parser.add_argument("--context", type=whole, default=2048, help="tokens of each sequence (default 2048)")
    parser.add_argument("--kv", choices=("bf16", "fp8"), default="bf16", help="format of keys and values")
    parser.set_defaults(joined=True)  # steps of several tokens of one sequence fit, too
    parser.add_argument("--variants", type=whole, default=len(PUBLISHED), help="of the published method, to tune it")


def numbers(text: str) -> list[int]:
    """`1,2,4`, in order."""
    words = text.split(",")
    if not all(word.strip().isdigit() and int(word) for word in words):
        raise argparse.ArgumentTypeError(f"{text!r}: give positive whole numbers, comma separated")
    return sorted({int(word) for word in words})


def batches(text: str) -> list[int]:
    """Numbers of sequences that a step can have."""
    found = numbers(text)
    if found[-1] > MOST_SEQUENCES:
        raise argparse.ArgumentTypeError(f"{text!r}: a step has at most {MOST_SEQUENCES} sequences")
    return found


def run(args: argparse.Namespace) -> int:
    store = Store.open(args.store)
    if args.free_mib:
        print(f"{args.free_mib} MiB of graphics memory:\n{fit(args, store, args.free_mib * MIB)}", flush=True)
    if not torch.cuda.is_available():
        print("bench decode needs a CUDA device; thimble plan forecasts without one", file=sys.stderr)
        return 2
    torch.set_num_threads(1)  # as in the engine: torch's threads would spin on the workers' cores
    with ExitStack() as stack:
        ballast = stack.enter_context(Ballast(args.free_mib)) if args.free_mib else None
        usable_device()
        if args.free_mib:
            free_bytes = torch.cuda.mem_get_info()[0]
            print(f"the CUDA context alone takes {args.free_mib - free_bytes / MIB:.0f} MiB", flush=True)
            fit(args, store, free_bytes + CONTEXT_BYTES)
            print(f"sequences a step that fit beside it: {args.batches}", flush=True)
        bench = Bench(args, store, ballast)
        bench.measure()
        bench.report()
    return 0


def fit(args: argparse.Namespace, store: Store, budget_bytes: int) -> Ledger:
    """Leave only the batches that fit; the largest one's ledger. Raises MemoryPlanError if not one sequence does."""
    dense = stored_layout(args.store)
    locked_bytes = args.resident * len(store.blocks) * store.layout.block_bytes
    one = Wanted(1, args.context, args.kv, locked_bytes=locked_bytes)
    copied = replace(one, staging_blocks=store.config.experts_per_token)
    require(store.config, dense, copied, budget_bytes)  # the published method
    made = {rows: ledger(store.config, dense, replace(one, sequences=rows)) for rows in [1, *args.batches]}
    args.joined = ledger(store.config, dense, replace(one, joined=True)).total_bytes <= budget_bytes
    args.batches = [rows for rows in args.batches if made[rows].total_bytes <= budget_bytes]
    return made[max([1, *args.batches])]


class Stepping(Protocol):
    """What is timed: DecodeRig, or what stands for one in tests."""

    def step(self, token: int) -> float: ...


def in_turns(rigs: Mapping[str, Stepping], first: int, tokens: int) -> dict[str, list[float]]:
    """Milliseconds of each rig's tokens from `first` of the trace on; every token by all before the next."""
    times: dict[str, list[float]] = {name: [] for name in rigs}
    for token in range(first, first + tokens):
        for name, rig in rigs.items():
            times[name].append(rig.step(token))
    return times


def warm(rig: Stepping) -> None:
    for token in range(WARM):
        rig.step(token)


@dataclass
class Rates:
    """GB/s of this run. `together`: what processor and GPU read of RAM at once, each time that it was measured."""

    card: float
    link: float
    first_share: dict[int, float] = field(default_factory=dict)  # by threads
    together: list[tuple[float, float]] = field(default_factory=list)


class Bench:
    """One run, in the order: rates, load, one sequence beside the published method, batches, then few threads."""

    def __init__(self, args: argparse.Namespace, store: Store, ballast: Ballast | None) -> None:
        self.args, self.store, self.ballast = args, store, ballast
        self.device = torch.device("cuda")
        self.trace = replay.make(
            store.config, max(WARM + args.tokens, TUNING), max(args.batches), args.resident, seed=1
        )
        self.results: list[Result] = []
        self.peak_bytes: dict[int, int] = {}  # by sequences
        self.token_s: dict[int, tuple[float, str]] = {}  # by tokens of one sequence in a step; what they named
        self.rates = Rates(measure_copy(self.device), 0.0)
        self.weights: DeviceWeights | None = None
        self.load_s = 0.0

    def measure(self) -> None:
        many = default_threads()
        with self.slots(many) as slots:
            self.read_rates(slots, many)
            self.forget_peak()
            begun = time.perf_counter()
            self.weights = DeviceWeights.load(self.store.dense(), self.store.config, self.device)
            torch.cuda.synchronize()
            self.load_s = time.perf_counter() - begun
            print(f"dense weights on the card after {self.load_s:.1f} s", flush=True)
            self.weights.embeddings.read_through()  # as after some use: a slow disk would be timed instead
            with self.sequences(1) as states:
                self.compare(states, slots, many)
            if self.args.joined:
                with self.sequences(1) as states:
                    self.joined(states[0], slots, many)
            self.forget_peak()
            for rows in self.args.batches:
                if rows > 1:
                    with self.sequences(rows) as states:
                        self.results.append(self.alone(states, slots, many))
                    self.peak(rows)
            self.read_rates(slots, many)
        if many > FEW_THREADS:
            with self.slots(FEW_THREADS) as slots:
                self.read_rates(slots, FEW_THREADS)
                with self.sequences(1) as states:
                    self.results.append(self.alone(states, slots, FEW_THREADS))

    def compare(self, states: Sequence[DeviceState], slots: SharedSlots, threads: int) -> None:
        """Ours beside the best published variant, in turns; then the parts of both."""
        ours = self.rig(states, slots, OURS, threads)
        warm(ours)
        in_turns({"ours": ours}, WARM, self.args.tokens // 2)
        self.peak(1)
        tuned = self.tune(states, slots, threads)
        published = self.rig(states, slots, tuned, threads)
        warm(published)
        before = {rig: rig.times() for rig in (ours, published)}
        times = in_turns({"ours": ours, "published": published}, WARM, self.args.tokens)
        for method, rig, ms in ((OURS, ours, times["ours"]), (tuned, published, times["published"])):
            share = rig.gpu_experts(before[rig])
            busy, disk_ms = rig.sums(WARM, RECORDED)
            idle, _ = rig.sums(WARM, RECORDED, nothing=True)
            found = parts(statistics.median(ms), busy, idle, disk_ms) if busy.dense_ms else None
            self.results.append(Result(method.name, threads, 1, ms, share, found))
            if rig.late:
                print(f"  {method.name}: {rig.late} tokens were late, the host did not answer in time", flush=True)
        published.close()
        ours.close()

    def tune(self, states: Sequence[DeviceState], slots: SharedSlots, threads: int) -> Method:
        """The published method's variant with the shortest median."""
        medians: dict[Method, float] = {}
        for method in PUBLISHED[: self.args.variants]:
            rig = self.rig(states, slots, method, threads)
            warm(rig)
            medians[method] = statistics.median(in_turns({"it": rig}, 0, TUNING)["it"])
            print(f"  {method.name}: {medians[method]:.2f} ms", flush=True)
            rig.close()
            torch.cuda.empty_cache()
        return min(medians, key=lambda method: medians[method])

    def alone(self, states: Sequence[DeviceState], slots: SharedSlots, threads: int) -> Result:
        rig = self.rig(states, slots, OURS, threads)
        warm(rig)
        before = rig.times()
        ms = in_turns({"ours": rig}, WARM, self.args.tokens)["ours"]
        result = Result(OURS.name, threads, len(states), ms, rig.gpu_experts(before))
        print(f"  {result.name}: {result.token_ms:.2f} ms", flush=True)
        rig.close()
        torch.cuda.empty_cache()
        return result

    def joined(self, state: DeviceState, slots: SharedSlots, threads: int) -> None:
        """Consecutive tokens of one sequence in a step, as a short prompt has them; steps of all sizes in turns."""
        trace = replay.make(self.store.config, JOINED[-1] * (WARM + self.args.tokens), 1, self.args.resident, seed=2)
        del state.ids[1 - JOINED[-1] :]  # so that all of a step's tokens are within the context
        traces = {rows: trace.joined(rows) for rows in JOINED}
        rigs = {rows: self.rig([state] * rows, slots, OURS, threads, each) for rows, each in traces.items()}
        for rig in rigs.values():
            warm(rig)
        times = in_turns({str(rows): rig for rows, rig in rigs.items()}, WARM, self.args.tokens)
        for rows, rig in rigs.items():
            union = f"{traces[rows].union():.1f} experts a layer"
            self.token_s[rows] = statistics.median(times[str(rows)]) / rows / 1e3, union
            print(f"  {rows} tokens of one sequence a step: {self.token_s[rows][0] * 1e3:.2f} ms a token, {union}")
            rig.close()
        rigs.clear()
        torch.cuda.empty_cache()

    def rig(
        self,
        states: Sequence[DeviceState],
        slots: SharedSlots,
        method: Method,
        threads: int,
        trace: replay.Trace | None = None,
    ) -> DecodeRig:
        assert self.weights is not None
        begun = time.perf_counter()
        rig = DecodeRig(self.weights, states, slots, method, self.rates.first_share[threads], trace or self.trace)
        print(f"  {method.name}, batch {len(states)}: graph ready in {time.perf_counter() - begun:.1f} s", flush=True)
        return rig

    def read_rates(self, slots: SharedSlots, threads: int) -> None:
        """Also how many experts the GPU takes at first. Without room to measure in, what was found before stands."""
        try:
            reading = ReadRates(slots)
        except torch.cuda.OutOfMemoryError:
            self.rates.first_share.setdefault(threads, self.rates.first_share[default_threads()])
            return
        self.rates.link = reading.copy()
        both = reading.together()
        if threads == default_threads():
            self.rates.together.append(both)
        cpu, gpu = both
        self.rates.first_share[threads] = self.store.config.experts_per_token * gpu / (cpu + gpu)
        del reading
        torch.cuda.empty_cache()

    @contextmanager
    def slots(self, threads: int) -> Iterator[SharedSlots]:
        begun = time.perf_counter()
        host = filled_host(self.store, threads, self.args.resident)
        try:
            shared = SharedSlots(host)
            print(f"slots full and page-locked, {threads} threads, {time.perf_counter() - begun:.1f} s", flush=True)
            try:
                yield shared
            finally:
                torch.cuda.synchronize()
                shared.close()
        finally:
            host.close()

    @contextmanager
    def sequences(self, count: int) -> Iterator[list[DeviceState]]:
        assert self.weights is not None
        pages = count * pages_for(self.args.context)
        pool = DevicePool(self.store.config, self.device, places=count, pages=pages, kv=self.args.kv)
        states = [mid_dialog(self.weights, pool, self.args.context) for _ in range(count)]
        yield states
        states.clear()  # the caller's list: the card's memory goes with the last state
        del pool
        gc.collect()
        torch.cuda.empty_cache()

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        if self.ballast:
            self.ballast.peak_bytes()

    def peak(self, rows: int) -> None:
        """Since the last one: by the driver, and what of that is torch's; the rest is context, kernels and graphs."""
        reserved, used = torch.cuda.max_memory_reserved() / MIB, torch.cuda.max_memory_allocated() / MIB
        if self.ballast:
            self.peak_bytes[rows] = self.ballast.peak_bytes()
            mib = self.peak_bytes[rows] / MIB
            print(
                f"  most graphics memory, batch {rows}: {mib:.0f} MiB by the driver = tensors {used:.0f} + allocator "
                f"{reserved - used:.0f} + context, kernels and graphs {mib - reserved:.0f}",
                flush=True,
            )
        torch.cuda.reset_peak_memory_stats()

    def report(self) -> None:
        config, args = self.store.config, self.args
        expert = decode_report.sampled(self.store, self.trace)
        cpu, gpu = (statistics.median(each) for each in zip(*self.rates.together, strict=True))
        dense = decode_report.token_bytes(config, stored_layout(args.store), args.context, args.kv)
        floor = Floor(dense, expert.layer_bytes * len(config.moe_layers), self.rates.card, cpu, gpu)
        kind = "synthetic" if self.store.synthetic else "real weights"
        note = (
            f"{kind}, replayed routing ({args.resident} experts a layer, all hits, {expert.alive:.3f} alive), "
            f"{f'ballast to {args.free_mib} MiB' if args.free_mib else 'no ballast'}, context {args.context}, "
            f"torch {torch.__version__}, triton {triton.__version__}"
        )
        print(f"\n{note}\ncopy engine {self.rates.link:.1f} GB/s; {floor}\n")
        print(decode_report.table(self.results, floor))
        if args.out:
            for row in decode_report.figure_rows(self.results, floor, self.peak_bytes, self.load_s, note):
                figures.append(args.out, *row)
            for rows, (token_s, union) in self.token_s.items():
                told = f"{note}, a token of {rows} of one sequence in a step, {union}, {default_threads()} threads"
                figures.append(args.out, "decode.union", token_s, "s", told)
