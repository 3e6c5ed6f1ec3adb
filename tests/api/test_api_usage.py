"""How full the store is, as the metrics say it, beside what the server itself says."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import redis
from running_api import RunningApi

from services.api.embedded import EmbeddedStore
from services.api.metrics import Metrics
from services.api.store import Store
from services.api.usage import StoreUsage


def told(metrics: Metrics, name: str, **labels: str) -> float:
    return float(metrics.registry.get_sample_value(f"thimble_api_snapshot_store_{name}", labels) or 0)


def evicted(client: Any) -> int:
    return int(client.info("stats")["evicted_keys"])


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come true")


def watched(url: str, play: Callable[[Store, Metrics], Awaitable[None]]) -> None:
    async def run() -> None:
        store, metrics = Store(url, 5.0, 100), Metrics("0")
        usage = StoreUsage(store, metrics, 0.02)
        try:
            await play(store, metrics)
        finally:
            await usage.close()
            await store.close()

    asyncio.run(run())


def test_memory_and_evictions_are_what_the_server_says(store: EmbeddedStore) -> None:
    with redis.Redis.from_url(store.url) as client:
        for n in range(80):
            client.set(f"early {n}", b"x" * 1_000_000)
        before = evicted(client)
        assert before > 10

        async def play(_: Store, metrics: Metrics) -> None:
            await until(lambda: told(metrics, "bytes", kind="used") > 40e6)
            assert told(metrics, "bytes", kind="limit") == 64 << 20
            assert told(metrics, "evictions_total", by="store") == 0, "what was before us is not ours to count"
            for n in range(40):
                client.set(f"late {n}", b"x" * 1_000_000)
            new = evicted(client) - before
            assert new > 10
            await until(lambda: told(metrics, "evictions_total", by="store") == evicted(client) - before)
            new = evicted(client) - before
            client.config_resetstat()  # as a restart would
            client.set("last", b"x" * 20_000_000)
            assert 0 < evicted(client) < new
            await until(lambda: told(metrics, "evictions_total", by="store") == new + evicted(client))
            client.flushall()
            await until(lambda: told(metrics, "bytes", kind="used") < 20e6)

        watched(store.url, play)


def test_what_we_remove_to_make_room_is_counted_apart(store: EmbeddedStore) -> None:
    async def play(store_: Store, metrics: Metrics) -> None:
        store_.removed += 3
        await until(lambda: told(metrics, "evictions_total", by="api") == 3)
        assert told(metrics, "evictions_total", by="store") == 0

    watched(store.url, play)


def test_a_store_that_is_away_leaves_the_last_numbers(store: EmbeddedStore) -> None:
    async def play(store_: Store, metrics: Metrics) -> None:
        await until(lambda: told(metrics, "bytes", kind="limit") > 0)
        await asyncio.to_thread(store.close)
        await until(lambda: not store_.available)
        await asyncio.sleep(0.1)
        assert told(metrics, "bytes", kind="limit") == 64 << 20

    watched(store.url, play)


@pytest.mark.parametrize("with_store", [True, False])
def test_a_running_api_tells_it(start_api: Callable[..., RunningApi], store: EmbeddedStore, with_store: bool) -> None:
    api = start_api(redis_url=store.url if with_store else "", redis_timeout_ms=5000)
    end = time.monotonic() + (10 if with_store else 0.3)
    while not (limit := api.metric("snapshot_store_bytes", kind="limit")) and time.monotonic() < end:
        time.sleep(0.01)
    assert limit == (64 << 20 if with_store else 0)
