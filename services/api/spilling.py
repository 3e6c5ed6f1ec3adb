"""A dialog's newest state on a disk, for when the store has lost it: evicted, or restarted. Owns when that is written
(when the dialog has rested: a state that a newer one replaces soon is not), and its way back into the store. Whatever
goes wrong here costs a prompt's reading and nothing else; the files are disk.py's.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping

from services.api.disk import Disk, DiskRefused
from services.api.metrics import Metrics
from services.api.records import Record
from services.api.store import CHUNK_BYTES, Store, StoreRefused

log = logging.getLogger(__name__)

TROUBLES = (OSError, DiskRefused, StoreRefused)
BACK_S = 20.0


class Spilling:
    def __init__(self, disk: Disk, store: Store, metrics: Metrics, rest_s: float) -> None:
        self._disk, self._store, self._metrics, self._rest_s = disk, store, metrics, rest_s
        self._resting: dict[
            bytes, asyncio.Task[None]
        ] = {}  # by the text's key; what is being written is not among them
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()  # the disk is used by one thread at a time
        metrics.disk_bytes.set_function(lambda: float(disk.used_bytes))

    def later(self, key: bytes, record: Record, dialog: Iterable[bytes]) -> None:
        """Write this state when its dialog has rested; `dialog` are the keys of what it has said before."""
        older = [each for each in dialog if each != key]
        for each in (*older, key):
            if (task := self._resting.pop(each, None)) is not None:
                task.cancel()
        task = self._resting[key] = asyncio.create_task(self._write(key, record, older))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def bring_back(self, keys: Mapping[int, bytes], beyond: int) -> bool:
        """Put the longest state of these boundaries that is on the disk, and reaches further than `beyond`, into the
        store; whether there was one."""
        offset = max((offset for offset, key in keys.items() if offset > beyond and key in self._disk), default=None)
        if offset is None or not self._store.available:
            return False
        key = keys[offset]
        try:
            async with asyncio.timeout(BACK_S), self._turn:
                record, own_part, blocks = await asyncio.to_thread(self._disk.read, key)

                async def chunks() -> AsyncIterator[bytes]:
                    for at in range(0, len(own_part), CHUNK_BYTES):
                        yield bytes(own_part[at : at + CHUNK_BYTES])
                    while (block := await asyncio.to_thread(next, blocks, None)) is not None:
                        yield block

                await self._store.write(record, True, range(len(record.blocks)), chunks())
                await self._store.write_record(key, record)
        except (*TROUBLES, TimeoutError) as error:
            self._metrics.disk["refused",].inc()
            log.warning("a state did not come back from the disk: %s", str(error) or "it took too long")
            return False
        self._metrics.disk["read",].inc()
        return True

    async def idle(self) -> None:
        """Until everything is written that is to be written."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        for task in self._resting.values():
            task.cancel()
        await self.idle()

    async def _write(self, key: bytes, record: Record, older: list[bytes]) -> None:
        await asyncio.sleep(self._rest_s)
        self._resting.pop(key, None)
        before = self._disk.written_bytes
        try:
            async with self._turn:
                lacking = self._disk.lacks(record)
                pieces = [piece async for piece in self._store.read(record, lacking)]
                if len(pieces) != record.head.chunks + len(lacking):
                    raise DiskRefused("the store has it no more")
                own_part, blocks = pieces[: record.head.chunks], pieces[record.head.chunks :]
                named = [(record.blocks[number], block) for number, block in zip(lacking, blocks, strict=True)]
                await asyncio.to_thread(self._disk.write, key, record, own_part, named)
                for each in older:
                    self._disk.forget(each)
            self._metrics.disk["written",].inc()
        except TROUBLES as error:
            self._metrics.disk["skipped",].inc()
            log.warning("a state was not written to the disk: %s", error)
        finally:
            self._metrics.disk_written.inc(self._disk.written_bytes - before)
