"""The measurement of drafts: its rows, and that it stops where words change."""

import csv
from pathlib import Path

import pytest

from services.engine.experts.store import Store
from services.engine.model import Model
from services.engine.state import State
from services.tools.cli import main


def command(store: Store, *more: str) -> int:
    words = ["bench", "speculation", str(store.folder), "--questions", "2", "--tokens", "8", "--right", "0.5", "1"]
    return main([*words, *more])


def test_its_rows(demo_store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "here.csv"
    assert command(demo_store, "--out", str(out)) == 0
    with out.open() as file:
        rows = list(csv.DictReader(file))
    gains = {row["note"].split("; ")[1]: float(row["value"]) for row in rows if row["name"] == "mtp.gain"}
    assert {"ngram", "told, 50 % right", "told, 100 % right"} <= gains.keys()
    moved = {row["note"].split("; ")[2]: float(row["value"]) for row in rows if row["name"] == "mtp.token_bytes"}
    assert moved["told, 100 % right"] < moved["without"], "two tokens of a step share experts"
    assert "mtp.demo_acceptance" in {row["name"] for row in rows}
    assert "100.0 % of" in capsys.readouterr().out


def test_it_stops_where_words_change(
    demo_store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settle = Model.settle

    def wrong(model: Model, state: State, accepted: int) -> None:
        settle(model, state, 0)
        state.ids.extend([5] * accepted)  # it never went through the model

    monkeypatch.setattr(Model, "settle", wrong)
    assert command(demo_store) == 1
    assert "answered differently with drafts: told, 50 % right" in capsys.readouterr().err
