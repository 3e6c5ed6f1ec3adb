"""`thimble bench sampling`: how long one token takes from its logits to its id, on one thread, beside the definition.

Random logits of the real vocabulary, as spread as a model's and nearly flat. Every id is held against the definition's
before anything is timed. What is measured is the thread's time on its processor: what else runs there does not count.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kernels.elementary.binding import bind
from kernels.sampling import cpu, penalties, reference
from services.tools import figures
from services.tools.amounts import whole

SPREADS = {"sigma 3": 3.0, "nearly flat": 0.01}
CHECKED = 2  # ids; the definition takes up to 0.1 s for each


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="append the figures to this CSV file (its name names the machine)")
    parser.add_argument(
        "--vocabulary", type=whole, default=131_072, help="ids (default: %(default)s, the real model's)"
    )
    parser.add_argument(
        "--draws", type=whole, default=200, help="of each kind; the median counts (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    path = "C++" if bind(*cpu.SAMPLE) else "no compiler: the definition itself"
    print(f"{args.vocabulary} ids, {path}, median of {args.draws}")
    rows = []
    for spread, sigma in SPREADS.items():
        for name, what, draw, definition in cases(args.vocabulary, sigma):
            for position in range(CHECKED):
                if draw(position) != definition(position):
                    print(f"{what}, {spread}: position {position} differs from the definition")
                    return 1
            ours, theirs = median_ms(draw, args.draws), median_ms(definition, CHECKED)
            print(f"{what:<38} {spread:<12} {ours:8.3f} ms   definition {theirs:8.2f} ms")
            rows.append((name, ours, "ms", f"{what}, {args.vocabulary} random logits, {spread}, one thread, {path}"))
    for row in rows if args.out else ():
        figures.append(args.out, *row)
    return 0


def cases(ids: int, sigma: float) -> list[tuple[str, str, Callable[[int], object], Callable[[int], object]]]:
    """Name of the figure, what is done, how we do it at a position, how the definition does."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ids, generator=generator) * sigma
    half = torch.randint(-(1 << 31), 1 << 31, ((ids + 31) // 32,), generator=generator, dtype=torch.int32)
    masked = cpu.masked(logits, half)
    return [
        (
            "sampling.ms",
            "temperature 1, top_p 0.95",
            lambda position: cpu.sample(logits, 1.0, 0.95, 1, position),
            lambda position: reference.sample(logits, 1.0, 0.95, 1, position),
        ),
        (
            "sampling.options_ms",
            "temperature 0.7, top_k 40, min_p 0.05",
            lambda position: cpu.sample(logits, 0.7, 0.95, 1, position, 40, 0.05),
            lambda position: reference.sample(logits, 0.7, 0.95, 1, position, 40, 0.05),
        ),
        (
            "sampling.masked_ms",
            "temperature 1, half of the ids allowed",
            lambda position: cpu.sample(logits, 1.0, 0.95, 1, position, allowed=half),
            lambda position: reference.sample(masked, 1.0, 0.95, 1, position),
        ),
        (
            "sampling.greedy_ms",
            "greedy",
            lambda position: cpu.sample(logits, 0.0, 1.0, 1, position),
            lambda position: reference.sample(logits, 0.0, 1.0, 1, position),
        ),
        (
            "sampling.logprobs_ms",
            "log probabilities of 20 ids",
            lambda position: cpu.logprobs(logits, position, 20),
            lambda position: penalties.logprobs(logits, position, 20),
        ),
    ]


def median_ms(call: Callable[[int], object], count: int) -> float:
    times = []
    for position in range(count):
        start = time.thread_time()
        call(position)
        times.append(time.thread_time() - start)
    return sorted(times)[count // 2] * 1e3
