"""States on a disk: written when a dialog rests, back when the store has lost them, harmless whatever happens there."""

import asyncio
import errno
import logging
import os
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from running_api import MODEL_DIR, RunningApi
from scripted_engine import ScriptedEngine

from services.api import disk as disk_module
from services.api.disk import Disk, DiskRefused
from services.api.embedded import EmbeddedStore
from services.api.program import main
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


@pytest.mark.parametrize("what", ["good", "refused", "another's"])
def test_a_state_that_is_no_good_comes_back_once(
    start: Any, store: EmbeddedStore, tmp_path: Path, cold: ScriptedEngine, what: str
) -> None:
    api = start()
    answer, _ = asked(api, DIALOG)
    (file,) = files(tmp_path)
    asked(api, [*DIALOG[:1], {"role": "user", "content": "Something else altogether, please."}])
    (other,) = set(files(tmp_path)) - {file}
    lose(store)
    if what == "another's":
        other.replace(file)
    cold.refuses_payloads = what == "refused"
    again = start(snapshot_disk_rest_s=3600.0)
    again.chat(*turn(answer))
    again.saved()
    spilling = again.app.state.chats.snapshots._spilling

    async def removed() -> None:
        await asyncio.gather(*(spilling._tasks - set(spilling._resting.values())))

    asyncio.run_coroutine_threadsafe(removed(), again.loop).result(20)
    assert again.metric("snapshot_disk_total", result="read") == 1
    assert file.exists() == (what == "good")


def test_a_full_disk_is_harmless(start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Disk, "_put", full)
    api = start()
    answer, _ = asked(api, DIALOG)
    assert asked(api, turn(answer))[1] > 40, "from the store"
    assert files(tmp_path) == []
    assert api.metric("snapshot_disk_total", result="skipped") == 2


TTL_S = 1000.0
Parts = tuple[bytes, Record, Callable[[list[int]], Iterator[bytes]]]


def state(number: int, blocks: int = 2, size_bytes: int = 1000) -> Parts:
    """As `Disk.write` takes it: key, record, and what a store would give."""
    names = tuple(bytes([block]) * 16 for block in range(blocks))
    record = Record(Head(bytes([number]) * 32, 9, 9, size_bytes, 1, blocks, 500), array("I", range(9)), names)

    def read(lacking: list[int]) -> Iterator[bytes]:
        yield bytes([number]) * size_bytes
        for block in lacking:
            yield names[block][:1] * 500

    return bytes([number]) * 32, record, read


def there(disk: Disk) -> list[int]:
    return [number for number in range(10) if bytes([number]) * 32 in disk]


def test_its_size_is_bounded_and_the_longest_unused_goes(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 4500, 10**9, TTL_S)
    for number in range(6):
        disk.write(*state(number))
        if number:
            disk.read(state(1)[0])  # in use
        held = sum(path.stat().st_size for path in tmp_path.glob("*/*"))
        assert held == disk.used_bytes <= 4500
    assert there(disk) == [1, 5]
    again = Disk(tmp_path, 4500, 10**9, TTL_S)
    assert there(again) == [1, 5]
    key, _, read = state(5)
    found, own = again.read(key)
    assert [bytes(own), *(again.read_block(key, found, number) for number in (0, 1))] == list(read([0, 1]))
    with pytest.raises(DiskRefused, match="more than the disk may hold"):
        disk.write(*state(9, size_bytes=5000))
    assert there(disk) == [1, 5], "what does not fit has nothing removed"


