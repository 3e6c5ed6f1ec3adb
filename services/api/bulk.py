"""Payloads out of Redis as fast as it sends them: pipelined, each chunk received where it is to lie. Owns a connection
of its own, used by one thread at a time; what is read must have exactly the sizes that were stored.
"""

import contextlib
import socket
from collections.abc import Sequence
from urllib.parse import parse_qsl, unquote, urlsplit

Command = tuple[str, ...]
AHEAD = 2  # windows asked for before the first of them is read


class BulkError(OSError):
    """The store answered something else than the chunk."""


class BulkReader:
    """Answers to `commands`, of these sizes, window by window. Raises OSError, BulkError among them."""

    def __init__(
        self, url: str, commands: Sequence[Command], sizes: Sequence[int], window: int, timeout_s: float
    ) -> None:
        self._url = url
        self._commands = commands
        self._sizes = sizes
        self._window = window
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None
        self._asked = self._read = 0

    def fill(self, views: Sequence[memoryview]) -> None:
        """The next chunks into these views, each as long as its chunk. Blocks."""
        if self._socket is None:
            self._socket = _connect(self._url, self._timeout_s)
        ahead = min(self._read + AHEAD * self._window, len(self._commands))
        if ahead > self._asked:
            self._socket.sendall(b"".join(map(_encode, self._commands[self._asked : ahead])))
            self._asked = ahead
        for view in views:
            expected = b"$%d\r\n" % len(view)
            if bytes(_exactly(self._socket, memoryview(bytearray(len(expected))))) != expected:
                raise BulkError("a chunk is missing, or has another size than was stored")
            _exactly(self._socket, view)
            _exactly(self._socket, memoryview(bytearray(2)))
            self._read += 1

    def close(self) -> None:
        """From any thread: ends a `fill` under way."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()


def can_read(url: str) -> bool:
    """TLS is left to the ordinary client."""
    return urlsplit(url).scheme in ("unix", "redis")


def _connect(url: str, timeout_s: float) -> socket.socket:
    """As redis-py reads the URL."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    if parts.scheme == "unix":
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout_s)
        connection.connect(unquote(parts.path))
        database = options.get("db", "")
    else:
        connection = socket.create_connection((parts.hostname or "localhost", parts.port or 6379), timeout_s)
        database = options.get("db", parts.path.strip("/"))
    password = options.get("password") or unquote(parts.password or "")
    user = options.get("username") or unquote(parts.username or "")
    try:
        if password:
            _say(connection, ("AUTH", user, password) if user else ("AUTH", password))
        if database not in ("", "0"):
            _say(connection, ("SELECT", database))
    except BaseException:
        connection.close()
        raise
    return connection


def _say(connection: socket.socket, command: Command) -> None:
    connection.sendall(_encode(command))
    if bytes(_exactly(connection, memoryview(bytearray(5)))) != b"+OK\r\n":
        raise BulkError(f"the store refuses {command[0]}")


def _encode(command: Command) -> bytes:
    words = [word.encode() for word in command]
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def _exactly(connection: socket.socket, view: memoryview) -> memoryview:
    rest = view
    while rest:
        count = connection.recv_into(rest)
        if not count:
            raise BulkError("the store closed the connection")
        rest = rest[count:]
    return view
