"""`thimble verify` end to end on the demo: figures, rows, exit status, and what it refuses."""

import csv
import shutil
from pathlib import Path

import pytest

from services.engine.experts.store import Store
from services.tools import verify
from services.tools.cli import main
from services.tools.parity import Parity

GOOD = Parity(
    tokens=10,
    perplexity=2.0,
    reference_perplexity=2.0,
    mean_kl=1e-4,
    max_kl=1e-3,
    top1=1.0,
    greedy=63,
    margins=(0.01,),
)


def test_the_demo_passes_and_is_recorded(
    demo_store: Store, demo_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "here.csv"
    assert main(["verify", str(demo_checkpoint), str(demo_store.folder), "--quick", "--record", str(record)]) == 0
    out = capsys.readouterr().out
    assert "chat" in out
    assert "passed: mean KL at most 0.003" in out
    with record.open() as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    assert 0 < float(rows["parity.demo_mean_kl"]["value"]) <= 0.003
    assert float(rows["parity.demo_greedy64"]["value"]) >= 63


@pytest.mark.parametrize(("change", "passed"), [({}, True), ({"mean_kl": 0.0031}, False), ({"greedy": 62}, False)])
def test_one_bad_passage_fails(
    change: dict, passed: bool, demo_checkpoint: Path, demo_store: Store, capsys, monkeypatch, tmp_path
) -> None:
    results = [("one", GOOD), ("two", Parity(**{**vars(GOOD), **change})), ("three", GOOD)]
    monkeypatch.setattr(verify, "measure", lambda *_: iter(results))
    record = tmp_path / "here.csv"
    status = main(["verify", str(demo_checkpoint), str(demo_store.folder), "--record", str(record)])
    assert status == (0 if passed else 1)
    assert ("FAILED" in capsys.readouterr().out) is not passed
    assert f"of 3 passages: {'one' if passed else 'two'}" in record.read_text()


def test_not_a_number_fails() -> None:
    assert GOOD.passed
    assert not Parity(**{**vars(GOOD), "mean_kl": float("nan")}).passed


@pytest.mark.parametrize("missing", ["config.json", "*.safetensors", "tokenizer.json"])
def test_a_checkpoint_that_the_reference_cannot_read(
    missing: str, demo_store: Store, demo_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "checkpoint"
    shutil.copytree(demo_checkpoint, broken)
    for path in broken.glob(missing):
        path.unlink()
    assert main(["verify", str(broken), str(demo_store.folder), "--quick"]) == 1
    error = capsys.readouterr().err
    assert str(broken) in error
    assert "Traceback" not in error


def test_a_missing_store(tmp_path: Path, demo_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(demo_checkpoint), str(tmp_path / "none")]) == 1
    assert "there is no store" in capsys.readouterr().err


def test_it_asks_for_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify"]) == 2
    assert "give the checkpoint's folder and the store's" in capsys.readouterr().err


def test_the_reference_by_layer_says_the_same_of_the_demo(
    demo_store: Store, demo_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = []
    for words in (["--no-by-layer"], ["--by-layer"]):
        assert main(["verify", str(demo_checkpoint), str(demo_store.folder), "--quick", *words]) == 0
        out = capsys.readouterr().out
        [row] = [row.split() for row in out.splitlines() if row.startswith("chat")]
        figures.append(row)
    assert "reference: layer 16 of 16" in out
    # The same to what the table shows, but for the ids that were fed to the greedy part.
    assert figures[0][:4] == figures[1][:4]
    assert float(figures[0][4]) == pytest.approx(float(figures[1][4]), rel=0.02)
    assert not (demo_store.folder / verify.KEPT).exists()
