"""Payloads lent to an engine on the same machine: on a connection of ours; else they go over gRPC."""

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from running_api import RunningApi
from scripted_engine import ScriptedEngine

from services.api import bulk as bulk_module
from services.api import exchange as exchange_module
from services.api.bulk import BulkError, bulk, can_read
from services.api.embedded import EmbeddedStore
from services.api.exchange import Exchange, _hand_over
from services.rpc import engine_pb2 as pb

SYSTEM = {"role": "system", "content": "You are a very patient assistant who explains things slowly, in many words."}


def two_turns(api: RunningApi) -> Any:
    dialog: list[Any] = [SYSTEM, {"role": "user", "content": "Please tell me what you can do for me."}]
    reply = api.chat(*dialog)
    api.saved()
    answer = {"role": "assistant", "content": reply["choices"][0]["message"]["content"]}
    reply = api.chat(*dialog, answer, {"role": "user", "content": "And what else?"})
    assert reply["choices"][0]["message"]["content"] == "Hello there, friend."
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture
def cold(engine: ScriptedEngine, tmp_path: Path) -> ScriptedEngine:
    engine.keeps_hot = False
    engine.exchange_dir = tmp_path
    return engine


@pytest.mark.parametrize("payload_mb", [0.01, 2.1, 40])
def test_payloads_of_any_size_are_lent(
    start_api: Callable[..., RunningApi],
    store: EmbeddedStore,
    cold: ScriptedEngine,
    tmp_path: Path,
    payload_mb: float,
) -> None:
    with redis.Redis.from_url(store.url) as client:
        client.config_set("maxmemory", 400_000_000)
    cold.payload_bytes = int(payload_mb * 1e6)
    api = start_api(
        redis_url=store.url, redis_reader_url=store.reader_url, exchange_dir=str(tmp_path), read_ahead=False
    )
    assert two_turns(api) > 40
    assert cold.calls[-1].source == "SENT"
    assert cold.calls[-1].lent_chunks > 0
    assert [path.name for path in tmp_path.iterdir()] == [cold.mark], "nothing of it stays"
    assert api.metric("snapshot_bytes_total", dir="sent") == cold.calls[-1].received_bytes


def test_an_engine_with_another_folder_gets_it_over_grpc(
    start_api: Callable[..., RunningApi], store: EmbeddedStore, cold: ScriptedEngine, tmp_path: Path
) -> None:
    (tmp_path / "another").mkdir()
    assert two_turns(start_api(redis_url=store.url, exchange_dir=str(tmp_path / "another"))) > 40
    assert (cold.calls[-1].source, cold.calls[-1].lent_chunks) == ("SENT", 0)


@pytest.mark.parametrize("spoil", ["missing", "short", "type"])
def test_what_is_spoilt_in_the_store_is_not_sent(
    start_api: Callable[..., RunningApi], store: EmbeddedStore, cold: ScriptedEngine, tmp_path: Path, spoil: str
) -> None:
    api = start_api(redis_url=store.url, exchange_dir=str(tmp_path))
    real = api.app.state.chats.snapshots.send

    async def spoilt(*args: Any) -> Any:
        with redis.Redis.from_url(store.url) as client:
            for name in client.keys("thimble:3:state:*"):
                if spoil == "missing":
                    client.hdel(name, "1")
                elif spoil == "short":
                    client.hset(name, "0", b"short")
                else:
                    client.delete(name)
                    client.set(name, b"x")
        return await real(*args)

    api.app.state.chats.snapshots.send = spoilt
    assert two_turns(api) == 0
    assert cold.calls[-1].source == "REFUSED"


def stored(store: EmbeddedStore) -> set[bytes]:
    with redis.Redis.from_url(store.url) as client:
        return {name for kind in ("text", "state") for name in client.keys(f"thimble:*:{kind}:*")}


