"""The routed experts as the model sees them. Owns the protocol and the choice of an implementation, not the arithmetic
(kernels/experts/reference.py) and not the file (services/engine/experts/store.py).
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Counters:
    """What happened since the start. A lookup is one distinct expert of one step; a hit found its block in RAM."""

    hits: int
    misses: int
    prefetch_issued: int
    prefetch_useful: int
    prefetch_wasted: int
    demand_read_bytes: int
    prefetch_read_bytes: int
    disk_wait_s: float
    compute_s: float
    evictions: int
    slots_total: int
    slots_used: int


class Experts(Protocol):
    """One per engine, used by the thread that owns the model; `prefetch` alone may be called beside it."""

    def step(self, layer: int, ids: Tensor, weights: Tensor, x: Tensor) -> Tensor:
        """ids int32 [M, k], weights float32 [M, k], x float32 [M, latent] -> float32 [M, latent].

        `layer` counts MoE layers. Column order of ids is router rank. A row of x with a NaN or Inf comes back as NaN.
        Raises StepError, naming the expert, if a block cannot be read; the next step works again.
        """
        ...

    def prefetch(self, layer: int, ids: Tensor) -> None:
        """A hint: these experts (int32, 1-D) may be needed soon. Never ahead of a demand read; never an error."""
        ...

    def counters(self) -> Counters: ...

    def check(self) -> None:
        """Conservation: free + used + in flight = total. Raises AssertionError otherwise."""
        ...

    def close(self) -> None: ...
