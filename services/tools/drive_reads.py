"""What a drive did for tokens, by the host library's counters before them and after them.

Two ways to say how much of it is hidden. A token needs blocks that are missing when they are named, some of which are
on their way by then, and blocks that were read in time because they had been guessed. `hidden` is of the time that a
drive takes for all of these, one after the other; `hidden_of_missing` of the time for the missing ones alone, which
leaves out what guesses gained. Blocks that were guessed for nothing count in neither.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class DriveReads:
    """Of one token, or of all. `needed` blocks came from the drive and were named, `missing` of them too late.
    `block_ms`: one at the drive's rate."""

    needed: float
    missing: float
    block_ms: float

    @staticmethod
    def between(
        before: Mapping[str, int], after: Mapping[str, int], block_bytes: int, gb_s: float, tokens: int = 1
    ) -> "DriveReads":
        """Both of Host.counters(), when nothing is on its way but what may not be needed."""

        def each(name: str) -> float:
            return (after[name] - before[name]) / tokens

        # A block that was begun as a guess and is demanded while it is on its way counts as useful, not as demanded.
        needed = each("demand_read_bytes") / block_bytes + each("prefetch_useful")
        return DriveReads(needed, each("misses"), block_bytes / gb_s / 1e6)

    @property
    def needed_ms(self) -> float:
        return self.needed * self.block_ms

    def hidden(self, exposed_ms: float) -> float:
        """If tokens took so much longer for their reads."""
        return 1 - exposed_ms / self.needed_ms if self.needed else 1.0

    def hidden_of_missing(self, exposed_ms: float) -> float:
        return 1 - exposed_ms / (self.missing * self.block_ms) if self.missing else 1.0
