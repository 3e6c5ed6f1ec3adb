"""Norms against transformers and float64, in awkward memory; rows do not see each other."""

import pytest
import torch
from odd_memory import distance, framed, randn, tolerance
from torch import Tensor

from kernels.norm.reference import gated_group_rms_norm, rms_norm

EPS = 1e-5
TOLERANCE = tolerance("norm")
SHAPES = [(1, 4), (3, 63), (2, 100), (7, 1000), (5, 4096)]


def gate_after(y: Tensor, z: Tensor, weight: Tensor, group: int, eps: float) -> Tensor:
    """A wrong order of operations, for the controls."""
    ones = torch.full_like(z, 30.0)  # silu(30) = 30, a constant that the norm takes out again
    return gated_group_rms_norm(y, ones, weight, group, eps) * torch.nn.functional.silu(z)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm_is_the_formula(shape: tuple[int, int]) -> None:
    x, weight = randn(*shape, scale=3), randn(shape[1], seed=1)
    exact = x.double() / (x.double().square().mean(1, keepdim=True) + EPS).sqrt() * weight.double()
    assert distance(rms_norm(framed(x), framed(weight), EPS), exact) < TOLERANCE


def test_rms_norm_is_transformers() -> None:
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNorm

    x, weight = randn(9, 96), randn(96, seed=1)
    theirs = NemotronHRMSNorm(96, eps=EPS)
    theirs.weight.data = weight
    assert distance(rms_norm(x, weight, EPS), theirs(x).detach()) < TOLERANCE


@pytest.mark.parametrize(("columns", "group"), [(8, 8), (126, 63), (300, 100), (4096, 1024)])
def test_gated_norm_is_transformers(columns: int, group: int) -> None:
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNormGated

    y, z, weight = randn(5, columns), randn(5, columns, seed=1), randn(columns, seed=2)
    theirs = NemotronHRMSNormGated(columns, group, eps=EPS)
    theirs.weight.data = weight
    exact = theirs(y, z).detach()
    assert distance(gated_group_rms_norm(framed(y), framed(z), framed(weight), group, EPS), exact) < TOLERANCE
    assert distance(gate_after(y, z, weight, group, EPS), exact) > 0.1, "the gate's place must show"
    if group < columns:
        assert distance(gated_group_rms_norm(y, z, weight, columns, EPS), exact) > 1e-2, "groups must show"


def test_epsilon_counts_for_small_rows() -> None:
    x, weight = randn(2, 64, scale=1e-3), torch.ones(64)
    assert distance(rms_norm(x, weight, EPS), rms_norm(x, weight, 1e-12)) > 0.1
    assert torch.equal(rms_norm(torch.zeros(2, 64), weight, EPS), torch.zeros(2, 64))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_does_not_see_the_others(shape: tuple[int, int]) -> None:
    y, z, weight = randn(*shape), randn(*shape, seed=1), randn(shape[1], seed=2)
    plain, gated = rms_norm(y, weight, EPS), gated_group_rms_norm(y, z, weight, shape[1], EPS)
    for row in range(shape[0]):
        at = slice(row, row + 1)
        assert torch.equal(rms_norm(y[at], weight, EPS), plain[at])
        assert torch.equal(gated_group_rms_norm(y[at], z[at], weight, shape[1], EPS), gated[at])
    y[0] = float("nan")
    assert torch.equal(rms_norm(y, weight, EPS)[1:], plain[1:])
