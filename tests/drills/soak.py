"""The soak: the same seeded dialogs, side by side, round after round. Every round says what the first one said, and the
processes take no more at the end than in the middle. `python tests/drills/soak.py --minutes 120` is the long one.

`--share 0.15` rests between rounds, so that all of it takes no more than that part of one core. On a machine with a GPU
`--device cuda` watches that one's memory too.
"""

import argparse
import concurrent.futures
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleet import Fleet
from load import WORKERS
from vitals import Growth, Vitals, cpu_s

from services.tools import figures
from services.tools.repack import repack

DEMO = Path(__file__).parents[2] / "demo"
SIDE_BY_SIDE = 3
CROWD = 4 * SIDE_BY_SIDE
QUESTIONS = (
    "Tell me a short story about a fox.",
    "What is {seed} + 3?",
    "And now something longer, please.",
    "What is the capital of France?",
    "Repeat the second of my questions.",
)
SETTINGS = {"ENGINE_EXPERT_SLOTS": "150", "ENGINE_HOT_STATES_GB": "0.02"}  # small enough to be turned over
SETTINGS |= {"ENGINE_LOCK_MEMORY": "true"}
MOST_PERCENT_A_MINUTE = 0.1
MOST_NEW_HANDLES = 2  # in passing: an engine reads its own figures of /proc for who asks for them, with one each
MOST_NEW_THREADS = 2  # a pool starts one when all of it are busy at once, be it after an hour
SAY_EVERY_S = 600.0
MOST_NEW_LOCKED_BYTES = 0
MOST_NEW_VRAM_BYTES = 2 << 20  # what drivers allocate by
LEAST_MINUTES = 60.0  # for that bar to mean something: in less, one page of malloc is a slope


@dataclass
class Report:
    minutes: float = 0.0
    rounds: int = 0
    turns: int = 0
    wrong: list[str] = field(default_factory=list)
    growths: dict[str, Growth] = field(default_factory=dict)

    def faults(self) -> list[str]:
        """What must not be."""
        found = list(self.wrong)
        for name, one in self.growths.items():
            if one.handles_kept > 0 or one.handles > MOST_NEW_HANDLES or one.threads > MOST_NEW_THREADS:
                handles = f"{one.handles:+d} (kept {one.handles_kept:+d})"
                found.append(f"{name}: handles {handles}, threads {one.threads:+d}")
            if one.locked_bytes > MOST_NEW_LOCKED_BYTES or one.vram_bytes > MOST_NEW_VRAM_BYTES:
                found.append(f"{name}: bytes locked {one.locked_bytes:+d}, of the GPU {one.vram_bytes:+d}")
            if self.minutes >= LEAST_MINUTES and one.rss_percent_a_minute > MOST_PERCENT_A_MINUTE:
                found.append(f"{name}: memory {one.rss_percent_a_minute:+.2f} %/min")
        return found

    def __str__(self) -> str:
        taken = "; ".join(f"{name} {one}" for name, one in self.growths.items())
        return (
            f"{self.minutes:.1f} minutes, {self.rounds} rounds of {SIDE_BY_SIDE} dialogs, {self.turns} turns, other "
            f"than in the first round {len(self.wrong)}; last half: {taken}"
        )


def dialog(fleet: Fleet, seed: int) -> list[str]:
    """What was answered, turn by turn; half of the dialogs are greedy."""
    messages: list[Any] = [{"role": "system", "content": f"You are number {seed}."}]
    drawn = {"temperature": 0} if seed % 2 else {"temperature": 0.8, "seed": seed}
    answers = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question.format(seed=seed)})
        reply = fleet.chat(messages, user=f"user{seed}", max_tokens=20, **drawn)
        messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
        answers.append(messages[-1]["content"])
    return answers


def drill(store: Path, folder: Path, minutes: float, share: float = 0.0, device: str = "cpu") -> Report:
    """`share`: of one core, for all of it; 0: as much as there is."""
    report = Report()
    with (
        Fleet(store, folder, engines=1, redis_mb=16, **WORKERS, **SETTINGS, ENGINE_DEVICE=device) as fleet,
        concurrent.futures.ThreadPoolExecutor(SIDE_BY_SIDE) as pool,
    ):

        def one_round() -> list[list[str]]:
            return list(pool.map(lambda seed: dialog(fleet, seed), range(SIDE_BY_SIDE)))

        first = one_round()
        one_round()  # what is only started once has started: the first dump of a state
        # Pools open one more connection when all of them are in use at once, be it after an hour: they get all that
        # they will ever need here.
        with concurrent.futures.ThreadPoolExecutor(CROWD) as crowd:
            list(crowd.map(lambda seed: dialog(fleet, seed), range(CROWD)))
        pids = {name: fleet.pid(name) for name in fleet.names}
        began = said = time.monotonic()
        until = began + 60 * minutes
        with Vitals(pids, metrics=fleet.metrics) as vitals:
            while time.monotonic() < until:
                before_s, since = spent_s(pids), time.monotonic()
                compare(report, first, one_round())
                if share:
                    rest_s = (spent_s(pids) - before_s) / share - (time.monotonic() - since)
                    time.sleep(max(0.0, min(rest_s, until - time.monotonic())))
                if time.monotonic() > said + SAY_EVERY_S:
                    said = time.monotonic()
                    now = "; ".join(f"{name} {vitals.growth(name)}" for name in fleet.names)
                    print(f"{(said - began) / 60:.0f} minutes, {report.rounds} rounds: {now}", flush=True)
        report.minutes = (time.monotonic() - began) / 60
        report.growths = {name: vitals.growth(name) for name in fleet.names}
    return report


def spent_s(pids: Mapping[str, int]) -> float:
    """Processor time of the fleet and of this process so far."""
    return time.process_time() + sum(map(cpu_s, pids.values()))


def compare(report: Report, first: list[list[str]], now: list[list[str]]) -> None:
    report.rounds += 1
    for seed, (wanted, got) in enumerate(zip(first, now, strict=True)):
        report.turns += len(got)
        for turn, (one, other) in enumerate(zip(wanted, got, strict=True)):
            if one != other:
                report.wrong.append(f"round {report.rounds}, dialog {seed}, turn {turn}: {other!r} instead of {one!r}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--share", type=float, default=0.0, help="of one core that it may take (default: all of two)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="append the figures to this CSV file (its name names the machine)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        store = repack(DEMO, Path(name) / "demo", say=lambda text: None).folder
        report = drill(store, Path(name), args.minutes, args.share, args.device)
    print(report, *report.faults(), sep="\n")
    if args.out:
        note = f"demo model on {args.device}; {report}"
        figures.append(args.out, "soak.wrong", len(report.wrong), "answers", note)
        for who, one in report.growths.items():
            figures.append(args.out, f"soak.{who}_growth", one.rss_percent_a_minute, "%/min", note)
    return 1 if report.faults() else 0


if __name__ == "__main__":
    sys.exit(main())
