"""A client on the same machine lends the engine its connection to the store: the payload is received where it belongs,
by who needs it, and is copied nowhere on the way. Owns the folder's mark, by which a client knows that it sees the same
folder, the taking over of connections there, and what may come on them.

The client says what to ask the store, a request for each chunk, and nothing but HGET and GET is passed on; the store
answers each as Redis does: `$`, the size, a line break, the chunk, a line break. Nothing is taken from a process of
another user. What goes wrong here is a TransferError, which says nothing about the payload, unless the store has other
chunks than it should have.
"""

import contextlib
import os
import re
import secrets
import select
import socket
import stat
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

from services.engine.errors import PayloadError, TransferError

AHEAD = 2  # chunks asked for and not begun: more of them make the store take fresh memory for them, which is slow
WAIT_MS = 1  # for more to come, while others wait
HAND_OVER_S = 5.0
_NAME = re.compile(r"[a-z0-9-]{1,80}")
_WORDS = {b"HGET": 3, b"GET": 2}  # what may be asked of a store, and of how many words
_CREDENTIALS = struct.Struct("3i")  # SO_PEERCRED: process, user, group


def mark(folder: Path) -> str:
    """Makes the mark and returns its name. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"engine-{secrets.token_hex(8)}"
    (folder / name).touch(mode=0o644)
    return name


def borrow(folder: Path | None, name: str) -> socket.socket:
    """The connection that a client hands over at the socket of this name. Blocks for a moment. Raises TransferError."""
    if folder is None or not _NAME.fullmatch(name):
        raise TransferError("snapshot: this engine has no exchange folder, or nothing of that name can be in it")
    path = folder / name
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise OSError("it is no socket")
        with socket.socket(socket.AF_UNIX) as counter:
            counter.settimeout(HAND_OVER_S)
            counter.connect(str(path))
            _, user, _ = _CREDENTIALS.unpack(
                counter.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            if user != os.geteuid():
                raise OSError(f"its owner is user {user}, not ours")
            _, descriptors, _, _ = socket.recv_fds(counter, 1, 1)
        if not descriptors:
            raise OSError("nothing was handed over")
        os.set_inheritable(descriptors[0], False)
        try:
            return socket.socket(fileno=descriptors[0])
        except OSError:
            os.close(descriptors[0])
            raise
    except OSError as error:
        raise TransferError(f"snapshot: the connection that was lent cannot be taken: {error}") from error


class Lent:
    """A payload on its way through a connection. `wait` is called when nothing has come for a moment, or others want to
    go on: it has to see to it that somebody reads again once there is something. Read by one thread at a time."""

    def __init__(
        self, connection: socket.socket, requests: Sequence[bytes], sizes: Sequence[int], wait: Callable[[], None]
    ) -> None:
        """Raises TransferError if what the client said does not fit."""
        if len(requests) != len(sizes) or not all(sizes):
            raise TransferError("snapshot: what was said of the lent connection does not fit")
        if not all(map(_only_reads, requests)):
            raise TransferError("snapshot: on a lent connection only HGET and GET are asked")
        connection.setblocking(False)
        self.connection = connection
        self.wait = wait
        self.size_bytes = sum(sizes)
        self._requests, self._sizes = requests, sizes
        self._asked = self._begun = 0
        self._head = b""  # what has to come before the next byte of the payload
        self._left = 0  # bytes of the chunk under way
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def read(self, view: memoryview) -> int:
        """Fill the memory from its beginning with what has come, at most with the rest of a chunk: whoever takes it
        works on a little while the store sends more. Waits for a moment if nothing is there.

        Returns how many bytes. Raises TransferError or PayloadError."""
        try:
            if not self._left and not self._head:
                self._begin_chunk()
            try:
                return self._receive(view)
            except BlockingIOError:
                if not self._poll.poll(WAIT_MS):
                    return 0
                with contextlib.suppress(BlockingIOError):  # a part of a chunk's head was all that came
                    return self._receive(view)
                return 0
        except OSError as error:
            raise TransferError(f"snapshot: the store cannot be read: {error}") from error

    def close(self) -> None:
        """By the thread that reads."""
        self.connection.close()

    def _receive(self, view: memoryview) -> int:
        while self._head:
            self._read_head()
        count = self.connection.recv_into(view[: self._left])
        if not count:
            raise TransferError("snapshot: the store closed the connection")
        self._left -= count
        return count

    def _read_head(self) -> None:
        came = self.connection.recv(len(self._head))
        if not came:
            raise TransferError("snapshot: the store closed the connection")
        if not self._head.startswith(came):
            if came.lstrip(b"\r\n")[:1] in (b"-", b"!"):
                raise TransferError("snapshot: the store refused to send a chunk")
            raise PayloadError("snapshot: in the store a chunk is missing or has another size")
        self._head = self._head[len(came) :]

    def _begin_chunk(self) -> None:
        if self._begun == len(self._sizes):
            raise TransferError("snapshot: it ends too early")
        ahead = min(self._begun + AHEAD, len(self._requests))
        if self._asked == self._begun or ahead - self._asked >= AHEAD // 2:
            self.connection.sendall(b"".join(self._requests[self._asked : ahead]))
            self._asked = ahead
        self._left = self._sizes[self._begun]
        self._head = b"%s$%d\r\n" % (b"\r\n" if self._begun else b"", self._left)
        self._begun += 1


def _only_reads(request: bytes) -> bool:
    """Whether it is one HGET or GET, as Redis wants it, and nothing behind it."""
    head, _, rest = request.partition(b"\r\n")
    words = []
    while match := re.match(rb"\$(\d{1,4})\r\n", rest):
        end = match.end() + int(match[1])
        if rest[end : end + 2] != b"\r\n":
            return False
        words.append(rest[match.end() : end])
        rest = rest[end + 2 :]
    return not rest and bool(words) and _WORDS.get(words[0]) == len(words) and head == b"*%d" % len(words)
