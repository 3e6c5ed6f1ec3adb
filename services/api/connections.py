"""An HTTP connection: how long a client may take to say what it wants. Owns these limits; the rest is uvicorn's.

Each connection costs a file handle. Without limits whoever opens enough of them and says nothing shuts all others out.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

# Between two requests. Longer than clients keep a silent connection, or else one now and then sends its request just
# as we close it, and sees a failure that is none: after the 5 s of uvicorn's default, which are httpx's too.
KEEP_ALIVE_S = 75
MOST_HEAD_BYTES = 64 * 1024


class Connection(H11Protocol):
    """A request's head and body must come within `patience_s` and as long as their bytes take at `least_bytes_s`."""

    patience_s = 30.0
    least_bytes_s = 1024
    look_every_s = 5.0

    _waiting_since: float | None = None
    _came_bytes = 0
    _look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waiting_since = self.loop.time()
        self._look = self.loop.call_later(self.look_every_s, self._look_at)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._waiting_since is None:
            self._waiting_since, self._came_bytes = self.loop.time(), 0
        self._came_bytes += len(data)
        super().data_received(data)
        if not self._unfinished():
            self._waiting_since = None

    def _unfinished(self) -> bool:
        """Whether a request's next byte is the client's to send."""
        if self.conn.their_state is h11.IDLE:
            return self.timeout_keep_alive_task is None  # else it rests between requests
        return self.conn.their_state is h11.SEND_BODY

    def _look_at(self) -> None:
        if self._waiting_since is not None and self._unfinished() and not self.flow.read_paused:
            allowed_s = self.patience_s + self._came_bytes / self.least_bytes_s
            if self.loop.time() - self._waiting_since > allowed_s:
                self._give_up()
                return
        self._look = self.loop.call_later(self.look_every_s, self._look_at)

    def _give_up(self) -> None:
        """Say why, unless an answer has begun, and close. The request's task then sees that its client is gone."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            text = b"the request did not come to its end in time\n"
            headers = [(b"content-type", b"text/plain"), (b"connection", b"close")]
            headers.append((b"content-length", str(len(text)).encode()))
            for event in (h11.Response(status_code=408, headers=headers), h11.Data(data=text), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def connection_options(kind: type[Connection] = Connection) -> dict[str, Any]:
    """What uvicorn must be told of connections."""
    return {"http": kind, "timeout_keep_alive": KEEP_ALIVE_S, "h11_max_incomplete_event_size": MOST_HEAD_BYTES}
