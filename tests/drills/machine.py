"""The machine misbehaves under a fleet that answers: the wall clock jumps by days, the disk is a hundred times as slow,
or full.

`python tests/drills/machine.py --seconds 300` is the long one. Every answer is held against what was said before, to
the last bit.
"""

import argparse
import concurrent.futures
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from crowd import Question, Seen, crowd, expected_answers
from fleet import Fleet
from load import WORKERS, percentile
from trouble import Trouble

from services.tools import figures
from services.tools.repack import repack

DEMO = Path(__file__).parents[2] / "demo"
DAY_S = 86400
JUMPS_S = (DAY_S, 0, -DAY_S, 10 * DAY_S, -30 * DAY_S, 3600, -3600)  # ahead of the true clock, one after the other
JUMP_EVERY_S = 1.0
READ_US, TIMES_SLOWER = 100, 100  # what an NVMe disk takes for a small read
CLIENTS = 2
LOG_S = 10.0  # a line is written after its answer was sent
SETTINGS = {**WORKERS, "ENGINE_EXPERT_SLOTS": "64", "ENGINE_READERS": "2", "ENGINE_HOT_STATES_GB": "0.02"}
Expected = dict[Question, list[tuple[str, float]]]


@dataclass
class Report:
    """What clients saw before and while."""

    title: str
    before: Seen
    during: Seen = field(default_factory=Seen)
    health_s: list[float] = field(default_factory=list)
    note: str = ""

    @property
    def sound(self) -> bool:
        return not (self.during.wrong or self.during.hangs or self.during.failures) and self.during.answers > 0

    def __str__(self) -> str:
        seen = self.during
        slower = percentile(seen.answer_s, 50) / percentile(self.before.answer_s, 50)
        return (
            f"{self.title}: {seen.answers} answers, wrong {seen.wrong}, hangs {seen.hangs}, failures "
            f"{dict(seen.failures) or 0}; an answer takes {slower:.1f} times as long as before; longest answer of "
            f"/health {max(self.health_s, default=float('nan')):.2f} s; {self.note}"
        )


@dataclass
class Troubled:
    """A fleet that is well so far, what it says, and how long that took."""

    fleet: Fleet
    trouble: Trouble
    expected: Expected
    before: Seen
    folder: Path

    def written(self) -> int:
        """Bytes of logs and of the trace."""
        return sum(path.stat().st_size for path in self.folder.iterdir() if path.suffix in (".log", ".trace"))


@contextmanager
def troubled(store: Path, folder: Path, device: str = "cpu") -> Iterator[Troubled]:
    trouble = Trouble(folder)
    own = {"ENGINE_DEVICE": device, "ENGINE_TRACE": str(folder / "own.trace"), "ENGINE_WARM_DIR": str(folder / "warm")}
    with Fleet(store, folder, engines=1, more=trouble.environ, **SETTINGS, **own) as fleet:
        expected = expected_answers(fleet.url)
        yield Troubled(fleet, trouble, expected, ask(fleet, 3.0, expected), folder)


def ask(fleet: Fleet, seconds: float, expected: Expected) -> Seen:
    seen = Seen()
    for member in crowd(fleet.url, CLIENTS, seconds, expected):
        seen.add(member.seen)
    return seen


def while_asked(it: Troubled, seconds: float, report: Report, step: Callable[[int], None]) -> None:
    """Clients ask for so long; meanwhile `step` is called with 0, 1, 2, ..., and the api's health is looked at."""
    url = it.fleet.url
    with concurrent.futures.ThreadPoolExecutor(1) as pool, httpx.Client(base_url=url, timeout=60) as http:
        asking = pool.submit(ask, it.fleet, seconds, it.expected)
        number = 0
        while not asking.done():
            step(number)
            began = time.monotonic()
            assert http.get("/health").status_code == 200
            report.health_s.append(time.monotonic() - began)
            number += 1
            concurrent.futures.wait([asking], JUMP_EVERY_S)
        report.during = asking.result()


def clock_drill(it: Troubled, seconds: float) -> Report:
    report = Report("the clock jumps", it.before)
    shown = []
    while_asked(it, seconds, report, lambda number: it.trouble.clock_ahead(JUMPS_S[number % len(JUMPS_S)]))
    for ahead_s in JUMPS_S:
        it.trouble.clock_ahead(ahead_s)
        created = it.fleet.chat([{"role": "user", "content": "Hi"}], max_tokens=1)["created"]
        shown.append(round((created - time.time()) / 3600))
    it.trouble.clock_ahead(0)
    report.note = f"{len(report.health_s)} jumps; clients were told {', '.join(map(str, shown))} hours ahead"
    return report


def disk_drill(it: Troubled, seconds: float) -> Report:
    report = Report("the disk is slow", it.before)
    it.trouble.slow_disk(TIMES_SLOWER * READ_US)
    while_asked(it, seconds, report, lambda number: None)
    it.trouble.slow_disk(0)
    began = time.monotonic()
    it.fleet.chat([{"role": "user", "content": "What is 2 + 3?"}], max_tokens=16)
    report.note = (
        f"each read of a block took {TIMES_SLOWER * READ_US / 1e3:g} ms longer; the first answer when the disk was "
        f"well again took {time.monotonic() - began:.2f} s"
    )
    return report


def full_drill(it: Troubled, seconds: float) -> Report:
    """Logs, the trace and what is kept for a warm start are all on that disk."""
    report = Report("the disk is full", it.before)
    it.trouble.full_disk(True)
    before = it.written()
    while_asked(it, seconds, report, lambda number: None)
    report.note = f"{it.written() - before} bytes were written meanwhile"
    it.trouble.full_disk(False)
    it.fleet.chat([{"role": "user", "content": "What is 2 + 3?"}], max_tokens=16)
    until = time.monotonic() + LOG_S
    while it.written() == before and time.monotonic() < until:
        time.sleep(0.05)
    report.note += f", {it.written() - before} when it was emptied"
    return report


DRILLS = {"clock": clock_drill, "disk": disk_drill, "full": full_drill}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300, help="of each (default: 300)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="append the figures to this CSV file (its name names the machine)")
    args = parser.parse_args()
    reports = {}
    with tempfile.TemporaryDirectory() as name:
        store = repack(DEMO, Path(name) / "demo", say=lambda text: None).folder
        with troubled(store, Path(name), args.device) as it:
            for title, drill in DRILLS.items():
                reports[title] = drill(it, args.seconds)
                print(reports[title], flush=True)
    for title, report in reports.items() if args.out else ():
        figures.append(
            args.out, f"machine.{title}.wrong", report.during.wrong, "answers", f"demo model on {args.device}; {report}"
        )
    return 0 if all(report.sound for report in reports.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
