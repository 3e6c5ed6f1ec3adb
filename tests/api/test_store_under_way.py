"""What happens to a store's commands under way: their data is evicted, their connections are lost."""

import asyncio
import contextlib
from array import array
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.api import store as store_module
from services.api.embedded import EmbeddedStore
from services.api.records import Head, Record
from services.api.store import CHUNK_BYTES, WINDOW_CHUNKS, Store, StoreRefused

ROUNDS, LOOKS, WRITERS = 40, 40, 4


async def write_while_evicting(store: Store, client: Any, evict_before: int) -> None:
    """Of a payload in four windows the server takes away what is there when that chunk comes."""

    async def chunks() -> AsyncIterator[bytes]:
        for number in range(4 * WINDOW_CHUNKS):
            if number == evict_before:
                client.flushall()
            yield b"chunk"

    head = Head(b"s" * 32, 9, 9, 5 * 4 * WINDOW_CHUNKS, 4 * WINDOW_CHUNKS)
    try:
        await store.write(Record(head, array("I", range(9))), True, (), chunks())
    finally:
        await store.close()


@pytest.mark.parametrize("evict_before", [WINDOW_CHUNKS, 2 * WINDOW_CHUNKS + 1, 4 * WINDOW_CHUNKS - 1, 0])
def test_a_payload_that_is_evicted_while_it_is_written_leaves_nothing(
    store: EmbeddedStore, client: Any, evict_before: int
) -> None:
    written = write_while_evicting(Store(store.url, 5.0, 1000), client, evict_before)
    if evict_before:
        with pytest.raises(StoreRefused, match="evicted a part"):
            asyncio.run(written)
        assert not client.keys("*:state:*")
    else:
        asyncio.run(written)
        assert client.hlen(*client.keys("*:state:*")) == 4 * WINDOW_CHUNKS + 1


async def come_and_go(store: Store) -> None:
    """Look-ups, on connections that they first have to open, and writers of much, who begin a moment after one another,
    while the store is taken for lost and found again at once. Each round another moment."""

    async def looks_up(number: int) -> None:
        await asyncio.sleep(number * 0.0005)
        assert await store.find({1: b"key"}) == {}

    async def writes(number: int) -> None:
        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(8):
                yield bytes(CHUNK_BYTES)

        head = Head(bytes([number]) * 32, 9, 9, 8 * CHUNK_BYTES, 8)
        await asyncio.sleep(number * 0.002)
        with contextlib.suppress(StoreRefused):
            await store.write(Record(head, array("I", range(9))), True, (), chunks())

    try:
        for number in range(ROUNDS):
            await store._lookups.connection_pool.disconnect()
            under_way = [*map(looks_up, range(LOOKS)), *map(writes, range(WRITERS))]
            together = asyncio.gather(*under_way)
            await asyncio.sleep(0.03 * (number + 1) / ROUNDS)
            store._leave_alone(ConnectionError("as if it had not answered in time"))
            await together
            for _ in range(500):
                if store.available:
                    break
                await asyncio.sleep(0.01)
            assert store.available, "it does not come back"
    finally:
        await store.close()


def test_what_is_under_way_ends_quietly_when_the_store_is_lost(
    store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's library raised an AttributeError then, and a chat ended with a 500: one of 26,000 under load."""
    monkeypatch.setattr(store_module, "KNOCK_S", 0.0)
    asyncio.run(come_and_go(Store(store.url, 5.0, 1000)))


def test_whatever_the_library_raises_is_the_store_s_trouble(
    store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask() -> bool:
        one = Store(store.url, 5.0, 1000)
        try:
            monkeypatch.setattr(one._lookups, "pipeline", lambda **options: None)
            assert await one.find({1: b"key"}) == {}
            return one.available
        finally:
            await one.close()

    assert not asyncio.run(ask())
