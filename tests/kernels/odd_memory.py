"""Inputs in awkward memory: every row is a slice of a wider one that is NaN elsewhere. Reading outside shows.

And how far two results may be apart: see kernels/README.md.
"""

import re
from pathlib import Path

import torch
from torch import Tensor

TOLERANCES = (Path(__file__).parents[2] / "kernels/README.md").read_text()


def tolerance(operation: str) -> float:
    """From the table in kernels/README.md."""
    (value,) = re.findall(rf"^\| {operation} \| (\S+) \|", TOLERANCES, re.MULTILINE)
    return float(value)


def framed(tensor: Tensor) -> Tensor:
    """The same values as a strided view into a buffer of NaN."""
    frame = torch.full([size + 3 for size in tensor.shape], float("nan"), dtype=tensor.dtype)
    view = frame[tuple(slice(1, 1 + size) for size in tensor.shape)]
    view.copy_(tensor)
    return view


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def distance(found: Tensor, exact: Tensor) -> float:
    """Largest error relative to the root mean square of what is exact; inf where one of the two is not finite."""
    error = (found.double() - exact.double()).abs().max() / exact.double().square().mean().sqrt()
    return float(torch.nan_to_num(error, nan=float("inf")))
