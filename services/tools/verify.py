"""`thimble verify`: is a store's model the model of its checkpoint? Against transformers, in figures.

Owns the run over the passages, the table and the recorded rows; what is measured and the bars are in parity.py, the
reference is in oracle.py. Needs the checkpoint that the store was made of, and memory for all of it in float32.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

from services.engine.experts.store import Store
from services.engine.experts.streamer import open_experts
from services.engine.model import Model
from services.tools import figures, oracle
from services.tools.parity import GREEDY_BAR, GREEDY_TOKENS, MEAN_KL_BAR, Parity, ask_reference, compare
from services.tools.passages import PASSAGES

QUICK = ("chat",)
HEADING = f"{'passage':<9}{'tokens':>7}{'ppl':>10}{'ref ppl':>10}{'mean KL':>10}{'max KL':>10}{'top-1':>7}{'greedy':>8}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", type=Path, help="folder that thimble repack wrote")
    parser.add_argument("checkpoint", type=Path, help="the checkpoint it was made of")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument(
        "--record", type=Path, metavar="CSV", help="append parity.demo_mean_kl and parity.demo_greedy64"
    )


def run(args: argparse.Namespace) -> int:
    store = Store.open(args.store)
    print(HEADING, flush=True)
    found = {}
    for name, parity in measure(store, args.checkpoint, QUICK if args.quick else tuple(PASSAGES)):
        print(line(name, parity), flush=True)
        found[name] = parity
    worst_kl = max(found, key=lambda name: found[name].mean_kl)
    worst_greedy = min(found, key=lambda name: found[name].greedy)
    if args.record:
        model = store.source.get("folder", "model")
        note = f"{model} on cpu, worst of {len(found)} passages: "
        figures.append(args.record, "parity.demo_mean_kl", found[worst_kl].mean_kl, "nats", note + worst_kl)
        figures.append(args.record, "parity.demo_greedy64", found[worst_greedy].greedy, "of 64", note + worst_greedy)
    passed = all(parity.passed for parity in found.values())
    bars = f"mean KL at most {MEAN_KL_BAR}, greedy at least {GREEDY_BAR} of {GREEDY_TOKENS}"
    print(f"{'passed' if passed else 'FAILED'}: {bars} on every passage")
    return 0 if passed else 1


def measure(store: Store, checkpoint: Path, names: tuple[str, ...]) -> Iterator[tuple[str, Parity]]:
    """The figures of each passage, as they come. Raises OracleError."""
    reference, tokenizer = oracle.load(checkpoint), oracle.tokenizer(checkpoint)
    # More threads gain little for one sequence and wait for one another on a busy machine.
    torch.set_num_threads(1)
    experts = open_experts(store, slots=sum(map(len, store.blocks)))
    try:
        model = Model(store.dense(), store.config, experts)
        for name in names:
            yield name, compare(model, ask_reference(reference, tokenizer(PASSAGES[name])))
    finally:
        experts.close()


def line(name: str, parity: Parity) -> str:
    margins = "".join(f"  margin {margin:.4f}" for margin in parity.margins)
    return (
        f"{name:<9}{parity.tokens:>7}{parity.perplexity:>10.5g}{parity.reference_perplexity:>10.5g}"
        f"{parity.mean_kl:>10.2e}{parity.max_kl:>10.2e}{parity.top1:>7.3f}{parity.greedy:>5}/{GREEDY_TOKENS}{margins}"
    )
