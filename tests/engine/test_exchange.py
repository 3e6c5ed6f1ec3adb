"""Payloads that a client lends in a file: read where they lie, refused if anything is wrong, and never a danger."""

import os
from pathlib import Path

import pytest
from toy_engine import Toy, answer, toy
from toy_server import Stream, channel_to, serving, start

from services.engine.errors import PayloadError
from services.engine.exchange import LentFiles, mark
from services.engine.request import Request, Snapshot
from services.rpc import engine_pb2 as pb

PROMPT = tuple(n % 40 for n in range(100))


def taken(t: Toy) -> Snapshot:
    call = t.ask(Request("r", PROMPT, 2, snapshot_at=(80,)))
    (snapshot,) = call.finish().snapshots
    call.handle.cancel()
    return snapshot


@pytest.fixture(scope="module")
def snapshot() -> Snapshot:
    with toy() as one:
        return taken(one)


def lend(folder: Path, snapshot: Snapshot, lent: list[pb.LentChunks]) -> tuple[list[pb.GenerateOut], list[int]]:
    """A request that offers the state, and what comes of it."""
    ref = snapshot.state
    offer = pb.StateRef(state_id=ref.state_id, tokens=ref.tokens, size_bytes=ref.size_bytes, blocks=ref.blocks)
    with toy(exchange_dir=folder) as t, serving(t.engine) as running, channel_to(running) as channel:
        stream = Stream(channel)
        stream.send(start=start(*PROMPT, offers=[offer]))
        assert stream.next("restore").source == pb.Restore.SEND
        for chunks in lent:
            stream.send(lent=chunks)
        stream.half_close()
        messages = stream.rest()
        t.hot.check()
    tokens = [message.token.id for message in messages if message.WhichOneof("message") == "token"]
    assert tokens == answer(list(PROMPT), 6)
    return messages, [message.restore.source for message in messages if message.WhichOneof("message") == "restore"]


def file_of(folder: Path, snapshot: Snapshot) -> pb.LentChunks:
    pieces = [*snapshot.chunks, *snapshot.blocks]
    (folder / "api-1").write_bytes(b"".join(pieces))
    offsets = [sum(map(len, pieces[:n])) for n in range(len(pieces))]
    return pb.LentChunks(name="api-1", first=0, offsets=offsets, sizes=list(map(len, pieces)))


def test_a_payload_is_read_from_the_file(tmp_path: Path, snapshot: Snapshot) -> None:
    whole = file_of(tmp_path, snapshot)
    count = len(whole.sizes)
    assert count == 2, "own part and a block"
    parts = [
        pb.LentChunks(name="api-1", first=n, offsets=[whole.offsets[n]], sizes=[whole.sizes[n]]) for n in range(count)
    ]
    for lent in ([whole], parts):
        messages, sources = lend(tmp_path, snapshot, lent)
        assert sources == [pb.Restore.SENT]
        reports = [message.taken.chunks for message in messages if message.WhichOneof("message") == "taken"]
        assert reports == ([2] if lent == [whole] else [1, 2])
        assert messages[-1].finish.cached_tokens == 80


@pytest.mark.parametrize("wrong", ["name", "path", "missing", "short", "bytes", "sizes", "link", "folder"])
def test_what_is_wrong_is_refused(tmp_path: Path, snapshot: Snapshot, wrong: str) -> None:
    lent = file_of(tmp_path, snapshot)
    file = tmp_path / "api-1"
    match wrong:
        case "name":
            lent.name = "API 1"
        case "path":
            lent.name = "../api-1"
        case "missing":
            file.unlink()
        case "short":
            os.truncate(file, file.stat().st_size - 1)
        case "bytes":
            file.write_bytes(bytes([1]) + file.read_bytes()[1:])
        case "sizes":
            lent.sizes[0] = 2 << 20
        case "link":
            file.rename(tmp_path / "elsewhere")
            file.symlink_to(tmp_path / "elsewhere")
        case "folder":
            file.unlink()
            file.mkdir()
    _, sources = lend(tmp_path, snapshot, [lent])
    assert sources == [pb.Restore.REFUSED]


def test_without_a_folder_every_file_is_refused() -> None:
    with pytest.raises(PayloadError, match="no exchange folder"):
        LentFiles(None, 100).chunks("api-1", [0], [10])


def test_one_call_has_one_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"0123456789")
    files = LentFiles(tmp_path, 100)
    (first,) = files.chunks("a", [2], [3])
    view = memoryview(bytearray(2))
    first.read(view, 1)
    assert bytes(view) == b"34"
    with pytest.raises(PayloadError):
        files.chunks("b", [0], [1])


def test_the_mark_tells_that_the_folder_is_the_same(tmp_path: Path) -> None:
    name = mark(tmp_path / "new")
    assert (tmp_path / "new" / name).exists()
    assert mark(tmp_path / "new") != name
