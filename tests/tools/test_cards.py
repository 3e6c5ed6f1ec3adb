"""The table of cards: its lines are the planner's, and come back from the results as they went in."""

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.engine.errors import MemoryPlanError
from services.tools import cards, forecast
from services.tools.cards import Line
from services.tools.cli import main
from services.tools.hardware import CARDS, Card

ROOT = Path(__file__).parents[2]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Less routing to replay: no figure of it is a prediction."""
    monkeypatch.setattr(forecast, "TOKENS", 70)
    monkeypatch.setattr(forecast, "WARM_TOKENS", 40)
    forecast.made_up.cache_clear()
    yield
    forecast.made_up.cache_clear()


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.mark.usefixtures("short")
def test_what_is_printed_comes_back_from_what_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.csv"
    assert main(["cards", "--card", "rtx4060", "--card", "rtx5060ti16", "--record", str(path)]) == 0
    out = capsys.readouterr().out
    assert list(cards.table(cards.recorded(rows(path)))) == out.splitlines()[:4]
    assert out.splitlines()[2].startswith("| RTX 4060 | ")
    assert "Predicted, not measured" in out
    assert all("predicted, not measured" in row["note"] for row in rows(path))
    small, large = cards.recorded(rows(path))[:2]
    assert (small.ram_gib, large.ram_gib) == (32, 64)
    assert small.tok_s < large.tok_s
    assert all(slow > fast for slow, fast in zip(small.ttft_s, large.ttft_s, strict=True))


def test_the_newest_rows_count(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    for speed in (7.0, 9.0):
        cards.record(path, [Line("A card", gib, speed, (1.0, speed)) for gib in cards.RAM_GIB])
    assert cards.recorded(rows(path)) == [Line("A card", gib, 9.0, (1.0, 9.0)) for gib in cards.RAM_GIB]


def test_a_card_that_is_too_small_has_no_line() -> None:
    with pytest.raises(MemoryPlanError, match="graphics memory"):
        cards.line(Card("Small card", 6144, 300, (4, 16), 20), 32)


def test_the_table_is_what_the_planner_says_now() -> None:
    """One of its lines. Else: `thimble cards --record tests/bench/results/build-2core.csv`, and its table to README."""
    found = cards.recorded(rows(ROOT / "tests/bench/results/build-2core.csv"))
    [was] = [one for one in found if (one.card, one.ram_gib) == (CARDS["rtx5060"].name, 32)]
    now = cards.line(CARDS["rtx5060"], 32)
    assert was.tok_s == pytest.approx(now.tok_s, rel=0.01)
    assert was.ttft_s == pytest.approx(now.ttft_s, rel=0.01)
