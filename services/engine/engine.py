"""The engine's boundary: everything that a server, a tool or a test may ask of it. No client goes round it.

    await engine.see(asks, text_tokens)      embeddings of pictures, which requests then name
    handle = engine.submit(request, sink)    the sink gets Restore, Progress, Token, ... and last Finish or Failed
    handle.restore(chunk)                    the answer to Restore(SEND), chunk by chunk
    handle.stop_thinking()                   the next token ends the thinking
    handle.stop()                            ends the answer as if a stop id had been sampled
    handle.cancel()                          always, when done: frees whatever the request still holds
    engine.info, engine.close()

One thread, started here, owns the model, the experts, the pages, the hot states and every sequence; nothing else
touches them after the constructor. Callers put jobs into an inbox and the thread runs them between two steps, of which
none takes long. A sink is called by that thread and must return at once. What leaves the thread (events, chunks of
payloads) never changes.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from services.engine.errors import (
    CancelledError,
    DeviceError,
    EngineError,
    StepError,
    StoppingError,
    UnsupportedError,
    as_engine_error,
    of_the_device,
)
from services.engine.exchange import Lent
from services.engine.experts.streamer import Experts
from services.engine.grammar import Grammars, Matcher
from services.engine.request import Event, Failed, Finish, Info, Request, Sink, Token
from services.engine.scheduler import Scheduler
from services.engine.sequence import Sequence
from services.engine.turns import Admission
from services.engine.vision.cache import Held
from services.engine.vision.ids import picture_ids
from services.engine.vision.looks import Looks, Work
from services.engine.vision.sight import Ask, Missing, Room, Seen, Sight

log = logging.getLogger(__name__)


Job = Callable[[Scheduler, Sequence], None]


class Engine:
    """Takes requests in from construction until `close`. `ended` is done when the thread is, failed if it failed.

    Everything below but `_inbox`, `_pressing`, `_open` and `_stop_at`, which `_wake` guards, belongs to the thread.
    """

    def __init__(
        self,
        info: Info,
        scheduler: Scheduler,
        experts: Experts,
        grammars: Grammars,
        sight: Sight | None = None,
        exchange_dir: Path | None = None,
    ) -> None:
        self.info = info
        self.exchange_dir = exchange_dir
        self._sight = sight
        self._looks = Looks()
        self._grammars = grammars
        self.ended: Future[None] = Future()
        self._scheduler = scheduler
        self._experts = experts
        self._wake = threading.Condition()
        self._inbox: deque[tuple[Job, Sequence]] = deque()
        self._open = Admission(info.max_sequences, info.queue_limit)
        self._pressing = False  # the inbox has something that idle work gives way to
        # In one memory with prompts a picture cannot begin before idle work has ended.
        scheduler.pressing = lambda: self._pressing or (scheduler.in_turns and self._looks.pending)
        scheduler.picture_begun = lambda: self._looks.begun
        scheduler.others_wait = lambda: bool(self._inbox) or self._looks.pending or self._stop_at is not None
        self._stop_at: float | None = None  # time.monotonic(); nothing is taken in once this is set
        self._thread = threading.Thread(target=self._run, name="engine")
        self._thread.start()

    async def prepare(self, request: Request) -> None:
        """Have everything ready that `submit` would wait for. Raises RequestError."""
        request.check(self.info)
        if request.grammar is not None:
            await self._grammars.prepare(request.grammar)

    def submit(self, request: Request, sink: Sink) -> "Handle":
        """Take a request in. Raises RequestError, QueueFullError or StoppingError, and then the sink gets nothing.

        It returns at once, but for a grammar that was not prepared.
        """
        request.check(self.info)
        matcher = self._matcher(request)
        pictures = self._hold(request)

        def counted(event: Event) -> None:
            if isinstance(event, Finish | Failed):
                with self._wake:
                    self._open.over(sequence, event if isinstance(event, Finish) else None)
                sequence.sink = _ignore  # else each would refer to itself, and stay until Python looks for such
            if pictures is not None and isinstance(event, Token | Finish | Failed):
                pictures.release()  # the prompt was read
            sink(event)

        sequence = Sequence(_with_picture_ids(request), counted, matcher, pictures)
        with self._wake:
            try:
                self._check_open(request)
            except EngineError:
                if pictures is not None:
                    pictures.release()
                sequence.sink = _ignore
                raise
            self._open.add(sequence)
            self._pressing |= not request.idle
            self._inbox.append((Scheduler.add, sequence))
            self._wake.notify()
        return Handle(self, sequence)

    async def see(
        self, asks: Seq[Ask], text_tokens: int, answer_tokens: int = 0, count_only: bool = False
    ) -> list[Seen] | Missing:
        """Embeddings of pictures, ready to be named by requests; or which of them must be sent.

        Raises UnsupportedError, PictureError, ContextError, QueueFullError or StoppingError.
        """
        room = Room(self.info.context_tokens, text_tokens, answer_tokens)
        return await self.sight.see(asks, room, self._look, count_only)

    @property
    def sight(self) -> Sight:
        """Raises UnsupportedError."""
        if self._sight is None:
            raise UnsupportedError("this engine's model cannot see pictures: send text only")
        return self._sight

    def _look(self, work: Work) -> "Future[Tensor]":
        with self._wake:
            if self._stop_at is not None:
                raise StoppingError("the engine is stopping: ask again in a moment, or ask another one")
            done = self._looks.add(work)
            self._wake.notify()
        return done

    def _matcher(self, request: Request) -> Matcher | None:
        if request.grammar is None:
            return None
        try:
            return self._grammars.matcher(request.grammar, request.stop_ids)
        except EngineError as error:
            # It is kept with the grammar and raised for everybody who asks: it would keep all their frames.
            raise error.with_traceback(None) from None

    def _hold(self, request: Request) -> Held | None:
        return self.sight.cache.hold(request.pictures) if request.pictures else None

    def _check_open(self, request: Request) -> None:
        """Raise StoppingError or QueueFullError if the request cannot be taken in. `_wake` is held."""
        if self._stop_at is not None:
            raise StoppingError("the engine is stopping: ask again in a moment, or ask another one")
        self._open.check(request)

    def post(self, job: Job, sequence: Sequence) -> None:
        """Have the thread run a job between two steps, if it still runs."""
        with self._wake:
            self._pressing |= sequence.request.idle and not sequence.over
            self._inbox.append((job, sequence))
            self._wake.notify()

    def close(self, timeout_s: float = 0.0) -> None:
        """Take nothing more in, let what has a place go on for `timeout_s`, end the rest, and wait for the thread."""
        with self._wake:
            self._stop_at = time.monotonic() + timeout_s
            self._wake.notify()
        self._thread.join()
        if self.exchange_dir is not None and self.info.exchange:
            (self.exchange_dir / self.info.exchange).unlink(missing_ok=True)

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            self._serve()
        except BaseException as error:
            log.critical("the engine has failed and stops", exc_info=error)
            failure = as_engine_error(error) if isinstance(error, Exception) and of_the_device(error) else error
        if failure is None:
            told: EngineError = StoppingError("the engine has stopped: ask again in a moment, or ask another one")
        elif isinstance(failure, DeviceError):
            told = StoppingError("the GPU has failed and the engine starts again: ask again in a moment")
        else:
            told = StepError("the engine has failed and stops; its log says why")
        for end in (partial(self._end_all, told), self._grammars.close, self._experts.close):
            try:
                end()
            except Exception as error:  # whatever it is, `ended` has to be set: the process waits for nothing else
                log.exception("the engine could not end in order")
                failure = failure or error
        if failure is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(failure)

    def _serve(self) -> None:
        scheduler = self._scheduler
        while True:
            jobs, stop_at = self._wait()
            for job, sequence in jobs:
                with scheduler.at_the_cost_of(sequence):
                    job(scheduler, sequence)
            jobs.clear()  # while the thread sleeps it would keep their requests
            if stop_at is not None:
                for sequence in [s for s in scheduler.sequences if s in scheduler.waiting or s.request.idle]:
                    scheduler.drop(sequence, StoppingError("the engine is stopping: ask another one"))
                if self._is_due(stop_at):
                    return
            if scheduler.runnable:
                scheduler.step()
            if not (scheduler.in_turns and scheduler.under_way):
                self._looks.advance()
            scheduler.publish()
            if not scheduler.sequences:
                scheduler.check()
                self._experts.check()

    def _wait(self) -> tuple[list[tuple[Job, Sequence]], float | None]:
        """Sleep until there is something to do. Returns the jobs, and when to stop as it was when they were taken."""
        with self._wake:
            while not (self._inbox or self._looks.pending or self._scheduler.runnable or self._is_due(self._stop_at)):
                self._wake.wait(None if self._stop_at is None else max(0.0, self._stop_at - time.monotonic()))
            jobs = list(self._inbox)
            self._inbox.clear()
            self._pressing = False
            return jobs, self._stop_at

    def _is_due(self, stop_at: float | None) -> bool:
        return stop_at is not None and (time.monotonic() >= stop_at or not self._scheduler.sequences)

    def _end_all(self, error: EngineError) -> None:
        with self._wake:
            self._stop_at = 0.0  # after this, submit takes nothing in
            left = [sequence for _, sequence in self._inbox]
            self._inbox.clear()
        self._looks.end(error)
        for sequence in [*self._scheduler.sequences, *left]:
            with suppress(DeviceError), self._scheduler.at_the_cost_of():
                self._scheduler.drop(sequence, error)
        self._scheduler.publish()


def _ignore(event: Event) -> None:
    """The sink of a request that is over."""


def _with_picture_ids(request: Request) -> Request:
    """The places of its pictures with the ids that tell pictures apart."""
    ids = list(request.ids)
    for picture in request.pictures:
        ids[picture.position : picture.position + picture.tokens] = picture_ids(picture.handle, picture.tokens)
    return replace(request, ids=tuple(ids)) if request.pictures else request


class Handle:
    """One submitted request. Every call returns at once, from any thread; after the end it does nothing."""

    def __init__(self, engine: Engine, sequence: Sequence) -> None:
        self._engine = engine
        self._sequence = sequence

    def then(self, call: Callable[[], None]) -> None:
        """Have the thread call this when it has done what was asked before; it must return at once."""
        self._engine.post(lambda scheduler, sequence: call(), self._sequence)

    def restore(self, chunk: bytes | Lent, refusal: str = "") -> None:
        """The next chunk of the payload that Restore(SEND) asked for, or why it cannot be had."""
        self._engine.post(lambda scheduler, sequence: scheduler.restore(sequence, chunk, refusal), self._sequence)

    def stop(self) -> None:
        """End the answer after the token under way; the end is a Finish, with its snapshots."""
        self._engine.post(Scheduler.stop, self._sequence)

    def stop_thinking(self) -> None:
        """The next token ends the thinking; nothing happens to an answer that does not think."""
        self._engine.post(lambda scheduler, sequence: sequence.choosing.stop_thinking(), self._sequence)

    def cancel(self) -> None:
        """A request that is not over ends with Failed(CancelledError); a finished one lets go of its snapshots. A step
        that works for cancelled requests alone breaks off before its next layer."""
        self._sequence.unwanted = True
        gone = CancelledError("the request was cancelled by its client")
        self._engine.post(lambda scheduler, sequence: scheduler.drop(sequence, gone), self._sequence)
