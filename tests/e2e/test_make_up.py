"""How the product starts, stops and fails: nothing is left behind, and whoever broke is named."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import Running, until

from services.engine.experts.store import Store

ROOT = Path(__file__).parents[2]


def outside_make() -> dict[str, str]:
    """The environment without what an outer `make test` tells its children."""
    return {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}


@pytest.fixture
def environ(demo_store: Store) -> dict[str, str]:
    return {"THIMBLE_ENGINE_STORE": str(demo_store.folder)}


@pytest.fixture
def starting(tmp_path: Path, environ: dict[str, str]) -> Iterator[Running]:
    """A stack of its own for one test, on the way up."""
    running = Running(tmp_path, **environ)
    try:
        running.wait_for(r"starting")
        yield running
    finally:
        running.close()


def test_it_prints_the_plan_and_how_to_chat(stack: Running, demo_store: Store) -> None:
    assert (stack.run_dir / "store/manifest.json").exists()
    blocks = sum(map(len, demo_store.layers))
    assert f"{blocks} of {blocks} blocks" in stack.output
    assert f"curl -N {stack.url}/v1/chat/completions" in stack.output
    assert f"chat --url {stack.url}" in stack.output
    for name in ("engine", "api"):
        assert (stack.run_dir / f"logs/{name}.log").stat().st_size > 0
    assert len(stack.processes()) == 4  # launcher, engine, api, the embedded store


def test_make_up_and_ctrl_c(tmp_path: Path, environ: dict[str, str]) -> None:
    """The README's command. Ctrl-C goes to make and to the launcher, as from a terminal."""
    fresh = subprocess.run(["make", "--question", ".venv/up.stamp"], cwd=ROOT, env=outside_make(), check=False)
    if fresh.returncode:
        pytest.skip("make's environment is not this one: `make up` would install it first")
    command = ("make", "--directory", str(ROOT), "up", "ARGS=--port 0 --run-dir {run_dir}")
    running = Running(tmp_path, command, **environ, MAKEFLAGS="", MAKELEVEL="")
    try:
        running.wait_until_ready()
        assert len(running.processes()) == 5  # make, launcher, engine, api, the embedded store
        os.killpg(running.process.pid, signal.SIGINT)
        running.process.wait(30)
        assert running.processes() == []
        assert running.wait_for(r"stopped")
        assert "killed" not in running.output
    finally:
        running.close()


def test_a_stop_signal_while_it_starts(starting: Running) -> None:
    starting.process.send_signal(signal.SIGTERM)
    assert starting.process.wait(30) == 0
    assert starting.processes() == []


def test_a_killed_launcher_leaves_no_orphan(starting: Running) -> None:
    assert until(lambda: len(starting.processes()) == 4)
    starting.process.send_signal(signal.SIGKILL)
    starting.process.wait(10)
    assert until(lambda: starting.processes() == [])


def test_a_child_that_dies_is_named_with_its_last_words(starting: Running) -> None:
    assert until(lambda: len(starting.processes()) == 4)
    os.kill(starting.child("services.engine"), signal.SIGKILL)
    assert starting.process.wait(30) == 1
    assert "engine was killed by SIGKILL" in starting.output
    assert f"the end of {starting.run_dir}/logs/engine.log:" in starting.output
    assert starting.processes() == []


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


def test_a_missing_store_is_told_before_anything_starts(tmp_path: Path) -> None:
    status, said = up(tmp_path / "run", "--port", "0", "--store", str(tmp_path / "store"))
    assert status == 1
    assert f"{tmp_path / 'store'} holds no store" in said
    assert "thimble repack" in said
    assert not (tmp_path / "run/logs").exists()


def test_a_truncated_store_is_told(tmp_path: Path, demo_store: Store) -> None:
    store = tmp_path / "store"
    shutil.copytree(demo_store.folder, store)
    os.truncate(store / "experts.bin", 4096)
    status, said = up(tmp_path / "run", "--port", "0", "--store", str(store))
    assert status == 1
    assert "engine ended with status 2" in said
    assert f"{store / 'experts.bin'}: truncated" in said
    assert "thimble repack" in said
