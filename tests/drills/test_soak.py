"""Short runs of the determinism drill and the soak, and that they would see what they look for."""

import ctypes
import mmap
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from crowd import QUESTIONS
from determinism import ASKED, drill, judge
from determinism import Report as Bits
from prometheus_client import CollectorRegistry, Gauge, start_http_server
from soak import Report, compare
from soak import drill as soak
from timing import in_time
from vitals import Growth, Sample, Vitals, driver_bytes, growth

from services.engine.experts.store import Store

pytestmark = pytest.mark.timeout(300)


def test_a_few_rounds_say_the_same_and_take_no_more(demo_store: Store, tmp_path: Path) -> None:
    report = soak(demo_store.folder, tmp_path, minutes=0.15)
    assert report.rounds >= 1
    assert report.wrong == []
    assert all(max(one.handles, one.threads) < 5 for one in report.growths.values()), str(report)
    assert report.growths["engine0"].most_locked_mb > 0
    assert report.growths["engine0"].locked_bytes == 0


def test_a_soak_can_fail() -> None:
    report = Report()
    compare(report, [["a", "b"], ["c", "d"]], [["a", "b"], ["c", "x"]])
    assert [fault.split(":")[0] for fault in report.faults()] == ["round 1, dialog 1, turn 1"]
    report = Report(minutes=120.0, growths={"api": Growth(0.2, 100.0, 0, 0), "engine0": Growth(0.01, 400.0, 3, 0)})
    assert len(report.faults()) == 2
    passing = Growth(0.01, 400.0, handles=1, threads=0)
    assert Report(growths={"engine0": passing}).faults() == []
    assert len(Report(growths={"engine0": replace(passing, handles_kept=1)}).faults()) == 1
    for more in ({"locked_bytes": 4096}, {"vram_bytes": 4 << 20}):
        grown = replace(Growth(0.0, 400.0, 0, 0, most_locked_mb=9.0, most_vram_mb=99.0), **more)  # type: ignore[arg-type]
        assert len(Report(growths={"engine0": grown}).faults()) == 1
        assert "of the GPU" in str(grown)


def test_locked_memory_and_a_gpu_s_are_seen() -> None:
    """Some is taken while it is watched; what CUDA locks is told by whose memory it is."""
    registry = CollectorRegistry()
    used = Gauge("thimble_memory_used_bytes", "as an engine's", ["model_name", "kind"], registry=registry)
    used.labels("x", "vram").set(5e6)
    used.labels("x", "ram").set(1e6)
    server, _ = start_http_server(0, "127.0.0.1", registry)
    libc, memory = ctypes.CDLL(None, use_errno=True), mmap.mmap(-1, 1 << 20)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    url = f"http://127.0.0.1:{server.server_port}/metrics"
    with Vitals({"me": os.getpid(), "gone": 0}, every_s=0.02, metrics={"me": url, "gone": url}) as vitals:
        seen = vitals.samples["me"]
        assert in_time(lambda: len(seen) > 12)
        used.labels("x", "vram").set(9e6)
        assert libc.mlock(ctypes.c_void_p(address), 1 << 20) == 0
        before = len(seen)
        assert in_time(lambda: len(seen) > before + 2)
    assert vitals.samples["gone"] == []
    found = vitals.growth("me")
    assert found.locked_bytes >= 1 << 20
    assert found.vram_bytes == 4_000_000
    assert found.most_vram_mb == 9
    server.shutdown()
    server.server_close()
    with Vitals({"me": os.getpid()}, every_s=0.02, metrics={"me": url}) as vitals:
        time.sleep(0.2)
    assert vitals.samples["me"] == [], "an engine that does not answer has no figure, not 0"


@pytest.mark.parametrize("at", range(1, 7))
def test_a_handle_that_stays_is_seen_whenever_it_came(at: int) -> None:
    """But for the last quarter of the last half: it might still go."""
    counts = [5] * at + [6] * (8 - at)
    samples = [Sample(float(number), 1 << 20, count, 1) for number, count in enumerate(counts)]
    assert growth(samples).handles_kept == 1


def test_what_a_driver_has_mapped_is_locked() -> None:
    maps = """\
200000000-200200000 rw-s 00000000 00:05 123                      /dev/nvidiactl
7f0000000000-7f0000001000 rw-s 00000000 00:05 123                /dev/nvidia0
7f0000001000-7f0000009000 rw-p 00000000 00:00 0
7f0000009000-7f000000a000 r--p 00000000 fe:00 26                 /usr/lib/libnvidia-ml.so.1 (deleted)
"""
    assert driver_bytes(maps) == 0x200000 + 0x1000


def test_under_load_and_with_a_small_cache_every_bit_is_the_same(demo_store: Store, tmp_path: Path) -> None:
    report = drill(demo_store.folder, tmp_path, ["scarce"], times=2, load_clients=3)
    assert (report.wrong, report.trouble) == ([], [])
    assert report.answers["scarce"] == 2 * len(ASKED)
    assert report.others > 0, "there was no load"


def test_the_determinism_drill_can_fail() -> None:
    report = Bits()
    expected = {QUESTIONS[0]: [("a", -1.0), ("b", -2.0)]}
    judge(report, "x", QUESTIONS[0], [("a", -1.0), ("b", -2.0)], expected)
    assert report.wrong == []
    judge(report, "x", QUESTIONS[0], [("a", -1.0), ("b", -2.0000001)], expected)
    judge(report, "x", QUESTIONS[0], [("a", -1.0)], expected)
    assert len(report.wrong) == 2
    assert {question.seed for question in ASKED} == {None, 7}
