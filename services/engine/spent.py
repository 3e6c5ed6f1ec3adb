"""Where the time of a token goes, as the network measures it: each part by a clock of its own, nothing by subtraction
from the whole. Owns the parts that an answer's token has; who measures adds to them, metrics.py counts them.

On a GPU the host's thread is the clock: it serves (experts, hand-off, disk) or it waits for the card (dense). The card
computes its share of the experts while the host computes its own, so that only what the host waits for is `dense`.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kernels.experts.device.times import Times

# dense       the layers themselves; on a GPU all that the host waits for, so also what is left of the card's experts
# experts     the host's routed experts, without the disk
# disk        nothing to compute before a block comes
# handoff     from a layer's post to the plan of what the card computes; none on a CPU
# inputs      written where the graph reads them; none on a CPU
# sampling    from logits to ids, and handing them out
# reading     slices of others' prompts between two tokens
# scheduling  who runs next, and the segments for it
# counting    for the metrics
# rest        what none of these clocks saw
PARTS = ("dense", "experts", "disk", "handoff", "inputs", "sampling", "reading", "scheduling", "counting", "rest")


@dataclass
class Spent:
    """Seconds since the start; written by the thread that owns the model. `experts_s` has the waits for the disk."""

    dense_s: float = 0.0
    experts_s: float = 0.0
    handoff_s: float = 0.0
    inputs_s: float = 0.0

    def served(self, before: Times, now: Times, inputs_s: float, until_end_s: float) -> None:
        """A graph's token: `until_end_s` from its launch to its end, of which the host served so long."""
        host_s, plan_s = (now.host_ns - before.host_ns) * 1e-9, (now.plan_ns - before.plan_ns) * 1e-9
        self.inputs_s += inputs_s
        self.handoff_s += plan_s
        self.experts_s += host_s - plan_s
        self.dense_s += until_end_s - host_s


class Counting(Protocol):
    """A counter, as prometheus_client has them."""

    def inc(self, amount: float = 1) -> None: ...


class TokenTime:
    """Between two tokens of those that answer, every second is some part's."""

    def __init__(self, parts: Mapping[str, Counting]) -> None:
        self._parts = parts
        self._begun: float | None = None
        self._known_s = 0.0

    def begin(self, answering: bool) -> None:
        """Before a step. The time goes on from the last token, unless nobody was answering."""
        if not answering:
            self._begun = None
        elif self._begun is None:
            self._begun, self._known_s = time.perf_counter(), 0.0

    def took(self, part: str, seconds: float) -> None:
        self._known_s += seconds
        if seconds > 0:
            self._parts[part].inc(seconds)

    def end(self) -> None:
        """There is a token for each."""
        now = time.perf_counter()
        if self._begun is not None:
            self._parts["rest"].inc(max(0.0, now - self._begun - self._known_s))
        self._begun, self._known_s = now, 0.0
