"""Lending an engine on the same machine our connection to the store: it receives the payload where it belongs, and
nothing of it passes through this process. Owns the socket in a folder that both see, where the connection is handed
over; where both do not see the same folder, payloads go over gRPC.
"""

import asyncio
import os
import secrets
import socket
from pathlib import Path

from services.api.bulk import Bulk
from services.api.client import Generation
from services.rpc import engine_pb2 as pb

MOST_FOLDER_CHARS = 80  # a socket's path has room for 107


class Exchange:
    """`folder` is the setting; empty: nothing is lent."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder) if folder else None
        self._seen: dict[str, bool] = {}  # by the engine's mark

    def shared_with(self, info: pb.InfoResponse) -> bool:
        """Whether this engine sees the same folder."""
        if self._folder is None or not info.exchange or "/" in info.exchange:
            return False
        if len(os.fsencode(self._folder)) > MOST_FOLDER_CHARS:
            return False
        if info.exchange not in self._seen:
            self._seen[info.exchange] = (self._folder / info.exchange).exists()
        return self._seen[info.exchange]

    async def lend(self, generation: Generation, payload: Bulk) -> bool:
        """Whether the engine has taken all of it and begins with that. Raises OSError if there is no connection."""
        assert self._folder is not None
        name = f"api-{secrets.token_hex(8)}"
        path = self._folder / name
        with await asyncio.to_thread(payload.connect) as connection, socket.socket(socket.AF_UNIX) as counter:
            counter.setblocking(False)
            try:
                counter.bind(str(path))
                path.chmod(0o600)  # before anybody can connect
                counter.listen(1)
                handing_over = asyncio.create_task(_hand_over(counter, connection))
                try:
                    silence_ms = round(payload.timeout_s * 1e3)
                    await generation.lend(
                        pb.Lent(name=name, requests=payload.requests, sizes=payload.sizes, silence_ms=silence_ms)
                    )
                    return await generation.restored()
                finally:
                    handing_over.cancel()
                    await asyncio.gather(handing_over, return_exceptions=True)
            finally:
                path.unlink(missing_ok=True)


async def _hand_over(counter: socket.socket, connection: socket.socket) -> None:
    taker, _ = await asyncio.get_running_loop().sock_accept(counter)
    with taker:
        socket.send_fds(taker, [b"\0"], [connection.fileno()])
    connection.close()  # ours: if the engine goes away, the store hears of it
