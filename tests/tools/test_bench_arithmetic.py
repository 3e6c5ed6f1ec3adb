"""The arithmetic benchmark rounds as the contract does, and sees that fewer bits cost more."""

import torch

from kernels.experts import reference
from services.tools import bench_arithmetic


def test_sixteen_bits_are_the_contract() -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    integers, exponents = reference.quantise(x)
    kept = bench_arithmetic.kept(x.double(), 16)
    for row, exponent in enumerate(exponents.tolist()):
        assert torch.equal(kept[row] * 2.0**exponent, integers[row])


def test_fewer_bits_cost_more() -> None:
    generator = torch.Generator().manual_seed(1)
    x, up, down = (torch.randn(shape, generator=generator).double() for shape in ((4, 64), (96, 64), (64, 96)))
    exact = bench_arithmetic.product(x, up, down, None)
    errors = [
        float((bench_arithmetic.product(x, up, down, bits) - exact).norm() / exact.norm()) for bits in (16, 12, 8)
    ]
    assert errors[0] < 1e-3 < errors[2]
    assert errors == sorted(errors)
