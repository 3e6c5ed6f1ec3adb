"""The parts of a step of two rows, each by itself, for the benchmark of drafts: where a plan of them is wrong, these
say why. Owns the measuring.

What a second row costs beside its own experts' bytes: the dense kernels' arithmetic, an expert that both rows name (its
bytes are read once, its sums are made twice), and settling a draft that was right.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from kernels.experts.host.binding import Host
from services.tools.replay import Trace

STEPS, SETTLED = 16, 6  # of each kind; the first find the split between processor and card


class Named(Enum):
    """What the rows of a step name."""

    TRACED = "as the trace has it"
    NOTHING = "nothing that computes"
    SAME = "the same experts"
    APART = "no expert together"


def ids_of(trace: Trace, places: list[int], named: Named) -> Tensor:
    """int32 [layers, rows, k]; of what the trace names anywhere, so that it is in RAM."""
    ids = trace.ids[places, :, 0].transpose(0, 1).clone()
    if named is Named.SAME:
        ids[:, 1:] = ids[:, :1]
    if named is Named.APART:
        for layer, rows in enumerate(ids):
            known = torch.unique(trace.ids[:, layer])
            rows[1] = known[~torch.isin(known, rows[0])][: rows.shape[1]]
    return ids


@dataclass(frozen=True)
class Parts:
    """Milliseconds. Of steps: `idle_ms` of one row and of two that compute no expert; `one_ms` of one row, `same_ms`
    and `apart_ms` of two. `settle_ms`: of a draft that was right."""

    idle_ms: tuple[float, float]
    one_ms: float
    same_ms: float
    apart_ms: float
    settle_ms: float

    @property
    def again(self) -> float:
        """What a second token of the same experts adds, in shares of the first one's time."""
        one, two = self.one_ms - self.idle_ms[0], self.same_ms - self.idle_ms[1]
        return two / one - 1

    @property
    def twice(self) -> float:
        """As many experts again, in shares of the first ones' time."""
        one, two = self.one_ms - self.idle_ms[0], self.apart_ms - self.idle_ms[1]
        return two / one - 1


class Steps(Protocol):
    """Who can do a step of so many rows, `place` tokens behind the begin of an answer, and settle a right draft."""

    def step_ms(self, rows: int, named: Named, place: int) -> float: ...

    def settle_ms(self) -> float: ...


def measured(steps: Steps, places: int) -> Parts:
    def median(rows: int, named: Named) -> float:
        found = [steps.step_ms(rows, named, number % places) for number in range(STEPS)]
        return statistics.median(found[SETTLED:])

    idle_ms = median(1, Named.NOTHING), median(2, Named.NOTHING)
    one_ms = median(1, Named.TRACED)
    same_ms, apart_ms = median(2, Named.SAME), median(2, Named.APART)
    return Parts(idle_ms, one_ms, same_ms, apart_ms, statistics.median(steps.settle_ms() for _ in range(SETTLED)))


def processor_us(host: Host, trace: Trace, clock: Callable[[], float] = time.perf_counter) -> tuple[float, float]:
    """Of a layer's experts on the processor alone, all in RAM, with one token and with two of the same experts. In
    turns, each time other blocks, so that no cache holds them."""
    found: dict[int, list[float]] = {1: [], 2: []}
    top_k = trace.ids.shape[-1]
    for layer in range(trace.ids.shape[1]):
        for rows, place in ((1, 0), (2, trace.tokens // 2)):
            ids = trace.ids[place, layer, :1].expand(rows, top_k).contiguous()
            x = trace.x[:rows, layer, 0].contiguous()
            begun = clock()
            host.step(layer, ids, torch.ones(rows, top_k), x)
            found[rows].append((clock() - begun) * 1e6)
    return statistics.median(found[1]), statistics.median(found[2])
