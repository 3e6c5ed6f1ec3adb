"""The engine as a process: what it prints, how it refuses to start, how it stops."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import engine_process
import grpc
import pytest
from engine_process import start_engine, stop_engine

from services.engine.experts.store import Store
from services.engine.program import main
from services.rpc import engine_pb2 as pb
from services.rpc.engine_pb2_grpc import EngineStub


class Attempt:
    """Runs the engine's main in this process, where it should not get far: exit status and last line of stderr."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, store: Path, **settings: str) -> tuple[int, str]:
        for key, value in {"store": str(store), "port": "0", "metrics_port": "0", **settings}.items():
            self._monkeypatch.setenv(f"THIMBLE_ENGINE_{key.upper()}", value)
        status = main()
        output, errors = self._capsys.readouterr()
        assert "ready:" not in output
        assert "Traceback" not in errors
        return status, errors.strip().splitlines()[-1]


@pytest.fixture
def attempt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Attempt:
    for name in [name for name in os.environ if name.startswith("THIMBLE_")]:
        monkeypatch.delenv(name)
    return Attempt(monkeypatch, capsys)


def truncated(store: Path, tmp_path: Path, name: str) -> Path:
    copy = tmp_path / "store"
    shutil.copytree(store, copy)
    os.truncate(copy / name, (copy / name).stat().st_size - 1)
    return copy


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prot": "1"}, "thimble engine: unknown setting THIMBLE_ENGINE_PROT; did you mean THIMBLE_ENGINE_PORT?"),
        ({"kv_gb": "-1"}, "thimble engine: THIMBLE_ENGINE_KV_GB=-1.0 is out of range"),
        ({"expert_slots": "2"}, "thimble engine: THIMBLE_ENGINE_EXPERT_SLOTS=2 holds 2 expert blocks"),
        ({"hot_states_gb": "4000"}, "thimble engine: the engine does not fit into this machine's memory"),
        ({"host": "192.0.2.1"}, "thimble engine: gRPC cannot listen on 192.0.2.1:0"),
    ],
    ids=["unknown", "range", "slots", "memory", "address"],
)
def test_a_bad_setting_is_one_line_and_status_2(
    attempt: Attempt, demo_store: Store, settings: dict[str, str], message: str
) -> None:
    status, line = attempt(demo_store.folder, **settings)
    assert status == 2
    assert line.startswith(message)


def test_a_missing_store_is_one_line_and_status_2_of_the_process(tmp_path: Path) -> None:
    environ = os.environ | {"THIMBLE_ENGINE_STORE": str(tmp_path / "nothing"), "THIMBLE_ENGINE_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "services.engine"],
        env=environ | {"THIMBLE_ENGINE_METRICS_PORT": "0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "manifest.json: not found, there is no store; run thimble repack" in line


@pytest.mark.parametrize("name", ["experts.bin", "dense.safetensors", "manifest.json"])
def test_a_truncated_store_is_one_line_and_status_2(
    attempt: Attempt, demo_store: Store, tmp_path: Path, name: str
) -> None:
    status, line = attempt(truncated(demo_store.folder, tmp_path, name))
    assert status == 2
    assert name in line
    assert "run thimble repack" in line


def test_changed_weights_are_found_at_start(attempt: Attempt, demo_store: Store, tmp_path: Path) -> None:
    copy = tmp_path / "store"
    shutil.copytree(demo_store.folder, copy)
    with (copy / "dense.safetensors").open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    status, line = attempt(copy)
    assert status == 2
    assert "dense.safetensors: the checksum does not match" in line


def test_a_taken_port_is_one_line_and_status_2(attempt: Attempt, demo_store: Store) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for name in ("port", "metrics_port"):
            status, line = attempt(demo_store.folder, **{name: port})
            assert status == 2
            assert f"cannot listen on 127.0.0.1:{port}" in line


def test_it_prints_settings_plan_and_addresses_and_stops_within_seconds(demo_store: Store, tmp_path: Path) -> None:
    """A stop signal while it answers: the client is told, and the exit status is 0."""
    engine = start_engine(demo_store.folder, tmp_path / "log", hot_states_gb="0.1", stop_timeout_s="0.5")
    printed = "\n".join(engine.printed)
    assert "stop_timeout_s = 0.5 s" in printed
    assert "plan: " in printed
    blocks = sum(map(len, demo_store.layers))
    assert f"experts, {blocks} of {blocks} blocks" in printed
    libraries = Path(f"/proc/{engine.process.pid}/maps").read_text()
    assert "libtorch_cpu" in libraries
    assert engine_process.TESTED_DEVICE != "cpu" or "libtriton" not in libraries, "half a second of the start"
    with grpc.insecure_channel(engine.address) as channel:
        endless = pb.GenerateIn(start=pb.Start(ids=[1] * 20, max_tokens=4000))
        call = EngineStub(channel).Generate(iter([endless]), timeout=100)
        next(call)
        begin = time.monotonic()
        ended: list[int] = []
        stopping = threading.Thread(target=lambda: ended.append(stop_engine(engine)))
        stopping.start()
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        stopping.join(timeout=60)
        assert ended == [0]
        assert time.monotonic() - begin < 15
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert dict(caught.value.trailing_metadata())["thimble-code"] == "engine_stopping"


ENDLESS = """
import sys, time
from services import garbage
with garbage.not_looked_for():
    from services.engine import program
load = program.load
def endless(*args):
    load(*args)
    time.sleep(600)
program.load = endless
sys.exit(program.main())
"""


def test_a_stop_signal_does_not_wait_for_the_model_to_load(demo_store: Store, tmp_path: Path) -> None:
    environ = os.environ | {
        "THIMBLE_ENGINE_STORE": str(demo_store.folder),
        "THIMBLE_ENGINE_PORT": "0",
        "THIMBLE_ENGINE_METRICS_PORT": "0",
    }
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert any(line.startswith("listening on 127.0.0.1:") for line in process.stdout)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
        assert process.returncode == 0
        assert "Traceback" not in errors
        assert "ready:" not in output


SABOTAGE = """
import sys
from services import garbage
with garbage.not_looked_for():
    from services.engine.program import main
from services.engine.pages import PagePool
def broken(self, held):
    raise AssertionError("a page is nobody's")
PagePool.check = broken
sys.exit(main())
"""


def test_an_engine_that_fails_ends_its_process_so_that_it_is_started_anew(demo_store: Store, tmp_path: Path) -> None:
    """Its conservation check is made to fail after the first answer, which is still delivered."""
    engine = start_engine(demo_store.folder, tmp_path / "log", ["-c", SABOTAGE], hot_states_gb="0.1")
    with engine.process as process, grpc.insecure_channel(engine.address) as channel:
        start = pb.GenerateIn(start=pb.Start(ids=[1] * 20, max_tokens=2))
        messages = list(EngineStub(channel).Generate(iter([start]), timeout=60))
        assert messages[-1].finish.generated_tokens == 2
        assert process.wait(timeout=30) == 1
    assert "a page is nobody's" in (tmp_path / "log").read_text()
