"""Lending payloads to an engine on the same machine: they are received from the store into a file in memory that both
see, and the engine reads them there. Bounded: a few mebibytes, however large the payload. Owns that file's life and
which part of it may be written to; where both do not see the same folder, payloads go over gRPC.
"""

import asyncio
import mmap
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.api.bulk import BulkReader
from services.api.client import Generation
from services.rpc import engine_pb2 as pb

CHUNK_BYTES = 1 << 20
WINDOW = 4  # chunks received at a time
SLOTS = 4 * WINDOW  # in the file


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
            taken = first = 0
            while first < len(sizes):
                count = min(WINDOW, len(sizes) - first)
                while first + count > taken + SLOTS:
                    if (more := await generation.taken()) is None:
                        return taken
                    taken = more
                offsets = [(first + n) % SLOTS * CHUNK_BYTES for n in range(count)]
                window = sizes[first : first + count]
                views = [memory[at : at + size] for at, size in zip(offsets, window, strict=True)]
                await _in_thread(reader, views)
                await generation.lend(pb.LentChunks(name=name, first=first, offsets=offsets, sizes=window))
                first += count
            while taken < len(sizes):
                if (more := await generation.taken()) is None:
                    return taken
                taken = more
        return taken

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


async def _in_thread(reader: BulkReader, views: list[memoryview]) -> None:
    filling = asyncio.ensure_future(asyncio.to_thread(reader.fill, views))
    try:
        await asyncio.shield(filling)
    except asyncio.CancelledError:
        reader.close()  # else the thread would wait for the store
        await asyncio.gather(filling, return_exceptions=True)
        raise
