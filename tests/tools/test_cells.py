"""What a limited run of a benchmark remembers of its cells, and which of them it begins."""

from pathlib import Path

import pytest

from services.tools.cells import Cells


def test_a_cell_is_done_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "done"
    cells = Cells(None, path)
    assert cells.done("ours", 0.24) is None
    cells.finish("ours", 0.24, value=0.05)
    cells.finish("ours", 0.33)
    later = Cells(None, path)
    assert later.done("ours", 0.24) == cells.done("ours", 0.24) == 0.05
    assert later.done("ours", 0.33) == 0.0
    assert later.done("published", 0.24) is None
    monkeypatch.setenv("THIMBLE_COMMIT", "another")
    assert Cells(None, path).done("ours", 0.24) is None, "another commit's figure"


def test_what_will_not_be_done_in_time_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert Cells(None, None).fits("a cell", 1e9)
    cells = Cells(1.0, None)
    assert cells.fits("a cell", 50.0)
    assert capsys.readouterr().out == ""
    assert not cells.fits("a cell", 61.0)
    assert "a cell left out: it may take 61 s, and " in capsys.readouterr().out
    assert not Cells(1e-9, None).fits("a cell", 0.1)
