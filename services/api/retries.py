"""Answers whose client stopped waiting and will ask again. Official clients give up reading after a time that they
announce, and send the same request once more; without this, the work so far would be lost every time.

Owns which answers go on without a client, for how long, and how a retry is recognised. A client that leaves at any
other moment means it: its answer ends at once.
"""

import asyncio
import hashlib
import time
from typing import Any

from fastapi import Request

from services.api.choices import Choices

TIMEOUT = "x-stainless-read-timeout"  # seconds; sent by the official clients
RETRY = "x-stainless-retry-count"  # 0 for a first try
GRACE_S = 30.0  # longest wait for the retry: official clients send it within 8 s
EARLY_SHARE, EARLY_S = 0.1, 1.0  # our clock of a request starts later than the client's, by the larger of these at most


class Work:
    """One whole reply in the making. Whoever holds it must end it: `close`."""

    def __init__(self, choices: Choices, value: asyncio.Future[dict[str, Any]]) -> None:
        self.value = value
        self._choices = choices
        value.add_done_callback(_heard)

    def close(self) -> None:
        self.value.cancel()
        self._choices.close()


class Retries:
    """Those that nobody waits for now, by what their requests were."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, tuple[Work, asyncio.TimerHandle]] = {}

    async def join(self, request: Request) -> Work | None:
        """What a retry goes on with, if it is one and its first try is still there."""
        if request.headers.get(RETRY, "0") == "0":
            return None
        return self._take(await _key(request))

    async def leave(self, request: Request, work: Work) -> None:
        """The client of this work is gone: keep it for a retry, or end it."""
        if not _timed_out(request):
            work.close()
            return
        key = await _key(request)
        self._drop(key)
        self._waiting[key] = work, asyncio.get_running_loop().call_later(GRACE_S, self._drop, key)

    def _take(self, key: bytes) -> Work | None:
        work, timer = self._waiting.pop(key, (None, None))
        if timer is not None:
            timer.cancel()  # or it would end the work that waits here for another retry by then
        return work

    def _drop(self, key: bytes) -> None:
        work = self._take(key)
        if work is not None:
            work.close()

    def close(self) -> None:
        for key in list(self._waiting):
            self._drop(key)


def _heard(value: asyncio.Future[dict[str, Any]]) -> None:
    """A failure that no client waits for any more is nobody's."""
    if not value.cancelled():
        value.exception()


async def _key(request: Request) -> bytes:
    who = request.headers.get("authorization", "") + "\0" + request.headers.get("x-api-key", "")
    digest = hashlib.sha256(f"{request.url.path}\0{who}\0".encode())
    digest.update(await request.body())
    return digest.digest()


def _timed_out(request: Request) -> bool:
    try:
        announced_s = float(request.headers.get(TIMEOUT, "inf"))
    except ValueError:
        return False
    began: float = request.state.began
    return time.perf_counter() - began >= announced_s - max(EARLY_SHARE * announced_s, EARLY_S)