@pytest.mark.parametrize("trouble", ["silent", "refused", "damaged"])
def test_only_damaged_bytes_are_removed(
    start_api: Callable[..., RunningApi], store: EmbeddedStore, cold: ScriptedEngine, tmp_path: Path, trouble: str
) -> None:
    """What did not come, for whatever reason, may be sound, and is there for the next one."""
    api = start_api(redis_url=store.url, exchange_dir=str(tmp_path), read_ahead=False)
    dialog: list[Any] = [SYSTEM, {"role": "user", "content": "Please tell me what you can do for me."}]
    answer = api.chat(*dialog)["choices"][0]["message"]
    dialog += [answer, {"role": "user", "content": "And what else?"}]
    api.saved()
    before = stored(store)
    cold.refuses_payloads = trouble == "damaged"
    real = bulk_module._encode

    def silent(command: tuple[str, ...]) -> bytes:  # the store waits for the rest, and so does the engine
        return real(command) if command[0] == "AUTH" else real(command)[:-2]

    def refused(command: tuple[str, ...]) -> bytes:
        return real(command if command[0] == "AUTH" else ("LRANGE", *command[1:], "0"))

    with pytest.MonkeyPatch.context() as patch:
        if trouble == "silent":
            patch.setattr(bulk_module, "_encode", silent)
            patch.setattr(api.app.state.chats.snapshots._store, "_read_s", 0.3)
        if trouble == "refused":
            patch.setattr(bulk_module, "_encode", refused)
        api.chat(*dialog, max_tokens=1)
    assert cold.calls[-1].source == "REFUSED"
    api.saved()
    assert (before - stored(store) == set()) == (trouble != "damaged")
    if trouble != "damaged":
        assert api.chat(*dialog)["usage"]["prompt_tokens_details"]["cached_tokens"] > 40


def test_an_engine_that_cannot_take_a_connection_gets_it_over_grpc(
    start_api: Callable[..., RunningApi], store: EmbeddedStore, cold: ScriptedEngine, tmp_path: Path
) -> None:
    cold.borrows = False
    assert two_turns(start_api(redis_url=store.url, exchange_dir=str(tmp_path), read_ahead=False)) > 40
    assert (cold.calls[-1].source, cold.calls[-1].lent_chunks) == ("SENT", 0)
    assert [path.name for path in tmp_path.iterdir()] == [cold.mark]


