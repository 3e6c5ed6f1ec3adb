"""Drafts of one who knows the answer, for benchmarks: as many are right as is asked for."""

from collections.abc import Callable
from collections.abc import Sequence as Seq

from services.engine.sequence import Sequence
from services.engine.state import State


class DraftError(Exception):
    """Drafts have changed what was said. The message says which."""

    code = "bench_drafts"


class Told:
    """Right in exactly the given share of cases, evenly spread. `ask`: is called for each draft, with the sequence's
    state and its last id, as the model's own block would be."""

    kind, costly = "mtp", False

    def __init__(self, answer: Seq[int], share: float, ask: Callable[[State, int], object] | None = None) -> None:
        self._answer, self._share, self._ask, self._due = answer, share, ask, 0.5

    def draft(self, sequences: Seq[Sequence]) -> list[int | None]:
        (sequence,) = sequences
        if self._ask is not None:
            assert sequence.state is not None
            self._ask(sequence.state, sequence.last_id)
        right = self._answer[sequence.generated_tokens]
        self._due += self._share
        if self._due >= 1:
            self._due -= 1
            return [right]
        return [right ^ 1]
