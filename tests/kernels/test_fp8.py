"""FP8: values, scales, rounding."""

import pytest
import torch

import kernels.fp8.reference as fp8


def test_every_code_dequantises_to_the_product() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = fp8.dequantise(codes, 0.375)
    # 1 sign, 4 exponent bits of bias 7, 3 fraction bits; exponent 0 is subnormal; all ones is NaN.
    for code in range(256):
        exponent, fraction = code >> 3 & 15, code & 7
        size = fraction * 2.0**-9 if exponent == 0 else (8 + fraction) * 2.0 ** (exponent - 10)
        expected = (-size if code & 128 else size) * 0.375
        assert (values[code] == expected) != (code & 127 == 127), f"code {code:#x}"


def test_what_is_representable_survives() -> None:
    weights = fp8.dequantise(torch.arange(127, dtype=torch.uint8).reshape(1, -1), 2.0**-7)
    assert torch.equal(fp8.dequantise(*fp8.quantise(weights, "max")), weights)
    assert torch.equal(fp8.dequantise(*fp8.quantise(weights, "mse")), weights)


def test_ties_go_to_the_even_code_and_nothing_overflows() -> None:
    weight, scale = fp8.quantise(torch.tensor([[448.0, 17.0, 19.0, -17.0, 447.9]]), "max")
    assert scale == 1
    assert weight.float().tolist() == [[448, 16, 20, -16, 448]]  # steps of 2 between 16 and 32


def test_plain_rounding_fits_the_largest_weight() -> None:
    weights = torch.randn(5, 33, generator=torch.Generator().manual_seed(1))
    weight, scale = fp8.quantise(weights, "max")
    assert scale == weights.abs().amax() / 448
    assert weight.float().abs().amax() == 448


def test_least_squares_is_better() -> None:
    weights = torch.randn(64, 65, generator=torch.Generator().manual_seed(2)) * 0.03
    errors = {c: (fp8.dequantise(*fp8.quantise(weights, c)) - weights).square().sum() for c in ("max", "mse")}
    assert errors["mse"] < errors["max"]


def test_an_all_zero_tensor_stays_zero() -> None:
    weight, scale = fp8.quantise(torch.zeros(3, 4))
    assert scale == 1
    assert not weight.float().any()


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        fp8.quantise(torch.tensor([bad, 1.0]))
