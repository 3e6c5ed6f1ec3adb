"""Lending an engine on the same machine our connection to the store: it receives the payload where it belongs, and
nothing of it passes through this process. Owns the socket in a folder that both see, where the connection is handed
over to a process of our own user and nobody else; where both do not see the same folder, payloads go over gRPC.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import stat
import struct
from pathlib import Path

from services.api.bulk import Bulk
from services.api.client import Generation
from services.rpc import engine_pb2 as pb

log = logging.getLogger(__name__)

MOST_FOLDER_CHARS = 80  # a socket's path has room for 107
_CREDENTIALS = struct.Struct("3i")  # SO_PEERCRED: process, user, group


class LendingError(Exception):
    """There is no connection to lend. The engine has heard nothing."""


class Exchange:
    """`folder` is the setting; empty: nothing is lent."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder) if folder else None
        self._seen: dict[str, bool] = {}  # by the engine's mark

    def shared_with(self, info: pb.InfoResponse) -> bool:
        """Whether this engine sees the same folder, and is our own user's."""
        if self._folder is None or not info.exchange or "/" in info.exchange:
            return False
        if len(os.fsencode(self._folder)) > MOST_FOLDER_CHARS:
            return False
        if info.exchange not in self._seen:
            self._seen[info.exchange] = _is_ours(self._folder / info.exchange)
        return self._seen[info.exchange]

    async def lend(self, generation: Generation, payload: Bulk) -> pb.Restore:
        """How the engine took it. Raises LendingError if it has heard nothing of it."""
        assert self._folder is not None
        path = self._folder / f"api-{secrets.token_hex(8)}"
        try:
            connection = await asyncio.to_thread(payload.connect)
        except (OSError, ValueError) as error:
            raise LendingError(str(error)) from error
        with connection, socket.socket(socket.AF_UNIX) as counter, contextlib.ExitStack() as after:
            try:
                counter.setblocking(False)
                counter.bind(str(path))
                after.callback(_remove, path)
                path.chmod(0o600)  # before anybody can connect
                counter.listen(1)
            except OSError as error:
                raise LendingError(str(error)) from error
            handing_over = asyncio.create_task(_hand_over(counter, connection))
            try:
                silence_ms = round(payload.timeout_s * 1e3)
                await generation.lend(
                    pb.Lent(name=path.name, requests=payload.requests, sizes=payload.sizes, silence_ms=silence_ms)
                )
                return await generation.lent()
            finally:
                handing_over.cancel()
                await asyncio.gather(handing_over, return_exceptions=True)


async def _hand_over(counter: socket.socket, connection: socket.socket) -> None:
    """To the first that is of our own user."""
    while True:
        taker, _ = await asyncio.get_running_loop().sock_accept(counter)
        with taker:
            user = _CREDENTIALS.unpack(taker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
            if user != os.geteuid():
                log.warning("user %d asked for a connection that is lent to our own only", user)
                continue
            socket.send_fds(taker, [b"\0"], [connection.fileno()])
        return connection.close()  # ours: if the engine goes away, the store hears of it


def _is_ours(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
