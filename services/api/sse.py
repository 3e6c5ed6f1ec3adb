"""Server-sent events on the wire: headers at once, one `data:` line an event, comments while nothing happens, an error
as an event. Owns the life of the response: when the client goes away, the source is closed. Knows nothing of chats.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.api.errors import ApiError, ClientGone

log = logging.getLogger(__name__)

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # no proxy may collect events

T = TypeVar("T")

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # made once: json.dumps makes one a call


@dataclass(frozen=True)
class Wire:
    """How one flavour of API writes events: `named` by their type, what comes at the end, what a failure looks like."""

    named: bool
    end: bytes
    failure: Callable[[ApiError], dict[str, Any]]

    def lines(self, value: Mapping[str, Any]) -> bytes:
        name = f"event: {value['type']}\n".encode() if self.named else b""
        return name + b"data: " + _encode(value).encode() + b"\n\n"


OPENAI = Wire(named=False, end=DONE, failure=ApiError.body)


class EventStream(Response):
    """Sends what `source` yields, as `wire` writes it. `on_error` turns a failure of the source into the ApiError to
    tell; `on_gone` is called if the client left before the end."""

    media_type = "text/event-stream"

    def __init__(
        self,
        source: AsyncGenerator[Mapping[str, Any], None],
        wire: Wire,
        ping_interval_s: float,
        on_error: Callable[[Exception], ApiError],
        on_gone: Callable[[], None],
    ) -> None:
        self.status_code = 200
        self.background = None
        self._source = source
        self._wire = wire
        self._ping_interval_s = ping_interval_s
        self._on_error = on_error
        self._on_gone = on_gone
        self.init_headers(HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_gone(receive, self._send_all(send))
        except (ClientGone, OSError):
            self._on_gone()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        lines, quiet = self._lines(), Quiet(send, self._ping_interval_s)
        try:
            async for line in lines:
                quiet.broken()
                await send({"type": "http.response.body", "body": line, "more_body": True})
        finally:
            await quiet.close()
            await lines.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _lines(self) -> AsyncGenerator[bytes, None]:
        try:
            async for value in self._source:
                yield self._wire.lines(value)
            if self._wire.end:
                yield self._wire.end
        except Exception as error:  # headers are out: the failure has to be told in the stream
            yield self._wire.lines(self._wire.failure(self._on_error(error)))
        finally:
            await self._source.aclose()


class Quiet:
    """Sends a ping whenever nothing else was sent for `interval_s` (0: never). A task beside the stream, so that an
    event costs no more than a look at the clock. A failure to send is left to the stream to find."""

    def __init__(self, send: Send, interval_s: float) -> None:
        self._send = send
        self._interval_s = interval_s
        self._last = time.monotonic()
        self._task = asyncio.ensure_future(self._ping()) if interval_s else None

    def broken(self) -> None:
        """Something is being sent."""
        self._last = time.monotonic()

    async def close(self) -> None:
        """No ping comes behind this."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _ping(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                left_s = self._last + self._interval_s - time.monotonic()
                if left_s > 0:
                    await asyncio.sleep(left_s)
                else:
                    self.broken()
                    await self._send({"type": "http.response.body", "body": PING, "more_body": True})


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; ClientGone, and `work` cancelled, if the client goes away first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone("the client closed the connection")
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.wait({task, gone})


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
