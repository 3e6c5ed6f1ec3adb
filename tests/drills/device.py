"""A GPU that fails again and again under clients: the engine starts itself anew each time, with nobody's help.

`python tests/drills/device.py --seconds 300` is the long one; on a machine with a GPU `--device cuda` makes it fail in
earnest. Whoever was answered meanwhile is told so, by a 503 or an event in the stream; every whole answer is held
against what was said before the first failure, to the last bit.
"""

import argparse
import concurrent.futures
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import failing_engine
import httpx
from crowd import Question, Seen, crowd, expected_answers
from fleet import Fleet
from load import WORKERS

from services.tools import figures
from services.tools.repack import repack

DEMO = Path(__file__).parents[2] / "demo"
CLIENTS = 4
STEPS = "30 150"
LOOK_EVERY_S = 0.1
MOST_AWAY_S = 120.0
SETTLED_S = 2.0  # after the last question: an engine that failed in its last step is yet to be seen away
TOLD = ("503 ", "in mid-stream: ")  # how a client is told; whatever else it meets is a failure
SETTINGS = {**WORKERS, "ENGINE_EXPERT_SLOTS": "150"}
Expected = dict[Question, list[tuple[str, float]]]


@dataclass
class Report:
    seen: Seen
    restarts: int
    away_s: list[float] = field(default_factory=list)
    deaf: int = 0  # how often the api's own health was not answered
    wrong_afterwards: int = 0

    @property
    def told(self) -> Counter[str]:
        """How often clients heard that the engine was away."""
        return Counter({what: count for what, count in self.seen.failures.items() if what.startswith(TOLD)})

    @property
    def failures(self) -> Counter[str]:
        return self.seen.failures - self.told

    @property
    def sound(self) -> bool:
        bad = self.seen.wrong or self.wrong_afterwards or self.seen.hangs or self.failures or self.deaf
        turned = len(self.away_s) >= self.restarts > 0 and max(self.away_s) < MOST_AWAY_S
        return not bad and turned and self.seen.answers > 0

    def __str__(self) -> str:
        return (
            f"the GPU failed {self.restarts} times: {self.seen.answers} answers, wrong {self.seen.wrong}, hangs "
            f"{self.seen.hangs}, failures {dict(self.failures) or 0}, told so {sum(self.told.values())} times; wrong "
            f"afterwards {self.wrong_afterwards}; /ready turned {len(self.away_s)} times, at most "
            f"{max(self.away_s, default=float('nan')):.1f} s; the api's own health missing {self.deaf} times"
        )


def drill(store: Path, folder: Path, seconds: float, device: str = "cpu") -> Report:
    fails = folder / "fails"
    more, program = {failing_engine.FILE: str(fails)}, (failing_engine.__file__,)
    with Fleet(store, folder, engines=1, more=more, engine=program, **SETTINGS, ENGINE_DEVICE=device) as fleet:
        expected = expected_answers(fleet.url)
        fails.write_text(STEPS)
        report = watched(fleet, seconds, expected, fails)
        fleet.wait_until_ready()
        afterwards = expected_answers(fleet.url)
        report.wrong_afterwards = sum(afterwards[question] != expected[question] for question in expected)
        report.restarts = (folder / "engine0.log").read_text(errors="replace").count("starting again")
    return report


def watched(fleet: Fleet, seconds: float, expected: Expected, fails: Path) -> Report:
    """Clients ask for so long, then `fails` is taken away; how long the service was not ready, each time."""
    report, away_since, over_since, now = Report(Seen(), 0), None, None, time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(1) as pool, httpx.Client(base_url=fleet.url, timeout=30) as http:
        asking = pool.submit(crowd, fleet.url, CLIENTS, seconds, expected)
        while over_since is None or away_since is not None or now - over_since < SETTLED_S:
            now = time.monotonic()
            if over_since is None and asking.done():
                fails.unlink()
                over_since = now
            ready = http.get("/ready").status_code == 200
            if not ready and away_since is None:
                away_since = now
            elif away_since is not None and (ready or now - away_since > MOST_AWAY_S):
                report.away_s.append(now - away_since)
                away_since = None
            report.deaf += http.get("/health").status_code != 200
            time.sleep(LOOK_EVERY_S)
        for member in asking.result():
            report.seen.add(member.seen)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="append the figures to this CSV file (its name names the machine)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        store = repack(DEMO, Path(name) / "demo", say=lambda text: None).folder
        report = drill(store, Path(name), args.seconds, args.device)
    print(report)
    if args.out:
        note = f"demo model on {args.device}, {args.seconds:g} s; {report}"
        figures.append(args.out, "device.wrong", report.seen.wrong + report.wrong_afterwards, "answers", note)
        figures.append(args.out, "device.longest_away", max(report.away_s, default=float("nan")), "s", note)
    return 0 if report.sound else 1


if __name__ == "__main__":
    sys.exit(main())
