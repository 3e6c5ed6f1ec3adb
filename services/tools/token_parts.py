"""Where a decoded token's time goes, from what its GPU did: every microsecond once.

    dense      kernels of the layers themselves: weights over the card's own memory
    PCIe       the experts' kernels and, where their bytes are copied first, the waits for those copies
    CPU        what the GPU then still waits for the host's experts
    hand-off   all of that in a token whose experts have nothing to compute
    disk       what the host waited for its disk, as it counts it
    rest       the others: gaps between kernels, the launch, whatever is not known

The GPU computes its experts while the host computes its own: what of the host is not waited for costs nothing, and is
in no part.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kernels.experts import decode, handoff
from services.tools.gpu_events import Event

WAIT, POST, COMBINE = "wait_kernel", "post_kernel", "combine_kernel"
HANDOFF = frozenset({WAIT, POST})
EXPERTS = frozenset(name for name in vars(decode) if name.endswith("_kernel"))
MOST_REST = 0.05  # of a token

assert {WAIT, POST} <= set(vars(handoff))
assert COMBINE in EXPERTS


@dataclass(frozen=True)
class Sums:
    """Milliseconds of one token by what its kernels are. `plan_ms`, `results_ms`: waits for either."""

    dense_ms: float
    experts_ms: float
    post_ms: float
    plan_ms: float
    results_ms: float

    @property
    def waits_ms(self) -> float:
        return self.post_ms + self.plan_ms + self.results_ms


@dataclass(frozen=True)
class Parts:
    """Milliseconds of one token; together `total_ms`, which was measured without recording."""

    total_ms: float
    dense_ms: float
    pcie_ms: float
    cpu_ms: float
    handoff_ms: float
    disk_ms: float

    @property
    def rest_ms(self) -> float:
        return self.total_ms - self.dense_ms - self.pcie_ms - self.cpu_ms - self.handoff_ms - self.disk_ms

    @property
    def rest_share(self) -> float:
        return self.rest_ms / self.total_ms


def sums(events: Sequence[Event], tokens: int = 1) -> Sums:
    """Of `tokens` tokens, each once. Copies are not counted: the GPU's waits for them are."""
    dense = experts = post = plan = results = 0.0
    waited: list[float] = []
    for event in events:
        if event.kind != "kernel":
            continue
        name = kernel(event.name)
        if name == WAIT:
            waited.append(event.duration_us)
        elif name == POST:
            post += event.duration_us
        elif name in EXPERTS:
            experts += event.duration_us
        else:
            dense += event.duration_us
        if name == COMBINE:  # the last wait before it was for the host's results, those before for its plan
            results += sum(waited[-1:])
            plan += sum(waited[:-1])
            waited = []
    scale = 1e-3 / tokens
    return Sums(dense * scale, experts * scale, post * scale, plan * scale, results * scale)


def parts(total_ms: float, busy: Sums, idle: Sums, disk_ms: float) -> Parts:
    """`busy`: of real tokens; `idle`: of tokens whose experts have nothing to compute, with the same placement."""
    copied_ms = max(0.0, busy.plan_ms - idle.plan_ms)
    host_ms = max(0.0, busy.results_ms - idle.results_ms)
    handoff_ms = busy.waits_ms - copied_ms - host_ms
    disk_ms = min(disk_ms, host_ms)
    return Parts(total_ms, busy.dense_ms, busy.experts_ms + copied_ms, host_ms - disk_ms, handoff_ms, disk_ms)


def kernel(name: str) -> str:
    """A kernel's own name: what compilers add after it is left out."""
    return name.partition("(")[0].strip()


HEADING = (
    f"{'method':<34}{'ms':>8}{'tok/s':>8}{'dense':>8}{'PCIe':>8}{'CPU':>8}{'handoff':>8}{'disk':>8}{'rest':>8}{'':>7}"
)


def line(name: str, found: Parts, rows: int = 1) -> str:
    """A row of the table; tok/s of all `rows` sequences together."""
    values = (found.dense_ms, found.pcie_ms, found.cpu_ms, found.handoff_ms, found.disk_ms, found.rest_ms)
    mark = "" if abs(found.rest_share) <= MOST_REST else "  too much is not accounted for"
    columns = "".join(f"{value:>8.2f}" for value in values)
    return f"{name:<34}{found.total_ms:>8.2f}{rows * 1e3 / found.total_ms:>8.2f}{columns}{found.rest_share:>7.1%}{mark}"
