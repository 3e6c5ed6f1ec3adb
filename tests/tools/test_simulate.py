"""`thimble simulate` and `thimble record`: a replay reads what the live engine read; tables and the plot are made."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from demo_traces import recorded

from services.engine.errors import TraceError
from services.engine.experts.store import Store
from services.engine.experts.trace import read_trace
from services.tools import simulate
from services.tools.cli import main
from services.tools.predict import SUPER
from services.tools.traces.sources import source
from services.tools.traces.tried import Tried


@pytest.fixture(scope="module")
def traces(demo_store: Store, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return recorded(demo_store, tmp_path_factory.mktemp("traces"))


def test_a_replay_reads_what_the_engine_read(traces: list[Path]) -> None:
    """The published simulator's accuracy is 0.4 reads a token."""
    assert len(traces) >= 5
    for path in traces:
        found = source(str(path), 0)
        assert found.note["misses"] > 20 * found.decoded_tokens
        difference = simulate.live(found)
        assert difference is not None
        assert abs(difference) <= 0.4, path
        found.note["slots_total"] //= 2
        assert abs(simulate.live(found) or 0) > 0.4, "this check can fail"


def test_a_recording_changes_no_bit(demo_store: Store, traces: list[Path], tmp_path: Path) -> None:
    """The same dialogs again, another cache: the same routing, to the id."""
    again = recorded(demo_store, tmp_path, slots=60, dialogs=1)
    one, other = read_trace(traces[0]), read_trace(again[0])
    assert one.whole
    assert other.whole
    assert torch.equal(torch.from_numpy(one.rows["ids"].astype(int)), torch.from_numpy(other.rows["ids"].astype(int)))
    assert one.note["misses"] < other.note["misses"]


def test_many_sizes_in_one_pass(traces: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plot.png"
    assert (
        main(["simulate", str(traces[0]), "--share", "0.1,0.24,0.5,1", "--plot", str(path), "--prefetch", "off"]) == 0
    )
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if "%" in line]
    hits = [float(row[3].rstrip("%")) for row in rows]
    assert len(hits) == 4
    assert hits == sorted(hits)
    assert hits[0] < hits[-1] - 20
    assert "replayed less live" in out
    assert path.read_bytes().startswith(b"\x89PNG")


def test_sizes_are_gigabytes_of_whole_blocks() -> None:
    assert simulate.slots_of(SUPER, 20) == 20_000_000_000 // 3_096_576
    assert simulate.slots_of(SUPER, 0.001) == 22
    assert simulate.slots_of(SUPER, 1000) == 40 * 512


def test_policies_are_compared_and_figures_kept(
    traces: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "here.csv"
    assert main(["simulate", str(traces[0]), str(traces[1]), "--compare", "--results", str(results)]) == 0
    assert "the shipped policy loses to LRU on: none" in capsys.readouterr().out
    rows = list(csv.DictReader(results.read_text().splitlines()))
    hits = {name: [float(row["value"]) for row in rows if row["name"] == f"cache.hit_{name}"] for name in NAMES}
    assert [len(values) for values in hits.values()] == [6, 6, 6]
    for lru, shipped, belady in zip(hits["lru"], hits["shipped"], hits["belady"], strict=True):
        assert lru < shipped < belady
    assert all("dialog" in row["note"] and "slots" in row["note"] for row in rows)


NAMES = ("lru", "shipped", "belady")


def test_the_difference_to_the_live_engine_is_a_figure(traces: list[Path], tmp_path: Path) -> None:
    results = tmp_path / "here.csv"
    assert main(["simulate", *map(str, traces), "--prefetch", "off", "--results", str(results)]) == 0
    [row] = csv.DictReader(results.read_text().splitlines())
    assert row["name"] == "simulate.reads_error"
    assert 0 <= float(row["value"]) <= 0.4
    assert "worst of 5 traces" in row["note"]


def test_what_others_tried_is_tried_again_in_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "here.csv"
    assert main(["simulate", "--tried", "--tokens", "60", "--results", str(results)]) == 0
    rows = {row["name"]: row for row in csv.DictReader(results.read_text().splitlines())}
    for name in ("prompt_experts_lru", "guesses_6_for_4", "experts_on_the_card", "early_copies", "neurons_for_groups"):
        assert f"tried.{name}" in rows
    shown = capsys.readouterr().out
    for row in rows.values():
        assert row["note"].split(", by ")[0] in shown
    assert float(rows["tried.neurons_for_groups"]["value"]) == pytest.approx(1 - 1561 / 2334, abs=0.001), "as by hand"
    slower = Tried("x", "x", "ms", 50.0, 60.0)
    assert (slower.gain, replace(slower, more_is_better=True).gain) == (pytest.approx(-0.2), pytest.approx(0.2))


def test_a_trace_that_was_cut_short_says_so(
    traces: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The end, with what the engine counted, is missing; so is the comparison with it."""
    data = traces[0].read_bytes()
    (tmp_path / "cut").write_bytes(data[:-9])
    for path, cut in ((traces[0], False), (tmp_path / "cut", True)):
        assert main(["simulate", str(path), "--share", "0.3"]) == 0
        out = capsys.readouterr().out
        assert ("did not end in order" in out) == cut
        assert ("replayed less live" in out) != cut


def test_more_ram_than_experts_and_reads_that_hide_nothing(
    traces: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """What a drive takes until it answers is not a share of what is hidden."""
    assert main(["simulate", str(traces[0]), "--ram", "0.001,12"]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if "%" in line]
    assert [row[-1] for row in rows] == ["0%", "0%"]
    assert "more RAM than that changes nothing" in out
    assert main(["simulate", str(traces[0]), "--share", "0.5"]) == 0
    assert "changes nothing" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "said", ["--ram=0", "--ram=-1", "--ram=nan", "--ram=inf", "--ram=12,,16", "--ram=12;16", "--share=x", "--tokens=0",
             "--policy=foo", "--disk-gb-s=0", "--late-us=-1"],
)  # fmt: skip
def test_what_cannot_be_is_refused(traces: list[Path], capsys: pytest.CaptureFixture[str], said: str) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", str(traces[0]), said])
    assert f"argument {said.partition('=')[0]}: " in capsys.readouterr().err


def test_a_plot_that_cannot_be(traces: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *map(str, traces[:2]), "--plot", str(tmp_path / "x.png")]) == 2
    assert "draws one trace" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="cannot be written: No such file"):
        main(["simulate", str(traces[0]), "--plot", str(tmp_path / "none" / "x.png")])


def test_traces_that_cannot_be_written(demo_store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a file").write_text("x")
    assert main(["record", str(demo_store.folder), str(tmp_path / "a file")]) == 1
    assert "a file: no traces can be written there: File exists" in capsys.readouterr().err


def test_a_bad_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").write_bytes(b"?")
    assert main(["simulate", str(tmp_path / "x")]) == 1
    assert "not a trace" in capsys.readouterr().err
    with pytest.raises(TraceError, match="cannot be read"):
        source("calibratedd", 1)
    assert main(["simulate"]) == 2
    assert "name a trace" in capsys.readouterr().err