def test_another_user_gets_no_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a folder shared with one."""
    (tmp_path / "engine-1").touch()
    info = pb.InfoResponse(exchange="engine-1")
    assert Exchange(str(tmp_path)).shared_with(info)

    async def hand_over() -> list[int]:
        given = []
        mine, lent = socket.socketpair()
        with mine, lent, socket.socket(socket.AF_UNIX) as counter:
            counter.setblocking(False)
            counter.bind(str(tmp_path / "counter"))
            counter.listen(2)
            task = asyncio.create_task(_hand_over(counter, lent))
            for user in (12345, os.geteuid()):
                with monkeypatch.context() as patch:
                    patch.setattr(exchange_module.os, "geteuid", lambda user=user: user)
                    given.append(await asyncio.to_thread(take, tmp_path / "counter"))
            await task
        return given

    def take(path: Path) -> int:
        with socket.socket(socket.AF_UNIX) as taker:
            taker.connect(str(path))
            descriptors = socket.recv_fds(taker, 1, 1)[1]
        for descriptor in descriptors:
            os.close(descriptor)
        return len(descriptors)

    assert asyncio.run(hand_over()) == [0, 1]
    monkeypatch.setattr(exchange_module.os, "geteuid", lambda: 12345)
    assert not Exchange(str(tmp_path)).shared_with(info)


def test_who_reads_can_do_nothing_else(store: EmbeddedStore) -> None:
    """The server itself sees to it, for what is lent by an api with a store of its own."""
    with redis.Redis.from_url(store.url) as client:
        client.hset("thimble:3:state:a", "0", b"x" * 10)
        client.set("thimble:3:block:b", b"y" * 10)
        client.set("other", b"z" * 10)
    asked: list[tuple[tuple[str, ...], bytes]] = [
        (("HGET", "thimble:3:state:a", "0"), b"$10\r\nxxxxxxxxxx\r\n"),
        (("GET", "thimble:3:block:b"), b"$10\r\nyyyyyyyyyy\r\n"),
        (("GET", "other"), b"-NOPERM"),
        (("SET", "thimble:3:block:b", "new"), b"-NOPERM"),
        (("DEL", "thimble:3:block:b"), b"-NOPERM"),
        (("KEYS", "*"), b"-NOPERM"),
        (("CONFIG", "GET", "*"), b"-NOPERM"),
        (("FLUSHALL",), b"-NOPERM"),
    ]
    for command, answer in asked:
        payload = bulk(store.reader_url, [command], [10], 5.0)
        with payload.connect() as connection:
            connection.sendall(payload.requests[0])
            assert connection.recv(1000).startswith(answer), command
    with redis.Redis.from_url(store.url) as client:
        assert client.get("thimble:3:block:b") == b"y" * 10, "the control: the owner may"


@pytest.mark.parametrize("user", ["reader:any@", "reader@", "?username=reader"])
def test_who_reads_cannot_become_another(store: EmbeddedStore, user: str) -> None:
    """Nobody is kept from RESET and AUTH, so the users that one can be then must be of no use."""
    with redis.Redis.from_url(store.url) as client:
        client.set("thimble:3:block:b", b"y" * 10)
    url = f"unix://{store.socket_path}{user}" if user.startswith("?") else f"unix://{user}{store.socket_path}"
    with bulk(url, [], [], 5.0).connect() as connection:

        def ask(*words: str) -> bytes:
            connection.sendall(bulk("", [words], [10], 5.0).requests[0])
            return connection.recv(1000)

        assert ask("GET", "thimble:3:block:b") == b"$10\r\nyyyyyyyyyy\r\n"
        assert ask("FLUSHALL").startswith(b"-NOPERM"), "the control: it is the reader who asks"
        for words in (("AUTH", "any"), ("AUTH", "default", "any"), ("AUTH", "default", "")):
            assert ask(*words).startswith(b"-WRONGPASS")
        assert ask("RESET") == b"+RESET\r\n"
        assert ask("FLUSHALL").startswith(b"-NOAUTH")
        assert ask("AUTH", store.password) == b"+OK\r\n"
        assert ask("FLUSHALL") == b"+OK\r\n", "the control: the password is all that is missing"
    arguments = Path(f"/proc/{store.pid}/cmdline").read_bytes()
    assert b"requirepass" not in arguments
    assert store.password.encode() not in arguments


@pytest.mark.parametrize(("user", "source"), [("", "REFUSED"), ("reader:any@", "SENT"), ("reader2:any@", "SENT")])
def test_a_store_that_does_not_let_the_reader_in(
    start_api: Callable[..., RunningApi],
    store: EmbeddedStore,
    cold: ScriptedEngine,
    tmp_path: Path,
    user: str,
    source: str,
) -> None:
    """One that says so at once is asked over gRPC; where only the engine hears of it, the prompt is read."""
    reader = f"unix://{user}{store.socket_path}"
    api = start_api(redis_url=store.url, redis_reader_url=reader, exchange_dir=str(tmp_path), read_ahead=False)
    assert (two_turns(api) > 40) == (source == "SENT")
    assert cold.calls[-1].source == source
    assert (cold.calls[-1].lent_chunks > 0) == (user == "reader:any@")


def test_a_folder_whose_name_is_too_long_for_a_socket_is_not_shared(tmp_path: Path) -> None:
    for name, shared in (("short", True), ("long" * 30, False)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "engine-1").touch()
        assert Exchange(str(tmp_path / name)).shared_with(pb.InfoResponse(exchange="engine-1")) is shared


def test_a_password_and_a_database_are_used(store: EmbeddedStore) -> None:
    with redis.Redis.from_url(store.url) as client:
        client.config_set("requirepass", "s/cret")
    with redis.Redis.from_url(f"unix://{store.socket_path}?db=3", password="s/cret") as client:
        client.set("a", b"x" * 10)
    path = store.socket_path
    for url in (f"unix://:s%2Fcret@{path}?db=3", f"unix://{path}?db=3&password=s/cret"):
        payload = bulk(url, [("GET", "a")], [10], 5.0)
        with payload.connect() as connection:
            connection.sendall(payload.requests[0])
            assert connection.recv(100) == b"$10\r\n" + b"x" * 10 + b"\r\n"
    with pytest.raises(BulkError, match="refuses AUTH"):
        bulk(f"unix://:wrong@{path}", [], [], 5.0).connect()
    with pytest.raises(ConnectionRefusedError):
        bulk("redis://127.0.0.1:1", [], [], 0.5).connect()
    assert can_read("redis://h")
    assert not can_read("rediss://h")
