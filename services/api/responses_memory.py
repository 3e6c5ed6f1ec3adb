"""Responses that a client may come back for: those under way, and the last complete ones. Owns the background tasks and
how much is remembered; in this process only, so a restart forgets.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from services.api.answer import Done, PromptProgress
from services.api.choices import Choices
from services.api.errors import ApiError, NotFound
from services.api.messages import Message
from services.api.responses_reply import ResponseReply

MOST_KEPT = 256
MOST_LETTERS = 256_000_000  # of all dialogs kept: pictures are part of them
CANCEL_S = 5.0  # longest wait for an answer to end that was cancelled


@dataclass(frozen=True)
class Kept:
    """A complete response, and the dialog with its answer, but without its instructions."""

    object: dict[str, Any]
    messages: Sequence[Message]


class ResponseMemory:
    """One for the process."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._under_way: WeakValueDictionary[str, ResponseReply] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[None]] = set()

    def note(self, reply: ResponseReply) -> None:
        """It is under way, as long as somebody holds it."""
        self._under_way[reply.object["id"]] = reply

    def keep(self, reply: ResponseReply, messages: Sequence[Message]) -> None:
        """It is complete."""
        self._kept[reply.object["id"]] = Kept(reply.object, messages)
        while len(self._kept) > MOST_KEPT or (len(self._kept) > 1 and self._letters() > MOST_LETTERS):
            self._kept.popitem(last=False)

    def _letters(self) -> int:
        return sum(len(message.content or "") for kept in self._kept.values() for message in kept.messages)

    def kept(self, name: str, param: str) -> Kept:
        """Raises NotFound."""
        if name not in self._kept:
            raise NotFound(f"there is no response {name!r}: this server remembers its last {MOST_KEPT}", param)
        self._kept.move_to_end(name)
        return self._kept[name]

    def find(self, name: str) -> dict[str, Any]:
        """The response as it is now. Raises NotFound."""
        running = self._under_way.get(name)
        return self.kept(name, "response_id").object if running is None or name in self._kept else running.object

    async def cancel(self, name: str) -> dict[str, Any]:
        """End it with what was said by then; one that is complete stays as it is. Raises NotFound."""
        running = self._under_way.get(name)
        if running is not None and name not in self._kept and not running.ended.is_set():
            running.choices.cancel()
            try:
                await asyncio.wait_for(running.ended.wait(), CANCEL_S)
            except TimeoutError:  # its client takes no events
                return {**running.object, "status": "cancelled"}
            return running.object
        return self.find(name)

    def run(self, reply: ResponseReply, on_error: Callable[[Exception], ApiError]) -> None:
        """Make an answer without a client that waits."""
        task = asyncio.create_task(_make(reply, reply.choices, on_error))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Give up what is made in the background."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _make(reply: ResponseReply, choices: Choices, on_error: Callable[[Exception], ApiError]) -> None:
    events = choices.events()
    try:
        async for index, event in events:
            if isinstance(event, Done):
                reply.last(index, event)
            elif not isinstance(event, PromptProgress):
                reply.piece(index, event)
    except Exception as error:
        reply.fail(on_error(error))
    finally:
        await events.aclose()
        choices.close()
