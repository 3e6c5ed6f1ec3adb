"""One generation under way: what was asked, how far it is, what it holds, and when things happened.

Owns its state from the moment it gets a place until `release`. Decides nothing about other sequences.
"""

import time

from services.engine.choosing import Choosing
from services.engine.grammar import Matcher
from services.engine.model import DECODED_TOKENS, Segment
from services.engine.request import Finish, Progress, Reason, Request, Sink, Snapshot
from services.engine.snapshots.arriving import Arriving
from services.engine.snapshots.hot import Stored
from services.engine.state import State
from services.engine.vision.cache import Held

MOST_LEFT_MS = 2**32 - 1  # that the contract has room for


class Sequence:
    """Times are `time.perf_counter` seconds; the clock of a phase runs from the end of the one before."""

    def __init__(
        self, request: Request, sink: Sink, matcher: Matcher | None = None, pictures: Held | None = None
    ) -> None:
        self.request = request
        self.pictures = pictures
        self.sink = sink
        self.choosing = Choosing(request, matcher)
        self.state: State | None = None
        self.arriving: Arriving | None = None  # the payload that the client was asked for
        self.began_empty = True  # the last time, if it was put off
        self.cached_tokens = 0
        self.executed_tokens = 0
        self.generated_tokens = 0
        self.last_id = 0  # sampled, not fed yet
        self.stopping = False  # the client asked to end the answer
        self.unwanted = False  # the client is gone: set by any thread, so that a step under way can break off
        self.over = False  # finished, failed or dropped: in no list any more
        self.owed: list[Stored] = []  # pinned until the client has them or is gone
        self.passing: Stored | None = None  # the one of them that a newer one takes the place of
        self.submitted_at = time.perf_counter()
        self.placed_at = 0.0
        self.reading_from = 0.0
        self.first_token_at = 0.0
        self.last_token_at = 0.0

    @property
    def reserved_tokens(self) -> int:
        """The most ids its state will consume: the last sampled one is not fed."""
        return len(self.request.ids) + max(0, self.request.max_tokens - 1)

    def place(self, state: State) -> None:
        """Its turn has come: `state` is fresh and has all the pages that it can need."""
        self.state = state
        self.placed_at = time.perf_counter()

    @property
    def piece(self) -> range:
        """The prompt's piece that is read now, from cut to cut: where reading began, where a state is to be stored,
        the end. It stays the same while parts of it are read."""
        assert self.state is not None
        done, prompt = self.state.tokens, len(self.request.ids)
        cuts = [self.cached_tokens, *self.request.snapshot_at, *self.request.passing_at, prompt]
        return range(max(cut for cut in cuts if cut <= done), min(cut for cut in cuts if cut > done))

    @property
    def left_of_piece(self) -> int:
        assert self.state is not None
        return self.piece.stop - self.state.tokens

    @property
    def sweeps(self) -> bool:
        """Whether the piece is a long one: services/engine/model.py says which are."""
        return len(self.piece) > DECODED_TOKENS

    def next_segment(self, count: int) -> Segment:
        """The next `count` ids of the piece, to be fed now."""
        assert self.state is not None
        assert 0 < count <= self.left_of_piece
        if not self.reading_from:
            self.reading_from = time.perf_counter()
        done = self.state.tokens
        rows = self.pictures.rows(done, done + count) if self.pictures is not None else []
        return Segment(self.state, list(self.request.ids[done : done + count]), rows, self.sweeps)

    def progress(self, done_tokens: int) -> Progress:
        """That so much of the prompt is read now; how long the rest takes, by the speed of what this request read."""
        total, read = len(self.request.ids), done_tokens - self.cached_tokens
        elapsed_s = time.perf_counter() - self.reading_from
        left_s = elapsed_s * (total - done_tokens) / read if read else 0.0
        return Progress(done_tokens, total, min(round(left_s * 1e3), MOST_LEFT_MS))

    @property
    def prompt_done(self) -> bool:
        assert self.state is not None
        return self.state.tokens >= len(self.request.ids)

    def accept(self, sampled: int) -> None:
        """One more token of the answer, now."""
        self.last_id = sampled
        self.generated_tokens += 1
        self.last_token_at = time.perf_counter()
        if self.generated_tokens == 1:
            self.first_token_at = self.last_token_at

    def put_off(self) -> None:
        """Idle work gives way: what was read is let go of, and read again another time. So is what is owed of it."""
        self.release()
        self.settle()
        self.began_empty = not self.cached_tokens
        self.cached_tokens = self.executed_tokens = 0
        self.reading_from = 0.0

    @property
    def ended(self) -> Reason | None:
        """Why the answer is complete; None while it goes on."""
        if not self.generated_tokens:
            return None
        if self.stopping or self.last_id in self.request.stop_ids:
            return Reason.STOP
        return Reason.LENGTH if self.generated_tokens >= self.request.max_tokens else None

    def finish(self, reason: Reason) -> Finish:
        return Finish(
            reason=reason,
            prompt_tokens=len(self.request.ids),
            cached_tokens=self.cached_tokens,
            executed_tokens=self.executed_tokens,
            generated_tokens=self.generated_tokens,
            queue_s=self.placed_at - self.submitted_at,
            prefill_s=self.first_token_at - self.placed_at,
            decode_s=time.perf_counter() - self.first_token_at,
            snapshots=tuple(
                Snapshot(stored.ref) if self.request.heads_only else Snapshot(stored.ref, stored.chunks, stored.blocks)
                for stored in self.owed
            ),
        )

    def release(self) -> None:
        """Give the pages back. Twice is no error."""
        if self.state is not None:
            self.state.release()
            self.state = None

    def owe(self, stored: Stored) -> None:
        """The client gets this state after the answer; with heads_only it gets its name, which needs no pin."""
        stored.pins += not self.request.heads_only
        self.owed.append(stored)

    def disown(self, stored: Stored) -> None:
        """The client is not going to get it after all."""
        stored.pins -= not self.request.heads_only
        self.owed.remove(stored)

    def settle(self) -> None:
        """The client has what it was owed, or is gone. Twice is no error."""
        for stored in self.owed:
            stored.pins -= not self.request.heads_only
        self.owed, self.passing = [], None
