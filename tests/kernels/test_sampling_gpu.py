"""Drawing ids in Triton against the reference: the same id from the same seed, ties, masks, unusable logits."""

import pytest
import torch
from gpu_checks import DEVICE, here
from odd_memory import randn
from torch import Tensor

from kernels.sampling import gpu, reference

IDS = 100
NAN, INF = float("nan"), float("inf")


def mask_words(allowed: Tensor) -> Tensor:
    """bool [M, IDS] -> int32 [M, words], 32 ids a word."""
    padded = torch.zeros(len(allowed), 128, dtype=torch.int64)
    padded[:, :IDS] = allowed
    words = (padded.view(len(allowed), 4, 32) << torch.arange(32)).sum(2)
    return words.to(torch.int32)


@pytest.fixture(autouse=True)
def several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "TILE", 64)


def draw(logits: Tensor, settings: list[tuple[float, float, int, int]], allowed: Tensor | None = None) -> list[int]:
    sampler = gpu.Sampler(len(logits), IDS, DEVICE)
    sampler.parameters.copy_(torch.tensor([each[:2] for each in settings], dtype=torch.float64))
    sampler.seeds.copy_(torch.tensor([each[2:] for each in settings]))
    sampler.drawn.fill_(-9)
    sampler.sample(here(logits), None if allowed is None else here(mask_words(allowed)))
    return sampler.drawn.tolist()


def expected(logits: Tensor, settings: list[tuple[float, float, int, int]]) -> list[int]:
    return [reference.sample(row, *each) for row, each in zip(logits, settings, strict=True)]


def test_draws_what_the_reference_draws() -> None:
    logits = torch.stack([randn(IDS, scale=2), torch.randint(-2, 3, (IDS,)).float(), randn(IDS, seed=2, scale=0.3)])
    settings = [(0.7, 0.9, 12345678901, 7), (1.0, 1.0, -5, 1 << 40), (1.5, 0.3, 3, 0)]
    assert draw(logits, settings) == expected(logits, settings)
    others = [(*each[:3], each[3] + 1) for each in settings]
    assert expected(logits, settings) != expected(logits, others), "another position draws otherwise"


def test_ties_and_temperature_zero() -> None:
    """All logits equal: ids in order, the draw decides. Temperature zero among ties: the lowest."""
    logits = torch.zeros(3, IDS)
    logits[2, [66, 70, 99]] = 1.0
    settings = [(1.0, 1.0, 1, 1), (1.0, 0.25, 2, 2), (0.0, 1.0, 3, 3)]
    assert draw(logits, settings) == expected(logits, settings)
    assert draw(logits[2:], settings[2:]) == [66]


def test_a_mask_forbids() -> None:
    logits = randn(2, IDS, scale=2)
    allowed = torch.zeros(2, IDS, dtype=torch.bool)
    allowed[0, ::7] = True
    allowed[1, 93] = True
    settings = [(1.0, 0.8, 5, 5), (1.0, 1.0, 6, 6)]
    masked = logits.masked_fill(~allowed, -INF)
    assert draw(logits, settings, allowed) == expected(masked, settings)
    assert expected(masked, settings)[1] == 93 != expected(logits, settings)[1]


def test_greedy_takes_the_lowest_of_the_largest() -> None:
    logits = torch.stack([randn(IDS), torch.zeros(IDS), randn(IDS), torch.full((IDS,), -INF)])
    logits[0, [40, 80]] = 50.0
    logits[1, 0] = -0.0  # equal to 0.0
    logits[3, 99] = -3.0
    sampler = gpu.Sampler(4, IDS, DEVICE)
    sampler.greedy(here(logits))
    assert sampler.drawn.tolist() == [40, 0, int(logits[2].argmax()), 99]
    sampler.greedy(here(logits), here(mask_words(torch.arange(IDS).expand(4, IDS) > 40)))
    assert sampler.drawn.tolist()[:2] == [80, 41]


@pytest.mark.filterwarnings("ignore:invalid value")  # the interpreter computes with numpy
@pytest.mark.parametrize("bad", [NAN, INF, None])
def test_unusable_logits_are_told(bad: float | None) -> None:
    """NaN, infinity, or nothing allowed: -1; and the row beside it is drawn as ever."""
    logits = randn(2, IDS)
    clean = (1.0, 0.9, 4, 4)
    if bad is None:
        logits[0] = -INF
    else:
        logits[0, 50] = bad
    assert draw(logits, [clean, clean]) == [-1, reference.sample(logits[1], *clean)]
    sampler = gpu.Sampler(2, IDS, DEVICE)
    sampler.greedy(here(logits))
    assert sampler.drawn.tolist() == [-1, int(logits[1].argmax())]
