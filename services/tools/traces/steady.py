"""What a token takes once a cache is full, by replay: all of a routing's tokens less its first ones."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kernels.experts.host.replay import SHIPPED, Clock, Routing, replay


@dataclass(frozen=True)
class Steady:
    """Of one token, on average. `ms` in all, `waited_ms` of it for the disk; `lookups`, of which `hits` found their
    block in RAM and `reads` were begun when they were named; `ahead` more were begun before."""

    ms: float
    waited_ms: float
    lookups: float
    hits: float
    reads: float
    ahead: float

    @property
    def hit_rate(self) -> float:
        return self.hits / self.lookups


def steady(routing: Routing, warm: int, slots: int, clock: Clock, policy: str = SHIPPED) -> Steady:
    """After `warm` tokens of a routing without prompts."""
    whole, beginning = (replay(part, policy, [slots], clock)[0] for part in (routing, first_tokens(routing, warm)))
    tokens = len(routing.layer) / routing.layers - warm

    def each(name: str) -> float:
        return float(getattr(whole, name) - getattr(beginning, name)) / tokens

    return Steady(
        ms=each("decode_ns") / 1e6,
        waited_ms=each("decode_waited_ns") / 1e6,
        lookups=each("decode_lookups"),
        hits=each("decode_hits"),
        reads=each("decode_reads"),
        ahead=each("prefetch_issued"),
    )


def first_tokens(routing: Routing, tokens: int) -> Routing:
    steps = tokens * routing.layers
    cut: Sequence[np.ndarray[tuple[int, int], np.dtype[np.int32]]] = [guess[:steps] for guess in routing.guesses]
    return Routing(
        routing.layers,
        routing.experts,
        routing.layer[:steps],
        routing.first[: steps + 1],
        routing.ids[:steps],
        tuple(cut),
    )
