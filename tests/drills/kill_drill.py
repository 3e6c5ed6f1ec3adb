"""The kill drill: dialogs with a fleet whose members are killed at random moments, each turn held against a fleet that
nobody kills and that never restores a state. `python tests/drills/kill_drill.py --each 100 --bystanders 2` is the long
one: until each has been killed a hundred times, while others ask too.

Right means: the same greedy text as the reference. Not lost means: what was stored before the turn under way is found
again, unless the store itself was away since; what was in flight, the turn before, may be read again.
"""

import argparse
import concurrent.futures
import contextlib
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from crowd import QUESTIONS as OTHERS
from crowd import expected_answers, said
from fleet import REDIS, Fleet

from services.tools import figures
from services.tools.repack import repack

DEMO = Path(__file__).parents[2] / "demo"
TURNS_OF_A_DIALOG = 10
PATIENCE_S = 300.0  # for an answer: all engines may be starting, on a machine that is busy
NOTICED_S = 3.0  # after a store is back: until the api asks it again, and what is stored from then on is there
CLOSING_TOKENS = 8  # of the template between two turns: what a state before an answer has not read of the history
QUESTIONS = (
    "What is {n} + {m}?",
    "Tell me a short story about a fox.",
    "What is the capital of France?",
    "How many days has a week?",
    "And what is {m} - 1?",
)


class Report:
    def __init__(self) -> None:
        self.turns = self.wrong = self.lost = self.kept = self.other_tokens = self.cached_tokens = (
            self.prompt_tokens
        ) = 0
        self.kills: Counter[str] = Counter()
        self.failures: list[str] = []
        self.others = 0  # answers to bystanders, each of them right
        self.longest_s: dict[str, float] = {}  # that a turn took while this one was killed

    def __str__(self) -> str:
        kills = ", ".join(f"{name} {count}" for name, count in sorted(self.kills.items()))
        longest = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in sorted(self.longest_s.items()))
        return (
            f"{self.turns} turns, killed: {kills}; wrong answers {self.wrong}, lost dialogs {self.lost} in {self.kept} "
            f"turns whose store was there all the while, turns whose history was tokenised otherwise "
            f"{self.other_tokens}; {self.cached_tokens} of {self.prompt_tokens} prompt tokens came from snapshots; "
            f"right answers to others meanwhile {self.others}; longest turn {longest}"
        )


class Killer:
    """Kills one member after a random time and starts it again a moment later, in a thread."""

    def __init__(self, fleet: Fleet, choose: random.Random) -> None:
        self._fleet, self._choose = fleet, choose
        self._thread: threading.Thread | None = None
        self._back_at: dict[str, float] = {}

    def since(self, name: str) -> float:
        """When it was last started again, on time.monotonic()'s clock; never, while it is going to be killed."""
        return self._back_at.get(name, float("-inf"))

    def strike(self) -> str:
        """Returns at once with the name of who is going to be killed."""
        self.wait()
        name = self._choose.choice(self._fleet.names)
        after_s, away_s = self._choose.uniform(0.0, 1.2), self._choose.uniform(0.0, 1.0)

        def run() -> None:
            time.sleep(after_s)
            self._fleet.kill(name)
            time.sleep(away_s)
            self._fleet.start(name)
            self._back_at[name] = time.monotonic()

        self._back_at[name] = float("inf")
        self._thread = threading.Thread(target=run)
        self._thread.start()
        return name

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()


class Bystanders:
    """A context manager: so many clients ask one thing after the other, and again until they are answered."""

    def __init__(self, fleet: Fleet, reference: Fleet, count: int, report: Report) -> None:
        self._fleet, self._report, self._count = fleet, report, count
        self._expected = expected_answers(reference.url) if count else {}
        self._over = threading.Event()
        self._pool = concurrent.futures.ThreadPoolExecutor(max(1, count))

    def __enter__(self) -> "Bystanders":
        self._asking = [self._pool.submit(self._ask, number) for number in range(self._count)]
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._pool.shutdown()
        for one in self._asking:
            if trouble := one.exception():
                self._report.failures.append(f"a bystander: {trouble!r}")

    def _ask(self, number: int) -> None:
        choose = random.Random(number)
        while not self._over.wait(choose.uniform(0.0, 1.0)):
            question = choose.choice(OTHERS)
            reply = self._fleet.chat(patience_s=PATIENCE_S, **question.body(f"bystander{number}", stream=False))
            if said(reply["choices"][0]) == self._expected[question]:
                self._report.others += 1
            else:
                self._report.wrong += 1
                self._report.failures.append(f"a bystander got something else for {question}")


def drill(
    fleet: Fleet,
    reference: Fleet,
    turns: int,
    seed: int,
    say: Callable[[str], None],
    minutes: float = 600.0,
    each: int = 0,
    bystanders: int = 0,
) -> Report:
    """So many turns, and on until each member was killed so often; ends with the dialog under way after so many
    minutes."""
    report, choose = Report(), random.Random(seed)
    until = time.monotonic() + 60 * minutes
    with Bystanders(fleet, reference, bystanders, report):
        _dialogs(fleet, reference, report, choose, lambda: _goes_on(report, fleet, turns, each, until), say)
    return report


