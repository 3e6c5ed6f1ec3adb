"""`thimble bench sweep-kernels`: linears and norms of a prompt's sweep on this machine's GPU, at the real shapes.

Random weights and inputs (sweep_cases.py). The caches are filled with other bytes before every launch. A linear is held
against cuBLAS with the same shape in BF16, timed in the same run. With `--check` each kernel is first compared with its
definition in float64, and bit for bit with itself on rows cut otherwise; one that is wrong is not timed. With `--tiles`
other tiles are timed instead: how the fixed ones were chosen. The routed experts come last (sweep_expert_cases.py).
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import triton

from kernels.linear.sweep import Tiles
from services.tools import figures, sweep_expert_cases
from services.tools.amounts import amount, whole
from services.tools.dense_cases import Dense
from services.tools.sweep_cases import Case, sweep_cases

FLUSHED_BYTES = 512 << 20  # several times any card's cache; written for longer than a launch takes to be queued
TIMES = 9
HEADING = f"{'kernel':<20}{'M':>6}{'us':>10}{'TFLOP/s':>9}{'of cuBLAS':>11}{'GB/s':>7}{'error':>10}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="append the figures to this CSV file (its name names the machine)")
    parser.add_argument(
        "--tokens", type=whole, nargs="+", help="rows of the inputs (default: 64 512 2048; lm_head 1 64)"
    )
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--check", action="store_true", help="compare with the definition first")
    parser.add_argument("--tiles", action="store_true", help="time other tiles of the linears instead")
    parser.add_argument("--seconds", type=amount, default=240.0, help="begin no kernel after this (default 240)")
    parser.add_argument("--jobs", type=whole, default=12, help="tiles compiled at once (default 12)")


def run(args: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        print("bench sweep-kernels needs a CUDA device", file=sys.stderr)
        return 2
    begun = time.monotonic()
    dense = Dense(torch.device("cuda"))
    clock = Clock(dense.device)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}; random weights")
    print(HEADING, flush=True)
    wrong: list[str] = []
    for name, build in sweep_cases(dense).items():
        if args.only not in name:
            continue
        if time.monotonic() - begun > args.seconds:
            print("out of time: the rest is left out")
            break
        case = build()
        for tokens in args.tokens or case.tokens:
            case.prepare(tokens)
            if args.tiles:
                try_tiles(case, clock, tokens, args.jobs)
            elif not measure(case, clock, tokens, args):
                wrong.append(f"{name} M={tokens}")
        del case
        torch.cuda.empty_cache()
    in_time = time.monotonic() - begun <= args.seconds
    if args.only in sweep_expert_cases.NAME and in_time and not sweep_expert_cases.run(args.out, args.tiles):
        wrong.append(sweep_expert_cases.NAME)
    print(f"{time.monotonic() - begun:.0f} s in all; wrong: {', '.join(wrong) or 'none'}")
    return 1 if wrong else 0


class Clock:
    """Times one launch that finds nothing in the caches."""

    def __init__(self, device: torch.device) -> None:
        self._other = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device)

    def seconds(self, launch: Callable[[], object]) -> float:
        """By the GPU's clock, the median; the first launch only warms up."""
        times: list[float] = []
        for _ in range(TIMES + 1):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self._other.zero_()
            start.record()
            launch()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return statistics.median(times[1:])


def measure(case: Case, clock: Clock, tokens: int, args: argparse.Namespace) -> bool:
    error = None
    if args.check:
        error = case.error()
        same = case.same_when_cut()
        if not (error < case.bound and same):
            cut = "same" if same else "DIFFER"
            print(f"{case.name:<20}{tokens:>6}  WRONG: error {error:.1e}, rows cut otherwise {cut}")
            return False
    seconds = clock.seconds(case.launch)
    rival = case.rival()
    share = clock.seconds(rival) / seconds if rival else None
    line(case.name, tokens, seconds, case.flop(), share, case.moved_bytes(), error)
    if args.out:
        note = f"random weights, {tokens} tokens, torch {torch.__version__}, triton {triton.__version__}"
        name = f"sweep_kernels.{case.name.replace(' ', '_').lower()}"
        figures.append(args.out, f"{name}_us", seconds * 1e6, "us", note)
        if share is not None:
            figures.append(args.out, f"{name}_over_cublas", share, "ratio", note)
    return True


def try_tiles(case: Case, clock: Clock, tokens: int, jobs: int) -> None:
    """The fixed tiles, then others, the fastest first. What a card cannot run is a result, too."""
    if not case.tiles:
        return

    def compiled(candidate: Tiles) -> str:
        try:
            case.launch(candidate)
            return ""
        except Exception as failure:
            return f"{type(failure).__name__} {str(failure)[:80]}"

    with ThreadPoolExecutor(jobs, initializer=torch.cuda.set_device, initargs=(0,)) as pool:
        failures = dict(zip(case.tiles, pool.map(compiled, case.tiles), strict=True))
    rival = case.rival()
    cublas = clock.seconds(rival) if rival else float("nan")
    seconds = clock.seconds(case.launch)
    line(case.name, tokens, seconds, case.flop(), cublas / seconds, case.moved_bytes(), None)
    results = []
    for candidate, failure in failures.items():
        if failure:
            print(f"  {shown(candidate)}: {failure}")
            continue
        results.append((clock.seconds(lambda chosen=candidate: case.launch(chosen)), candidate))  # type: ignore[misc]
    for seconds, candidate in sorted(results, key=lambda result: result[0]):
        line(f"  {shown(candidate)}", tokens, seconds, case.flop(), cublas / seconds, case.moved_bytes(), None)


def shown(made: Tiles) -> str:
    return f"{made.bm}x{made.bn}x{made.bk} {made.warps}w{made.stages}s"


def line(
    name: str, tokens: int, seconds: float, flop: float, share: float | None, moved_bytes: float, error: float | None
) -> None:
    rate = f"{flop / seconds / 1e12:9.1f}" if flop else " " * 9
    print(
        f"{name:<20}{tokens:>6}{seconds * 1e6:>10.1f}{rate}{'' if share is None else f'{share:.1%}':>11}"
        f"{moved_bytes / seconds / 1e9:>7.0f}{'' if error is None else f'{error:.1e}':>10}",
        flush=True,
    )
