"""The sampling benchmark times only what draws the right ids, and writes what it measured."""

import csv

import pytest

from kernels.sampling import cpu
from services.tools import bench_sampling, cli


def test_writes_a_row_for_each_case(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "machine.csv"
    assert cli.main(["bench", "sampling", "--vocabulary", "999", "--draws", "3", "--out", str(out)]) == 0
    with out.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * len(bench_sampling.cases(999, 1.0))
    assert {row["unit"] for row in rows} == {"ms"}
    assert all(0 < float(row["value"]) < 1e4 for row in rows)
    assert sum(row["name"] == "sampling.ms" for row in rows) == 2
    assert "definition" in capsys.readouterr().out


def test_a_wrong_id_is_no_figure(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = cpu.sample
    monkeypatch.setattr(cpu, "sample", lambda *args, **kwargs: right(*args, **kwargs) + 1)
    out = tmp_path / "machine.csv"
    assert cli.main(["bench", "sampling", "--vocabulary", "999", "--draws", "3", "--out", str(out)]) == 1
    assert "differs from the definition" in capsys.readouterr().out
    assert not out.exists()
