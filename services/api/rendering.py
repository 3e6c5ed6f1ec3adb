"""Has templates rendered by render.py in processes of their own, and ends those that take too much. Owns the processes
and their limits, not what a template may do.

One for ordinary dialogs, which stays, and one for large ones, which goes again with the memory that it took: who sends
32 MiB waits for others like him, and nobody else does. Whoever asks waits in a thread, never in an event loop; but for
a large dialog's turn, which may be long in coming, without one.
"""

import asyncio
import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

PROGRAM = Path(__file__).with_name("render.py")
MEMORY_BYTES = 1 << 30  # of address space; Python takes 30 MiB, a dialog of 32 MiB up to 700
CPU_S = 10  # 10,000 messages take a fifth of a second, 32 MiB with as many arguments as fit five
WALL_S = 120.0  # without an answer: a machine that swaps
TEXT_BYTES = 64 << 20
LARGE_BYTES = 1 << 20
TEXT, INVALID, EXHAUSTED = b"t", b"i", b"m"  # render.py's letters
Result = TypeVar("Result")
_takes_large: ContextVar[bool] = ContextVar("takes_large", default=True)  # False: they are to wait for their turn


class RenderRefused(Exception):
    """A template does not render these variables, or takes too much time or memory for it. Says why."""


class TemplateBroken(Exception):
    """This is no template. Says why."""


class Rendering:
    """Safe to use from several threads. Limits are arguments so that tests can reach them."""

    def __init__(self, memory_bytes: int = MEMORY_BYTES, cpu_s: float = CPU_S, wall_s: float = WALL_S) -> None:
        self._ordinary = _Process(memory_bytes, cpu_s, wall_s)
        self._large = _Process(memory_bytes, cpu_s, wall_s)

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """`variables` as JSON has them. Raises RenderRefused or TemplateBroken."""
        asked = {"source": source, "variables": variables}
        request = json.dumps(asked, ensure_ascii=False).encode("utf-8", "surrogatepass")
        large = len(request) > LARGE_BYTES
        if large and not _takes_large.get():
            raise _LargeDialog
        letter, answer = (self._large if large else self._ordinary).ask(request, once=large)
        text = answer.decode("utf-8", "surrogatepass")
        if letter == TEXT:
            return text
        raise TemplateBroken(text) if letter == INVALID else RenderRefused(text)

    def close(self) -> None:
        """The next rendering begins with a new process."""
        for process in (self._ordinary, self._large):
            process.close()


class _LargeDialog(Exception):
    """It is to be rendered in its turn."""


class Turns:
    """Of one event loop: threads for what renders, of which large dialogs have one at a time."""

    def __init__(self) -> None:
        self._large = asyncio.Lock()

    async def run(self, call: Callable[..., Result], *args: Any) -> Result:
        """`call(*args)` in a thread; it begins again, in its turn, where it has a large dialog rendered."""
        try:
            return await asyncio.to_thread(_without_large, call, *args)
        except _LargeDialog:
            await self._large.acquire()
        work = asyncio.ensure_future(asyncio.to_thread(call, *args))
        work.add_done_callback(self._ended)
        return await asyncio.shield(work)  # who goes away takes his thread's turn along only when that is done

    def _ended(self, work: "asyncio.Future[Any]") -> None:
        self._large.release()
        if not work.cancelled():
            work.exception()  # seen, though nobody may be there to see it


def _without_large(call: Callable[..., Result], *args: Any) -> Result:
    _takes_large.set(False)  # in this thread's copy of the context, which ends with the call
    return call(*args)


class _Process:
    """One that is there when it is needed."""

    def __init__(self, memory_bytes: int, cpu_s: float, wall_s: float) -> None:
        self._limits = (str(memory_bytes), str(cpu_s), str(TEXT_BYTES))
        self._cpu_s = cpu_s
        self._wall_s = wall_s
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def ask(self, request: bytes, once: bool) -> tuple[bytes, bytes]:
        """The letter and what follows it. `once`: it ends behind this. Raises RenderRefused."""
        with self._turn:
            try:
                letter, answer = self._exchange(request)
            except EOFError:
                if self._end() != -signal.SIGKILL:
                    raise self._too_much() from None
                try:  # somebody else ended it, as a system does that is short of memory
                    letter, answer = self._exchange(request)
                except EOFError:
                    self._end()
                    raise self._too_much() from None
            if once or letter == EXHAUSTED or len(answer) > LARGE_BYTES:
                self._end()
        return letter, answer

    def close(self) -> None:
        with self._turn:
            self._end()

    def _too_much(self) -> RenderRefused:
        return RenderRefused(f"it takes more than {self._cpu_s:g} s of processor time, or fails altogether")

    def _exchange(self, request: bytes) -> tuple[bytes, bytes]:
        """Raises EOFError if the process ended, or says nothing sensible."""
        connection = self._connection()
        try:
            connection.sendall(len(request).to_bytes(8, "little") + request)
            head = _receive(connection, 9)
            size = int.from_bytes(head[1:], "little")
            if size > TEXT_BYTES:
                raise EOFError
            answer = _receive(connection, size)
        except OSError as error:
            raise EOFError from error
        return bytes(head[:1]), bytes(answer)

    def _connection(self) -> socket.socket:
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._socket is None:
            self._begin()
        assert self._socket is not None
        return self._socket

    def _begin(self) -> None:
        """Raises OSError where there is no room for a process; the next one tries again."""
        ours, its = socket.socketpair()
        zone = {"TZ": os.environ["TZ"]} if "TZ" in os.environ else {}
        with its:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", str(PROGRAM), *self._limits],
                    stdin=its.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=zone,
                    start_new_session=True,  # a Ctrl-C is for us
                )
            except BaseException:
                ours.close()
                raise
        ours.settimeout(self._wall_s)
        self._socket = ours

    def _end(self) -> int:
        """Its exit status, as subprocess tells it; 0 if it had to be killed."""
        if self._socket is not None:
            self._socket.close()
        status = 0
        if self._process is not None:
            try:
                status = self._process.wait(0.2)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = self._socket = None
        return status


def _receive(connection: socket.socket, size: int) -> bytearray:
    got = bytearray(size)
    view = memoryview(got)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return got


SHARED = Rendering()
atexit.register(SHARED.close)
