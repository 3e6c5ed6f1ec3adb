"""The measurement of drafts: its rows, and that it stops where words change."""

import csv
import shutil
from pathlib import Path
from typing import Any

import pytest

from services.engine.experts.store import TEXT_FILES, Store
from services.engine.model import Model
from services.engine.request import Request
from services.engine.state import State
from services.tools import small_checkpoint
from services.tools.bench_speculation import Rig, Sums
from services.tools.cli import main
from services.tools.repack import repack


def command(store: Store, *more: str) -> int:
    words = ["bench", "speculation", str(store.folder), "--questions", "2", "--tokens", "8", "--right", "0.5", "1"]
    return main([*words, *more])


def test_its_rows_and_turns(
    demo_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "here.csv"
    asked: dict[tuple[int, ...], list[Sums]] = {}
    answer = Rig.answer

    def noted(rig: Rig, request: Request, sources: Any, sums: Sums, forgets: bool = False) -> list[int]:
        asked.setdefault(request.ids, []).append(sums)
        return answer(rig, request, sources, sums, forgets)

    monkeypatch.setattr(Rig, "answer", noted)
    assert command(demo_store, "--out", str(out)) == 0
    first, second = ([id(sums) for sums in turns[1:]] for turns in asked.values())
    assert second == [*first[1:], first[0]], "without drafts it is first, then last"
    assert len(set(first)) == len(first) == (4 if demo_store.draft_file is None else 8)
    uncounted = [turns[0] for turns in asked.values()]
    assert not {id(sums) for sums in uncounted} & set(first)
    with out.open() as file:
        rows = list(csv.DictReader(file))
    gains = {row["note"].split("; ")[1]: float(row["value"]) for row in rows if row["name"] == "mtp.gain"}
    assert {"ngram", "told, 50 % right", "told, 100 % right"} <= gains.keys()
    moved = {row["note"].split("; ")[2]: float(row["value"]) for row in rows if row["name"] == "mtp.token_bytes"}
    assert moved["told, 100 % right"] < moved["without"], "two tokens of a step share experts"
    assert "mtp.demo_acceptance" in {row["name"] for row in rows}
    assert "100.0 % of" in capsys.readouterr().out


def test_the_models_own_block_in_every_way(
    demo_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = small_checkpoint.write(tmp_path / "c", vocabulary=4096)
    for name in TEXT_FILES:
        shutil.copy(demo_checkpoint / name, checkpoint / name)
    store = repack(checkpoint, tmp_path / "store", say=lambda _: None)
    out = tmp_path / "here.csv"
    assert command(store, "--temperature", "1", "--out", str(out)) == 0
    with out.open() as file:
        ways = [row["note"].split("; ") for row in csv.DictReader(file) if row["name"] == "mtp.demo_acceptance"]
    assert {way[2] for way in ways} >= {"mtp", "mtp, nothing of the prompt", "mtp, the likeliest"}
    assert all("drawn at 1" in way[1] and not way[0].startswith("0 ") for way in ways)


def test_it_stops_where_words_change(
    demo_store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settle = Model.settle

    def wrong(model: Model, state: State, accepted: int) -> None:
        settle(model, state, 0)
        state.ids.extend([5] * accepted)  # it never went through the model

    monkeypatch.setattr(Model, "settle", wrong)
    assert command(demo_store) == 1
    first = "told, 50 % right" if demo_store.draft_file is None else "mtp"  # of those that are right at times
    assert f"answered differently with drafts: {first}\n" in capsys.readouterr().err
