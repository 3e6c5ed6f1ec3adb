"""`thimble bench arithmetic`: what rounding an expert's inputs to 16 bits costs, beside 8 bits, against exact float64.

Experts of the real model's shape from random weights that were never trained to bear quantisation, rounded to NVFP4;
the error is that of the activations' rounding alone, since all variants use the same weights. With --store and
--checkpoint also end to end: KL of a whole model from transformers. The shipped arithmetic is
kernels/experts/reference.py; `bits` below only changes how many bits an input keeps.
"""

import argparse
import functools
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kernels.experts import reference
from kernels.nvfp4.reference import dequantise, quantise
from services.engine.experts.store import Store
from services.engine.experts.streamer import PythonExperts
from services.engine.model import Model
from services.tools import figures, oracle, parity, passages

LATENT, WIDTH, TOKENS = 1024, 2688, 64
BITS = (16, 8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="append the figures to this CSV file (its name names the machine)")
    parser.add_argument("--store", type=Path, help="with --checkpoint: a small model's store, to measure it end to end")
    parser.add_argument("--checkpoint", type=Path, help="the checkpoint that the store was made from")


def run(args: argparse.Namespace) -> int:
    generator = torch.Generator().manual_seed(0)
    up, down = (rounded(torch.randn(shape, generator=generator)) for shape in ((WIDTH, LATENT), (LATENT, WIDTH)))
    # A few large inputs, as real residual streams have: they set the one scale that all others share.
    x = torch.randn(TOKENS, LATENT, generator=generator)
    x[:, :4] *= 20
    exact = product(x, up, down, None)
    rows = []
    for bits in BITS:
        error = float((product(x, up, down, bits) - exact).norm() / exact.norm())
        print(f"inputs of {bits:2} bits: relative error {error:.2e}")
        note = "random weights in NVFP4, inputs with outliers of 20 sigma"
        rows.append((f"arithmetic.error_int{bits}", error, "ratio", note))
    if args.store and args.checkpoint:
        for bits, kl in end_to_end(args.store, args.checkpoint):
            print(f"inputs of {bits:2} bits: mean KL {kl:.2e} over all passages")
            rows.append((f"arithmetic.mean_kl_int{bits}", kl, "nats", f"{args.checkpoint.name}, all passages"))
    for row in rows if args.out else ():
        figures.append(args.out, *row)
    return 0


def rounded(weight: Tensor) -> Tensor:
    return dequantise(*quantise(weight)).double()


def product(x: Tensor, up: Tensor, down: Tensor, bits: int | None) -> Tensor:
    """float64 [tokens, latent]: the expert with its inputs kept to `bits` bits, or exact."""
    h = torch.relu(kept(x.double(), bits) @ up.T) ** 2
    return kept(h, bits) @ down.T


def kept(values: Tensor, bits: int | None) -> Tensor:
    """One power of two a row, as the contract's quantise; fewer bits by rounding its 16 further."""
    if bits is None:
        return values
    quantised, exponent = reference.quantise(values.float())
    coarse = 2.0 ** (16 - bits)
    limit = 2 ** (bits - 1) - 1
    integers = (quantised / coarse).round().clamp(-limit, limit) * coarse
    return integers * torch.from_numpy(np.exp2(-exponent.astype(np.float64)))[:, None]


def end_to_end(folder: Path, checkpoint: Path) -> list[tuple[int, float]]:
    """For each of BITS: KL from transformers in float32, the mean over every position of all passages."""
    store, theirs, ids_of = Store.open(folder), oracle.load(checkpoint), oracle.tokenizer(checkpoint)
    expected = [parity.ask_reference(theirs, ids_of(text)) for text in passages.PASSAGES.values()]
    results = []
    for bits in BITS:
        model = Model(store.dense(), store.config, CoarseExperts(store, bits))
        found = [parity.compare(model, one) for one in expected]
        results.append((bits, sum(p.mean_kl * p.tokens for p in found) / sum(p.tokens for p in found)))
    return results


class CoarseExperts(PythonExperts):
    """The routed experts with inputs of `bits` bits; in float64, so nothing else is rounded."""

    def __init__(self, store: Store, bits: int) -> None:
        super().__init__(store, slots=sum(map(len, store.blocks)))
        self.bits = bits
        self.weights = functools.cache(self._weights)

    def step(self, layer: int, ids: Tensor, weights: Tensor, x: Tensor) -> Tensor:
        out = torch.zeros(x.shape, dtype=torch.float64)
        for id_ in sorted(set(ids.flatten().tolist())):
            rows, ranks = (ids == id_).nonzero(as_tuple=True)
            y = product(x[rows], *self.weights(layer, id_), self.bits)
            out.index_add_(0, rows, y * weights[rows, ranks, None].double())
        return out.float()

    def _weights(self, layer: int, id_: int) -> tuple[Tensor, Tensor]:
        expert = self._expert(layer, id_)
        factor = 2.0**-10  # the integers are codes times 2 and scales times 2^9
        return expert.up * (expert.up_scale * factor), expert.down * (expert.down_scale * factor)
