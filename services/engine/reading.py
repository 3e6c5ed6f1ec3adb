"""Prompts that are read together: how a chunk is shared among them, and one call of the network that stops on the way.

Owns that call and the clock of a slice. Who may read, and what comes of what was read, is the scheduler's.
"""

import time
from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq
from typing import Protocol

from torch import Tensor

from services.engine.model import Segment
from services.engine.request import Progress
from services.engine.sequence import Sequence

# Others wait so long for the network to come to a place where it can stop, and that place may be as far again: an
# answer shall not stand still for longer than 0.3 s.
SLICE_S = 0.1
PROGRESS_S = 1.0  # at most between two events, where the network stops as often


class Network(Protocol):
    """What is asked of the model: services/engine/model.py.

    `reading` yields, from 0 to 1, the share of its work that is done, wherever others may run. Between two yields
    `forward` may be called for states that are not in it, and never another `reading`. It returns the logits after each
    segment's last id, [len(segments), vocab]. Closed early it leaves its states spoiled, and has let go of all else.
    """

    def forward(self, segments: list[Segment], give_way: Callable[[], bool] | None = None) -> Tensor: ...

    def reading(self, segments: list[Segment]) -> Generator[float, None, Tensor]: ...


class Reading:
    """The next tokens of some prompts, as one call. Until it has ended, or is closed, the states are the call's."""

    def __init__(self, network: Network, sequences: Seq[Sequence], chunk_tokens: int) -> None:
        """`sequences`: those whose turn it is come first. They share the chunk; who gets nothing of it is left out."""
        parts = [(sequence, count) for sequence, count in shared(sequences, chunk_tokens) if count]
        self.sequences = [sequence for sequence, _ in parts]
        self.tokens = [count for _, count in parts]
        segments = [sequence.next_segment(count) for sequence, count in parts]
        # Where it began: some networks feed a state as they go, others at the end.
        self._read = [segment.state.tokens for segment in segments]
        self._running = network.reading(segments)
        self._told_at = time.perf_counter()

    def wanted(self, pressing: bool) -> bool:
        """Whether anybody waits for it. `pressing`: idle work does not count."""
        return not all(s.over or s.unwanted or (s.request.idle and pressing) for s in self.sequences)

    def advance(self, enough: Callable[[], bool], tell: Callable[[Sequence, Progress], None]) -> Tensor | None:
        """Go on until `enough`, which is asked wherever the network can stop; the logits if it is done before. `tell`
        gets how far each prompt is, now and then."""
        while True:
            try:
                share = next(self._running)
            except StopIteration as end:
                logits: Tensor = end.value
                return logits
            now = time.perf_counter()
            if now - self._told_at >= PROGRESS_S:
                self._told_at = now
                for sequence, count, read in zip(self.sequences, self.tokens, self._read, strict=True):
                    if sequence.state is not None and not sequence.over:
                        tell(sequence, sequence.progress(read + int(share * count)))
            if enough():
                return None

    def close(self) -> None:
        """The states are their sequences' again: spoiled, if it had begun and has not come to its end."""
        self._running.close()


def shared(sequences: Seq[Sequence], tokens: int) -> list[tuple[Sequence, int]]:
    """How many tokens of its piece each one reads: users get equal shares, and so do the prompts of a user."""
    users: dict[str, list[Sequence]] = {}
    for sequence in sequences:
        users.setdefault(sequence.request.user, []).append(sequence)
    wanted = [sum(sequence.left_of_piece for sequence in own) for own in users.values()]
    parts: list[tuple[Sequence, int]] = []
    for own, share in zip(users.values(), shares(tokens, wanted), strict=True):
        parts += zip(own, shares(share, [sequence.left_of_piece for sequence in own]), strict=True)
    return parts


def shares(total: int, wanted: Seq[int]) -> list[int]:
    """Split `total` so that nobody gets more than is wanted, and nobody less than another but for that; what cannot be
    split goes to the first."""
    given = [0] * len(wanted)
    while total and (open_ := [number for number, most in enumerate(wanted) if given[number] < most]):
        each = max(1, total // len(open_))
        for number in open_:
            more = min(each, wanted[number] - given[number], total)
            given[number] += more
            total -= more
    return given
