"""Short runs of the drills of a machine that misbehaves, and that they would see what they look for."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from crowd import Seen
from machine import CLIENTS, DEMO, JUMPS_S, Report, Troubled, clock_drill, disk_drill, full_drill, troubled
from trouble import Trouble

from services.engine.experts.store import EXPERTS, Store

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def it(demo_store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Troubled]:
    with troubled(demo_store.folder, tmp_path_factory.mktemp("machine")) as running:
        yield running


def test_a_clock_that_jumps_changes_nothing(it: Troubled) -> None:
    report = clock_drill(it, seconds=4.0)
    assert report.sound, str(report)
    assert len(report.health_s) >= 3, "it hardly jumped"
    told = ", ".join(str(round(ahead_s / 3600)) for ahead_s in JUMPS_S)
    assert f"told {told} hours ahead" in report.note, "the clock that clients see did not jump"


def test_a_disk_a_hundred_times_as_slow_makes_answers_late_and_nothing_else(it: Troubled) -> None:
    report = disk_drill(it, seconds=1.0)
    assert report.sound, str(report)
    assert report.during.answers >= CLIENTS
    assert min(report.during.answer_s) > 2 * min(report.before.answer_s), "the disk was not slow"


def test_a_full_disk_costs_logs_and_nothing_else(it: Troubled) -> None:
    report = full_drill(it, seconds=1.0)
    assert report.sound, str(report)
    assert report.note.startswith("0 bytes were written"), "the disk was not full"
    assert not report.note.endswith(", 0 when it was emptied"), "nothing writes there at all"


def test_a_disk_that_fills_up_during_a_repack(demo_store: Store, tmp_path: Path) -> None:
    """It says so in a line, and goes on from there once there is space."""
    trouble, folder = Trouble(tmp_path), tmp_path / "store"
    whole = {path.name: path.read_bytes() for path in demo_store.folder.iterdir() if path.is_file()}

    def repack() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "services.tools.cli", "repack", str(DEMO), str(folder)]
        environ = os.environ | trouble.environ
        return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)

    trouble.full_disk(True, after_bytes=len(whole[EXPERTS]) // 2)
    for _ in range(2):
        run = repack()
        assert run.returncode != 0
        assert "No space left on device; free space there" in run.stderr.splitlines()[-1]
        assert "Traceback" not in run.stderr
    trouble.full_disk(False)
    assert repack().returncode == 0
    assert (folder / EXPERTS).read_bytes() == whole[EXPERTS]
    assert Store.open(folder).fingerprint == demo_store.fingerprint


def test_the_drills_can_fail() -> None:
    good = Seen(answers=3, answer_s=[1.0])
    assert Report("x", good, good).sound
    for bad in (Seen(answers=3, wrong=1), Seen(answers=3, hangs=1), Seen(), Seen(answers=1)):
        if bad.answers == 1:
            bad.failures["500"] += 1
        assert not Report("x", good, bad).sound
