"""Short runs of the drills of a machine that misbehaves, and that they would see what they look for."""

from collections.abc import Iterator

import pytest
from crowd import Seen
from machine import CLIENTS, JUMPS_S, Report, Troubled, clock_drill, disk_drill, troubled

from services.engine.experts.store import Store

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def it(demo_store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Troubled]:
    with troubled(demo_store.folder, tmp_path_factory.mktemp("machine")) as running:
        yield running


def test_a_clock_that_jumps_changes_nothing(it: Troubled) -> None:
    report = clock_drill(it, seconds=4.0)
    assert report.sound, str(report)
    assert len(report.health_s) >= 3, "it hardly jumped"
    told = ", ".join(str(round(ahead_s / 3600)) for ahead_s in JUMPS_S)
    assert f"told {told} hours ahead" in report.note, "the clock that clients see did not jump"


def test_a_disk_a_hundred_times_as_slow_makes_answers_late_and_nothing_else(it: Troubled) -> None:
    report = disk_drill(it, seconds=1.0)
    assert report.sound, str(report)
    assert report.during.answers >= CLIENTS
    assert min(report.during.answer_s) > 2 * min(report.before.answer_s), "the disk was not slow"


def test_the_drills_can_fail() -> None:
    good = Seen(answers=3, answer_s=[1.0])
    assert Report("x", good, good).sound
    for bad in (Seen(answers=3, wrong=1), Seen(answers=3, hangs=1), Seen(), Seen(answers=1)):
        if bad.answers == 1:
            bad.failures["500"] += 1
        assert not Report("x", good, bad).sound
