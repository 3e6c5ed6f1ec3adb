"""`thimble bench dense`: every dense kernel of a decoded token on this machine's GPU, against what it must move.

Synthetic: random weights at the real model's shapes. Each kernel is first compared with its reference and, for one to
four tokens, with itself bit for bit; only then timed, by replays of a CUDA graph of launches that take their weights
from several sets in turn. The copy rate, bytes read plus bytes written, is measured in the same run. With `--sweep`
other tilings are timed instead: how the fixed ones were chosen.
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

from kernels.linear.gpu import Tiling
from services.tools import figures
from services.tools.amounts import amount, whole
from services.tools.dense_cases import TOKENS, Case, Dense, linear_cases
from services.tools.dense_state_cases import state_cases
from services.tools.dense_token import DenseToken

Tensor = torch.Tensor

GRAPH_BYTES = 4 << 30  # what the launches of a graph move together, about
MOST_LAUNCHES = 400
REPLAYS = 7
COPY_BYTES = 2 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="append the figures to this CSV file (its name names the machine)")
    parser.add_argument("--sweep", action="store_true", help="time other tilings instead")
    parser.add_argument("--tokens", type=whole, default=1, help="tokens of a sweep (default 1)")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--seconds", type=amount, default=90.0, help="begin no case after this (default 90)")
    parser.add_argument("--jobs", type=whole, default=12, help="kernels compiled at once (default 12)")


def run(args: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        print("bench dense needs a CUDA device", file=sys.stderr)
        return 2
    begun = time.monotonic()
    dense = Dense(torch.device("cuda"))
    copy_rate = measure_copy(dense.device)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"copy rate {copy_rate:.0f} GB/s; synthetic weights\n\n{HEADING}", flush=True)
    wrong: list[str] = []
    for name, build in {**state_cases(dense), **linear_cases(dense)}.items():
        if args.only not in name:
            continue
        if time.monotonic() - begun > args.seconds:
            print("out of time: the rest is left out")
            break
        case = build()
        try:
            (try_tilings if args.sweep else measure)(case, args, copy_rate)
        except AssertionError as error:  # a wrong kernel is not timed, the others are
            print(f"WRONG {error}", flush=True)
            wrong.append(name)
        del case
        torch.cuda.empty_cache()
    if "token".startswith(args.only) and not args.sweep:
        for tokens in (1, TOKENS):
            measure_token(DenseToken(dense, tokens), args, copy_rate)
            torch.cuda.empty_cache()
    print(f"{time.monotonic() - begun:.0f} s in all; wrong: {', '.join(wrong) or 'none'}")
    return 1 if wrong else 0


HEADING = f"{'kernel':<24}{'M':>2}{'us':>9}{'MB':>9}{'GB/s':>7}{'of copy':>9}{'error':>10}"


def measure_copy(device: torch.device) -> float:
    """GB/s, counting what is read and what is written."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / timed(lambda: target.copy_(source)) / 1e9


def timed(work: Callable[[], object]) -> float:
    """Seconds by the GPU's clock, the median of several runs; the first one only warms up."""
    times: list[float] = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[1:])


def measure(case: Case, args: argparse.Namespace, copy_rate: float) -> None:
    compile_all(case, [(tokens, None) for tokens in (1, 2, TOKENS)], args.jobs)
    errors = {tokens: case.error(tokens, None) for tokens in (1, TOKENS)}
    assert max(errors.values()) < case.bound, f"{case.name}: error {errors}"
    check_batches(case)
    for tokens, error in errors.items():
        seconds = time_graph(case, tokens, None)
        moved = case.size_bytes + (tokens - 1) * case.more_bytes
        line(case.name, tokens, seconds, moved, copy_rate, error)
        if args.out:
            note = f"synthetic weights, {tokens} tokens, torch {torch.__version__}, triton {triton.__version__}"
            name = f"dense.{case.name.replace(' ', '_').lower()}"
            figures.append(args.out, f"{name}_us", seconds * 1e6, "us", note)
            figures.append(args.out, f"{name}_copy_share", moved / seconds / 1e9 / copy_rate, "ratio", note)


