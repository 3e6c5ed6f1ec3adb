"""Elementary functions against float64, and their bits against shapes, threads and padding."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from odd_memory import framed, randn
from torch import Tensor

from kernels.elementary.reference import exp, sigmoid, silu, softplus, sqrt, total

Function = Callable[[Tensor], Tensor]

FUNCTIONS: dict[str, tuple[Function, Function]] = {
    "exp": (exp, torch.exp),
    "sigmoid": (sigmoid, torch.sigmoid),
    "silu": (silu, torch.nn.functional.silu),
    "softplus": (softplus, lambda x: torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0)),
}


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_is_within_one_unit_in_the_last_place(name: str) -> None:
    ours, theirs = FUNCTIONS[name]
    x = torch.cat([torch.linspace(-88, 88, 40_001), randn(10_000), randn(10_000, scale=1e-3)])
    found, exact = ours(x), theirs(x.double()).float()
    upwards = torch.nextafter(exact, torch.tensor(math.inf))
    downwards = torch.nextafter(exact, torch.tensor(-math.inf))
    assert ((found == exact) | (found == upwards) | (found == downwards)).all()
    assert (found == exact).float().mean() > 0.999


def test_sqrt_is_correctly_rounded() -> None:
    """Found the hard way: torch.sqrt is not, on some machines, so a whole model differed from its C++ in rare bits."""
    x = torch.cat([randn(500_000).square(), randn(100_000, seed=1).abs() * 1e-30, torch.tensor([0.0, 1e-45, 3e38])])
    assert np.array_equal(sqrt(x).numpy(), np.sqrt(x.numpy()))
    assert not np.array_equal(torch.nextafter(sqrt(x), torch.tensor(9e9)).numpy(), np.sqrt(x.numpy()))


def test_the_comparison_with_float64_can_fail() -> None:
    x = torch.linspace(-10, 10, 1001)
    assert (x.exp().bfloat16().float() != x.double().exp().float()).any()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_special_values(name: str) -> None:
    ours, theirs = FUNCTIONS[name]
    x = torch.tensor([0.0, -0.0, 150.0, -150.0, 89.0, -104.0, math.nan])
    torch.testing.assert_close(ours(x), theirs(x.double()).float(), equal_nan=True, rtol=1e-6, atol=0)
    assert exp(torch.tensor([-math.inf, math.inf])).tolist() == [0.0, math.inf]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", [(1,), (7,), (63, 5), (100, 1003), (3, 65536)], ids=str)
def test_bits_depend_on_neither_shape_nor_threads(name: str, shape: tuple[int, ...], threads: Callable) -> None:
    ours = FUNCTIONS[name][0]
    x = randn(*shape, scale=10)
    threads(1)
    whole = ours(x)
    picks = torch.randint(x.numel(), (200,), generator=torch.Generator().manual_seed(1)).tolist()
    for at in picks:
        assert torch.equal(ours(x.view(-1)[at : at + 1]), whole.view(-1)[at : at + 1])
    for count in (2, 3):
        threads(count)
        assert torch.equal(ours(framed(x)), whole)


@pytest.mark.parametrize("size", [1, 2, 3, 63, 64, 65, 100, 1000])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_total_is_the_sum(size: int, dim: int) -> None:
    x = randn(size, size, 3)
    exact = x.double().sum(dim)
    torch.testing.assert_close(total(framed(x), dim).double(), exact, rtol=0, atol=1e-6 * math.sqrt(size) * 4)
    torch.testing.assert_close(total(x.double(), dim), exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [1, 3, 100, 1000])
def test_total_does_not_see_zeros_behind_or_rows_beside(size: int) -> None:
    x = randn(5, size)
    wide = torch.nn.functional.pad(x, (0, 1333))
    assert torch.equal(total(wide, 1), total(x, 1))
    assert torch.equal(total(x.T.contiguous(), 0), total(x, 1))
    assert torch.equal(torch.stack([total(row, 0) for row in x]), total(x, 1))


def test_total_of_zeros_is_positive() -> None:
    for zeros in (torch.tensor([-0.0]), torch.tensor([-0.0, -0.0]), torch.tensor([-0.0, 0.0, -0.0])):
        assert math.copysign(1, total(zeros, 0).item()) == 1


def test_the_bits_of_a_sum_do_depend_on_its_order() -> None:
    """Else the tests of equality above would show nothing."""
    x = randn(1000)
    orders = [torch.randperm(1000, generator=torch.Generator().manual_seed(seed)) for seed in range(8)]
    assert len({total(x[order], 0).item() for order in orders}) > 1
