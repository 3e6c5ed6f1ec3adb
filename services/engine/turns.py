"""Users take turns: who is let in when the queue is full, whose waiting request is next, and when to ask again.

Owns no queue and no thread: the engine's boundary holds a lock around `Admission`, the engine's thread owns `Turns`.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Iterable

from services.engine.errors import QueueFullError
from services.engine.request import Finish, Request
from services.engine.sequence import Sequence

MOST_IDLE = 16  # requests under way or waiting
MOST_USERS = 1000  # whose last turn is remembered
NEWEST = 0.3  # weight of the newest answer in the mean of their times
LONGEST_WAIT_S = 600


class Admission:
    """The requests that are taken in and not over: `places` and `queue_limit` of them, and as many as `queue_limit`
    more from users who have none, so that nobody can shut the others out. Idle ones are counted apart."""

    def __init__(self, places: int, queue_limit: int) -> None:
        self._places = places
        self._queue_limit = queue_limit
        self._open: dict[Sequence, None] = {}  # in the order they came in
        self._idle: set[Sequence] = set()
        self._answer_s: float | None = None  # mean time of an answer in its place

    def __len__(self) -> int:
        return len(self._open) + len(self._idle)

    def check(self, request: Request) -> None:
        """Raise QueueFullError if this request cannot be taken in now."""
        count, limit = len(self._open), self._places + self._queue_limit
        if request.idle:
            count, limit = len(self._idle), MOST_IDLE
        elif all(sequence.request.user != request.user for sequence in self._open):
            limit += self._queue_limit
        if count >= limit:
            raise QueueFullError(
                f"{count} requests are under way or waiting, the most this engine takes: ask again later",
                self._next_end_s(),
            )

    def add(self, sequence: Sequence) -> None:
        if sequence.request.idle:
            self._idle.add(sequence)
        else:
            self._open[sequence] = None

    def over(self, sequence: Sequence, finish: Finish | None) -> None:
        self._open.pop(sequence, None)
        self._idle.discard(sequence)
        if finish is not None and not sequence.request.idle:
            took_s = finish.prefill_s + finish.decode_s
            self._answer_s = took_s if self._answer_s is None else self._answer_s + NEWEST * (took_s - self._answer_s)

    def _next_end_s(self) -> int:
        """When an answer will probably end: their mean time, shared by the places. Before the first one has ended it
        is as long again as the oldest is under way."""
        oldest_s = time.perf_counter() - next(iter(self._open)).submitted_at if self._open else 0.0
        expected_s = oldest_s if self._answer_s is None else self._answer_s / self._places
        return min(max(1, math.ceil(expected_s)), LONGEST_WAIT_S)


class Turns:
    """Whose turn it is: of those that wait, the user who has the fewest at it now, then who had a turn longest ago."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, int] = OrderedDict()
        self._turn = 0

    def next(self, waiting: Iterable[Sequence], at_it: Iterable[Sequence] = ()) -> Sequence:
        """One of `waiting`, which is in the order they came in and not empty."""
        users = [sequence.request.user for sequence in at_it]

        def rank(sequence: Sequence) -> tuple[int, int]:
            user = sequence.request.user
            return users.count(user), self._last.get(user, 0)

        return min(waiting, key=rank)

    def order(self, waiting: Iterable[Sequence]) -> list[Sequence]:
        """All of `waiting`: who had a turn longest ago comes first, one user's in the order they came in."""
        return sorted(waiting, key=lambda sequence: self._last.get(sequence.request.user, 0))

    def took(self, sequence: Sequence) -> None:
        """It had its turn."""
        self._turn += 1
        self._last[sequence.request.user] = self._turn
        self._last.move_to_end(sequence.request.user)
        while len(self._last) > MOST_USERS:
            self._last.popitem(last=False)