def try_tilings(case: Case, args: argparse.Namespace, copy_rate: float) -> None:
    if not case.tilings:
        return
    tokens, moved = args.tokens, case.size_bytes + (args.tokens - 1) * case.more_bytes
    compile_all(case, [(tokens, None), *((tokens, each) for each in case.tilings)], args.jobs)
    line(case.name, tokens, time_graph(case, tokens, None), moved, copy_rate, case.error(tokens, None))
    results = []
    for candidate in case.tilings:
        try:
            results.append((time_graph(case, tokens, candidate), case.error(tokens, candidate), candidate))
        except Exception as failure:  # a tiling that this card cannot run is a result, too
            print(f"    {candidate}: {type(failure).__name__} {str(failure)[:80]}")
    for seconds, error, candidate in sorted(results, key=lambda result: result[0]):
        name = f"  tile {candidate.tile} warps {candidate.warps}{' ahead' if candidate.ahead else ''}"
        line(name, tokens, seconds, moved, copy_rate, error)


def measure_token(token: DenseToken, args: argparse.Namespace, copy_rate: float) -> None:
    """Everything but the routed experts, 88 layers in one graph."""
    token.launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token.launch()
    seconds = timed(graph.replay)
    assert torch.isfinite(token.output).all()
    line(f"token, {token.launches} launches", token.tokens, seconds, token.size_bytes, copy_rate, None)
    if args.out:
        note = f"synthetic weights, {token.tokens} tokens, {token.launches} launches, no routed experts"
        figures.append(args.out, "dense.token_us", seconds * 1e6, "us", note)


def line(name: str, tokens: int, seconds: float, moved: int, copy_rate: float, error: float | None) -> None:
    rate = moved / seconds / 1e9
    shown = "" if error is None else f"{error:10.1e}"
    print(
        f"{name:<24}{tokens:>2}{seconds * 1e6:>9.2f}{moved / 1e6:>9.2f}{rate:>7.0f}{rate / copy_rate:>9.1%}{shown}",
        flush=True,
    )


def compile_all(case: Case, variants: list[tuple[int, Tiling | None]], jobs: int) -> None:
    """First launches side by side: most of their time is the compiler's, outside Python's lock.

    What a candidate fails with is told when it is timed.
    """
    with ThreadPoolExecutor(jobs, initializer=torch.cuda.set_device, initargs=(0,)) as pool:
        futures = [pool.submit(case.launch, 0, slice(0, tokens), candidate) for tokens, candidate in variants]
    for future, (_, candidate) in zip(futures, variants, strict=True):
        if candidate is None:
            future.result()
    torch.cuda.synchronize()


def check_batches(case: Case) -> None:
    """A token's outputs are the same bits alone and beside others."""
    alone = []
    for token in range(TOKENS):
        case.reset()
        case.launch(0, slice(token, token + 1), None)
        alone.append([output[token].clone() for output in case.outputs])
    for tokens in range(2, TOKENS + 1):
        case.reset()
        case.launch(0, slice(0, tokens), None)
        for token in range(tokens):
            for output, expected in zip(case.outputs, alone[token], strict=True):
                assert torch.equal(output[token], expected), f"{case.name}: token {token} of {tokens} differs"


def time_graph(case: Case, tokens: int, candidate: Tiling | None) -> float:
    """Seconds of one launch, of many in a graph."""
    moved = case.size_bytes + (tokens - 1) * case.more_bytes
    launches = max(case.sets, min(MOST_LAUNCHES, GRAPH_BYTES // moved))
    case.launch(0, slice(0, tokens), candidate)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(launches):
            case.launch(index % case.sets, slice(0, tokens), candidate)
    return timed(graph.replay) / launches
