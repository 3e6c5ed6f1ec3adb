"""How a call to the engine ended, in the words that came with its status.

grpc.aio puts its own in their place where a write finds the call over: INTERNAL, "Internal error from Core". An engine
that stops, or refuses a picture while the rest of it is on its way, would look like one that has failed. So the first
words are kept when they come. Owns that, and the translation of what was kept into the api's errors.
"""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc

from services.api.errors import CODE_KEY, RETRY_AFTER_KEY, ApiError, from_engine

FROM_CORE = "Internal error from Core"  # what grpc.aio says of a write that failed
TOLD_S = 1.0  # longest wait for the engine's words behind those
LOOK_S = 0.005

T = TypeVar("T")
Told = tuple[grpc.StatusCode, str, Any]  # status, details, trailing metadata


class Ending:
    """Of one call, from its beginning on. Holds no call: that would be a cycle."""

    def __init__(self, call: Any) -> None:
        self._told: Told | None = None
        call.add_done_callback(self._note)

    def _note(self, call: Any) -> None:
        if self._told is None:
            told = _at_once(call.code()), _at_once(call.details()) or "", _at_once(call.trailing_metadata())
            self._told = None if told[1] == FROM_CORE else told

    async def error(self, call: Any) -> ApiError:
        """What it means to our client; waits for the call's end."""
        await call.code()
        until = time.monotonic() + TOLD_S
        while self._told is None and time.monotonic() < until:  # a write failed before the status came
            self._note(call)
            await asyncio.sleep(0 if self._told is not None else LOOK_S)
        return api_error(*(self._told or (await call.code(), await call.details(), ())))


def api_error(status: grpc.StatusCode, details: str | None, trailing: Any) -> ApiError:
    told = {key: value for key, value in trailing or () if isinstance(value, str)}
    return from_engine(status, details or "", told.get(CODE_KEY), told.get(RETRY_AFTER_KEY))


def _at_once(told: Coroutine[Any, Any, T]) -> T:
    """What a call that has ended knows of itself, which it says without a wait."""
    try:
        told.send(None)
    except StopIteration as end:
        found: T = end.value
        return found
    told.close()
    raise AssertionError("a call that has ended knows how")
