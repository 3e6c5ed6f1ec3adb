"""Progress lines: speed and time left, on a terminal and in a log."""

import io

import pytest

from services.tools import progress
from services.tools.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_speed_and_time_left_do_not_count_an_earlier_run(clock: list[float]) -> None:
    log = io.StringIO()
    shown = Progress("repack", total_bytes=10**10, done_bytes=4 * 10**9, stream=log)
    clock[0] += 20
    shown.update(6 * 10**9)
    assert log.getvalue() == "repack: 6.00 of 10.00 GB, 100 MB/s, 40 s left\n"


def test_a_log_gets_a_line_now_and_then_and_a_terminal_one_that_changes(clock: list[float]) -> None:
    log, terminal = io.StringIO(), Terminal()
    shown = [Progress("x", 100, stream=stream) for stream in (log, terminal)]
    for step in range(1, 31):
        clock[0] += 1
        for one in shown:
            one.update(step)
    for one in shown:
        one.close()
    assert log.getvalue().count("\n") == 3
    assert terminal.getvalue().count("\r") == 30
    assert terminal.getvalue().endswith("70 s left\n")


def test_nothing_is_said_of_short_work(clock: list[float]) -> None:
    terminal = Terminal()
    shown = Progress("x", 100, stream=terminal)
    shown.update(100)
    shown.close()
    assert terminal.getvalue() == ""
