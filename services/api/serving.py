"""From answers under way to an HTTP response, whole or as a stream of events, in whichever flavour of API. Owns what
all flavours do alike: reading the body, the order of a reply's parts, and that the answers end with the client.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol, runtime_checkable

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from services.api.answer import Done, PromptProgress
from services.api.choices import Choices
from services.api.errors import ClientGone, InvalidRequest
from services.api.parsers.answer import Delta
from services.api.retries import Work
from services.api.sse import OPENAI, EventStream, Wire, until_gone
from services.api.validation import parse_json


class Reply(Protocol):
    """The objects of one flavour. Answers are named by their number."""

    def first(self, index: int) -> list[dict[str, Any]]:
        """Before the answer says anything."""

    def piece(self, index: int, delta: Delta) -> list[dict[str, Any]]: ...

    def last(self, index: int, done: Done) -> list[dict[str, Any]]: ...

    def ending(self, dones: Sequence[Done]) -> list[dict[str, Any]]:
        """Behind all answers."""

    def whole(self, dones: Sequence[Done]) -> dict[str, Any]:
        """All of it as one object."""


@runtime_checkable
class ShowsProgress(Protocol):
    """A flavour that can tell how far a prompt is read."""

    def progress(self, index: int, progress: PromptProgress) -> list[dict[str, Any]]: ...


async def respond(request: Request, choices: Choices, reply: Reply, stream: bool, wire: Wire = OPENAI) -> Response:
    """Raises ClientGone, and what the engine fails with, unless it is a stream: that tells its failures itself."""
    state = request.app.state

    def gone() -> None:
        state.chats.metrics.disconnects.inc()
        choices.close()

    if stream:
        return EventStream(_events(choices, reply), wire, state.ping_interval_s, state.on_error, gone)
    return await _wait(request, Work(choices, asyncio.ensure_future(_whole(choices, reply))))


async def rejoin(request: Request) -> Response | None:
    """The reply to a retry of a request that is still being answered; None if it is to be answered anew."""
    work = await request.app.state.retries.join(request)
    return None if work is None else await _wait(request, work)


async def _wait(request: Request, work: Work) -> Response:
    """The whole reply. A failure is told to whoever waits then."""

    async def value() -> dict[str, Any]:
        return await asyncio.shield(work.value)

    try:
        return JSONResponse(await until_gone(request.receive, value()))
    except ClientGone:
        request.app.state.chats.metrics.disconnects.inc()
        await request.app.state.retries.leave(request, work)
        raise
    except BaseException:
        work.close()
        raise


async def _whole(choices: Choices, reply: Reply) -> dict[str, Any]:
    return reply.whole(await _ends(choices))


async def _ends(choices: Choices) -> list[Done]:
    events = choices.events()
    try:
        return [event async for _, event in events if isinstance(event, Done)]
    finally:
        await events.aclose()


async def _events(choices: Choices, reply: Reply) -> AsyncGenerator[dict[str, Any], None]:
    events = choices.events()
    dones: list[Done] = []
    try:
        for value in reply.first(0):
            yield value
        async for index, event in events:
            if isinstance(event, Done):
                dones.append(event)
                values = reply.last(index, event)
                if index + 1 < choices.count:
                    values += reply.first(index + 1)
            elif isinstance(event, PromptProgress):
                values = reply.progress(index, event) if isinstance(reply, ShowsProgress) else []
            else:
                values = reply.piece(index, event)
            for value in values:
                yield value
        for value in reply.ending(dones):
            yield value
    finally:
        await events.aclose()


async def read_json(request: Request) -> Any:
    """The body. Only with its own content type: a page in a browser can post others here without being asked."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise InvalidRequest("send the body as JSON with the header Content-Type: application/json")
    try:
        body = await request.body()
    except ClientDisconnect as error:
        raise ClientGone("the client closed the connection before all of its request had come") from error
    return parse_json(body)
