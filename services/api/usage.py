"""How full the snapshot store is, asked now and then, off every request's path. Owns these gauges and their clock."""

import asyncio

from services.api.metrics import Metrics
from services.api.store import Store

EVERY_S = 15.0


class StoreUsage:
    """A task; while the store is away its last numbers stay, and `snapshot_store_available` says so."""

    def __init__(self, store: Store, metrics: Metrics, every_s: float = EVERY_S) -> None:
        self._store, self._metrics, self._every_s = store, metrics, every_s
        self._evicted: int | None = None  # as the server counts, from its start on
        self._removed = 0
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            usage = await self._store.usage()
            if usage is not None:
                self._metrics.store_bytes["used",].set(usage.used_bytes)
                self._metrics.store_bytes["limit",].set(usage.limit_bytes)
                before = usage.evicted_keys if self._evicted is None else self._evicted
                new = usage.evicted_keys - before
                self._metrics.store_evictions["store",].inc(new if new >= 0 else usage.evicted_keys)  # it was restarted
                self._evicted = usage.evicted_keys
            self._metrics.store_evictions["api",].inc(self._store.removed - self._removed)
            self._removed = self._store.removed
            await asyncio.sleep(self._every_s)
