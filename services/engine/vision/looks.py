"""Pictures that the engine's thread works on: one at a time, a piece of work between two of its steps."""

import logging
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future
from threading import Lock

from torch import Tensor

from services.engine.errors import DeviceError, EngineError, StepError, as_engine_error, of_the_device

log = logging.getLogger(__name__)

Work = Generator[None, None, Tensor]


class Looks:
    """`add` from any thread; the rest by the thread that works. A picture that nobody waits for any more is dropped."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Work, Future[Tensor]]] = deque()
        self._lock = Lock()
        self._begun = False

    @property
    def pending(self) -> bool:
        return bool(self._waiting)

    @property
    def begun(self) -> bool:
        """A picture is half read."""
        return self._begun

    def add(self, work: Work) -> "Future[Tensor]":
        done: Future[Tensor] = Future()
        with self._lock:
            self._waiting.append((work, done))
        return done

    def advance(self) -> None:
        """Do the next piece of the first picture, if there is one. Raises DeviceError: nothing else can run either."""
        if not self._waiting:
            return
        work, done = self._waiting[0]
        lost: DeviceError | None = None
        if not done.cancelled():
            try:
                self._begun = True
                next(work)
                return
            except StopIteration as ended:
                _settle(done, ended.value, None)
            except Exception as error:
                known = isinstance(error, EngineError) or of_the_device(error)
                named = as_engine_error(error) if known else StepError(f"a picture could not be read: {error!r}")
                _settle(done, None, named)
                lost = named if isinstance(named, DeviceError) else None
        work.close()
        self._waiting.popleft()
        self._begun = False
        if lost is not None:
            raise lost

    def end(self, error: EngineError) -> None:
        """Nothing more is done."""
        with self._lock:
            left = list(self._waiting)
            self._waiting.clear()
        for work, done in left:
            try:
                work.close()
            except Exception:  # of a GPU that has failed: whoever waits is told all the same
                log.exception("a picture's reading could not be closed")
            _settle(done, None, error)


def _settle(done: "Future[Tensor]", rows: Tensor | None, error: EngineError | None) -> None:
    if not done.set_running_or_notify_cancel():
        return
    if error is not None:
        done.set_exception(error)
    elif rows is not None:
        done.set_result(rows)
