"""Short runs of the determinism drill and the soak, and that they would see what they look for."""

from pathlib import Path

import pytest
from crowd import QUESTIONS
from determinism import ASKED, drill, judge
from determinism import Report as Bits
from soak import Report, compare
from soak import drill as soak
from vitals import Growth

from services.engine.experts.store import Store

pytestmark = pytest.mark.timeout(300)


def test_a_few_rounds_say_the_same_and_take_no_more(demo_store: Store, tmp_path: Path) -> None:
    report = soak(demo_store.folder, tmp_path, minutes=0.15)
    assert report.rounds >= 1
    assert report.wrong == []
    assert all(max(one.handles, one.threads) < 5 for one in report.growths.values()), str(report)


def test_a_soak_can_fail() -> None:
    report = Report()
    compare(report, [["a", "b"], ["c", "d"]], [["a", "b"], ["c", "x"]])
    assert [fault.split(":")[0] for fault in report.faults()] == ["round 1, dialog 1, turn 1"]
    report = Report(minutes=120.0, growths={"api": Growth(0.2, 100.0, 0, 0), "engine0": Growth(0.01, 400.0, 1, 0)})
    assert len(report.faults()) == 2


def test_under_load_and_with_a_small_cache_every_bit_is_the_same(demo_store: Store, tmp_path: Path) -> None:
    report = drill(demo_store.folder, tmp_path, ["scarce"], times=2, load_clients=3)
    assert (report.wrong, report.trouble) == ([], [])
    assert report.answers["scarce"] == 2 * len(ASKED)
    assert report.others > 0, "there was no load"


def test_the_determinism_drill_can_fail() -> None:
    report = Bits()
    expected = {QUESTIONS[0]: [("a", -1.0), ("b", -2.0)]}
    judge(report, "x", QUESTIONS[0], [("a", -1.0), ("b", -2.0)], expected)
    assert report.wrong == []
    judge(report, "x", QUESTIONS[0], [("a", -1.0), ("b", -2.0000001)], expected)
    judge(report, "x", QUESTIONS[0], [("a", -1.0)], expected)
    assert len(report.wrong) == 2
    assert {question.seed for question in ASKED} == {None, 7}
