"""Users take turns: who is let in when the queue is full, whose waiting request is next, and when to ask again.

Who was turned away is told when the turn will be theirs, and until then stands in line: a place that gets free is kept
for who was turned away first, not given to who happens to ask just then. Only the queue's places are kept: with
nobody waiting, whoever asks is let in.

Owns no queue and no thread: the engine's boundary holds a lock around `Admission`, the engine's thread owns `Turns`.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from services.engine.errors import QueueFullError
from services.engine.request import Finish, Request
from services.engine.sequence import Sequence

MOST_IDLE = 16  # requests under way or waiting
MOST_USERS = 1000  # whose last turn is remembered
NEWEST = 0.3  # weight of the newest answer in the mean of their times
LONGEST_WAIT_S = 600
# That users may come back after they were told to, and still be in line. Before the engine is asked a long dialog is
# cut into tokens, and pictures that gave way to others' are read again: each time, so they would never be in time.
LATE_S = 10.0


class Line:
    """Users who were turned away, first the one who has been for longest, and until when each is waited for."""

    def __init__(self) -> None:
        self._until: OrderedDict[str, float] = OrderedDict()

    def ahead(self, user: str | None, now: float) -> int:
        """How many are ahead of this user; None: of somebody behind them all. Who did not come back is forgotten."""
        for other in [other for other, until in self._until.items() if until < now]:
            del self._until[other]
        return next((place for place, other in enumerate(self._until) if other == user), len(self._until))

    def wait(self, user: str, until: float) -> None:
        """Where they stand already, if they do, else behind the others. Of several requests of theirs each was told a
        time of its own: they are waited for until the last."""
        if user in self._until or len(self._until) < MOST_USERS:
            self._until[user] = max(until, self._until.get(user, until))

    def leave(self, user: str) -> None:
        self._until.pop(user, None)


class Admission:
    """The requests that are taken in and not over: `places` and `queue_limit` of them, and as many as `queue_limit`
    more from users who have none, so that nobody can shut the others out. Idle ones are counted apart."""

    def __init__(self, places: int, queue_limit: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._places = places
        self._queue_limit = queue_limit
        self._clock = clock
        self._open: dict[Sequence, None] = {}  # in the order they came in
        self._idle: set[Sequence] = set()
        self._line = Line()
        self._answer_s: float | None = None  # mean time of an answer in its place

    def __len__(self) -> int:
        return len(self._open) + len(self._idle)

    def check(self, request: Request) -> None:
        """Raise QueueFullError if this request cannot be taken in now."""
        if request.idle:
            if len(self._idle) >= MOST_IDLE:
                raise self._refused(len(self._idle), 1)
            return
        count, user, now = len(self._open), request.user, self._clock()
        has_some = any(sequence.request.user == user for sequence in self._open)
        ahead = self._line.ahead(None if has_some else user, now)
        free = self._places + self._queue_limit * (1 if has_some else 2) - count
        if free > ahead or (free > 0 and count <= self._places):
            self._line.leave(user)
            return
        error = self._refused(count, ahead - free + 1, ahead)
        if not has_some:
            self._line.wait(user, now + (error.retry_after_s or 0) + LATE_S)
        raise error

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

    def _refused(self, count: int, ends: int, ahead: int = 0) -> QueueFullError:
        """To be asked again when so many answers will probably have ended: one does in their mean time, shared by the
        places. Before the first one has, it is as long again as the oldest is under way."""
        oldest_s = self._clock() - next(iter(self._open)).submitted_at if self._open else 0.0
        each_s = oldest_s if self._answer_s is None else self._answer_s / self._places
        wait_s = min(max(1, math.ceil(ends * each_s)), LONGEST_WAIT_S)
        others = f", and places are kept for {ahead} users who asked before" if ahead else ""
        return QueueFullError(
            f"{count} requests are under way or waiting{others}: more are not taken in, ask again in {wait_s} s",
            wait_s,
        )


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
