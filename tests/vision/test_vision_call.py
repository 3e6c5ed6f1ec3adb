"""Vision calls over gRPC: the contract's order, its limits, and that a client that leaves stops the work."""

import hashlib
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from demo_engine import Demo, demo
from drawn import corners, encoded
from PIL import Image
from toy_engine import soon
from toy_server import channel_to, code_of, serving

from services.engine.experts.store import Store
from services.engine.vision.ids import picture_ids
from services.rpc import engine_pb2 as pb
from services.rpc.engine_pb2_grpc import EngineStub
from services.tools import small_checkpoint
from services.tools.repack import repack

DATA = encoded(corners(20, 12))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("sees")
    return repack(small_checkpoint.write(folder / "c", "3.5-super-vl"), folder / "store", say=lambda text: None)


@pytest.fixture(scope="module")
def engine(store: Store) -> Iterator[Demo]:
    with demo(store) as running:
        yield running


@pytest.fixture
def stub(engine: Demo) -> Iterator[Any]:
    with serving(_Open(engine.engine)) as running, channel_to(running) as channel:  # type: ignore[arg-type]
        yield EngineStub(channel)


class _Open:
    """An engine that a server's end does not close."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def close(self, timeout_s: float = 0.0) -> None:
        pass


def ask(*pictures: bytes, sent: bool = True, **more: Any) -> pb.VisionIn:
    asks = [pb.PictureAsk(digest=hashlib.sha256(p).digest(), size_bytes=len(p) if sent else 0) for p in pictures]
    return pb.VisionIn(ask=pb.VisionAsk(pictures=asks, text_tokens=10, **more))


def vision(stub: Any, *messages: pb.VisionIn) -> pb.VisionOut:
    out: pb.VisionOut = stub.Vision(iter(messages), timeout=60)
    return out


def refused(stub: Any, *messages: pb.VisionIn) -> tuple[grpc.StatusCode, str | None, str]:
    with pytest.raises(grpc.RpcError) as caught:
        vision(stub, *messages)
    error: Any = caught.value
    return error.code(), code_of(error), error.details()


def test_names_first_then_bytes_then_an_answer(stub: Any) -> None:
    fresh = encoded(corners(22, 14))
    assert list(vision(stub, ask(fresh, sent=False)).missing) == [0]
    pieces = [pb.VisionIn(data=fresh[at : at + 50]) for at in range(0, len(fresh), 50)]
    (seen,) = vision(stub, ask(fresh), *pieces).pictures
    assert len(seen.handle) == 32
    assert vision(stub, ask(fresh, sent=False)).pictures == [seen]
    both = vision(stub, ask(fresh, DATA), pb.VisionIn(data=fresh + DATA))
    assert both.pictures[0] == seen
    ids = [1, 2, 3, *[18] * seen.tokens, 4]
    place = pb.PictureRef(handle=seen.handle, position=3, tokens=seen.tokens)
    start = pb.Start(request_id="r", ids=ids, max_tokens=3, pictures=[place])
    finish = [m for m in stub.Generate(iter([pb.GenerateIn(start=start)])) if m.WhichOneof("message") == "finish"]
    assert finish[0].finish.prompt_tokens == len(ids)
    assert vision(stub, ask(fresh, sent=False, count_only=True)).pictures[0].handle == b""


def test_a_picture_that_is_not_held_must_be_sent_again(stub: Any) -> None:
    place = pb.PictureRef(handle=b"x" * 32, position=0, tokens=2)
    start = pb.Start(request_id="r", ids=[18, 18, 1], max_tokens=3, pictures=[place])
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(iter([pb.GenerateIn(start=start)])))
    assert code_of(caught.value) == "picture_gone"


def test_messages_out_of_order_and_beyond_limits(stub: Any) -> None:
    bad = (grpc.StatusCode.INVALID_ARGUMENT, "bad_stream")
    assert refused(stub, pb.VisionIn(data=b"x"))[:2] == bad
    assert refused(stub)[:2] == bad
    assert refused(stub, ask(DATA), pb.VisionIn(data=DATA[:-1]))[:2] == bad
    assert refused(stub, ask(DATA), pb.VisionIn(data=DATA + b"x"))[:2] == bad
    assert refused(stub, ask(DATA), ask(DATA))[:2] == bad
    asked = pb.VisionAsk(pictures=[pb.PictureAsk(digest=b"short")])
    assert refused(stub, pb.VisionIn(ask=asked))[:2] == bad
    huge = pb.PictureAsk(digest=b"0" * 32, size_bytes=33 << 20)
    status, code, details = refused(stub, pb.VisionIn(ask=pb.VisionAsk(pictures=[huge])))
    assert (status, code) == (grpc.StatusCode.INVALID_ARGUMENT, "bad_picture")
    assert "at most 33554432" in details
    many = [pb.PictureAsk(digest=b"0" * 32, size_bytes=30 << 20)] * 3
    assert "at once" in refused(stub, pb.VisionIn(ask=pb.VisionAsk(pictures=many)))[2]
    assert "0 pictures" in refused(stub, pb.VisionIn(ask=pb.VisionAsk()))[2]


def test_what_is_no_picture_is_refused_by_name(stub: Any) -> None:
    for data, named in ((b"%PDF-1.7 ...", "PDF"), (DATA[: len(DATA) // 2], "incomplete PNG")):
        status, code, details = refused(stub, ask(data), pb.VisionIn(data=data))
        assert (status, code) == (grpc.StatusCode.INVALID_ARGUMENT, "bad_picture")
        assert named in details


def test_a_client_that_leaves_stops_the_tower(stub: Any, engine: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = engine.engine.sight.weights
    begun, closed = [], []
    first = next(iter(weights.blocks()))

    def endless() -> Iterator[Any]:
        done = 0
        begun.append(True)
        try:
            while True:
                done += 1
                yield first
        finally:
            closed.append(done)

    monkeypatch.setattr(weights, "blocks", endless)
    fresh = encoded(Image.effect_noise((21, 21), 33).convert("RGB"))
    call = stub.Vision.future(iter([ask(fresh), pb.VisionIn(data=fresh)]))
    assert soon(lambda: bool(begun))
    call.cancel()
    assert soon(lambda: not engine.engine._looks.pending)
    assert soon(lambda: bool(closed))
    monkeypatch.undo()
    assert vision(stub, ask(fresh), pb.VisionIn(data=fresh)).pictures


def test_ids_are_of_the_handle() -> None:
    one, other = picture_ids(b"a" * 32, 256), picture_ids(b"b" * 32, 256)
    assert len(set(one)) > 250
    assert not set(one) & set(other)