def test_a_day_has_its_budget_across_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a clock that is set back. What has no budget is not even read."""
    now = 1000.0 * disk_module.DAY_S
    monkeypatch.setattr(disk_module.time, "time", lambda: now)
    Disk(tmp_path, 10**9, 3000, TTL_S).write(*state(1))
    disk = Disk(tmp_path, 10**9, 3000, TTL_S)
    for _ in range(2):
        with pytest.raises(DiskRefused, match="may be written today"):
            disk.write(*state(2)[:2], lambda lacking: pytest.fail("it was read"))
        now -= disk_module.DAY_S
    now += 3 * disk_module.DAY_S
    disk.write(*state(2))
    assert there(disk) == [1, 2]
    now -= 100 * disk_module.DAY_S
    assert Disk(tmp_path, 10**9, 3000, TTL_S)._day < 1000, "a day that is yet to come would end the writing"


def test_what_is_not_written_costs_no_budget(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 10**9, 4000, TTL_S)
    for _ in range(5):
        with pytest.raises(DiskRefused, match="the store has it no more"):
            disk.write(*state(1)[:2], lambda lacking: iter(()))
    assert list(tmp_path.glob("*/*")) == []
    assert there(disk) == []
    disk.write(*state(1))
    assert Disk(tmp_path, 10**9, 4000, TTL_S)._day_bytes == disk.written_bytes < 4000


def test_a_block_is_written_before_the_next_is_read(tmp_path: Path) -> None:
    """A long dialog has a gigabyte of them. The state gets its name last."""
    key, record, read = state(1)

    def watched(lacking: list[int]) -> Iterator[bytes]:
        for number, piece in enumerate(read(lacking)):
            assert len([path for path in tmp_path.glob("blocks/*") if not path.suffix]) == max(0, number - 1)
            assert not (tmp_path / "states" / key.hex()).exists()
            yield piece

    disk = Disk(tmp_path, 10**9, 10**9, TTL_S)
    disk.write(key, record, watched)
    assert there(disk) == [1]


@pytest.mark.parametrize("way", ["start", "read", "write"])
def test_what_was_not_used_for_long_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    now = time.time()
    monkeypatch.setattr(disk_module.time, "time", lambda: now)
    disk = Disk(tmp_path, 10**9, 10**9, TTL_S)
    disk.write(*state(1))
    now += TTL_S - 10
    disk.write(*state(2, blocks=0))
    os.utime(tmp_path / "states" / state(2)[0].hex(), (now, now))
    assert there(Disk(tmp_path, 10**9, 10**9, TTL_S)) == [1, 2], "the control"
    now += 20
    if way == "start":
        disk = Disk(tmp_path, 10**9, 10**9, TTL_S)
    elif way == "write":
        disk.write(*state(3, blocks=0))
    else:
        with pytest.raises(DiskRefused, match="no more"):
            disk.read(state(1)[0])
    assert set(there(disk)) == {2} | ({3} if way == "write" else set())
    assert list(tmp_path.glob("blocks/*")) == [], "nor the blocks that only it had"


def test_nobody_else_can_read_it(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        disk = Disk(tmp_path / "disk", 10**9, 10**9, TTL_S)
        disk.write(*state(1))
    finally:
        os.umask(old)
    found = [tmp_path / "disk", *tmp_path.glob("disk/**/*")]
    assert {path.stat().st_mode & 0o777 for path in found if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in found if path.is_file()} == {0o600}
    for path in (tmp_path / "disk", tmp_path / "disk/states"):
        path.chmod(0o750)
        with pytest.raises(OSError, match="chmod 700"):
            Disk(tmp_path / "disk", 10**9, 10**9, TTL_S)
        path.chmod(0o700)
    assert there(Disk(tmp_path / "disk", 10**9, 10**9, TTL_S)) == [1], "the control"


def test_what_is_no_file_of_ours_goes(tmp_path: Path) -> None:
    Disk(tmp_path, 10**9, 10**9, TTL_S).write(*state(1))
    for kind in ("states", "blocks"):
        (tmp_path / kind / "ab12").symlink_to(tmp_path / "nowhere")
        (tmp_path / kind / "ab34.half").write_bytes(b"half")
    (tmp_path / "states/ab56").write_bytes(disk_module.MAGIC + b"\xff" * 12)  # 12 GiB of record, it says
    assert there(Disk(tmp_path, 10**9, 10**9, TTL_S)) == [1]
    assert len(list(tmp_path.glob("*/*"))) == 3


@pytest.mark.parametrize(("is_file", "why"), [(False, "chmod 700"), (True, "/disk: ")])
def test_a_folder_that_cannot_be_used_ends_the_start_in_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str], is_file: bool, why: str
) -> None:
    if is_file:
        (tmp_path / "disk").touch()
    else:
        (tmp_path / "disk").mkdir(mode=0o755)
    monkeypatch.setenv("THIMBLE_API_MODEL_DIR", str(MODEL_DIR))
    monkeypatch.setenv("THIMBLE_API_SNAPSHOT_DISK_DIR", str(tmp_path / "disk"))
    monkeypatch.setenv("THIMBLE_API_REDIS_URL", "redis://127.0.0.1:1/0")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    assert main() == 1
    said = capfd.readouterr()
    assert "THIMBLE_API_SNAPSHOT_DISK_DIR" in said.err
    assert why in said.err
    assert "give a folder" in said.err
    assert "Errno" not in said.err
    assert "listening" not in said.out
