"""A GPU that fails in the middle of an answer: the client hears so at once, the engine comes back on the same port."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import pytest
from engine_process import TESTED_DEVICE, EngineProcess, start_engine, stop_engine
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ports import free_ports

from services.engine.experts.store import Store
from services.rpc import engine_pb2 as pb
from services.rpc.engine_pb2_grpc import EngineStub

# While the file FAIL exists, the third step of an engine fails: on a GPU by an index out of bounds, which no later call
# of that process survives; on a CPU as that would be reported.
FAILING = """
import os, sys
from pathlib import Path
from services import garbage
with garbage.not_looked_for():
    import torch
    from services.engine.program import main
from services.engine.errors import DeviceError
from services.engine.gpu.decoder import Decoder
from services.engine.model import Model

flag, steps = Path(os.environ["FAIL"]), 0

def fails():
    global steps
    steps += 1
    if steps != 3 or not flag.exists():
        return False
    if os.environ["KEEP"] == "0":
        flag.unlink()
    return True

run, forward = Decoder.run, Model.forward

def bad_run(self, rows):
    if fails():
        torch.zeros(4, device="cuda")[torch.tensor([1 << 40], device="cuda")]
    return run(self, rows)

def bad_forward(self, segments, give_way=None):
    if fails():
        raise DeviceError("the GPU has failed")
    return forward(self, segments, give_way)

Decoder.run, Model.forward = bad_run, bad_forward
sys.exit(main())
"""


@contextmanager
def started(
    store: Store, folder: Path, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[EngineProcess, int]]:
    (folder / "fail").touch()
    monkeypatch.setenv("FAIL", str(folder / "fail"))
    monkeypatch.setenv("KEEP", str(int(keep)))
    port, metrics_port = free_ports(2)
    engine = start_engine(store.folder, folder / "log", ("-c", FAILING), port=str(port), metrics_port=str(metrics_port))
    try:
        yield engine, port
    finally:
        with engine.process:
            engine.process.kill()


def generate(channel: grpc.Channel) -> list[int]:
    ask = pb.GenerateIn(start=pb.Start(request_id="r", ids=[1, 5, 9], max_tokens=6, sampling=pb.Sampling(top_p=1.0)))
    return [out.token.id for out in EngineStub(channel).Generate(iter([ask])) if out.HasField("token")]


def serving(port: int) -> bool:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            asked = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)
        except grpc.RpcError:
            return False
        return bool(asked.status == health_pb2.HealthCheckResponse.SERVING)


@pytest.mark.timeout(240)
def test_the_engine_starts_again_after_its_gpu_failed(
    demo_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(demo_store, tmp_path, False, monkeypatch) as (engine, port):
        fail_and_recover(port)
        assert stop_engine(engine) == 0


def fail_and_recover(port: int) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.RpcError) as failed:
            generate(channel)
        assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "GPU has failed" in str(failed.value.details())
    deadline = time.monotonic() + 120
    tokens: list[int] = []
    while not tokens:
        assert time.monotonic() < deadline
        time.sleep(0.1)
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, suppress(grpc.RpcError):
            tokens = generate(channel)
    assert len(tokens) == 6
    assert serving(port)


@pytest.mark.timeout(240)
@pytest.mark.skipif(TESTED_DEVICE != "cpu", reason="four starts of a GPU engine take minutes")
def test_a_gpu_that_fails_again_and_again_is_left_to_people(
    demo_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(demo_store, tmp_path, True, monkeypatch) as (engine, port):
        deadline = time.monotonic() + 120
        while engine.process.poll() is None:
            assert time.monotonic() < deadline
            if serving(port):
                with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, suppress(grpc.RpcError):
                    generate(channel)
            time.sleep(0.1)
        assert engine.process.wait() == 1
    assert "4 times in a row" in (tmp_path / "log").read_text()
