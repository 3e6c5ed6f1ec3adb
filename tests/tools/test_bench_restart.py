"""The restart benchmark on the demo, short: it counts what the first reply misses, with and without what was in RAM."""

from pathlib import Path

import pytest
from demo_engine import demo

from services.engine.experts.store import Store
from services.tools import bench_restart
from services.tools.bench_restart import Reply, middle, questions
from services.tools.cli import main


def test_the_first_reply_misses_less_where_the_set_is_known(
    demo_store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_restart, "DIALOGS", bench_restart.DIALOGS[:2])
    out = tmp_path / "machine.csv"
    words = ["--rounds", "1", "--waits", "1", "--tokens", "4", "--disk", "0.05", "--out", str(out)]
    status = main(["bench", "restart", str(demo_store.folder), *words])
    lines = capsys.readouterr().out.splitlines()
    [warm], [cold] = ([line for line in lines if words in line] for words in ("after a restart", "nothing known"))
    assert int(warm.split()[-1]) < int(cold.split()[-1]) / 2, (warm, cold)
    names = [row.split(",")[3] for row in out.read_text().splitlines()[1:]]
    assert names[:2] == ["restart.first_reply_over_steady", "restart.cold_over_steady"]
    assert status == (names[2:] != ["restart.seconds"]), "times are this machine's mood, what they mean is not"


def test_another_answer_than_before_is_a_failure() -> None:
    usual = Reply(1.0, (1, 2), 5)
    assert middle([Reply(3.0, (1, 2), 7), Reply(2.0, (1, 2), 9), Reply(1.0, (1, 2), 8)], usual) == Reply(2.0, (1, 2), 8)
    with pytest.raises(RuntimeError, match="differs"):
        middle([Reply(1.0, (1, 3), 5)], usual)


def test_questions_are_written_as_the_demo_reads_them(demo_store: Store) -> None:
    with demo(demo_store) as running:
        assert list(questions(demo_store)[1]) == running.prompt("What is the capital of Italy?")
