"""Operations of gRPC's that are never broken off. Owns how they are waited for; what comes of them is their caller's.

grpc.aio forgets the memory of an operation whose waiter is cancelled: some 120 bytes for ever, with each client that
hangs up, each time limit that passes and each answer that ends before its client has said its last word. So who waits
may be cancelled, and the operation goes on until its call ends, which ends it too.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
Operation = Coroutine[Any, Any, T]


async def unbroken(operation: Operation[T]) -> T:
    """What it returns or raises."""
    return await asyncio.shield(_begin(operation))


def is_ending() -> bool:
    """Whether it is our own task that was cancelled, and not what it waits for: a call that somebody else gave up."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Reads:
    """Of one call; `read` is its own. One at a time waits for them."""

    def __init__(self, read: Callable[[], Operation[Any]]) -> None:
        self._read = read
        self._reading: asyncio.Task[Any] | None = None

    async def next(self) -> Any:
        """What `read` returns or raises. After a cancellation the next one gets what came meanwhile."""
        reading = self._reading = self._reading or _begin(self._read())
        try:
            return await asyncio.shield(reading)
        finally:
            if reading.done():
                self._reading = None


def _begin(operation: Operation[T]) -> "asyncio.Task[T]":
    task = asyncio.create_task(operation)
    task.add_done_callback(_seen)
    return task


def _seen(done: "asyncio.Task[Any]") -> None:
    if not done.cancelled():
        done.exception()  # nobody may be there any more to see it
