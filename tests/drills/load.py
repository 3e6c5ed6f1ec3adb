"""The load drill: 1, 4, 16 and 64 clients, then 64 at a queue that is too short. A row of figures for each.

`python tests/drills/load.py --seconds 600` is the long one. Answers are held against those of another engine that has
other cache sizes, no snapshots, and nothing else to do. Fairness is the tokens of the steady client that got most over
those of the one that got least, while the drill ran.

Before the levels everything is asked once, alone, until the engine has read ahead of all that may follow. It keeps a
state of 1 MB for each, and under load is idle so rarely that they came one by one over many minutes: the cache as it
fills, which would look like a leak (with 4 clients; one alone leaves it time, and many leave it none).
"""

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from crowd import TOKENS, Client, Question, Seen, crowd, expected_answers
from fleet import API, Fleet
from twenty_turns import settle
from vitals import Growth, Vitals

from services.tools import figures
from services.tools.repack import repack

DEMO = Path(__file__).parents[2] / "demo"
MOST_CLIENTS = 64
ROOMY = {"ENGINE_QUEUE_LIMIT": "64", "ENGINE_EXPERT_SLOTS": "150", "ENGINE_PREFILL_CHUNK_TOKENS": "48"}
SHORT = {**ROOMY, "ENGINE_QUEUE_LIMIT": "8"}
REFERENCE = {"ENGINE_HOT_STATES_GB": "0", "API_READ_AHEAD": "false"}
WORKERS = {"ENGINE_WORKERS": "1"}


@dataclass(frozen=True)
class Level:
    clients: int
    seconds: float
    seen: Seen
    fairness: float
    engine: Growth
    api: Growth

    @property
    def sound(self) -> bool:
        return not (self.seen.wrong or self.seen.hangs or self.seen.failures)

    def __str__(self) -> str:
        seen = self.seen
        first = "/".join(f"{percentile(seen.first_token_s, p):.2f}" for p in (50, 95, 100))
        whole = "/".join(f"{percentile(seen.answer_s, p):.2f}" for p in (50, 95, 100))
        return (
            f"{self.clients} clients, {self.seconds:g} s: {seen.answers} answers of {TOKENS} tokens, "
            f"{seen.tokens / self.seconds:.1f} tok/s; wrong {seen.wrong}, hangs {seen.hangs}, failures "
            f"{dict(seen.failures) or 0}, told to wait {seen.refused}; first token p50/p95/max {first} s, "
            f"answer {whole} s; most over least {self.fairness:.2f}; engine {self.engine}; api {self.api}"
        )


def complains(line: str) -> bool:
    """Whether a line of a log tells of a fault of our own."""
    return '"level": "error"' in line or '"level": "critical"' in line or line.startswith("Traceback")


def percentile(values: list[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else float("nan")


def fairness(members: list[Client]) -> float:
    steady = [member.seen.tokens for member in members if member.manner == "steady"]
    return max(steady) / min(steady) if min(steady) else float("inf")


def level(fleet: Fleet, clients: int, seconds: float, expected: dict[Question, list[tuple[str, float]]]) -> Level:
    with Vitals({name: fleet.pid(name) for name in (fleet.engines[0], API)}) as vitals:
        members = crowd(fleet.url, clients, seconds, expected)
    seen = Seen()
    for member in members:
        seen.add(member.seen)
    growths = (vitals.growth(fleet.engines[0]), vitals.growth(API))
    return Level(clients, seconds, seen, fairness(members), *growths)


def warm_up(fleet: Fleet, expected: dict[Question, list[tuple[str, float]]]) -> None:
    """Until the engine keeps every state that it can be asked for."""
    assert expected_answers(fleet.url) == expected, "wrong without any load"
    settle(fleet)


def drill(
    store: Path, folder: Path, levels: tuple[int, ...], full: int, seconds: float, device: str = "cpu"
) -> list[tuple[str, Level]]:
    """A level after the other with room for all, then `full` clients where there is not (0: none). There, who comes
    back at the right moment gets more: fairness is for those who were let in."""
    on = {"ENGINE_DEVICE": device, **WORKERS}
    for name in ("reference", "roomy", "short"):
        (folder / name).mkdir()
    with Fleet(store, folder / "reference", engines=1, redis_mb=0, **on, **REFERENCE) as reference:
        expected = expected_answers(reference.url)
    found = []
    if levels:
        with Fleet(store, folder / "roomy", engines=1, **on, **ROOMY) as fleet:
            warm_up(fleet, expected)
            for clients in levels:
                found.append((f"clients{clients}", level(fleet, clients, seconds, expected)))
                print(found[-1][1], flush=True)
    if full:
        with Fleet(store, folder / "short", engines=1, **on, **SHORT) as fleet:
            warm_up(fleet, expected)
            found.append((f"full{full}", level(fleet, full, seconds, expected)))
            print(f"queue of {SHORT['ENGINE_QUEUE_LIMIT']}: {found[-1][1]}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="of each level (default: 600)")
    parser.add_argument(
        "--levels", default="1,4,16,64", help="clients; empty: only the short queue (default: 1,4,16,64)"
    )
    parser.add_argument("--short", type=int, default=MOST_CLIENTS, help="clients at the short queue; 0: none")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="append the figures to this CSV file (its name names the machine)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        store = repack(DEMO, Path(name) / "demo", say=lambda text: None).folder
        levels = tuple(map(int, filter(None, args.levels.split(","))))
        found = drill(store, Path(name), levels, args.short, args.seconds, args.device)
        for log in sorted(Path(name).glob("*/*.log")):  # gone with the folder, and one in thousands is not met again
            for line in filter(complains, log.read_text(errors="replace").splitlines()):
                print(f"{log.parent.name}/{log.name}: {line}")
    for title, one in found if args.out else []:
        note = f"demo model on {args.device}, {one}"
        figures.append(args.out, f"load.{title}.wrong", one.seen.wrong, "answers", note)
        figures.append(args.out, f"load.{title}.hangs", one.seen.hangs, "requests", note)
        figures.append(args.out, f"load.{title}.most_over_least", one.fairness, "ratio", note)
    unsound = [title for title, one in found if not one.sound]
    print(f"{len(found)} levels, {sum(one.seen.answers for _, one in found)} answers, unsound: {unsound or 'none'}")
    return 1 if unsound else 0


if __name__ == "__main__":
    sys.exit(main())