def _goes_on(report: Report, fleet: Fleet, turns: int, each: int, until: float) -> bool:
    enough = report.turns >= turns and all(report.kills[name] >= each for name in fleet.names)
    return not enough and time.monotonic() < until


def _dialogs(
    fleet: Fleet,
    reference: Fleet,
    report: Report,
    choose: random.Random,
    goes_on: Callable[[], bool],
    say: Callable[[str], None],
) -> None:
    killer = Killer(fleet, choose)
    number = 0
    while goes_on():
        number += 1
        dialog: list[Any] = [{"role": "system", "content": f"You are helper number {number}."}]
        read: list[tuple[float, int]] = []  # when each turn began, and its prompt's tokens
        for turn in range(TURNS_OF_A_DIALOG):
            n, m = choose.randrange(2, 40), choose.randrange(2, 40)
            dialog.append({"role": "user", "content": choose.choice(QUESTIONS).format(n=n, m=m)})
            victim = killer.strike() if choose.random() < 0.6 else "none"
            if victim in fleet.names:
                report.kills[victim] += 1
            began = time.monotonic()
            reply = fleet.chat(dialog, PATIENCE_S)
            report.longest_s[victim] = max(report.longest_s.get(victim, 0.0), time.monotonic() - began)
            expected = reference.chat(dialog)
            _judge(report, reply, expected, read, killer.since(REDIS))
            read.append((began, reply["usage"]["prompt_tokens"]))
            dialog.append(expected["choices"][0]["message"])
            report.turns += 1
            say(f"turn {report.turns}: {report}")
            time.sleep(choose.uniform(0.0, 0.6))
            if turn % 3 == 2:
                killer.wait()
    killer.wait()


def _judge(report: Report, reply: Any, expected: Any, read: list[tuple[float, int]], store_since: float) -> None:
    said, wanted = (one["choices"][0]["message"]["content"] for one in (reply, expected))
    prompt_tokens = reply["usage"]["prompt_tokens"]
    cached_tokens = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    report.prompt_tokens += prompt_tokens
    report.cached_tokens += cached_tokens
    if prompt_tokens != expected["usage"]["prompt_tokens"]:
        report.other_tokens += 1  # the ids that were generated, where the reference reads its own text again
    elif said != wanted:
        report.wrong += 1
        report.failures.append(f"turn {report.turns}: {said!r} instead of {wanted!r}")
    if len(read) < 2:
        return
    began, read_tokens = read[-2]
    if began <= store_since + NOTICED_S:
        return
    report.kept += 1
    if cached_tokens < read_tokens - CLOSING_TOKENS:
        report.lost += 1
        report.failures.append(f"turn {report.turns}: {cached_tokens} cached, {read_tokens} were read two turns ago")


@contextlib.contextmanager
def fleets(store: Path, folder: Path, device: str = "cpu") -> Iterator[tuple[Fleet, Fleet]]:
    """The one whose members die, and the one they are held against."""
    for name in ("fleet", "reference"):
        (folder / name).mkdir()
    lent = {"ENGINE_EXCHANGE_DIR": str(folder / "lent"), "API_EXCHANGE_DIR": str(folder / "lent")}
    bare = {"ENGINE_HOT_STATES_GB": "0", "API_READ_AHEAD": "false"}
    on = {"ENGINE_DEVICE": device, "ENGINE_WORKERS": "1"}
    patient = {"API_REDIS_TIMEOUT_MS": "5000"}  # a store that is slow on a busy machine loses nothing, but is not asked
    with (
        Fleet(store, folder / "fleet", ENGINE_HOT_STATES_GB="0.05", **on, **patient, **lent) as fleet,
        Fleet(store, folder / "reference", engines=1, redis_mb=0, **on, **bare) as reference,
    ):
        yield fleet, reference


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--each", type=int, default=0, help="go on until each member was killed so often")
    parser.add_argument("--bystanders", type=int, default=0, help="clients that ask meanwhile")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no dialog after this")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="append the figures to this CSV file (its name names the machine)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        store = repack(DEMO, Path(name) / "demo", say=lambda text: None).folder
        with fleets(store, Path(name), args.device) as (fleet, reference):
            say = partial(print, flush=True)
            limits = (args.minutes, args.each, args.bystanders)
            report = drill(fleet, reference, args.turns, args.seed, say, *limits)
    print(report, *report.failures, sep="\n")
    if args.out:
        note = f"demo model on {args.device}, two engines; {report}"
        figures.append(args.out, "snapshot.drill_wrong", report.wrong, "answers", note)
        figures.append(args.out, "snapshot.drill_lost", report.lost, "dialogs", note)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
