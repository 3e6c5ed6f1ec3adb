"""Routing held against the three figures that were published for the real model's: the generator `calibrated`, or what
was recorded of a model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kernels.experts.host.replay import Routing, replay
from services.tools.traces.generators import generate
from services.tools.traces.guesses import right

TOKENS = 1000
SHARE = 0.24  # of the experts in RAM


@dataclass(frozen=True)
class Figure:
    text: str
    low: float
    high: float
    found: float

    @property
    def met(self) -> bool:
        return self.low <= self.found <= self.high


def figures(routing: Routing) -> Sequence[Figure]:
    """Of the tokens that were decoded; prompts between them take room in the cache. A published figure without a range
    is met within one point of a hundred."""
    [lru] = replay(routing, "lru", [int(SHARE * routing.layers * routing.experts)])
    single = decoded(routing)
    return (
        Figure("LRU hits with 24 % of the experts in RAM", 0.81, 0.84, lru.decode_hits / lru.decode_lookups),
        Figure("experts of a layer that the next token names again", 0.39, 0.41, repeats(single)),
        Figure("experts of the next layer that were guessed", 0.71, 0.73, right(single, 1)),
    )


def decoded(routing: Routing) -> Routing:
    """The steps of a single token."""
    single = routing.rows_of_step == 1
    rows = routing.first[:-1][single]
    guesses = tuple(guess[rows] for guess in routing.guesses)
    first = np.arange(len(rows) + 1, dtype=np.int64)
    return replace(routing, layer=routing.layer[single], first=first, ids=routing.ids[rows], guesses=guesses)


def repeats(routing: Routing) -> float:
    by_token = routing.ids.reshape(-1, routing.layers, routing.ids.shape[1]).astype(np.int64)
    named = np.zeros((len(by_token), routing.layers, routing.experts), bool)
    np.put_along_axis(named, by_token, True, axis=2)
    return float(np.take_along_axis(named[:-1], by_token[1:], axis=2).mean())


def check() -> bool:
    """Prints found beside published."""
    found = figures(generate("calibrated", TOKENS))
    show(f"calibrated, {TOKENS} tokens", found)
    return all(one.met for one in found)


def show(title: str, found: Sequence[Figure]) -> None:
    print(f"{title:<52}{'published':>14}{'found':>8}")
    for one in found:
        published = f"{one.low:.0%} to {one.high:.0%}"
        print(f"{one.text:<52}{published:>14}{one.found:>8.1%}{'' if one.met else '  not met'}")
