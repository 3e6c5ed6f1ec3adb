"""The Triton choice of experts against the reference, in the interpreter or on a GPU."""

import pytest
import torch
from gpu_checks import BOUND, DEVICE, here, poisoned, relative_error
from odd_memory import randn
from torch import Tensor

from kernels.router import reference
from kernels.router.gpu import choose


def run(logits: Tensor, bias: Tensor, top_k: int, scale: float, normalise: bool) -> tuple[Tensor, Tensor]:
    ids = torch.full((len(logits), top_k), -7, dtype=torch.int32, device=DEVICE)
    weights = poisoned(len(logits), top_k)
    choose(here(logits), here(bias), top_k, scale, normalise, ids, weights)
    return ids.cpu(), weights.cpu()


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (3, 3), (40, 6), (64, 22)])
@pytest.mark.parametrize("normalise", [True, False])
def test_is_the_reference(experts: int, top_k: int, normalise: bool) -> None:
    logits, bias = randn(3, experts, scale=2), randn(experts, seed=1, scale=0.3)
    ids, weights = run(logits, bias, top_k, 5.0, normalise)
    exact_ids, exact = reference.choose(logits, bias, top_k, 5.0, normalise)
    assert torch.equal(ids, exact_ids)
    assert relative_error(weights, exact) < BOUND


def test_of_equal_choices_the_lowest_id_comes_first() -> None:
    logits, bias = torch.zeros(2, 40), torch.zeros(40)
    logits[1, [7, 31]] = 1.0
    ids, _ = run(logits, bias, 4, 1.0, True)
    assert ids.tolist() == [[0, 1, 2, 3], [7, 31, 0, 1]]


def test_the_bias_chooses_and_does_not_weigh() -> None:
    ids, weights = run(torch.zeros(1, 4), torch.tensor([-0.9, 0.0, 0.4, 0.2]), 4, 1.0, False)
    assert ids.tolist() == [[2, 3, 1, 0]], "negative choices order as numbers do, too"
    assert weights.tolist() == [[0.5, 0.5, 0.5, 0.5]]


def test_a_row_does_not_see_the_others() -> None:
    logits, bias = randn(4, 24, scale=2), randn(24, seed=1)
    ids, weights = run(logits, bias, 5, 2.5, True)
    for row in (0, 3):
        one_ids, one_weights = run(logits[row : row + 1], bias, 5, 2.5, True)
        assert torch.equal(one_ids[0], ids[row])
        assert torch.equal(one_weights[0], weights[row])


def test_a_sweeps_rows_are_chosen_as_the_same_rows_in_fours() -> None:
    logits, bias = randn(262, 24, scale=2), randn(24, seed=1)
    ids, weights = run(logits, bias, 5, 2.5, True)
    exact_ids, exact = reference.choose(logits, bias, 5, 2.5, True)
    assert torch.equal(ids, exact_ids)
    assert relative_error(weights, exact) < BOUND
    for first in (0, 126, 258):
        four_ids, four_weights = run(logits[first : first + 4], bias, 5, 2.5, True)
        assert torch.equal(four_ids, ids[first : first + 4])
        assert torch.equal(four_weights, weights[first : first + 4])
    assert not torch.equal(weights[:4], weights[4:8])


def test_a_nan_gives_valid_ids_and_weights_that_tell() -> None:
    logits = randn(1, 24)
    logits[0, 9] = float("nan")
    ids, weights = run(logits, torch.zeros(24), 5, 1.0, True)
    assert ids[0, 0] == 9
    assert len(set(ids[0].tolist())) == 5
    assert weights.isnan().all()
