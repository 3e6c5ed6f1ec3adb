"""The router against transformers, its ties, and what must not go into the weights."""

import pytest
import torch
from odd_memory import distance, framed, randn, tolerance

from kernels.router.reference import choose, route

TOLERANCE = tolerance("router")


def test_is_transformers() -> None:
    from transformers import NemotronHConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHTopkRouter

    config = NemotronHConfig(
        layers_block_type=["moe"], hidden_size=48, n_routed_experts=40, num_experts_per_tok=7, routed_scaling_factor=2.5
    )
    theirs = NemotronHTopkRouter(config)
    x, gate, bias = randn(33, 48), randn(40, 48, seed=1, scale=0.2), randn(40, seed=2, scale=0.2)
    theirs.weight.data, theirs.e_score_correction_bias = gate, bias
    _, their_weights, their_ids = theirs(x)
    ids, weights = route(framed(x), framed(gate), framed(bias), 7, 2.5, True)
    order = their_ids.sort(1).indices
    assert torch.equal(ids.long().sort(1).values, their_ids.gather(1, order))
    by_id = weights.gather(1, ids.long().sort(1).indices)
    assert distance(by_id, their_weights.gather(1, order).detach()) < TOLERANCE

    corrected, _ = choose(x @ gate.T, torch.zeros(40), 7, 2.5, True)
    assert not torch.equal(corrected.long().sort(1).values, their_ids.gather(1, order)), "the bias must show"


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (2, 2), (63, 6), (100, 22), (512, 22)])
def test_is_the_formula(experts: int, top_k: int) -> None:
    logits, bias = randn(11, experts, scale=2), randn(experts, seed=1, scale=0.3)
    ids, weights = choose(framed(logits), framed(bias), top_k, 5.0, True)
    assert ids.dtype == torch.int32
    for row in range(11):
        scores = [1 / (1 + pow(2.718281828459045, -value)) for value in logits[row].double().tolist()]
        by_choice = sorted(range(experts), key=lambda e: -(scores[e] + bias[e].item()))[:top_k]
        assert ids[row].tolist() == by_choice
        norm = sum(scores[e] for e in by_choice)
        exact = torch.tensor([5.0 * scores[e] / norm for e in by_choice], dtype=torch.float64)
        assert distance(weights[row], exact) < TOLERANCE
    assert torch.allclose(weights.sum(1), torch.tensor(5.0))


def test_of_equal_choices_the_lowest_id_comes_first() -> None:
    ids, weights = choose(torch.zeros(3, 50), torch.zeros(50), 5, 1.0, True)
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert torch.equal(weights, torch.full((3, 5), 0.2))
    logits = torch.zeros(1, 50)
    logits[0, [7, 40]] = 1.0
    assert choose(logits, torch.zeros(50), 5, 1.0, True)[0].tolist() == [[7, 40, 0, 1, 2]]


def test_the_bias_chooses_and_does_not_weigh() -> None:
    logits, bias = torch.zeros(1, 4), torch.tensor([0.0, 0.0, 0.4, 0.2])
    ids, weights = choose(logits, bias, 2, 1.0, False)
    assert ids.tolist() == [[2, 3]]
    assert weights.tolist() == [[0.5, 0.5]]


def test_without_normalising_the_weights_are_the_scaled_scores() -> None:
    logits = randn(4, 16)
    ids, weights = choose(logits, torch.zeros(16), 3, 2.0, False)
    assert distance(weights, 2 * torch.sigmoid(logits.double()).gather(1, ids.long())) < TOLERANCE


def test_scores_of_zero_give_weights_and_no_nan() -> None:
    weights = choose(torch.full((1, 8), -1000.0), torch.zeros(8), 2, 1.0, True)[1]
    assert torch.isfinite(weights).all()


def test_a_row_does_not_see_the_others() -> None:
    logits, bias = randn(37, 63, scale=2), randn(63, seed=1)
    ids, weights = choose(logits, bias, 6, 2.5, True)
    for row in range(37):
        one_ids, one_weights = choose(logits[row : row + 1], bias, 6, 2.5, True)
        assert torch.equal(one_ids[0], ids[row])
        assert torch.equal(one_weights[0], weights[row])
