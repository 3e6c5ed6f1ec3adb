"""A dialog's newest state on a disk, for when the store has lost it: evicted, or restarted. Owns when that is written
(when the dialog has rested: a state that a newer one replaces soon is not), and its way back into the store. A disk in
trouble costs a prompt's reading, and one that does not answer one wait of BACK_S; the files are disk.py's.
"""

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from services.api.disk import Disk, DiskRefused
from services.api.metrics import Metrics
from services.api.records import Record
from services.api.store import CHUNK_BYTES, Store, StoreRefused

log = logging.getLogger(__name__)

Result = TypeVar("Result")
TROUBLES = (OSError, DiskRefused, StoreRefused)
BACK_S = 20.0  # longest that a request waits
TURN_S = 60.0  # longest that anything waits for its turn


class Spilling:
    def __init__(self, disk: Disk, store: Store, metrics: Metrics, rest_s: float) -> None:
        self._disk, self._store, self._metrics, self._rest_s = disk, store, metrics, rest_s
        # By the text's key; what is being written is not among them.
        self._resting: dict[bytes, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._turn = asyncio.Lock()  # to use the disk; kept until the thread that uses it is done
        self._late: asyncio.Task[bool] | None = None  # it took too long: nobody waits for the disk until it is done
        self._counted_bytes = 0  # of those written
        metrics.disk_bytes.set(disk.used_bytes)
        metrics.disk_limits["kept",].set(disk.limit_bytes)
        metrics.disk_limits["day",].set(disk.daily_bytes)

    def later(self, key: bytes, record: Record, dialog: Iterable[bytes]) -> None:
        """Write this state when its dialog has rested; `dialog` are the keys of what it has said before."""
        older = [each for each in dialog if each != key]
        self._stop_resting([*older, key])
        self._resting[key] = self._begin(self._write(key, record, older))

    def forget(self, keys: Iterable[bytes]) -> None:
        """These are no good."""
        keys = list(keys)
        self._stop_resting(keys)
        if any(key in self._disk for key in keys):
            self._begin(self._remove(keys))

    async def bring_back(self, keys: Mapping[int, bytes], beyond: int) -> bool:
        """Put the longest state of these boundaries that is on the disk, and reaches further than `beyond`, into the
        store; whether there was one. What takes too long, or whose request is given up, goes on for the next one."""
        offset = max((offset for offset, key in keys.items() if offset > beyond and key in self._disk), default=None)
        if offset is None or not self._store.available or (self._late is not None and not self._late.done()):
            return False
        task = self._begin(self._back(keys[offset]))
        await asyncio.wait([task], timeout=BACK_S)  # which cancels nothing
        if task.done():
            return task.result()
        self._late = task
        log.warning("a state did not come back from the disk in time: until it does, none is waited for")
        return False

    async def idle(self) -> None:
        """Until everything is written that is to be written."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self, within_s: float) -> None:
        """Let what is being written end, then give it up."""
        self._stop_resting(list(self._resting))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=within_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _stop_resting(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if (task := self._resting.pop(key, None)) is not None:
                task.cancel()

    @asynccontextmanager
    async def _its_turn(self) -> AsyncIterator[None]:
        """For tasks that only `close` cancels: a thread cannot be. Raises DiskRefused."""
        try:
            async with asyncio.timeout(TURN_S):
                await self._turn.acquire()
        except TimeoutError:
            raise DiskRefused("the disk is busy, or does not answer") from None
        try:
            yield
        finally:
            self._turn.release()
            self._metrics.disk_bytes.set(self._disk.used_bytes)
            self._metrics.disk_written.inc(self._disk.written_bytes - self._counted_bytes)
            self._counted_bytes = self._disk.written_bytes

    async def _write(self, key: bytes, record: Record, older: list[bytes]) -> None:
        await asyncio.sleep(self._rest_s)
        self._resting.pop(key, None)
        loop = asyncio.get_running_loop()

        def read(lacking: list[int]) -> Iterator[bytes]:
            stream = self._store.read(record, lacking)

            async def piece() -> bytes | None:
                return await anext(stream, None)

            while (found := asyncio.run_coroutine_threadsafe(piece(), loop).result()) is not None:
                yield found

        try:
            async with self._its_turn():
                await _in_thread(lambda: self._disk.write(key, record, read))
                await _in_thread(lambda: self._disk.forget(older))
            self._metrics.disk["written",].inc()
        except TROUBLES as error:
            self._metrics.disk["skipped",].inc()
            log.warning("a state was not written to the disk: %s", error)

    async def _back(self, key: bytes) -> bool:
        try:
            async with self._its_turn():
                record, own_part = await _in_thread(lambda: self._disk.read(key))
                # Only what is not there: another request may have brought it, and the engine is reading it.
                own_lacks, lacking = await self._store.lacks(record)

                async def chunks() -> AsyncIterator[bytes]:
                    for at in range(0, len(own_part) if own_lacks else 0, CHUNK_BYTES):
                        yield bytes(own_part[at : at + CHUNK_BYTES])
                    for number in lacking:
                        yield await _in_thread(partial(self._disk.read_block, key, record, number))

                if own_lacks or lacking:
                    await self._store.write(record, own_lacks, lacking, chunks())
                await self._store.write_record(key, record)
        except TROUBLES as error:
            self._metrics.disk["refused",].inc()
            log.warning("a state did not come back from the disk: %s", error)
            return False
        self._metrics.disk["read",].inc()
        return True

    async def _remove(self, keys: list[bytes]) -> None:
        try:
            async with self._its_turn():
                await _in_thread(lambda: self._disk.forget(keys))
        except TROUBLES as error:
            log.warning("a state that is no good was not removed from the disk: %s", error)


def _in_thread(call: Callable[[], Result]) -> "asyncio.Future[Result]":
    """In a thread of its own: one that the disk never lets go takes no place in a pool, and no exit waits for it."""
    done: concurrent.futures.Future[Result] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="disk", daemon=True).start()
    return asyncio.wrap_future(done)
