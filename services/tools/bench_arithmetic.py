"""`thimble bench arithmetic`: what rounding an expert's inputs to 16 bits costs, beside 8 bits, against exact float64.

Experts of the real model's shape from random weights that were never trained to bear quantisation, rounded to NVFP4;
the error is that of the activations' rounding alone, since all variants use the same weights. The shipped arithmetic is
kernels/experts/reference.py; `bits` below only changes how many bits an input keeps.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kernels.experts import reference
from kernels.nvfp4.reference import dequantise, quantise
from services.tools import figures

LATENT, WIDTH, TOKENS = 1024, 2688, 64
NAMES = {16: "arithmetic.error_int16", 8: "arithmetic.error_int8"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="append the figures to this CSV file (its name names the machine)")


def run(args: argparse.Namespace) -> int:
    generator = torch.Generator().manual_seed(0)
    up, down = (rounded(torch.randn(shape, generator=generator)) for shape in ((WIDTH, LATENT), (LATENT, WIDTH)))
    # A few large inputs, as real residual streams have: they set the one scale that all others share.
    x = torch.randn(TOKENS, LATENT, generator=generator)
    x[:, :4] *= 20
    exact = product(x, up, down, None)
    for bits, name in NAMES.items():
        error = float((product(x, up, down, bits) - exact).norm() / exact.norm())
        print(f"inputs of {bits:2} bits: relative error {error:.2e}")
        if args.out:
            figures.append(args.out, name, error, "ratio", "random weights in NVFP4, inputs with outliers of 20 sigma")
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
