"""The disk benchmark, small: every way to say what is read, and the rows it writes."""

import csv
from pathlib import Path

import pytest

from kernels.block import BlockLayout
from services.engine.experts.store import Store
from services.tools import bench_disk
from services.tools.cli import main


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_disk, "LAYOUT", BlockLayout(64, 32))
    monkeypatch.setattr(bench_disk, "BLOCKS", 40)
    monkeypatch.setattr(bench_disk, "LIMIT_NS", 2_000_000)
    monkeypatch.setattr(bench_disk, "DEPTHS", (1, 2))


def test_a_folder_a_store_and_an_emulated_drive(
    demo_store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "machine.csv"
    for words in (["--folder", str(tmp_path)], ["--store", str(demo_store.folder)], ["--emulate", "0.5"]):
        assert main(["bench", "disk", *words, "--out", str(out)]) == 0
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [row["name"] for row in rows] == ["disk.read_gb_s", "disk.warm_start_gb_s"] * 3
    assert all(float(row["value"]) > 0 for row in rows)
    assert ["emulated drive of 0.5 GB/s" in row["note"] for row in rows] == [False] * 4 + [True] * 2
    assert float(rows[4]["value"]) <= 0.51, "not faster than it pretends to be"
    assert list(tmp_path.iterdir()) == [out], "the blocks are gone"
    assert "memory was too slow for the drive by" in capsys.readouterr().out
