"""Sampling: known answers of the generator, shares over many seeds, ties, limits, and what cannot be sampled."""

import math

import pytest
import torch
from odd_memory import framed, randn

from kernels.sampling.reference import WORD, LogitsError, philox, sample, uniform

# Known answers of Random123 1.14 (kat_vectors, philox4x32 10): counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((WORD,) * 4, (WORD,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
# Chi-square with 9 degrees of freedom exceeds this once in 1000 times; the seeds are fixed.
CHI_SQUARE_9 = 27.9


def chi_square(counts: list[int], shares: list[float]) -> float:
    total = sum(counts)
    return sum((n - total * p) ** 2 / (total * p) for n, p in zip(counts, shares, strict=True))


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_gives_the_known_answers(counter, key, words) -> None:
    assert philox(counter, key) == words
    assert philox(counter, (key[0] ^ 1, key[1])) != words


def test_uniform_fills_its_interval() -> None:
    drawn = [uniform(seed=7, position=i) for i in range(20_000)]
    assert min(drawn) >= 0
    assert max(drawn) < 1
    assert chi_square([sum(n / 10 <= u < (n + 1) / 10 for u in drawn) for n in range(10)], [0.1] * 10) < CHI_SQUARE_9
    assert (
        len({uniform(seed, position) for seed in (0, 1, 1 << 32, (1 << 64) - 1) for position in (0, 1, 1 << 32)}) == 12
    )


def test_shares_are_the_softmax() -> None:
    logits = randn(10, scale=1.5)
    shares = torch.softmax(logits.double() / 0.7, 0).tolist()
    drawn = [sample(logits, 0.7, 1.0, seed=3, position=i) for i in range(5000)]
    counts = [drawn.count(i) for i in range(10)]
    assert chi_square(counts, shares) < CHI_SQUARE_9
    assert chi_square(counts, torch.softmax(logits.double(), 0).tolist()) > CHI_SQUARE_9, "the temperature must show"


def test_shares_over_seeds_are_the_softmax_too() -> None:
    logits = randn(10, seed=1)
    drawn = [sample(logits, 1.0, 1.0, seed=seed, position=17) for seed in range(5000)]
    assert chi_square([drawn.count(i) for i in range(10)], torch.softmax(logits.double(), 0).tolist()) < CHI_SQUARE_9


def test_top_p_keeps_the_shortest_run() -> None:
    logits = torch.tensor([0.05, 0.4, 0.3, 0.25]).log()
    for top_p, kept in [
        (0.01, {1}),
        (0.39, {1}),
        (0.41, {1, 2}),
        (0.69, {1, 2}),
        (0.71, {1, 2, 3}),
        (1.0, {0, 1, 2, 3}),
    ]:
        assert {sample(logits, 1.0, top_p, seed=5, position=i) for i in range(400)} == kept, top_p
    drawn = [sample(logits, 1.0, 0.6, seed=6, position=i) for i in range(4000)]
    assert drawn.count(1) / 4000 == pytest.approx(4 / 7, abs=0.03)  # what is kept is drawn in proportion


def test_of_equal_logits_the_lowest_id_comes_first() -> None:
    logits = torch.zeros(100)
    assert sample(logits, 0.0, 1.0, 0, 0) == 0
    assert sample(logits, 1.0, 0.005, 0, 0) == 0
    assert {sample(logits, 1.0, 0.025, 0, i) for i in range(200)} == {0, 1, 2}
    logits[[70, 20, 90]] = 1.0
    assert sample(logits, 0.0, 1.0, 0, 0) == 20


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    logits = randn(4096)
    first = [sample(logits, 1.0, 0.95, seed=11, position=i) for i in range(64)]
    again = [sample(framed(logits), 1.0, 0.95, seed=11, position=i) for i in reversed(range(64))]
    assert first == again[::-1]
    assert first != [sample(logits, 1.0, 0.95, seed=12, position=i) for i in range(64)]


@pytest.mark.parametrize("temperature", [1e-320, 1e-6, 1.0, 1e6])
def test_any_temperature_draws(temperature: float) -> None:
    logits = randn(50, scale=2)
    drawn = {sample(logits, temperature, 1.0, seed=1, position=i) for i in range(300)}
    assert drawn == {int(logits.argmax())} if temperature < 1e-3 else len(drawn) > 1


def test_a_forbidden_id_is_never_drawn() -> None:
    logits = torch.zeros(6)
    logits[[0, 3, 5]] = -math.inf
    assert {sample(logits, 1e6, 1.0, seed=2, position=i) for i in range(300)} == {1, 2, 4}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_refused(temperature: float, bad: float) -> None:
    logits = randn(10)
    logits[6] = bad
    with pytest.raises(LogitsError, match="not usable"):
        sample(logits, temperature, 1.0, 0, 0)
    with pytest.raises(LogitsError):
        sample(torch.full((4,), -math.inf), temperature, 1.0, 0, 0)
