"""States on a disk: written when a dialog rests, back when the store has lost them, harmless whatever happens there."""

import asyncio
import errno
import os
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from running_api import RunningApi
from scripted_engine import ScriptedEngine

from services.api import disk as disk_module
from services.api.disk import Disk, DiskRefused
from services.api.embedded import EmbeddedStore
from services.api.records import Head, Record

DIALOG: list[Any] = [
    {"role": "system", "content": "You are a very patient assistant who explains things slowly, in many words."},
    {"role": "user", "content": "Please tell me what you can do for me."},
]


@pytest.fixture
def cold(engine: ScriptedEngine) -> ScriptedEngine:
    engine.keeps_hot = False
    return engine


@pytest.fixture
def start(start_api: Callable[..., RunningApi], store: EmbeddedStore, cold: ScriptedEngine, tmp_path: Path) -> Any:
    def api(**settings: Any) -> RunningApi:
        more = {
            "snapshot_disk_dir": str(tmp_path / "disk"),
            "snapshot_disk_rest_s": 0.0,
            "redis_timeout_ms": 5000,
        } | settings
        return start_api(redis_url=store.url, **more)

    return api


def settle(api: RunningApi) -> None:
    api.saved()
    spilling = api.app.state.chats.snapshots._spilling
    asyncio.run_coroutine_threadsafe(spilling.idle(), api.loop).result(20)


def asked(api: RunningApi, dialog: list[Any]) -> tuple[str, int]:
    reply = api.chat(*dialog)
    settle(api)
    return reply["choices"][0]["message"]["content"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def lose(store: EmbeddedStore) -> None:
    with redis.Redis.from_url(store.url) as client:
        client.flushall()


def turn(answer: str) -> list[Any]:
    return [*DIALOG, {"role": "assistant", "content": answer}, {"role": "user", "content": "And what else?"}]


def files(folder: Path, kind: str = "states") -> list[Path]:
    return sorted((folder / "disk" / kind).iterdir())


def test_what_the_store_has_lost_comes_back(start: Any, store: EmbeddedStore, tmp_path: Path) -> None:
    """Also for an api that was started anew; and the control: not without its file."""
    api = start()
    answer, _ = asked(api, DIALOG)
    assert len(files(tmp_path)) == 1
    written = sum(path.stat().st_size for kind in ("states", "blocks") for path in files(tmp_path, kind))
    assert api.metric("snapshot_disk_written_bytes_total") == api.metric("snapshot_disk_bytes") == written
    lose(store)
    again = start()
    assert asked(again, turn(answer))[1] > 40
    assert again.metric("snapshot_disk_total", result="read") == 1
    assert len(files(tmp_path)) == 1, "of a dialog the newest state alone"
    lose(store)
    for path in files(tmp_path):
        path.unlink()
    assert asked(start(), turn(answer))[1] == 0


def test_off_unless_asked_for(start: Any, tmp_path: Path) -> None:
    api = start(snapshot_disk_dir="")
    api.chat(*DIALOG)
    api.saved()
    assert not (tmp_path / "disk").exists()


def test_a_dialog_that_goes_on_is_not_written(start: Any, tmp_path: Path) -> None:
    api = start(snapshot_disk_rest_s=3600.0)
    reply = api.chat(*DIALOG)
    api.saved()
    api.chat(*turn(reply["choices"][0]["message"]["content"]))
    api.saved()
    spilling = api.app.state.chats.snapshots._spilling
    assert len(spilling._resting) == 1, "the newest state waits, the one before does not any more"
    assert files(tmp_path) == []


@pytest.mark.parametrize("kind", ["states", "blocks"])
@pytest.mark.parametrize("damage", ["bit", "short", "gone"])
def test_a_damaged_file_costs_a_prompt_s_reading(
    start: Any, store: EmbeddedStore, tmp_path: Path, cold: ScriptedEngine, kind: str, damage: str
) -> None:
    api = start()
    answer, _ = asked(api, DIALOG)
    lose(store)
    for path in files(tmp_path, kind):
        data = bytearray(path.read_bytes())
        data[-40] ^= 1
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes(bytes(data) if damage == "bit" else bytes(data[:-1]))
    content, cached = asked(api, turn(answer))
    assert (content, cached) == (answer, 0)
    assert api.metric("snapshot_disk_total", result="refused") == 1


def test_a_full_disk_is_harmless(start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk_module, "_put", full)
    api = start()
    answer, _ = asked(api, DIALOG)
    assert asked(api, turn(answer))[1] > 40, "from the store"
    assert files(tmp_path) == []
    assert api.metric("snapshot_disk_total", result="skipped") == 2


def state(number: int, blocks: int = 2, size_bytes: int = 1000) -> tuple[bytes, Record, list[bytes], list[Any]]:
    names = tuple(bytes([block]) * 16 for block in range(blocks))
    record = Record(Head(bytes([number]) * 32, 9, 9, size_bytes, 1, blocks, 500), array("I", range(9)), names)
    return bytes([number]) * 32, record, [bytes([number]) * size_bytes], [(name, name[:1] * 500) for name in names]


def test_its_size_is_bounded_and_the_longest_unused_goes(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 4500, 10**9)
    for number in range(6):
        key, record, own, blocks = state(number)
        disk.write(key, record, own, [blocks[n] for n in disk.lacks(record)])
        if number:
            disk.read(state(1)[0])  # in use
        held = sum(path.stat().st_size for path in tmp_path.glob("*/*"))
        assert held == disk.used_bytes <= 4500
    there = [number for number in range(6) if state(number)[0] in disk]
    assert there == [1, 5]
    again = Disk(tmp_path, 4500, 10**9)
    assert [number for number in range(6) if state(number)[0] in again] == there
    record, own, read = again.read(state(5)[0])
    assert (bytes(own), list(read)) == (state(5)[2][0], [data for _, data in state(5)[3]])
    with pytest.raises(DiskRefused, match="more than the disk may hold"):
        disk.write(*state(9, size_bytes=5000))


def test_a_day_has_its_budget_across_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000 * disk_module.DAY_S
    monkeypatch.setattr(disk_module.time, "time", lambda: now)
    Disk(tmp_path, 10**9, 3000).write(*state(1))
    disk = Disk(tmp_path, 10**9, 3000)
    with pytest.raises(DiskRefused, match="may be written today"):
        disk.write(*state(2))
    now += disk_module.DAY_S
    disk.write(*state(2))
    assert state(2)[0] in disk
