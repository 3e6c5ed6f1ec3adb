"""Where the Triton kernels run in tests, and how far their results may be from the reference."""

import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BOUND = 2e-6  # relative root mean square: both compute in float32, in different orders


def here(tensor: Tensor) -> Tensor:
    return tensor.to(DEVICE)


def poisoned(*shape: int) -> Tensor:
    return torch.full(shape, float("nan"), device=DEVICE)


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Root mean square of the difference over that of what is exact; inf where one of the two is not finite."""
    found, exact = found.cpu().double(), exact.cpu().double()
    return float(torch.nan_to_num((found - exact).norm() / exact.norm(), nan=float("inf")))
