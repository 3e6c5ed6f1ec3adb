"""The sweep's norms against the reference, and the same bits however rows are cut. In the interpreter, or on a GPU."""

import pytest
import torch
from gpu_checks import BOUND, here, poisoned, relative_error
from odd_memory import randn
from torch import Tensor

from kernels.norm import reference
from kernels.norm.sweep import gated_group_rms_norm, rms_norm

EPS = 1e-5
KINDS = pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])


def normed(x: Tensor, weight: Tensor, kind: torch.dtype = torch.float32) -> Tensor:
    """With rows of NaN before and behind."""
    frame, out = poisoned(len(x) + 2, x.shape[1]), poisoned(len(x) + 2, x.shape[1]).to(kind)
    frame[1:-1] = x
    rms_norm(frame[1:-1], here(weight), EPS, out[1:-1])
    assert out[[0, -1]].isnan().all()
    return out[1:-1].cpu()


def gated(y: Tensor, z: Tensor, weight: Tensor, group: int, kind: torch.dtype = torch.float32) -> Tensor:
    """Of views into wider rows that are NaN elsewhere."""
    columns = y.shape[1]
    wide = poisoned(len(y) + 1, 3 * columns + 8)
    wide[:-1, 4 : 4 + columns], wide[:-1, -columns:] = y, z
    out = poisoned(len(y) + 1, columns).to(kind)
    gated_group_rms_norm(wide[:-1, 4 : 4 + columns], wide[:-1, -columns:], here(weight), group, EPS, out[:-1])
    assert out[-1].isnan().all()
    return out[:-1].cpu()


@pytest.mark.parametrize("columns", [8, 72, 304])
def test_rms_norm_is_the_reference(columns: int) -> None:
    x, weight = randn(5, columns, scale=30), randn(columns, seed=1)
    out = normed(x, weight)
    assert relative_error(out, reference.rms_norm(x, weight, EPS)) < BOUND
    assert relative_error(out, x * weight) > 0.1, "the norm must show"
    assert torch.equal(normed(x, weight, torch.bfloat16), out.bfloat16())


@pytest.mark.parametrize(("columns", "group"), [(48, 24), (64, 64), (64, 8)])
def test_gated_norm_is_the_reference(columns: int, group: int) -> None:
    y, z, weight = randn(5, columns), randn(5, columns, seed=1), randn(columns, seed=2)
    out = gated(y, z, weight, group)
    assert relative_error(out, reference.gated_group_rms_norm(y, z, weight, group, EPS)) < BOUND
    ungated = reference.gated_group_rms_norm(y, torch.full_like(z, 50.0), weight, group, EPS)
    assert relative_error(out, ungated) > 0.1, "the gate must show"
    assert torch.equal(gated(y, z, weight, group, torch.bfloat16), out.bfloat16())


@KINDS
def test_bits_do_not_depend_on_how_rows_are_cut(kind: torch.dtype) -> None:
    y, z, weight = randn(9, 72, scale=3), randn(9, 72, seed=1), randn(72, seed=2)
    together, together_gated = normed(y, weight, kind), gated(y, z, weight, 24, kind)
    for first, end in ((0, 1), (1, 6), (6, 9)):
        assert torch.equal(normed(y[first:end], weight, kind), together[first:end])
        assert torch.equal(gated(y[first:end], z[first:end], weight, 24, kind), together_gated[first:end])


def test_another_order_of_sums_shows() -> None:
    """The control of the above: in one row of eight, so among many."""
    y, weight = randn(100, 72, scale=3), randn(72, seed=2)
    assert not torch.equal(normed(y.flip(1), weight.flip(0)).flip(1), normed(y, weight))


@KINDS
def test_a_row_of_zeros_is_zero_and_a_nan_stays_in_its_row(kind: torch.dtype) -> None:
    x, weight = randn(3, 32), torch.ones(32)
    x[0] = 0.0
    clean = normed(x, weight, kind)
    clean_gated = gated(x, x, weight, 16, kind)
    x[1, 3] = float("nan")
    out, out_gated = normed(x, weight, kind), gated(x, x, weight, 16, kind)
    assert torch.equal(out[0], torch.zeros(32, dtype=kind))
    assert out[1].isnan().all()
    assert torch.equal(out[2], clean[2])
    assert out_gated[1, :16].isnan().all()
    assert torch.equal(out_gated[1, 16:], clean_gated[1, 16:])
    assert torch.equal(out_gated[[0, 2]], clean_gated[[0, 2]])


def test_no_rows_are_no_work() -> None:
    assert normed(torch.empty(0, 32), torch.ones(32)).shape == (0, 32)


def test_rows_at_odd_places_are_our_own_bug() -> None:
    with pytest.raises(AssertionError):
        rms_norm(here(torch.ones(129))[1:].view(4, 32), here(torch.ones(32)), EPS, poisoned(4, 32))
