"""`thimble routing STORE`: how a model's experts are named and how many of their neurons are zero, beside what was
published for the real model.

Of the tokens answered in the dialogs of `thimble record`. Owns the count of zeros, which no trace has: experts are
unpacked in Python for it, which is quick for a small model and takes hours for one of 120 B parameters.
"""

import argparse
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from torch import Tensor

from kernels.experts import reference
from services.engine.experts.store import Store
from services.engine.experts.streamer import Counters, Experts
from services.engine.experts.trace import read_trace
from services.tools import figures, record
from services.tools.amounts import whole
from services.tools.traces import calibration
from services.tools.traces.calibration import Figure

ZEROS = 0.925  # published for Nemotron-3-Super, as a share of the neurons behind ReLU^2
NAMES = ("demo.lru_hits", "demo.repeats", "demo.guessed", "demo.zeros")


class Zeros:
    """Experts that also count, of every decoded token, the neurons of named experts that are zero behind ReLU^2."""

    def __init__(self, store: Store) -> None:
        self._experts: Experts | None = None
        self._store = store
        self._up = lru_cache(maxsize=512)(self._unpacked)
        self.neurons = self.zeros = 0

    def before(self, experts: Experts) -> "Zeros":
        """This count, in front of other experts than before."""
        self._experts = experts
        return self

    def step(self, layer: int, ids: Tensor, weights: Tensor, x: Tensor) -> Tensor:
        if len(x) == 1:
            values, _ = reference.quantise(x)
            for id_ in ids[0].tolist():
                sums = values @ self._up(layer, id_).T  # exact: behind ReLU^2 a neuron is zero unless its sum is above
                self.neurons += sums.numel()
                self.zeros += int((sums <= 0).sum())
        return self._inner.step(layer, ids, weights, x)

    def prefetch(self, layer: int, ids: Tensor) -> None:
        self._inner.prefetch(layer, ids)

    @property
    def prefetching(self) -> bool:
        return self._inner.prefetching

    def counters(self) -> Counters:
        return self._inner.counters()

    def check(self) -> None:
        self._inner.check()

    def close(self) -> None:
        self._inner.close()

    @property
    def _inner(self) -> Experts:
        assert self._experts is not None, "before() names them"
        return self._experts

    def _unpacked(self, layer: int, id_: int) -> Tensor:
        block = self._store.layers[layer][id_]
        data = self._store.read_block(layer, id_)
        return reference.unpack_expert(data, self._store.layout, block.up_scale, block.down_scale).up


def measure(store: Store, folder: Path, answer_tokens: int = 60, dialogs: int = len(record.DIALOGS)) -> list[Figure]:
    """The figures in the order of NAMES; of dialogs by their decoded tokens. Traces are left in `folder`."""
    zeros = Zeros(store)
    slots = max(store.config.experts_per_token, int(calibration.SHARE * sum(map(len, store.blocks))))
    paths = record.record(store, folder, slots=slots, answer_tokens=answer_tokens, dialogs=dialogs, beside=zeros.before)
    traces = [read_trace(path) for path in paths]
    tokens = [trace.decoded_tokens for trace in traces]
    each = [calibration.figures(trace.routing()) for trace in traces]
    found = [
        Figure(same[0].text, same[0].low, same[0].high, float(np.average([one.found for one in same], weights=tokens)))
        for same in zip(*each, strict=True)
    ]
    share = zeros.zeros / zeros.neurons
    return [*found, Figure("values behind relu^2 that are zero", ZEROS - 0.01, ZEROS + 0.01, share)]


def several(text: str) -> int:
    """Tokens of an answer: figures are of one token beside the next."""
    return whole(text, 2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", type=Path, help="folder that `thimble repack` wrote, of a small model")
    parser.add_argument("--answer-tokens", type=several, default=60, help="longest answer (60)")
    parser.add_argument("--dialogs", type=whole, default=len(record.DIALOGS), help=f"so many of {len(record.DIALOGS)}")
    parser.add_argument("--record", type=Path, metavar="CSV", help="append the figures as rows")
    parser.add_argument("--note", default="", help="put before each row's note")


def run(args: argparse.Namespace) -> int:
    store = Store.open(args.store)
    dialogs = min(args.dialogs, len(record.DIALOGS))
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(store, Path(scratch), args.answer_tokens, dialogs)
    calibration.show(f"{store.config.experts} experts, {dialogs} dialogs", found)
    if args.record:
        write(args.record, args.note, found)
    return 0


def write(path: Path, note: str, found: Sequence[Figure]) -> None:
    for name, one in zip(NAMES, found, strict=True):
        published = f"{one.text}; published for the real model: {one.low:.0%} to {one.high:.0%}"
        figures.append(path, name, one.found, "share", "; ".join(filter(None, (note, published))))
