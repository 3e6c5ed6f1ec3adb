"""What requests do to logits and to the draw: top_k, min_p, penalties, bias, forbidden ids, and log probabilities."""

import math

import pytest
import torch
from odd_memory import randn

from kernels.sampling.penalties import logprobs, penalise, shift
from kernels.sampling.reference import sample

LOGITS = torch.tensor([0.05, 0.4, 0.3, 0.25]).log()


def drawn(top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0, draws: int = 400) -> list[int]:
    return [sample(LOGITS, 1.0, top_p, 5, i, top_k, min_p) for i in range(draws)]


@pytest.mark.parametrize(
    ("top_k", "kept"), [(1, {1}), (2, {1, 2}), (3, {1, 2, 3}), (4, {0, 1, 2, 3}), (0, {0, 1, 2, 3}), (9, {0, 1, 2, 3})]
)
def test_top_k_keeps_the_k_most_probable(top_k: int, kept: set[int]) -> None:
    assert set(drawn(top_k=top_k)) == kept


@pytest.mark.parametrize(
    ("min_p", "kept"), [(1.0, {1}), (0.74, {1, 2}), (0.62, {1, 2, 3}), (0.12, {0, 1, 2, 3}), (0.0, {0, 1, 2, 3})]
)
def test_min_p_keeps_what_is_as_probable(min_p: float, kept: set[int]) -> None:
    assert set(drawn(min_p=min_p)) == kept


def test_top_p_is_a_share_of_what_top_k_and_min_p_left() -> None:
    """0.4 of 0.7 is more than half; of everything it is less."""
    assert set(drawn(top_p=0.55)) == {1, 2}
    assert set(drawn(top_p=0.55, top_k=2)) == {1}
    assert set(drawn(top_p=0.55, min_p=0.7)) == {1}


def test_what_is_kept_is_drawn_in_proportion() -> None:
    ids = drawn(top_k=2, draws=4000)
    assert ids.count(1) / 4000 == pytest.approx(4 / 7, abs=0.03)
    assert ids.count(1) / 4000 != pytest.approx(0.5, abs=0.03), "the control: they are not drawn alike"


def test_neutral_values_change_no_draw() -> None:
    logits = randn(4096)
    plain = [sample(logits, 1.0, 0.9, 11, i) for i in range(64)]
    assert plain == [sample(logits, 1.0, 0.9, 11, i, top_k=4096, min_p=0.0) for i in range(64)]
    assert torch.equal(penalise(logits, [1, 2], {3: 4}), logits)
    assert torch.equal(shift(logits, {}, ()), logits)


def test_penalties_by_hand() -> None:
    logits = torch.tensor([2.0, -2.0, 4.0, -4.0, 1.0])
    before = logits.clone()
    assert penalise(logits, [0, 1], {2: 3}, repetition=2.0).tolist() == [1.0, -4.0, 2.0, -4.0, 1.0]
    assert penalise(logits, [0, 1], {2: 3}, presence=0.5).tolist() == [2.0, -2.0, 3.5, -4.0, 1.0], "answer only"
    assert penalise(logits, [], {2: 3, 3: 1}, frequency=0.5).tolist() == [2.0, -2.0, 2.5, -4.5, 1.0]
    together = penalise(logits, [0], {2: 2}, repetition=2.0, presence=0.25, frequency=0.5)
    assert together.tolist() == [1.0, -2.0, 0.75, -4.0, 1.0], "repetition first"
    assert torch.equal(logits, before), "the model's logits are its own"


def test_bias_and_forbidden_ids() -> None:
    logits = torch.tensor([1.0, 2.0, 3.0])
    assert shift(logits, {0: 100.0, 2: -1.5}, ()).tolist() == [101.0, 2.0, 1.5]
    assert shift(logits, {2: 5.0}, (2, 1)).tolist() == [1.0, -math.inf, -math.inf], "no bias allows it again"
    assert torch.equal(logits, torch.tensor([1.0, 2.0, 3.0]))


def test_logprobs_are_the_log_softmax() -> None:
    logits = randn(300, scale=3)
    exact = torch.log_softmax(logits.double(), 0)
    value, top = logprobs(logits, 17, 5)
    assert value == pytest.approx(float(exact[17]), rel=1e-6)
    best = exact.topk(5)
    assert [id_ for id_, _ in top] == best.indices.tolist()
    assert [logprob for _, logprob in top] == pytest.approx(best.values.tolist(), rel=1e-6)
    even = pytest.approx(-math.log(8))
    assert logprobs(torch.zeros(8), 3, 2) == (even, [(0, even), (1, even)]), "ties: the lowest id"
    assert logprobs(logits, 17, 0)[1] == []
