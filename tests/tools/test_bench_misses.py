"""The benchmark with misses, on tiny blocks: its rows, and that the plan follows what is measured."""

import csv
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from timing import in_some_try

from kernels.block import BlockLayout
from kernels.experts.host.binding import Host
from kernels.experts.host.drives import EmulatedDrive
from kernels.experts.host.replay import Clock
from kernels.workers.pool import Workers
from services.tools import bench_misses, measure
from services.tools.cli import main
from services.tools.synthetic_blocks import SyntheticBlocks
from services.tools.traces.steady import first_tokens, steady


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_misses, "LAYOUT", BlockLayout(64, 32))
    monkeypatch.setattr(bench_misses, "CARRIED_MS", 4.0)
    monkeypatch.setattr(measure, "BLOCKS", 44)


def rows(path: Path, name: str) -> list[float]:
    return [float(row["value"]) for row in csv.DictReader(path.read_text().splitlines()) if row["name"] == name]


def test_shares_and_drives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "machine.csv"
    words = ["--share", "0.1,0.3", "--disk", "0.02", "--physical", "31", "--tokens", "3", "--warm", "12"]

    def measured() -> list[float]:
        out.unlink(missing_ok=True)
        capsys.readouterr()
        assert main(["bench", "misses", *words, "--threads", "1", "--out", str(out)]) == 0
        return rows(out, "misses.ms_token")

    token_ms = in_some_try(measured, lambda found: found[2] < found[0])
    hidden = rows(out, "misses.hidden_share")
    assert len(token_ms) == len(hidden) == 4
    assert token_ms[2] < token_ms[0], "more experts in RAM, fewer reads of 0.2 ms each"
    assert all(share <= 1 for share in hidden)
    assert all(of <= whole for of, whole in zip(rows(out, "misses.hidden_of_missing"), hidden, strict=True))
    [error] = rows(out, "plan.error_max")
    out_text = capsys.readouterr().out
    lines = [line.split() for line in out_text.splitlines() if " off " in line]
    planned, found_ms = ([float(line[at]) for line in lines] for at in (7, 6))
    worst = max(abs(plan / ms - 1) for plan, ms in zip(planned, found_ms, strict=True))
    assert error == pytest.approx(worst, abs=0.02)
    misses = [float(line[5]) for line in lines]
    assert all(plan > 4.0 + 0.1 * count for plan, count in zip(planned, misses, strict=True)), (
        "gaps, and reads of 0.2 ms"
    )
    assert f"wrong by at most {100 * error:.1f} %" in out_text


def test_this_machines_disk(tmp_path: Path) -> None:
    words = ["--share", "0.2", "--physical", "31", "--tokens", "2", "--warm", "4", "--threads", "1"]
    assert main(["bench", "misses", "--folder", str(tmp_path), *words]) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_pause_is_as_long_as_asked() -> None:
    def paused(seconds: float) -> float:
        begun = time.perf_counter()
        bench_misses.pause(seconds)
        return time.perf_counter() - begun

    for seconds in (0.0, 50e-6, 2e-3):
        found = in_some_try(partial(paused, seconds), lambda found, most=seconds + 0.5: found < most)
        assert seconds <= found < seconds + 0.5


def test_the_plan_is_of_what_comes_after_the_beginning() -> None:
    """By hand where nothing is read twice; smaller caches and later blocks take longer."""
    routing = bench_misses.generate("markov", 20)
    clock = Clock(gap_ns=1e6, expert_ns=0.0, read_ns=0.0)
    assert steady(routing, 15, 20480, clock).ms == pytest.approx(40.0)
    slow = replace(clock, read_ns=1e6)
    all_there = steady(routing, 15, 20480, slow).ms
    assert 40 < all_there < steady(routing, 15, 2000, slow).ms
    late = steady(routing, 15, 20480, replace(slow, late_ns=1e5)).ms
    assert all_there + 1 < late <= all_there + 4.0001
    assert len(first_tokens(routing, 15).layer) == 600


@pytest.mark.parametrize("latency_ms", [0, 30])
def test_how_late_a_block_is(latency_ms: int) -> None:
    """A slow drive, so that this machine does not show: 10 ms a block, and what its first byte takes beside them."""
    blocks = SyntheticBlocks(BlockLayout(512, 704), 1, 42)
    memory, catalog = blocks.memory(42)
    drive = EmulatedDrive(memory, gb_s=0.0405504, lane_gb_s=1.0, latency_us=1e3 * latency_ms)

    def reads() -> measure.Reads:
        host = Host(catalog, Workers(1), slots=42, readers=4, prefetch="off", drives=[drive])
        found = measure.reads(host, blocks.inputs(1, seed=1), top_k=6)
        host.close()
        return found

    def right(found: measure.Reads) -> bool:
        return 5e6 < found.read_ns < 2e7 and latency_ms - 10 < found.late_ns / 1e6 < latency_ms + 20

    assert right(in_some_try(reads, right))
