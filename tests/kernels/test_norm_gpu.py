"""The Triton norms against the reference, in the interpreter or on a GPU."""

import pytest
import torch
from gpu_checks import BOUND, here, poisoned, relative_error
from odd_memory import randn

from kernels.linear.octets import from_octets
from kernels.norm import reference
from kernels.norm.gpu import gated_group_rms_norm, rms_norm

EPS = 1e-5


@pytest.mark.parametrize("columns", [8, 72, 300])
def test_rms_norm_is_the_reference(columns: int) -> None:
    x, weight, out = randn(3, columns, scale=30), randn(columns, seed=1), poisoned(3, columns)
    rms_norm(here(x), here(weight), EPS, out)
    assert relative_error(out, reference.rms_norm(x, weight, EPS)) < BOUND
    alone = poisoned(1, columns)
    rms_norm(here(x[2:]), here(weight), EPS, alone)
    assert torch.equal(alone[0], out[2])


@pytest.mark.parametrize(("columns", "group"), [(48, 24), (64, 64), (64, 8)])
def test_gated_norm_is_the_reference(columns: int, group: int) -> None:
    y, wide, weight, out = (
        randn(3, columns),
        randn(3, 3 * columns, seed=1),
        randn(columns, seed=2),
        poisoned(3, columns),
    )
    z = wide[:, columns : 2 * columns]  # a slice of the projection
    gated_group_rms_norm(here(y), here(wide)[:, columns : 2 * columns], here(weight), group, EPS, out)
    assert relative_error(from_octets(out), reference.gated_group_rms_norm(y, z, weight, group, EPS)) < BOUND
    ungated = reference.gated_group_rms_norm(y, torch.full_like(z, 50.0), weight, group, EPS)
    assert relative_error(from_octets(out), ungated) > 0.1, "the gate must show"
    alone = poisoned(1, columns)
    gated_group_rms_norm(here(y[1:2]), here(wide)[1:2, columns : 2 * columns], here(weight), group, EPS, alone)
    assert torch.equal(alone[0], out[1])


def test_a_row_of_zeros_is_zero_and_a_nan_spreads() -> None:
    x, weight = torch.zeros(2, 32), torch.ones(32)
    x[1, 3] = float("nan")
    out = poisoned(2, 32)
    rms_norm(here(x), here(weight), EPS, out)
    assert torch.equal(out[0].cpu(), torch.zeros(32))
    assert out[1].isnan().all()
