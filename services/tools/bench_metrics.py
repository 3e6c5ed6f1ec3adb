"""`thimble bench metrics STORE`: what counting costs a token, on the processor.

The engine's own scheduler, metrics and experts make tokens with a network that computes next to nothing, in turns with
metrics that count nothing; the difference is the cost. The network's own clocks are measured beside it: two readings a
layer. The share is of a token of `--token-ms`, by default the fastest that was measured of the real shape.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from services.engine.config import EngineConfig
from services.engine.experts.streamer import Experts
from services.engine.load import load
from services.engine.model import Model, Segment
from services.engine.request import Request
from services.engine.scheduler import Scheduler
from services.engine.sequence import Sequence
from services.tools import figures
from services.tools.amounts import amount, whole

TOKEN_MS = 19.7  # decode.tok_s, one sequence, in tests/bench/results/h200-16core.csv
LAYERS = 88
WARM = 20


class Nothing:
    """Whatever is asked of it, it takes and does nothing: metrics that do not count."""

    def __getattr__(self, name: str) -> "Nothing":
        return self

    def __getitem__(self, key: object) -> "Nothing":
        return self

    def __call__(self, *words: object) -> "Nothing":
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


class NoNetwork:
    """Says the same whatever it is fed, but moves what is counted: one layer's experts, and every clock."""

    def __init__(self, model: Model, experts: Experts) -> None:
        vocabulary, self.spent, self.experts = model.config.vocab_size, model.spent, experts
        self.ids = torch.arange(model.config.experts_per_token, dtype=torch.int32).view(1, -1)
        self.weights, self.x = torch.ones(self.ids.shape), torch.ones(1, model.config.latent_size)
        self.logits = torch.zeros(1, vocabulary)
        self.logits[0, -1] = 1.0

    def forward(self, segments: list[Segment], give_way: Callable[[], bool] | None = None) -> Tensor:
        for segment in segments:
            segment.state.ids.extend(segment.ids)
        self.experts.step(0, self.ids, self.weights, self.x)
        self.spent.dense_s += 1e-3
        self.spent.experts_s += 1e-3
        self.spent.handoff_s += 1e-3
        self.spent.inputs_s += 1e-3
        return self.logits

    def reading(self, segments: list[Segment]) -> Generator[float, None, Tensor]:
        yield 0.0
        return self.forward(segments)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", type=Path, help="any store, of which a few experts are opened")
    parser.add_argument("--tokens", type=whole, default=200, help="in each turn (default: %(default)s)")
    parser.add_argument("--turns", type=whole, default=10, help="the median counts (default: %(default)s)")
    parser.add_argument("--token-ms", type=amount, default=TOKEN_MS, help="a token's time (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="append the figures to this CSV file (its name names the machine)")


def run(args: argparse.Namespace) -> int:
    config = EngineConfig(
        store=args.store, device="cpu", warm_dir="-", hot_states_gb=0.01, workers=1, speculation="off"
    )
    parts = load(config, CollectorRegistry(), lambda text: None)
    try:
        scheduler: Any = parts.scheduler
        scheduler.model = NoNetwork(scheduler.model, parts.experts)
        metrics, nothing = scheduler.metrics, Nothing()
        answer(scheduler, args.tokens)
        costs = []
        for _ in range(args.turns):
            scheduler.metrics = metrics
            with_us = answer(scheduler, args.tokens)
            scheduler.metrics = nothing
            costs.append(with_us - answer(scheduler, args.tokens))
    finally:
        parts.experts.close()
    counting_us, clocks_us = statistics.median(costs), 2 * LAYERS * clock_us()
    share = (counting_us + clocks_us) / (1e3 * args.token_ms)
    print(
        f"counting {counting_us:.1f} us a token, clocks of {LAYERS} layers {clocks_us:.1f} us: {share:.2%} of a token"
    )
    print(f"of {args.token_ms} ms")
    if args.out:
        note = (
            f"median of {args.turns} turns of {args.tokens} tokens, and two clock readings for each of {LAYERS} layers"
        )
        figures.append(args.out, "metrics.us_per_token", counting_us + clocks_us, "us", note)
        figures.append(args.out, "metrics.share_of_token", share, "ratio", f"{note}; of a token of {args.token_ms} ms")
    return 0


def answer(scheduler: Scheduler, tokens: int) -> float:
    """An answer of one sequence -> microseconds of this thread for each of its tokens."""
    steps: list[float] = []
    sequence = Sequence(Request("bench", (1, 2, 3), tokens + WARM), lambda event: None)
    scheduler.add(sequence)
    while not sequence.over:
        begun = time.thread_time_ns()
        scheduler.step()
        scheduler.publish()
        steps.append((time.thread_time_ns() - begun) * 1e-3)
    return statistics.median(steps[WARM:-1])


def clock_us(count: int = 10_000) -> float:
    """Of one reading with its sum."""
    total, begun = 0.0, time.thread_time_ns()
    for _ in range(count):
        total += time.perf_counter() - total
    return (time.thread_time_ns() - begun) * 1e-3 / count
