"""Fetching from a real HTTP server: broken connections, short and corrupt files, kills, gates, mirrors, no network."""

import hashlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools.hub_server import Hub, serving

from services.engine.checkpoint import Checkpoint
from services.tools import hub as hub_module
from services.tools import small_checkpoint
from services.tools.cli import main


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.file_download as theirs

    monkeypatch.setattr(hub_module, "PAUSE_S", 0.01)
    monkeypatch.setattr(hub_module, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(theirs.time, "sleep", lambda seconds, sleep=time.sleep: sleep(min(seconds, 0.01)))
    for name in ("HF_ENDPOINT", "HF_TOKEN", "HF_HUB_OFFLINE", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    source = small_checkpoint.write(tmp_path / "source", "3.5-super-vl")
    (source / "README.md").write_text("a card")
    (source / "pytorch_model.bin").write_bytes(b"not wanted")
    (source / "sub").mkdir()
    (source / "sub" / "config.json").write_text("{}")
    with serving(Hub(source)) as hub:
        yield hub


def fetch(hub: Hub, folder: Path, *words: str) -> int:
    return main(["fetch", hub.model, str(folder), "--endpoint", hub.url, *words])


SHARD = "model-00002-of-00003.safetensors"
LAST = "model-00003-of-00003.safetensors"


def assert_whole(hub: Hub, folder: Path) -> None:
    wanted = {path.name for path in hub.folder.iterdir() if path.is_file() and path.suffix != ".bin"}
    assert {path.name for path in folder.iterdir() if path.is_file()} == wanted
    for name in wanted:
        assert (folder / name).read_bytes() == (hub.folder / name).read_bytes(), name
    assert not list((folder / ".fetch").glob("*.part"))
    Checkpoint.open(folder)


def test_all_that_a_checkpoint_needs_comes(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch(hub, tmp_path / "c") == 0
    assert_whole(hub, tmp_path / "c")
    out = capsys.readouterr().out
    assert "owner/small at 0123456789ab: 7 files" in out
    assert "all checksums right" in out


def test_a_second_time_asks_only_what_there_is(hub: Hub, tmp_path: Path) -> None:
    fetch(hub, tmp_path / "c")
    hub.requests.clear()
    assert fetch(hub, tmp_path / "c") == 0
    assert [path for path, _ in hub.requests] == ["/api/models/owner/small/revision/main"]


def test_broken_connections_are_gone_on_with(hub: Hub, tmp_path: Path) -> None:
    hub.breaks.update({SHARD: 3, LAST: 1})
    assert fetch(hub, tmp_path / "c") == 0
    assert_whole(hub, tmp_path / "c")
    begins = [wanted for path, wanted in hub.requests if path.endswith(SHARD)]
    assert begins == [None, *(f"bytes={5000 * i}-" for i in (1, 2, 3))]
    assert hub.sent_bytes == sum(path.stat().st_size for path in (tmp_path / "c").iterdir() if path.is_file())


def test_a_server_without_ranges_is_good_enough(hub: Hub, tmp_path: Path) -> None:
    hub.ranges = False
    hub.breaks[SHARD] = 2
    assert fetch(hub, tmp_path / "c") == 0
    assert_whole(hub, tmp_path / "c")


@pytest.mark.parametrize("fault", ["shorts", "corruptions"])
def test_short_and_corrupt_files_are_fetched_again(hub: Hub, tmp_path: Path, fault: str) -> None:
    getattr(hub, fault).update({SHARD: 2, "config.json": 1})
    assert fetch(hub, tmp_path / "c") == 0
    assert_whole(hub, tmp_path / "c")


@pytest.mark.parametrize(
    ("fault", "message"),
    [("shorts", "given up after 5 attempts"), ("corruptions", "another checksum than the hub says")],
)
def test_a_file_that_stays_wrong_is_refused_and_named(
    hub: Hub, tmp_path: Path, fault: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    getattr(hub, fault)[SHARD] = 1000
    assert fetch(hub, tmp_path / "c") == 1
    error = capsys.readouterr().err
    assert SHARD in error
    assert message in error
    assert not (tmp_path / "c" / SHARD).exists()
    getattr(hub, fault).clear()
    assert fetch(hub, tmp_path / "c") == 0
    assert_whole(hub, tmp_path / "c")


def test_killed_it_goes_on_with_what_it_had(hub: Hub, tmp_path: Path) -> None:
    """SIGKILL while a shard is under way; the next run asks for the rest of it only."""
    hub.breaks[SHARD] = 10_000
    code = "import sys, time; sleep = time.sleep; time.sleep = lambda seconds: sleep(min(seconds, 0.01)); "
    code += "from services.tools import cli, hub; hub.CHUNK_BYTES = 1000; sys.exit(cli.main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, "fetch", hub.model, str(tmp_path / "c"), "--endpoint", hub.url]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not any(path.endswith(SHARD) and wanted == "bytes=40000-" for path, wanted in hub.requests):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    hub.breaks.clear()
    sums = hashlib.sha256((hub.folder / SHARD).read_bytes()).hexdigest()
    had = (tmp_path / "c" / ".fetch" / f"{sums}.part").stat().st_size
    assert had >= 30_000  # all but what Python had not yet written
    hub.requests.clear()
    assert fetch(hub, tmp_path / "c") == 0
    assert (f"/owner/small/resolve/0123456789abcdef0123456789abcdef01234567/{SHARD}", f"bytes={had}-") in hub.requests
    assert_whole(hub, tmp_path / "c")


def test_too_little_space_is_said_before_the_first_byte(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert fetch(hub, tmp_path / "c") == 1
    assert "0.07 GB needed, 0.00 GB free" in capsys.readouterr().err
    assert hub.sent_bytes == 0


def test_a_gated_model_says_how_to_get_in(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.gated, hub.token = True, "secret"
    assert fetch(hub, tmp_path / "c") == 1
    error = capsys.readouterr().err
    assert f"accept its licence at {hub.url}/owner/small" in error
    assert "HF_TOKEN" in error
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert fetch(hub, tmp_path / "c") == 0
    assert_whole(hub, tmp_path / "c")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["owner/other"], "has no model 'owner/other', or it is private"),
        (["owner/small", "--revision", "nowhere"], "no revision 'nowhere'"),
    ],
)
def test_what_is_not_there_is_said(
    hub: Hub, tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fetch", words[0], str(tmp_path / "c"), "--endpoint", hub.url, *words[1:]]) == 1
    assert message in capsys.readouterr().err


def test_an_unreachable_hub_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", "owner/small", str(tmp_path / "c"), "--endpoint", "http://127.0.0.1:9"]) == 1
    error = capsys.readouterr().err
    assert "http://127.0.0.1:9" in error
    assert "HF_ENDPOINT" in error


def test_the_mirror_may_come_from_the_environment(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.url + "/")
    assert main(["fetch", hub.model, str(tmp_path / "c")]) == 0
    assert_whole(hub, tmp_path / "c")


@pytest.mark.parametrize("by", ["--offline", "HF_HUB_OFFLINE"])
def test_offline_checks_what_is_there(
    hub: Hub, tmp_path: Path, by: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--offline"] if by.startswith("-") else []
    fetch(hub, tmp_path / "c")
    hub.requests.clear()
    if not words:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch(hub, tmp_path / "none", *words) == 1
    assert "nothing was fetched there" in capsys.readouterr().err
    assert fetch(hub, tmp_path / "c", *words) == 0
    damaged = tmp_path / "c" / SHARD
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert fetch(hub, tmp_path / "c", *words) == 1
    assert f"missing or damaged: {SHARD}" in capsys.readouterr().err
    assert main(["fetch", "owner/other", str(tmp_path / "c"), "--offline"]) == 1
    assert hub.requests == []


def test_damage_that_kept_its_time_is_found_by_check(hub: Hub, tmp_path: Path) -> None:
    fetch(hub, tmp_path / "c")
    damaged = tmp_path / "c" / SHARD
    times = damaged.stat()
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    os.utime(damaged, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert fetch(hub, tmp_path / "c", "--offline") == 0
    assert fetch(hub, tmp_path / "c", "--check", "--offline") == 1
    assert fetch(hub, tmp_path / "c", "--check") == 0
    assert_whole(hub, tmp_path / "c")


def test_a_file_that_changed_at_the_hub_comes_again(hub: Hub, tmp_path: Path) -> None:
    fetch(hub, tmp_path / "c")
    (hub.folder / "README.md").write_text("another card")
    hub.requests.clear()
    assert fetch(hub, tmp_path / "c") == 0
    assert_whole(hub, tmp_path / "c")
    assert len(hub.requests) == 2
