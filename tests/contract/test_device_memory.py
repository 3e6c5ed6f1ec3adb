"""On a GPU whose memory another process holds: refused at start with the numbers, or no matter at all once it runs."""

from pathlib import Path

import grpc
import pytest
from engine_process import TESTED_DEVICE, EngineProcess, start_engine

from services.engine.experts.store import Store
from services.rpc import engine_pb2 as pb
from services.rpc.engine_pb2_grpc import EngineStub
from services.tools.ballast import Ballast

pytestmark = pytest.mark.skipif(TESTED_DEVICE != "cuda", reason="needs TESTED_DEVICE=cuda")


def tokens(engine: EngineProcess) -> list[int]:
    ask = pb.GenerateIn(start=pb.Start(request_id="r", ids=[1, 5, 9], max_tokens=20, sampling=pb.Sampling(top_p=1.0)))
    with grpc.insecure_channel(engine.address) as channel:
        return [out.token.id for out in EngineStub(channel).Generate(iter([ask])) if out.HasField("token")]


def test_too_little_is_refused_before_anything_is_loaded(demo_store: Store, tmp_path: Path) -> None:
    with Ballast(700), pytest.raises(AssertionError, match=r"does not fit into .* MiB of graphics memory"):
        start_engine(demo_store.folder, tmp_path / "log")


def test_memory_that_is_taken_later_was_not_needed(ample: EngineProcess) -> None:
    before = tokens(ample)
    with Ballast(64):
        assert tokens(ample) == before
    assert len(before) == 20
