"""A short run of the drill of a GPU that fails, and that it would see what it looks for."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from crowd import Seen
from device import Report, drill

from services.engine.experts.store import Store


@pytest.mark.timeout(300)
def test_an_engine_whose_gpu_fails_comes_back_by_itself(demo_store: Store, tmp_path: Path) -> None:
    for seconds in (6.0, 40.0):  # a busy machine may not come to the step that fails in the first
        folder = tmp_path / str(seconds)
        folder.mkdir()
        report = drill(demo_store.folder, folder, seconds)
        if report.restarts:
            break
        assert (report.seen.wrong, report.seen.failures, report.away_s) == (0, {}, []), str(report)
    assert report.sound, str(report)
    assert report.told, "nobody noticed"


def test_the_drill_can_fail() -> None:
    told = Counter({"503 x": 3, "in mid-stream: unavailable": 1})
    good = Report(Seen(answers=3, failures=told), 2, [4.0, 5.0])
    assert good.sound
    assert (good.told, good.failures) == (told, Counter())
    bad = (
        replace(good, restarts=0),
        replace(good, restarts=3),  # once /ready did not turn
        replace(good, away_s=[4.0, 500.0]),
        replace(good, deaf=1),
        replace(good, wrong_afterwards=1),
        replace(good, seen=Seen(answers=3, wrong=1)),
        replace(good, seen=Seen(answers=3, hangs=1)),
        replace(good, seen=Seen(answers=3, failures=Counter({"ReadError()": 1}))),
        replace(good, seen=Seen()),
    )
    assert not any(report.sound for report in bad)
