"""Payloads on a connection that a client lends: received where they belong, refused if anything is wrong, and never in
others' way."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from toy_engine import Gate, Toy, answer, soon, toy
from toy_server import Stream, channel_to, serving, start

from services.engine import exchange
from services.engine.errors import TransferError
from services.engine.exchange import Lent, borrow, mark
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


def framed(data: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(data), data)


class FakeStore:
    """Answers GET n with answer n, as it was told, `piece` bytes at a time; and a socket where its connection is
    handed over, by this name in this folder."""

    def __init__(self, folder: Path, answers: list[bytes], piece: int = 1 << 20, pause_s: float = 0.0) -> None:
        self.mine, self.lent = socket.socketpair()
        self.counter = socket.socket(socket.AF_UNIX)
        self.counter.bind(str(folder / "api-1"))
        self.counter.listen(1)
        self.answers, self.piece, self.pause_s = answers, piece, pause_s
        self.asked: list[int] = []
        self.closed = threading.Event()
        threading.Thread(target=self._hand_over, daemon=True).start()
        threading.Thread(target=self._answer, daemon=True).start()

    def _hand_over(self) -> None:
        with contextlib.suppress(OSError):
            taker, _ = self.counter.accept()
            with taker:
                socket.send_fds(taker, [b"\0"], [self.lent.fileno()])
            self.lent.close()

    def _answer(self) -> None:
        with contextlib.suppress(OSError):
            lines = self.mine.makefile("rb")
            for line in lines:
                number = int([lines.readline() and lines.readline() for _ in range(int(line[1:]))][-1])
                self.asked.append(number)
                data = self.answers[number]
                for at in range(0, len(data), self.piece):
                    self.mine.sendall(data[at : at + self.piece])
                    time.sleep(self.pause_s)
        self.closed.set()

    def close(self) -> None:
        for each in (self.mine, self.lent, self.counter):
            each.close()


@contextlib.contextmanager
def storing(folder: Path, answers: list[bytes], **more: Any) -> Iterator[FakeStore]:
    store = FakeStore(folder, answers, **more)
    try:
        yield store
    finally:
        store.close()


def hang_up(store: FakeStore) -> None:
    """In the middle of a payload."""
    if soon(lambda: store.asked == [0, 1]):
        store.mine.shutdown(socket.SHUT_RDWR)


def pieces(snapshot: Snapshot) -> list[bytes]:
    return [*snapshot.chunks, *snapshot.blocks]


def command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def get(number: int) -> bytes:
    return command(b"GET", b"%d" % number)


def told(snapshot: Snapshot, **changes: Any) -> pb.Lent:
    sizes = [len(piece) for piece in pieces(snapshot)]
    fields = {"name": "api-1", "requests": list(map(get, range(len(sizes)))), "sizes": sizes, "silence_ms": 5000}
    return pb.Lent(**(fields | changes))


def offering(t: Toy, channel: Any, snapshot: Snapshot) -> Stream:
    """A request that offers the state, and is asked for it."""
    ref = snapshot.state
    offer = pb.StateRef(state_id=ref.state_id, tokens=ref.tokens, size_bytes=ref.size_bytes, blocks=ref.blocks)
    stream = Stream(channel)
    stream.send(start=start(*PROMPT, offers=[offer]))
    assert stream.next("restore").source == pb.Restore.SEND
    return stream


def lend(folder: Path, snapshot: Snapshot, lent: pb.Lent) -> tuple[list[pb.Restore], int]:
    """What the engine said of it, and the tokens that were restored; the answer must be right."""
    with toy(exchange_dir=folder) as t, serving(t.engine) as running, channel_to(running) as channel:
        stream = offering(t, channel, snapshot)
        stream.send(lent=lent)
        messages = stream.rest()
        t.hot.check()
        assert t.pool.free == t.pool.total
    tokens = [message.token.id for message in messages if message.WhichOneof("message") == "token"]
    assert tokens == answer(list(PROMPT), 6)
    restores = [message.restore for message in messages if message.WhichOneof("message") == "restore"]
    return restores, messages[-1].finish.cached_tokens


@pytest.mark.parametrize(("piece", "pause_s"), [(1 << 20, 0.0), (1, 0.0), (300, 0.004)], ids=["whole", "bytes", "slow"])
def test_a_payload_is_read_from_the_connection(tmp_path: Path, snapshot: Snapshot, piece: int, pause_s: float) -> None:
    answers = [framed(data) for data in pieces(snapshot)]
    assert len(answers) == 2, "own part and a block"
    with storing(tmp_path, answers, piece=piece, pause_s=pause_s) as store:
        (restore,), restored = lend(tmp_path, snapshot, told(snapshot))
        assert (restore.source, restored) == (pb.Restore.SENT, 80)
        assert store.asked == [0, 1]
        assert store.closed.wait(5)


@pytest.mark.parametrize("ending", ["sound", "damaged", "silent", "unavailable"])
def test_the_connection_is_closed_before_the_answer(tmp_path: Path, snapshot: Snapshot, ending: str) -> None:
    own, block = pieces(snapshot)
    last = {"sound": framed(block), "damaged": framed(bytes(len(block)))}.get(ending, b"")
    gate = Gate()
    with (
        toy(exchange_dir=tmp_path) as t,
        serving(t.engine) as running,
        channel_to(running) as channel,
        storing(tmp_path, [framed(own), last]) as store,
    ):
        t.model.before = gate
        stream = offering(t, channel, snapshot)
        stream.send(lent=told(snapshot, silence_ms=300 if ending == "silent" else 60_000))
        if ending == "unavailable":
            assert soon(lambda: store.asked == [0, 1])
            stream.send(unavailable=pb.Unavailable())
        assert stream.next("restore").source == (pb.Restore.SENT if ending == "sound" else pb.Restore.REFUSED)
        assert store.closed.wait(5)
        gate.open()
        assert stream.rest()


@pytest.mark.parametrize(
    ("wrong", "reason", "damaged"),
    [
        ("bytes", "checksum does not match", True),
        ("block", "not what its name says", True),
        ("size", "has another size", True),
        ("nothing", "a chunk is missing", True),
        ("error", "refused to send", False),
        ("closed", "closed", False),
        ("silent", "silent for 0.2 s", False),
        ("sizes", "another number of bytes", False),
    ],
)
def test_what_is_wrong_is_refused(tmp_path: Path, snapshot: Snapshot, wrong: str, reason: str, damaged: bool) -> None:
    """And whether it is in the bytes: what did not come may be sound."""
    own, block = pieces(snapshot)
    lent = told(snapshot)
    answers = [framed(own), framed(block)]
    match wrong:
        case "bytes":
            answers[0] = framed(own[:-9] + bytes([own[-9] ^ 1]) + own[-8:])
        case "block":
            answers[1] = framed(bytes([block[0] ^ 1]) + block[1:])
        case "size":
            answers[0] = framed(own + b"x")
        case "nothing":
            answers[1] = b"$-1\r\n"
        case "error":
            answers[0] = b"-ERR no\r\n"
        case "silent":
            answers[1], lent.silence_ms = framed(block)[:50], 200
        case "sizes":
            lent.sizes[1] += 1
    with storing(tmp_path, answers) as store:
        if wrong == "closed":
            store.answers = [framed(own)[:100], b""]
            threading.Thread(target=hang_up, args=(store,), daemon=True).start()
        restores, restored = lend(tmp_path, snapshot, lent)
    assert ([r.source for r in restores], restored) == ([pb.Restore.REFUSED], 0)
    assert reason in restores[0].reason
    assert restores[0].damaged == damaged


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("name", "no exchange folder, or nothing"),
        ("path", "no exchange folder, or nothing"),
        ("file", "no socket"),
        ("none", "cannot be taken"),
        ("user", "not ours"),
        ("requests", "does not fit"),
        ("write", "only HGET and GET"),
        ("behind", "only HGET and GET"),
        ("longer", "only HGET and GET"),
        ("inline", "only HGET and GET"),
    ],
)
def test_what_cannot_be_borrowed_is_asked_for_in_chunks(
    tmp_path: Path, snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch, wrong: str, reason: str
) -> None:
    lent = told(snapshot)
    match wrong:
        case "name":
            lent.name = "API 1"
        case "path":
            lent.name = "../api-1"
        case "file":
            (tmp_path / "file").touch()
            lent.name = "file"
        case "none":
            lent.name = "api-2"
        case "user":
            monkeypatch.setattr(exchange.os, "geteuid", lambda: 12345)
        case "requests":
            lent.requests.pop()
        case "write":
            lent.requests[1] = command(b"SET", b"a", b"b")
        case "behind":
            lent.requests[1] += command(b"GET", b"a")
        case "longer":
            lent.requests[1] = command(b"GET", b"a", b"b")
        case "inline":
            lent.requests[1] = b"GET a\r\n"
    with (
        toy(exchange_dir=tmp_path) as t,
        serving(t.engine) as running,
        channel_to(running) as channel,
        storing(tmp_path, []) as store,
    ):
        stream = offering(t, channel, snapshot)
        stream.send(lent=lent)
        again = stream.next("restore")
        assert (again.source, list(again.need)) == (pb.Restore.SEND, [0])
        assert reason in again.reason
        for index, data in enumerate(pieces(snapshot)):
            stream.send(chunk=pb.SnapshotChunk(index=index, data=data))
        assert stream.next("restore").source == pb.Restore.SENT
        assert stream.rest()[-1].finish.cached_tokens == 80
        assert store.asked == []


def test_a_read_of_either_kind_is_passed_on() -> None:
    mine, lent_socket = socket.socketpair()
    with mine, lent_socket:
        for request in (command(b"HGET", b"key", b"0"), command(b"GET", b"key\r\nSET")):
            Lent(lent_socket, [request], [1], lambda: None)


def test_others_go_on_while_the_store_is_slow(tmp_path: Path, snapshot: Snapshot) -> None:
    """And a client that goes away meanwhile leaves nothing behind."""
    answers = [framed(data) for data in pieces(snapshot)]
    answers[0] = answers[0][:200]
    with (
        toy(exchange_dir=tmp_path) as t,
        serving(t.engine) as running,
        channel_to(running) as channel,
        storing(tmp_path, answers) as store,
    ):
        stream = offering(t, channel, snapshot)
        stream.send(lent=told(snapshot, silence_ms=60_000))
        assert soon(lambda: store.asked == [0, 1])
        began = time.perf_counter()
        for _ in range(3):
            assert t.ask(Request("other", PROMPT, 6)).finish()
        assert time.perf_counter() - began < 5
        stream.call.cancel()
        assert store.closed.wait(5)
        assert soon(lambda: t.pool.free == t.pool.total)
        t.hot.check()


def test_without_a_folder_nothing_is_borrowed() -> None:
    with pytest.raises(TransferError, match="no exchange folder"):
        borrow(None, "api-1")


def test_what_a_store_keeps_ready_is_bounded() -> None:
    """Requests go out two at a time, however many there are."""
    mine, lent_socket = socket.socketpair()
    with mine, lent_socket:
        lent = Lent(lent_socket, list(map(get, range(50))), [10] * 50, lambda: None)
        view, asked = memoryview(bytearray(100)), b""
        for number in range(50):
            assert lent.read(view) == 0, "nothing has come"
            mine.setblocking(False)
            asked += mine.recv(1000) if number < 49 else b""
            assert asked.count(b"GET") <= number + 2
            mine.sendall(framed(b"%010d" % number))
            assert lent.read(view) == 10
            assert bytes(view[:10]) == b"%010d" % number
        with pytest.raises(TransferError, match="ends too early"):
            lent.read(view)


def test_the_mark_tells_that_the_folder_is_the_same(tmp_path: Path) -> None:
    name = mark(tmp_path / "new")
    assert (tmp_path / "new" / name).exists()
    assert mark(tmp_path / "new") != name
