"""Who runs next: continuous batching of a few sequences. Owns the queue, the places and the pages of what runs.

A step is a token for every sequence that is answering, or two (speculation.py), then a slice of reading: prompts share
a chunk, and what reads it stops as soon as others have waited long enough. Users take turns at the places and share the
reading; prompts of low priority wait until nothing else runs. A place comes with all the pages that its request can
need, so nothing that runs ever waits for memory. Idle work begins when there is nothing else to do, and is put off when
something comes. Used by the engine's thread only; nothing here waits for anything but the model.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from services.engine.errors import CancelledError, DeviceError, EngineError, as_engine_error
from services.engine.exchange import Lent
from services.engine.metrics import Metrics
from services.engine.model import GaveWay
from services.engine.model_config import ModelConfig
from services.engine.pages import PagePool, pages_for
from services.engine.reading import SLICE_S, Network, Reading
from services.engine.request import Failed, Progress, Reason, Restore, Source
from services.engine.sequence import Sequence
from services.engine.snapshots.arriving import Arriving
from services.engine.snapshots.hot import HotStates
from services.engine.snapshots.owing import owe, owe_in_passing
from services.engine.speculation import Speculation
from services.engine.state import State
from services.engine.turns import Turns

log = logging.getLogger(__name__)


class Scheduler:
    """A sequence is in one of the five lists from `add` until it is over. One that is over while its prompt is being
    read together with others' keeps its state until that call of the network has ended."""

    def __init__(
        self,
        model: Network,
        pool: PagePool,
        hot: HotStates,
        metrics: Metrics,
        places: int,
        chunk_tokens: int,
        new_state: Callable[[ModelConfig, Any], State] = State,
        slice_s: float = SLICE_S,
        speculation: Speculation | None = None,
    ) -> None:
        self.model, self.pool, self.hot, self.metrics = model, pool, hot, metrics
        self.places, self.chunk_tokens, self.new_state, self.slice_s = places, chunk_tokens, new_state, slice_s
        self.speculation = speculation or Speculation()
        self.waiting: deque[Sequence] = deque()
        self.restoring: list[Sequence] = []  # have a place, wait for their client's payload
        self.reading: deque[Sequence] = deque()  # who has waited longest comes first
        self.under_way: Reading | None = None  # of some of those
        self.answering: list[Sequence] = []
        self.idle: deque[Sequence] = deque()  # what to read when there is nothing else to do
        self.pressing: Callable[[], bool] = lambda: False  # whether something has come that idle work gives way to
        self.in_turns = False  # what is read lies where pictures have theirs, so neither begins before the other ends
        self.picture_begun: Callable[[], bool] = lambda: False
        self.others_wait: Callable[[], bool] = lambda: False  # whether this thread has anything else to do
        self._places_in_turn, self._chunks_in_turn = Turns(), Turns()

    @property
    def sequences(self) -> list[Sequence]:
        return [*self._placed, *self.waiting, *self.idle]

    @property
    def _placed(self) -> list[Sequence]:
        return [*self.answering, *self.reading, *self.restoring]

    @property
    def runnable(self) -> bool:
        """Whether a step would do anything now."""
        return bool(self.answering or self.reading or self._next_fits() is not None or self._next_idle() is not None)

    def step(self) -> None:
        """Give places, then a token for each answer, then a slice of reading."""
        begin = time.perf_counter()
        self.metrics.token_time.begin(bool(self.answering))
        if self.waiting:
            self._put_off_idle()
        if (idle := self._next_idle()) is not None:
            self.idle.remove(idle)
            with self.at_the_cost_of(idle):
                self._place(idle)
        while (upcoming := self._next_fits()) is not None:
            self.waiting.remove(upcoming)
            self._places_in_turn.took(upcoming)
            with self.at_the_cost_of(upcoming):
                self._place(upcoming)
        self.publish()
        if self.answering:
            self.metrics.token_time.took("scheduling", time.perf_counter() - begin)
            with self.at_the_cost_of(*self.answering):
                self._decode(list(self.answering))
        if self.under_way is None and not (self.in_turns and self.picture_begun()):
            self._begin_reading()
        if self.under_way is not None:
            self._read(self.under_way)

    @contextmanager
    def at_the_cost_of(self, *sequences: Sequence) -> Iterator[None]:
        """An exception inside ends these sequences and nothing else: the engine goes on."""
        try:
            yield
        except (GaveWay, CancelledError) as error:  # nothing is wrong
            by_client = CancelledError("the request was cancelled by its client")
            for sequence in sequences:
                self.drop(sequence, error if isinstance(error, CancelledError) else by_client)
        except Exception as error:
            log.exception("failed: requests %s", [sequence.request.request_id[:64] for sequence in sequences])
            told = as_engine_error(error)
            for sequence in sequences:
                self.drop(sequence, told)
            if isinstance(told, DeviceError):
                raise told from None  # nothing else can run either

    def add(self, sequence: Sequence) -> None:
        (self.idle if sequence.request.idle else self.waiting).append(sequence)

    def stop(self, sequence: Sequence) -> None:
        """End the answer: at once if it has a token, else after the first one."""
        sequence.stopping = True
        if sequence in self.answering:
            self._finish_if_ended(sequence)

    def restore(self, sequence: Sequence, chunk: bytes | Lent, refusal: str) -> None:
        """The next chunk of the payload that was asked for, or why there is none. What comes too late is ignored."""
        arriving = sequence.arriving
        if sequence not in self.restoring or arriving is None:
            return
        try:
            if not refusal and not arriving.add(chunk):
                return
        except EngineError as error:
            refusal = str(error)
        self.restoring.remove(sequence)
        sequence.arriving = None
        if refusal:
            assert sequence.state is not None
            sequence.state.reset()
        else:
            sequence.cached_tokens = arriving.ref.tokens
            self.metrics.snapshot_bytes["received",].inc(arriving.received_bytes)
            if not arriving.lent:  # what lies in the client's memory would have to be copied to stay
                self.hot.keep(arriving.ref, arriving.chunks, arriving.blocks)
        source = Source.REFUSED if refusal else Source.SENT
        self._start_reading(sequence, Restore(source, arriving.ref, refusal, damaged=arriving.damaged))

    def drop(self, sequence: Sequence, error: EngineError) -> None:
        """End a sequence without an answer. One that is over only lets go of what is kept for its client."""
        sequence.settle()
        self.hot.trim()
        if sequence.over:
            return
        self._leave(sequence)
        self.metrics.failures[error.code,].inc()
        try:
            sequence.sink(Failed(error))
        except Exception:
            log.exception("the sink of request %r failed", sequence.request.request_id[:64])

    def publish(self) -> None:
        """Set the gauges."""
        self.metrics.requests["waiting"].set(len(self.waiting))
        self.metrics.requests["running"].set(len(self.answering) + len(self.reading) + len(self.restoring))
        self.metrics.kv_pages["total",].set(self.pool.total)
        self.metrics.kv_pages["used",].set(self.pool.total - self.pool.free)
        self.metrics.hot_states.set(len(self.hot))
        self.metrics.hot_state_bytes.set(self.hot.used_bytes)
        self.metrics.glance()

    def check(self) -> None:
        """Conservation: every page and every byte is somebody's. Raises AssertionError with the numbers."""
        held = {*self.sequences, *(self.under_way.sequences if self.under_way is not None else ())}
        self.pool.check([sequence.state.pages for sequence in held if sequence.state is not None])
        self.hot.check()

    def _next_fits(self) -> Sequence | None:
        """Whose turn for a place it is, if there is one for it."""
        placed = self._placed
        # One that is over keeps its state until the call of the network that it shares has ended.
        held = [each for each in self.under_way.sequences if each.over] if self.under_way else []
        if not self.waiting or len(placed) + len(held) >= self.places:
            return None
        upcoming = self._places_in_turn.next([*filter(_urgent, self.waiting)] or self.waiting, placed)
        if not _urgent(upcoming) and any(map(_urgent, placed)):
            return None
        return upcoming if pages_for(upcoming.reserved_tokens) <= self.pool.free else None

    def _next_idle(self) -> Sequence | None:
        """What may be read now, when there is nothing else at all."""
        return self.idle[0] if self.idle and not self.waiting and not self._placed else None

    def _put_off_idle(self) -> None:
        """One that waits for its client's payload keeps its place: it has asked, and will not ask again."""
        if self.under_way is not None and not self.under_way.wanted(pressing=True):
            self._break_off(self.under_way)
        for sequence in [sequence for sequence in self.reading if sequence.request.idle]:
            self._put_off(sequence)

    def _put_off(self, sequence: Sequence) -> None:
        self.reading.remove(sequence)
        self.metrics.idle_put_off.inc()
        sequence.put_off()
        self.hot.trim()
        self.idle.appendleft(sequence)

    def _readers(self) -> list[Sequence]:
        """Who may read now. One of low priority would hold up those that answer, and idle work everybody."""
        idle = [sequence for sequence in self.reading if sequence.request.idle]
        asked = [sequence for sequence in self.reading if not sequence.request.idle]
        if urgent := [*filter(_urgent, asked)]:
            return urgent
        return [] if any(map(_urgent, self.answering)) else asked or idle

    def _place(self, sequence: Sequence) -> None:
        request, again = sequence.request, bool(sequence.placed_at)
        state = self._fresh_state(sequence)
        sequence.place(state)
        if not request.idle:
            self.metrics.cache_queries.inc(len(request.ids))
        ref = self.hot.choose(request.offers, request.ids)
        if again:
            stored = None if ref is None else self.hot.get(ref)
            if stored is not None:
                sequence.cached_tokens = self.hot.load(stored, state)
            elif not sequence.began_empty:
                raise CancelledError("what this idle request began with is not held any more")
            self.reading.append(sequence)
        elif ref is None:
            self._start_reading(sequence, Restore(Source.NONE))
        elif (stored := self.hot.get(ref)) is not None:
            sequence.cached_tokens = self.hot.load(stored, state)
            self._start_reading(sequence, Restore(Source.HOT, ref))
        else:
            arriving = sequence.arriving = Arriving(ref, state, self.hot)
            self.restoring.append(sequence)
            sequence.sink(Restore(Source.SEND, ref, need=arriving.need))

    def _fresh_state(self, sequence: Sequence) -> State:
        state = self.new_state(self.hot.payloads.config, self.pool)
        try:
            state.reserve(sequence.reserved_tokens)
        except BaseException:
            state.release()
            raise
        return state

    def _start_reading(self, sequence: Sequence, restore: Restore) -> None:
        if not sequence.request.idle:
            self.metrics.restores[restore.source.name.lower(),].inc()
            self.metrics.cache_hits.inc(sequence.cached_tokens)
        self.reading.append(sequence)
        sequence.sink(restore)

    def _decode(self, batch: list[Sequence]) -> None:
        with self.metrics.forward("decode"):
            fed = self.speculation.forward(self.model, batch, lambda: all(sequence.unwanted for sequence in batch))
        begin = time.perf_counter()
        for sequence, segment, logits in fed:
            with self.at_the_cost_of(sequence):
                self.speculation.take(sequence, segment, logits, self._sample)
        self.metrics.token_time.took("sampling", time.perf_counter() - begin)
        self.metrics.token_time.end()

    def _begin_reading(self) -> None:
        """Short pieces are not read together with long ones: they are done long before."""
        in_turn = self._chunks_in_turn.order(self._readers())
        alike = [sequence for sequence in in_turn if sequence.sweeps == in_turn[0].sweeps]
        if alike:
            with self.at_the_cost_of(*alike):
                self.under_way = Reading(self.model, alike, self.chunk_tokens)
                for sequence in self.under_way.sequences:
                    self._chunks_in_turn.took(sequence)

    def _read(self, reading: Reading) -> None:
        """Go on until others have waited long enough, nobody wants it any more, or it is done."""
        begin, answers = time.perf_counter(), len(self.answering)
        logits = None

        def enough() -> bool:
            late = time.perf_counter() - begin >= self.slice_s and (self.answering or self.others_wait())
            return bool(late) or not reading.wanted(self.pressing())

        with self.at_the_cost_of(*reading.sequences):
            try:
                with self.metrics.forward("prefill"):
                    logits = reading.advance(enough, self._tell)
            except BaseException:
                self._end(reading)
                raise
        if logits is not None:
            self._end(reading)
            for number, (sequence, tokens) in enumerate(zip(reading.sequences, reading.tokens, strict=True)):
                (self.metrics.idle_tokens if sequence.request.idle else self.metrics.prompt_tokens).inc(tokens)
                if not sequence.over:
                    with self.at_the_cost_of(sequence):
                        self._was_read(sequence, tokens, logits[number])
        elif self.under_way is not None and not reading.wanted(self.pressing()):
            self._break_off(reading)
        if answers:
            spent_s = time.perf_counter() - begin
            self.metrics.prefill_stall.observe(spent_s)
            self.metrics.token_time.took("reading", spent_s)

    def _tell(self, sequence: Sequence, event: Progress) -> None:
        with self.at_the_cost_of(sequence):
            sequence.sink(event)

    def _was_read(self, sequence: Sequence, tokens: int, logits: Tensor) -> None:
        state, prompt = sequence.state, sequence.request.ids
        assert state is not None
        self.reading.remove(sequence)
        sequence.executed_tokens += tokens
        passing = None
        if state.tokens in sequence.request.snapshot_at:
            owe(sequence, self.hot, self.metrics)
        elif state.tokens in sequence.request.passing_at:
            passing = owe_in_passing(sequence, self.hot, self.metrics)
        sequence.sink(replace(sequence.progress(state.tokens), passing=passing))
        if state.tokens < len(prompt):
            self.reading.append(sequence)  # behind the others: prompts take turns
        elif sequence.request.idle:
            sequence.first_token_at = time.perf_counter()
            self._finish(sequence, Reason.LENGTH)
        else:
            self.answering.append(sequence)
            self._sample(sequence, logits)

    def _break_off(self, reading: Reading) -> None:
        """Nobody wants what is read any more; idle work is read again another time."""
        self._end(reading)
        for sequence in reading.sequences:
            if sequence.unwanted:
                self.drop(sequence, CancelledError("the request was cancelled by its client"))
            elif not sequence.over:
                self._put_off(sequence)

    def _end(self, reading: Reading) -> None:
        """The states are the sequences' again: those that are over let go of theirs."""
        self.under_way = None
        try:
            reading.close()
        except Exception:  # of a GPU that has failed: its next use says so, and everybody is told
            log.exception("a reading could not be closed")
        finally:
            for sequence in reading.sequences:
                if sequence.over:
                    sequence.release()

    def _sample(self, sequence: Sequence, logits: Tensor) -> None:
        state, before = sequence.state, sequence.last_token_at
        assert state is not None
        token = sequence.choosing.next(logits, state.tokens)
        sequence.accept(token.id)
        self.metrics.generation_tokens.inc()
        if sequence.generated_tokens == 1:
            self.metrics.ttft.observe(sequence.last_token_at - sequence.submitted_at)
        else:
            self.metrics.itl.observe(sequence.last_token_at - before)
        sequence.sink(token)
        self._finish_if_ended(sequence)

    def _finish_if_ended(self, sequence: Sequence) -> None:
        reason = sequence.ended
        if reason is not None:
            self._finish(sequence, reason)

    def _finish(self, sequence: Sequence, reason: Reason) -> None:
        if sequence.request.snapshot_answer:
            owe(sequence, self.hot, self.metrics)
        self._leave(sequence)
        finish = sequence.finish(reason)
        if not sequence.request.idle:
            self.metrics.finished(finish)
        sequence.sink(finish)

    def _leave(self, sequence: Sequence) -> None:
        sequence.over = True
        for places in (self.waiting, self.restoring, self.reading, self.answering, self.idle):
            if sequence in places:
                places.remove(sequence)
        if self.under_way is None or sequence not in self.under_way.sequences:
            sequence.release()
        elif all(mate.over for mate in self.under_way.sequences):
            self._end(self.under_way)


def _urgent(sequence: Sequence) -> bool:
    return not sequence.request.low_priority
