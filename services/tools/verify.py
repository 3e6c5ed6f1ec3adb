"""`thimble verify`: is a store's model the model of its checkpoint? Against transformers, in figures.

Owns the run over the passages, the table and the recorded rows; what is measured and the bars are in parity.py, the
reference is in oracle.py and, for models that memory does not hold in float32, in oracle_layers.py. The mistakes that
the figures must show are in controls.py.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path

import torch

from kernels.workers.pool import SPIN_US
from services.engine.experts.store import Store
from services.engine.experts.streamer import open_experts
from services.engine.gpu.open import AWAKE_US, Sizes, open_device
from services.engine.model import Model
from services.engine.model_config import read_config
from services.engine.pages import pages_for
from services.tools import controls, figures, oracle, oracle_layers
from services.tools.complaints import UsageError
from services.tools.parity import (
    GREEDY_BAR,
    GREEDY_TOKENS,
    MEAN_KL_BAR,
    Expected,
    Network,
    Parity,
    ask_reference,
    compare,
    propose,
)
from services.tools.passages import PASSAGES

QUICK = ("chat",)
HEADING = f"{'passage':<9}{'tokens':>7}{'ppl':>11}{'ref ppl':>11}{'mean KL':>10}{'max KL':>10}{'top-1':>7}{'greedy':>8}"
CONTEXT_TOKENS = 4096  # of the GPU engine: more than the longest passage
KEPT = "verify.reference"  # in the store's folder while the reference runs layer by layer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, nargs="?", help="the checkpoint that the store was made of")
    parser.add_argument("store", type=Path, nargs="?", help="folder that thimble repack wrote")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the engine's model runs")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument(
        "--by-layer",
        action=argparse.BooleanOptionalAction,
        help="run the reference a layer at a time from disk; resumes (default: if memory does not hold all in float32)",
    )
    parser.add_argument(
        "--controls", action="store_true", help="run the nine mistakes that the figures must show; needs no checkpoint"
    )
    parser.add_argument(
        "--record", type=Path, metavar="CSV", help="append parity.demo_mean_kl and parity.demo_greedy64"
    )


def run(args: argparse.Namespace) -> int:
    # More threads gain little for one sequence and wait for one another on a busy machine.
    torch.set_num_threads(1)
    if args.controls:
        caught = controls.report()
        print(f"{'passed' if caught else 'FAILED'}: every mistake must show as a mean KL of {controls.CAUGHT_KL:.3g}")
        if args.checkpoint is None:
            return 0 if caught else 1
        if not caught:
            return 1
    if args.checkpoint is None or args.store is None:
        raise UsageError("give the checkpoint's folder and the store's, or --controls")
    read_config(args.checkpoint)  # a wrong path is told before anything is computed
    store = Store.open(args.store)
    names = QUICK if args.quick else tuple(PASSAGES)
    by_layer = args.by_layer if args.by_layer is not None else _float32_bytes(args.checkpoint) > _available_bytes()
    found = {}
    print(HEADING, flush=True)
    for name, parity in (measure_by_layer if by_layer else measure)(store, args.checkpoint, names, args.device):
        print(line(name, parity), flush=True)
        found[name] = parity
    if args.record:
        _record(args.record, store, found, args.device)
    passed = all(parity.passed for parity in found.values())
    bars = f"mean KL at most {MEAN_KL_BAR}, greedy at least {GREEDY_BAR} of {GREEDY_TOKENS}"
    print(f"{'passed' if passed else 'FAILED'}: {bars} on every passage")
    return 0 if passed else 1


def measure(store: Store, checkpoint: Path, names: tuple[str, ...], device: str) -> Iterator[tuple[str, Parity]]:
    """The figures of each passage, as they come. Raises OracleError."""
    reference, tokenizer = oracle.load(checkpoint), oracle.tokenizer(checkpoint)
    with running(store, device) as model:
        for name in names:
            yield name, compare(model, ask_reference(reference, tokenizer(PASSAGES[name])))


def measure_by_layer(
    store: Store, checkpoint: Path, names: tuple[str, ...], device: str
) -> Iterator[tuple[str, Parity]]:
    """As `measure`, with the engine's model and the reference never in memory together, and the reference run once."""
    tokenizer = oracle.tokenizer(checkpoint)
    ids = {name: tokenizer(PASSAGES[name]) for name in names}
    with running(store, device) as model:
        continued = {name: propose(model, ids[name]) for name in names}
    texts = [ids[name] + continued[name] for name in names]
    logits = oracle_layers.logits(checkpoint, texts, store.folder / KEPT, lambda said: print(said, flush=True))
    with running(store, device) as model:
        for name, rows in zip(names, logits, strict=True):
            yield name, compare(model, Expected.given(ids[name], continued[name], rows))


@contextmanager
def running(store: Store, device: str) -> Iterator[Network]:
    fitting = _available_bytes() // 2 // store.layout.block_bytes
    slots = min(sum(map(len, store.blocks)), fitting)
    experts = open_experts(store, slots=slots, spin_us=AWAKE_US if device == "cuda" else SPIN_US)
    try:
        if device == "cuda":
            pages = pages_for(CONTEXT_TOKENS)
            yield open_device(store, experts, Sizes(1, (1,), CONTEXT_TOKENS, pages, chunk_tokens=256)).model
        else:
            yield Model(store.dense(), store.config, experts)
    finally:
        experts.close()


def line(name: str, parity: Parity) -> str:
    margins = "".join(f"  margin {margin:.4f}" for margin in parity.margins)
    return (
        f"{name:<9}{parity.tokens:>7}{parity.perplexity:>11.5g}{parity.reference_perplexity:>11.5g}"
        f"{parity.mean_kl:>10.2e}{parity.max_kl:>10.2e}{parity.top1:>7.3f}{parity.greedy:>5}/{GREEDY_TOKENS}{margins}"
    )


def _record(path: Path, store: Store, found: dict[str, Parity], device: str) -> None:
    worst_kl = max(found, key=lambda name: found[name].mean_kl)
    worst_greedy = min(found, key=lambda name: found[name].greedy)
    note = f"{store.source.get('folder', 'model')} on {device}, worst of {len(found)} passages: "
    figures.append(path, "parity.demo_mean_kl", found[worst_kl].mean_kl, "nats", note + worst_kl)
    figures.append(path, "parity.demo_greedy64", found[worst_greedy].greedy, "of 64", note + worst_greedy)


def _float32_bytes(checkpoint: Path) -> int:
    """What the reference takes with all weights in memory, twice as it is made; 0 if the files cannot be read."""
    count = 0
    for path in checkpoint.glob("*.safetensors"):
        with path.open("rb") as file:
            text = file.read(int.from_bytes(file.read(8), "little"))
        try:
            entries = [entry for name, entry in json.loads(text).items() if name != "__metadata__"]
            count += sum(prod(entry["shape"]) * (2 if entry["dtype"] == "U8" else 1) for entry in entries)
        except (ValueError, KeyError, AttributeError):
            return 0
    return 8 * count


def _available_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        return next(int(row.split()[1]) << 10 for row in file if row.startswith("MemAvailable"))
