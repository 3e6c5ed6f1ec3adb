"""From logits to an id: the definition. Owns the randomness, which is a function of seed and position alone.

The same seed and the same position give the same draw whatever was drawn before, in whatever batch: a restored sequence
goes on as if it had never stopped. Generator: Philox 4x32-10 (Salmon et al. 2011), key = seed, counter = position.
"""

import math

import torch
from torch import Tensor

from kernels.elementary.reference import exp

WHOLE = 2.0**40  # the mass of the most probable id

PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10
WORD = 0xFFFFFFFF


class LogitsError(ValueError):
    """Logits that no id can be drawn from: NaN, +inf, or nothing but -inf."""

    @classmethod
    def of(cls, largest: float) -> "LogitsError":
        return cls(f"the largest logit is {largest}: the model's output is not usable")


def sample(
    logits: Tensor, temperature: float, top_p: float, seed: int, position: int, top_k: int = 0, min_p: float = 0.0
) -> int:
    """One id. logits float32 [V]; -inf forbids an id. `seed` and `position` are 64-bit.

    Temperature 0 is greedy, of equal logits the lowest id. Else ids are ordered by probability (of equal ones the
    lowest id first); the first `top_k` of them (0: all) that are at least `min_p` times as probable as the first stay;
    the shortest run that holds `top_p` of what stayed is kept, at least one id, and one is drawn from it.
    Probabilities are integers, 2^40 e^((logit - largest) / temperature) rounded towards zero, so that their sums are
    exact and an implementation may add them up in any order. Raises LogitsError.
    """
    assert temperature >= 0
    assert 0 < top_p <= 1
    assert top_k >= 0
    assert 0 <= min_p <= 1
    top = logits.max()
    if not torch.isfinite(top):  # the maximum of anything with a NaN is NaN
        raise LogitsError.of(top.item())
    if temperature == 0:
        return int((logits == top).nonzero()[0])
    ordered, ids = torch.sort(logits, descending=True, stable=True)
    share = exp((ordered - top).double() / temperature).double()
    stay = min(top_k or len(share), int((share >= min_p).sum()))  # the first share is 1
    mass = (share[:stay] * WHOLE).long().cumsum(0)
    whole = int(mass[-1])
    wanted = min(math.ceil(whole * top_p), whole)
    kept = int(mass[torch.searchsorted(mass, wanted)])
    drawn = min(int(uniform(seed, position) * kept), kept - 1)
    return int(ids[torch.searchsorted(mass, drawn, right=True)])


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    counter = (position & WORD, position >> 32 & WORD, 0, 0)
    high, low, _, _ = philox(counter, (seed & WORD, seed >> 32 & WORD))
    return float((high >> 5) * (1 << 26) + (low >> 6)) / float(1 << 53)


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox 4x32-10: four random 32-bit words of a counter and a key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(PHILOX_ROUNDS):
        left, right = PHILOX_MULTIPLIERS[0] * c0, PHILOX_MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right & WORD, (left >> 32) ^ c3 ^ k1, left & WORD
        k0, k1 = (k0 + PHILOX_KEY_STEPS[0]) & WORD, (k1 + PHILOX_KEY_STEPS[1]) & WORD
    return c0, c1, c2, c3
