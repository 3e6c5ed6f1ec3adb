"""Routing that is made up has the structure it claims, the calibrated one meets what was published, and guesses are
as wrong as they should be."""

import numpy as np
import pytest

from kernels.experts.host.replay import replay
from services.tools.traces import calibration
from services.tools.traces.generators import GENERATORS, Sizes, generate
from services.tools.traces.guesses import guesses, right, truth_ahead, worsen

SIZES = Sizes(layers=5, experts=64, top_k=6)


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_makes_whole_tokens(name: str) -> None:
    routing = generate(name, 120, SIZES)
    rows = routing.rows_of_step.reshape(-1, SIZES.layers)
    assert np.array_equal(routing.layer.reshape(rows.shape), np.tile(np.arange(SIZES.layers), (len(rows), 1)))
    assert (rows == rows[:, :1]).all()
    assert (rows[:, 0] == 1).sum() >= 120
    assert all(len(set(ids)) == SIZES.top_k for ids in routing.ids.tolist())
    again = generate(name, 120, SIZES)
    assert np.array_equal(routing.ids, again.ids)
    assert not np.array_equal(routing.ids, generate(name, 120, SIZES, seed=2).ids)


def test_only_some_have_prompts() -> None:
    assert {name for name in GENERATORS if generate(name, 120, SIZES).rows_of_step.max() > 8} == {"dialogs", "scan"}


def test_they_differ_in_structure() -> None:
    """Reuse at the next token, and what a third of the experts in RAM is worth under LRU, tell them apart."""
    found = {name: generate(name, 300, SIZES) for name in ("calibrated", "zipf", "markov")}
    repeats = {name: calibration.repeats(routing) for name, routing in found.items()}
    assert repeats["markov"] == pytest.approx(0.4, abs=0.01)
    assert repeats["zipf"] < repeats["markov"]
    [lru], [best] = (replay(generate("scan", 300, SIZES), policy, [100]) for policy in ("lru", "belady"))
    assert lru.hit_rate < 0.75 * best.hit_rate


def test_the_calibrated_one_meets_what_was_published(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = calibration.figures(generate("calibrated", 400))
    assert [one.met for one in figures] == [True, True, True], [one.found for one in figures]
    others = calibration.figures(generate("zipf", 100))
    assert not all(one.met for one in others)


def test_guesses_are_wrong_as_often_as_they_should_be() -> None:
    random = np.random.default_rng(1)
    truth = np.argsort(random.random((2000, 64)), axis=1)[:, :6].astype(np.int32)
    guessed = guesses(truth, 64, random, 0.72)
    hit = (guessed[:, :, None] == truth[:, None, :]).any(axis=1)
    assert hit.mean() == pytest.approx(0.72, abs=0.01)
    assert all(len(set(row) - {-1}) == sum(id_ >= 0 for id_ in row) for row in guessed.tolist())
    assert (guessed >= 0).mean() > 0.99


def test_guesses_stand_where_they_were_made() -> None:
    for name in ("calibrated", "dialogs"):
        routing = generate(name, 200, SIZES)
        assert right(routing, 1) == pytest.approx(0.72, abs=0.02)
        assert right(routing, 2) == pytest.approx(0.62, abs=0.02)
        layer = np.repeat(routing.layer, routing.rows_of_step)
        assert (routing.guesses[0][layer == SIZES.layers - 1] == -1).all()
        assert (truth_ahead(routing, 1)[layer < SIZES.layers - 1] >= 0).all()


def test_better_guesses_are_made_worse() -> None:
    routing = generate("calibrated", 200, SIZES)
    random = np.random.default_rng(2)
    worse = worsen(routing, 1, random, 0.5)
    replaced = type(routing)(routing.layers, routing.experts, routing.layer, routing.first, routing.ids, (worse,))
    assert right(replaced, 1) == pytest.approx(0.5, abs=0.02)
    assert np.array_equal(worsen(routing, 1, random, 0.9), routing.guesses[0])
