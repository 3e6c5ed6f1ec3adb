"""Elementary functions in Triton: units in the last place from the reference, and what is not a number."""

import pytest
import torch
import triton
import triton.language as tl
from gpu_checks import here, poisoned
from odd_memory import randn
from torch import Tensor

from kernels.elementary import gpu, reference

COUNT = 16384
NAMES = ["exp", "sigmoid", "silu", "softplus"]


@triton.jit
def _apply(x, y, COUNT: tl.constexpr, NAME: tl.constexpr):
    at = tl.arange(0, COUNT)
    values = tl.load(x + at)
    if NAME == "exp":
        values = gpu.exp(values)
    elif NAME == "sigmoid":
        values = gpu.sigmoid(values)
    elif NAME == "silu":
        values = gpu.silu(values)
    else:
        values = gpu.softplus(values)
    tl.store(y + at, values)


def run(name: str, x: Tensor) -> Tensor:
    padded = torch.cat([x, torch.zeros(COUNT - len(x))])
    y = poisoned(COUNT)
    _apply[(1,)](here(padded), y, COUNT=COUNT, NAME=name, enable_fp_fusion=False)
    return y[: len(x)].cpu()


@pytest.mark.filterwarnings("ignore:overflow")  # the interpreter computes with numpy
@pytest.mark.parametrize("name", NAMES)
def test_is_within_three_units_of_the_reference(name: str) -> None:
    x = torch.cat([torch.linspace(-85, 88, 9001), randn(5000, scale=3), torch.tensor([0.0, 1e-30, -1e-30])])
    exact = getattr(reference, name)(x)
    found = run(name, x)
    units = (found.view(torch.int32) - exact.view(torch.int32)).abs()
    assert int(units.max()) <= 3
    assert not torch.equal(found, getattr(reference, name)(x * 1.000001)), "a change in the last places must show"


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_ends_of_the_range() -> None:
    ends = torch.tensor([float("inf"), float("-inf"), 100.0, -120.0])
    assert run("exp", ends).tolist() == [float("inf"), 0.0, float("inf"), 0.0]
    assert run("sigmoid", ends).tolist() == [1.0, 0.0, 1.0, 0.0]
    assert run("softplus", ends).tolist() == [float("inf"), 0.0, 100.0, 0.0]
    for name in NAMES:
        assert run(name, torch.tensor([float("nan")])).isnan().all()
