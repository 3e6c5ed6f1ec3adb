"""The answers to one request: `n` of them, one after another, so that a request with many takes one place in the
engine. Owns which is under way; answer.py owns each.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable

from services.api.answer import Answer, Done, PromptProgress
from services.api.errors import ApiError, QueueFull
from services.api.parsers.answer import Delta
from services.unbroken import is_ending

PATIENCE_S = 600.0  # with a full queue, between two answers: as long as an engine ever says to wait

Opener = Callable[[int], Awaitable[Answer]]  # opens the answer of that number


class Choices:
    """Iterate `events` once, to its end, or close it: that frees the engine's sequence. `answers` are those begun."""

    def __init__(self, first: Answer, count: int, open_next: Opener, prefix: str) -> None:
        self.id = prefix + secrets.token_hex(12)
        self.count = count
        self.answers = [first]
        self._open_next = open_next
        self._closed = False
        self._cancelled = False

    async def events(self) -> AsyncGenerator[tuple[int, PromptProgress | Delta | Done], None]:
        """The number of the answer and what it says. Raises ApiError if the engine fails on the way."""
        for index in range(self.count):
            if index:
                answer = await self._open(index)
                self.answers.append(answer)
                if self._closed:
                    answer.close()
            events = self.answers[index].events()
            try:
                async for event in events:
                    yield index, event
            except (ApiError, asyncio.CancelledError):
                if not self._cancelled or is_ending():
                    raise
                yield index, self.answers[index].cancelled()
                return
            finally:
                await events.aclose()

    async def _open(self, index: int) -> Answer:
        """In its turn: where others were let in meanwhile, what was answered so far is not to be lost."""
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                return await self._open_next(index)
            except QueueFull as error:
                wait_s = error.retry_after_s or 1
                if self._closed or time.monotonic() + wait_s > until:
                    raise
                await asyncio.sleep(wait_s)

    async def stop_thinking(self) -> bool:
        """End the thinking of the answer under way; False if it is over."""
        return await self.answers[-1].stop_thinking()

    def cancel(self) -> None:
        """Free the engine's sequence; the events end with what was said by then."""
        self._cancelled = True
        self.close()

    def close(self) -> None:
        """Give up what is not complete; also if the events were never begun."""
        self._closed = True
        self.answers[-1].close()
