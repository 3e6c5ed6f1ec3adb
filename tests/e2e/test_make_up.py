"""How the product starts, stops and fails: nothing is left behind, and whoever broke is named."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from running import Running, until

from services.engine.experts.store import Store


@pytest.fixture
def environ(demo_store: Store) -> dict[str, str]:
    return {"THIMBLE_ENGINE_STORE": str(demo_store.folder)}


def test_it_prints_the_plan_and_how_to_chat(stack: Running) -> None:
    assert "making the demo's store" in stack.output
    assert "448 of 448 blocks" in stack.output
    assert f"curl -N {stack.url}/v1/chat/completions" in stack.output
    assert f"chat --url {stack.url}" in stack.output
    for name in ("engine", "api"):
        assert (stack.run_dir / f"logs/{name}.log").stat().st_size > 0
    assert len(stack.processes()) == 4  # launcher, engine, api, the embedded store


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything(number: int, tmp_path: Path, environ: dict[str, str]) -> None:
    running = Running(tmp_path, **environ).wait_until_ready()
    assert len(running.processes()) == 4
    running.process.send_signal(number)
    assert running.process.wait(30) == 0
    assert running.processes() == []
    assert running.wait_for(r"stopped")
    assert "killed" not in running.output


def test_stopped_while_it_starts(tmp_path: Path, environ: dict[str, str]) -> None:
    running = Running(tmp_path, **environ)
    running.wait_for(r"starting")
    assert running.stop() == 0
    assert running.processes() == []


def test_a_killed_launcher_leaves_no_orphan(tmp_path: Path, environ: dict[str, str]) -> None:
    running = Running(tmp_path, **environ)
    running.wait_for(r"starting")
    assert until(lambda: len(running.processes()) == 4)
    running.process.send_signal(signal.SIGKILL)
    running.process.wait(10)
    assert until(lambda: running.processes() == [])


def test_a_child_that_dies_is_named_with_its_last_words(tmp_path: Path, environ: dict[str, str]) -> None:
    running = Running(tmp_path, **environ)
    running.wait_for(r"starting")
    assert until(lambda: len(running.processes()) >= 3)
    os.kill(running.child("services.engine"), signal.SIGKILL)
    assert running.process.wait(30) == 1
    assert "engine was killed by SIGKILL" in running.output
    assert f"the end of {tmp_path}/logs/engine.log:" in running.output
    assert running.processes() == []


def up(run_dir: Path, *words: str, **environ: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "services.tools.cli", "up", "--run-dir", str(run_dir), *words]
    done = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_taken_port_is_told_before_anything_starts(tmp_path: Path, environ: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        status, said = up(tmp_path, "--port", str(port), **environ)
    assert status == 1
    assert f"port {port} on 127.0.0.1" in said
    assert "--port N" in said
    assert not (tmp_path / "logs").exists()


def test_a_second_launcher_in_the_same_folder_is_refused(stack: Running) -> None:
    status, said = up(stack.run_dir, "--port", "0")
    assert status == 1
    assert "another `thimble up` runs" in said
    assert stack.process.poll() is None


def test_a_misspelt_setting_is_told(tmp_path: Path) -> None:
    status, said = up(tmp_path, THIMBLE_ENGINE_REEDERS="4")
    assert status == 1
    assert "did you mean THIMBLE_ENGINE_READERS?" in said


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_store_that_cannot_be_read_is_told(damage: str, tmp_path: Path, demo_store: Store) -> None:
    store = tmp_path / "store"
    if damage == "truncated":
        store.mkdir()
        for file in demo_store.folder.iterdir():
            data = file.read_bytes()
            (store / file.name).write_bytes(data[: len(data) // 2] if file.name == "experts.bin" else data)
    status, said = up(tmp_path / "run", "--port", "0", "--store", str(store))
    assert status == 1
    assert "engine ended with status 2" in said or "api ended with status 1" in said
    assert str(store) in said
    assert "thimble repack" in said
