"""Between store and disk: a disk that does not answer, two requests of one dialog, states that are no good."""

import asyncio
import threading
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from services.api import spilling as spilling_module
from services.api.disk import Disk
from services.api.embedded import EmbeddedStore
from services.api.metrics import Metrics
from services.api.records import Head, Record
from services.api.spilling import Spilling
from services.api.store import Store

KEY = b"k" * 32
RECORD = Record(Head(b"s" * 32, 9, 9, 1000, 1, 2, 500), array("I", range(9)), (b"0" * 16, b"1" * 16))
FOUND = {40: KEY}  # as the boundaries of a prompt


async def pieces(count: int = 3) -> AsyncIterator[bytes]:
    for piece in (b"own " * 250, b"a" * 500, b"b" * 500)[:count]:
        yield piece


class Parts:
    """A store that has lost a state which the disk has."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.metrics = url, Metrics("test")
        self.disk = Disk(folder / "disk", 10**9, 2 * 10**9, 1000)
        self.store = Store(url, 5.0, 1000)
        self.spilling = Spilling(self.disk, self.store, self.metrics, 0.0)

    async def written(self) -> None:
        await self.store.write(RECORD, True, (0, 1), pieces())
        self.spilling.later(KEY, RECORD, ())
        await self.spilling.idle()
        assert KEY in self.disk
        with redis.Redis.from_url(self.url) as client:
            client.flushall()

    async def stored(self) -> list[bytes]:
        return [piece async for piece in self.store.read(RECORD, (0, 1))]

    def count(self, result: str) -> float:
        return self.metrics.disk[result,]._value.get()


@pytest.fixture
def within(store: EmbeddedStore, tmp_path: Path) -> Callable[..., None]:
    def run(test: Callable[[Parts], Awaitable[None]]) -> None:
        async def whole() -> None:
            parts = Parts(store.url, tmp_path)
            try:
                await parts.written()
                await test(parts)
            finally:
                await parts.spilling.close(5)
                await parts.store.close()

        asyncio.run(whole())

    return run


class Stuck:
    """A call of the disk that does not return until it is let go."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.calls, self.began, self._call, self._go = 0, threading.Event(), call, threading.Event()

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        self.began.set()
        assert self._go.wait(20)
        return self._call(*args)

    def let_go(self) -> None:
        self._go.set()


def test_a_disk_that_does_not_answer_is_waited_for_once(within: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one thread, and none of the process's pool; when it answers, all is as before."""
    monkeypatch.setattr(spilling_module, "BACK_S", 0.05)

    async def test(parts: Parts) -> None:
        monkeypatch.setattr(parts.disk, "read", stuck := Stuck(parts.disk.read))
        threads = threading.active_count()
        assert not await parts.spilling.bring_back(FOUND, 0)
        while not stuck.began.is_set():
            await asyncio.sleep(0.01)
        monkeypatch.setattr(spilling_module, "BACK_S", 1000.0)
        assert [await parts.spilling.bring_back(FOUND, 0) for _ in range(50)] == [False] * 50, "at once"
        assert (stuck.calls, threading.active_count()) == (1, threads + 1)
        stuck.let_go()
        await parts.spilling.idle()
        assert await parts.stored() == [piece async for piece in pieces()], "it came late, for the next request"
        assert await parts.spilling.bring_back(FOUND, 0)
        assert stuck.calls == 2

    within(test)


def test_a_client_that_hangs_up_does_not_let_another_thread_in(within: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(parts: Parts) -> None:
        monkeypatch.setattr(parts.disk, "read", stuck := Stuck(parts.disk.read))
        for _ in range(3):
            request = asyncio.create_task(parts.spilling.bring_back(FOUND, 0))
            await asyncio.to_thread(stuck.began.wait, 10)
            request.cancel()
            assert isinstance((await asyncio.gather(request, return_exceptions=True))[0], asyncio.CancelledError)
        assert stuck.calls == 1
        stuck.let_go()
        await parts.spilling.idle()
        assert stuck.calls == parts.count("read") == 3

    within(test)


def test_nothing_waits_long_for_its_turn(within: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """States that cannot be written do not pile up; nor does the end wait for a disk."""
    monkeypatch.setattr(spilling_module, "TURN_S", 0.02)

    async def test(parts: Parts) -> None:
        monkeypatch.setattr(parts.disk, "write", stuck := Stuck(lambda *args: None))
        parts.spilling.later(KEY, RECORD, ())
        await asyncio.to_thread(stuck.began.wait, 10)
        (writing,) = parts.spilling._tasks
        others = [parts.spilling.later(bytes([number]) * 32, RECORD, ()) for number in range(5)]
        await asyncio.gather(*(parts.spilling._tasks - {writing}))
        assert parts.count("skipped") == len(others)
        began = time.monotonic()
        await parts.spilling.close(0.02)
        assert time.monotonic() - began < 5
        assert parts.spilling._tasks == set()
        stuck.let_go()

    within(test)


def test_two_requests_do_not_write_over_each_other(within: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one waits for its turn, and finds that all is there."""
    writes: list[tuple[bool, list[int]]] = []

    async def test(parts: Parts) -> None:
        write = parts.store.write

        async def watched(record: Record, own_part: bool, blocks: Any, chunks: AsyncIterator[bytes]) -> None:
            writes.append((own_part, list(blocks)))
            await write(record, own_part, blocks, chunks)

        monkeypatch.setattr(parts.store, "write", watched)
        back = [parts.spilling.bring_back(FOUND, 0) for _ in range(2)]
        assert await asyncio.gather(*back) == [True, True]
        assert writes == [(True, [0, 1])]
        await parts.store.forget([], blocks=[RECORD.blocks[1]])
        assert await parts.spilling.bring_back(FOUND, 0)
        assert writes[1:] == [(False, [1])], "only what is missing"
        assert await parts.stored() == [piece async for piece in pieces()]

    within(test)


def test_what_is_no_good_goes_from_the_disk(within: Any) -> None:
    async def test(parts: Parts) -> None:
        parts.spilling.forget([b"o" * 32])
        await parts.spilling.idle()
        assert KEY in parts.disk, "the control: another's"
        parts.spilling.forget([KEY])
        await parts.spilling.idle()
        assert not await parts.spilling.bring_back(FOUND, 0)
        assert Disk(parts.disk._states_dir.parent, 10**9, 10**9, 1000).used_bytes == 0

    within(test)


def test_bytes_are_counted_once(within: Any) -> None:
    async def test(parts: Parts) -> None:
        for number in range(4):
            parts.spilling.later(bytes([number]) * 32, RECORD, ())
        await parts.spilling.idle()
        assert parts.count("skipped") == 4, "the store has it no more"
        assert parts.metrics.disk_written._value.get() == parts.disk.written_bytes

    within(test)


def test_the_limits_are_told(within: Any) -> None:
    """0 where there is no disk: dashboards and alerts hold what is written against them."""
    limits = Metrics("test").disk_limits
    assert [limits[of,]._value.get() for of in ("kept", "day")] == [0, 0]

    async def test(parts: Parts) -> None:
        assert [parts.metrics.disk_limits[of,]._value.get() for of in ("kept", "day")] == [10**9, 2 * 10**9]

    within(test)
