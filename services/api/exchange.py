"""Lending payloads to an engine on the same machine: they are received from the store into a file in memory that both
see, and the engine reads them there. Bounded: a few mebibytes, however large the payload. Owns that file's life and
which part of it may be written to; where both do not see the same folder, payloads go over gRPC.

A thread receives without a pause as long as there is room, the loop tells the engine what has come, and what the engine
has taken is room again: the three go on at the same time.
"""

import asyncio
import contextlib
import mmap
import os
import secrets
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

from services.api.bulk import BulkReader
from services.api.client import Generation
from services.rpc import engine_pb2 as pb

CHUNK_BYTES = 1 << 20
WINDOW = 4  # chunks received at a time
SLOTS = 4 * WINDOW  # in the file
Window = tuple[int, list[int], list[int]]  # number of the first chunk, offsets, sizes


class Exchange:
    """`folder` is the setting; empty: nothing is lent."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder) if folder else None
        self._seen: dict[str, bool] = {}  # by the engine's mark

    def shared_with(self, info: pb.InfoResponse) -> bool:
        """Whether this engine sees the same folder."""
        if self._folder is None or not info.exchange or "/" in info.exchange:
            return False
        if info.exchange not in self._seen:
            self._seen[info.exchange] = (self._folder / info.exchange).exists()
        return self._seen[info.exchange]

    async def lend(self, generation: Generation, reader: BulkReader, sizes: list[int]) -> int:
        """Returns how many of the chunks the engine has taken: all of them, or fewer if it wants no more. Raises
        OSError for the store's troubles."""
        with self._ring() as (name, memory):
            receiving = _Receiving(reader, sizes, memory)
            telling = asyncio.create_task(_tell(generation, receiving, name))
            try:
                taken = 0
                while taken < len(sizes):
                    hearing = asyncio.ensure_future(generation.taken())
                    try:
                        await asyncio.wait({hearing, telling}, return_when=asyncio.FIRST_COMPLETED)
                        if telling.done():
                            telling.result()  # all has been told, or it raises
                        more = await hearing
                    finally:
                        hearing.cancel()
                    if more is None:
                        break
                    taken = more
                    receiving.free(taken)
                return taken
            finally:
                telling.cancel()
                await asyncio.gather(telling, return_exceptions=True)
                await receiving.stop()

    @contextmanager
    def _ring(self) -> Iterator[tuple[str, memoryview]]:
        assert self._folder is not None
        name = f"api-{secrets.token_hex(8)}"
        path = self._folder / name
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, SLOTS * CHUNK_BYTES)
            yield name, memoryview(mmap.mmap(file, SLOTS * CHUNK_BYTES))
        finally:
            os.close(file)
            path.unlink(missing_ok=True)


class _Receiving:
    """A thread that fills the file. `windows` tells what has come."""

    def __init__(self, reader: BulkReader, sizes: list[int], memory: memoryview) -> None:
        self._reader, self._sizes, self._memory = reader, sizes, memory
        self._room = threading.Semaphore(SLOTS)
        self._freed = 0
        self._stopped = False
        self._come: asyncio.Queue[Window | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._thread = asyncio.ensure_future(asyncio.to_thread(self._run))

    async def windows(self) -> AsyncIterator[Window]:
        while (window := await self._come.get()) is not None:
            yield window
        await self._thread  # raises what ended it

    def free(self, taken: int) -> None:
        """The engine has taken so many chunks in all."""
        if taken > self._freed:
            self._room.release(taken - self._freed)
            self._freed = taken

    async def stop(self) -> None:
        """When this returns, nothing writes into the file any more."""
        self._stopped = True
        self._reader.close()
        self._room.release(SLOTS)
        await asyncio.gather(self._thread, return_exceptions=True)

    def _run(self) -> None:
        try:
            for first in range(0, len(self._sizes), WINDOW):
                sizes = self._sizes[first : first + WINDOW]
                for _ in sizes:
                    self._room.acquire()
                if self._stopped:
                    return
                offsets = [(first + n) % SLOTS * CHUNK_BYTES for n in range(len(sizes))]
                self._reader.fill([self._memory[at : at + size] for at, size in zip(offsets, sizes, strict=True)])
                self._put((first, offsets, sizes))
        finally:
            self._put(None)

    def _put(self, window: Window | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is gone: nobody listens
            self._loop.call_soon_threadsafe(self._come.put_nowait, window)


async def _tell(generation: Generation, receiving: _Receiving, name: str) -> None:
    async for first, offsets, sizes in receiving.windows():
        await generation.lend(pb.LentChunks(name=name, first=first, offsets=offsets, sizes=sizes))
