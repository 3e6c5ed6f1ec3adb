"""Every cache policy on every trace, beside the optimum: what the choice of the shipped one rests on."""

from collections.abc import Sequence
from pathlib import Path

from kernels.experts.host.replay import OPTIMUM, POLICIES, SHIPPED, Counts, replay
from services.tools import figures
from services.tools.traces.sources import Source

SHARES = (0.16, 0.24, 0.33)  # of all experts in RAM
COLUMNS = ("lru", SHIPPED, *(policy for policy in POLICIES if policy != "lru"), OPTIMUM)


def run(traces: Sequence[Source], results: Path | None) -> None:
    """Prints hit rates of decode, in percent; appends rows for the shipped policy, plain LRU and the optimum."""
    print(f"{'trace':<14}{'RAM':>5}" + "".join(f"{policy:>9}" for policy in COLUMNS) + "   prompt reads: lru, shipped")
    beaten = []
    for trace in traces:
        slots = [max(trace.shape.experts_per_token, int(share * trace.shape.blocks)) for share in SHARES]
        found = {policy: replay(trace.routing, policy, slots) for policy in COLUMNS}
        for at, share in enumerate(SHARES):
            counts = {policy: found[policy][at] for policy in COLUMNS}
            cells = "".join(f"{100 * counts[policy].hit_rate:>9.2f}" for policy in COLUMNS)
            print(f"{trace.name:<14}{share:>5.0%}{cells}{_prompt_reads(counts)}")
            if counts[SHIPPED].hit_rate < counts["lru"].hit_rate:
                beaten.append(f"{trace.name} at {share:.0%}")
            if results is not None:
                note = f"replay, trace {trace.name}, {trace.size}, {share:.0%} of experts in RAM ({slots[at]} slots)"
                for name, policy in (("shipped", SHIPPED), ("lru", "lru"), ("belady", OPTIMUM)):
                    figures.append(results, f"cache.hit_{name}", counts[policy].hit_rate, "share of lookups", note)
    print(f"the shipped policy loses to LRU on: {', '.join(beaten) or 'none'}")


def _prompt_reads(counts: dict[str, Counts]) -> str:
    lru, shipped = counts["lru"].sweep_reads, counts[SHIPPED].sweep_reads
    return f"   {lru:,} to {shipped:,}" if lru else ""
