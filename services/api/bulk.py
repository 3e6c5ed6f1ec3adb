"""Payloads out of Redis as fast as it sends them: over a connection of their own, for whoever receives each chunk where
it is to lie. Owns how such a connection is made and what is asked on it.
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

Command = tuple[str, ...]


class BulkError(OSError):
    """The store does not let us in."""


@dataclass(frozen=True)
class Bulk:
    """A request for each chunk, in Redis' own form, and the size that its answer must have."""

    url: str
    requests: tuple[bytes, ...]
    sizes: tuple[int, ...]
    timeout_s: float  # for an answer

    def connect(self) -> socket.socket:
        """Blocks. Raises OSError, BulkError among them. As redis-py reads the URL."""
        parts = urlsplit(self.url)
        options = dict(parse_qsl(parts.query))
        if parts.scheme == "unix":
            connection = socket.socket(socket.AF_UNIX)
            database = options.get("db", "")
        else:
            connection = socket.create_connection((parts.hostname or "localhost", parts.port or 6379), self.timeout_s)
            database = options.get("db", parts.path.strip("/"))
        password = options.get("password") or unquote(parts.password or "")
        user = options.get("username") or unquote(parts.username or "")
        try:
            if parts.scheme == "unix":
                connection.settimeout(self.timeout_s)
                connection.connect(unquote(parts.path))
            if user or password:
                _say(connection, ("AUTH", user, password) if user else ("AUTH", password))
            if database not in ("", "0"):
                _say(connection, ("SELECT", database))
        except BaseException:
            connection.close()
            raise
        return connection


def bulk(url: str, commands: Sequence[Command], sizes: Sequence[int], timeout_s: float) -> Bulk:
    return Bulk(url, tuple(map(_encode, commands)), tuple(sizes), timeout_s)


def can_read(url: str) -> bool:
    """TLS is left to the ordinary client."""
    return urlsplit(url).scheme in ("unix", "redis")


def _say(connection: socket.socket, command: Command) -> None:
    connection.sendall(_encode(command))
    expected, answer = b"+OK\r\n", b""
    while len(answer) < len(expected) and (more := connection.recv(len(expected) - len(answer))):
        answer += more
    if answer != expected:
        raise BulkError(f"the store refuses {command[0]}")


def _encode(command: Command) -> bytes:
    words = [word.encode() for word in command]
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)
