"""The linear layer: a true fma in a fixed order, and C++ equal to it for every shape, thread count and ISA."""

import math
from fractions import Fraction

import pytest
import torch

from kernels.linear import cpu, reference
from kernels.workers.pool import Workers, available_isas

SHAPES = [(1, 16, 1), (1, 1, 1), (3, 100, 7), (5, 257, 33), (9, 15, 64), (2, 1000, 13), (130, 48, 100)]
ODD_VALUES = (0.0, -0.0, 2.0**-149, -(2.0**-126), 3.4e38, -3.4e38, 1.0, 2.0**-75)


def inputs(rows: int, size: int, outputs: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(rows, size, generator=generator), torch.randn(outputs, size, generator=generator)
    for at, value in enumerate(ODD_VALUES[:size]):
        x[at % rows, at] = value
    return x, weight


def bits(values: torch.Tensor) -> torch.Tensor:
    """NaN payloads are not part of the contract; every other bit is."""
    return torch.where(values.isnan(), -1, values.view(torch.int32))


def exact(value: Fraction, sign_of_zero: float) -> float:
    """A fraction rounded to float32, half to even, done with integers only (no subnormals, no overflow)."""
    if value == 0:
        return math.copysign(0.0, sign_of_zero)
    exponent = 0
    size = abs(value)
    while size >= 2**24:
        size, exponent = size / 2, exponent + 1
    while size < 2**23:
        size, exponent = size * 2, exponent - 1
    return math.copysign(math.ldexp(round(size), exponent), value)


@pytest.mark.parametrize("seed", range(3))
def test_the_definition_is_a_fused_multiply_add(seed: int) -> None:
    x, weight = (t[:, :40] for t in inputs(1, 48, 3, seed))
    x = torch.randn(1, 40, generator=torch.Generator().manual_seed(seed + 10))
    for n in range(3):
        lanes = [0.0] * 16
        for k in range(40):
            product = Fraction(x[0, k].item()) * Fraction(weight[n, k].item())
            lanes[k % 16] = exact(product + Fraction(lanes[k % 16]), 1.0)
        for half in (8, 4, 2, 1):
            lanes = [exact(Fraction(lanes[i]) + Fraction(lanes[i + half]), 1.0) for i in range(half)]
        assert reference.linear(x, weight)[0, n].item() == lanes[0]


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_definition(shape: tuple[int, int, int], isa: str) -> None:
    x, weight = inputs(*shape)
    expected = bits(reference.linear(x, weight))
    for threads in (1, 2, 7):
        workers = Workers(threads, spin_us=0)
        assert torch.equal(bits(cpu.linear(x, weight, workers, isa)), expected), threads
        workers.close()


def test_overflow_infinity_and_nan_go_through() -> None:
    x = torch.tensor([[3.4e38] * 32, [math.inf] + [0.0] * 31, [math.nan] + [1.0] * 31, [math.inf, -math.inf] * 16])
    weight = torch.full((2, 32), 2.0)
    expected = reference.linear(x, weight)
    assert expected[0].isinf().all()
    assert expected[1].isinf().all()
    assert expected[2:].isnan().all()
    for isa in available_isas():
        assert torch.equal(bits(cpu.linear(x, weight, None, isa)), bits(expected))


def test_a_row_does_not_depend_on_the_others() -> None:
    x, weight = inputs(33, 130, 50)
    whole = cpu.linear(x, weight)
    for row in range(33):
        assert torch.equal(cpu.linear(x[row : row + 1], weight)[0], whole[row])
    assert torch.equal(cpu.linear(x, weight[7:20]), whole[:, 7:20])
    assert torch.equal(cpu.linear(x.repeat(2, 1)[1::2], weight), whole.repeat(2, 1)[1::2])


def test_every_output_is_written() -> None:
    """A result's memory is what torch hands out, often a freed tensor: fill one of the same size with NaN first."""
    x, weight = inputs(7, 64, 333)
    expected = cpu.linear(x, weight)
    for _ in range(5):
        poison = torch.full_like(expected, math.nan)
        del poison
        assert torch.equal(bits(cpu.linear(x, weight)), bits(expected))


def test_the_comparison_can_fail() -> None:
    x, weight = inputs(4, 300, 20, seed=5)
    x = x.clamp(-10, 10)
    expected = reference.linear(x, weight)
    changed = weight.clone()
    changed.view(torch.int32)[3, 299] ^= 1 << 12
    assert not torch.equal(cpu.linear(x, changed), expected)
    unfused = torch.zeros(4, 20, 16)
    padded_x, padded_w = (torch.nn.functional.pad(t, (0, 4)) for t in (x, weight))
    for k in range(0, 304, 16):
        unfused = padded_x[:, None, k : k + 16] * padded_w[None, :, k : k + 16] + unfused
    for half in (8, 4, 2, 1):
        unfused = unfused[..., :half] + unfused[..., half : 2 * half]
    assert not torch.equal(unfused[..., 0], expected)
    assert torch.allclose(unfused[..., 0], expected, atol=1e-4)


def test_no_rows_and_refusals() -> None:
    assert cpu.linear(torch.empty(0, 8), torch.empty(3, 8)).shape == (0, 3)
    assert reference.linear(torch.empty(0, 8), torch.empty(3, 8)).shape == (0, 3)
    for function in (cpu.linear, reference.linear):
        with pytest.raises(ValueError, match="must be"):
            function(torch.zeros(2, 8), torch.zeros(3, 9))
        with pytest.raises(ValueError, match="float32"):
            function(torch.zeros(2, 8).double(), torch.zeros(3, 8))
    with pytest.raises(ValueError, match="not available"):
        cpu.linear(torch.zeros(2, 8), torch.zeros(3, 8), None, "avx1024")


def test_without_a_library_the_bits_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = inputs(5, 70, 9)
    expected = cpu.linear(x, weight)
    monkeypatch.setattr(cpu, "_function", lambda: None)
    assert torch.equal(bits(cpu.linear(x, weight)), bits(expected))
