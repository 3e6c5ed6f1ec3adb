"""The determinism drill: the same greedy and the same seeded request 100 times each, under load, on engines with other
cache sizes, other cuts of the prompt, other batch mates, with and without stored states. One answer, to the last bit.

`python tests/drills/determinism.py --times 100`
"""

import argparse
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from crowd import HANG_S, QUESTIONS, Client, Question, crowd, expected_answers, said
from fleet import Fleet
from load import REFERENCE, WORKERS

from services.tools import figures
from services.tools.repack import repack

DEMO = Path(__file__).parents[2] / "demo"
BARE = {"ENGINE_HOT_STATES_GB": "0", "API_READ_AHEAD": "false"}
ASKED = tuple(question for question in QUESTIONS if "word89" in question.prompt)  # a prompt of several chunks
ENGINES: dict[str, dict[str, str]] = {
    "scarce": {**BARE, "ENGINE_EXPERT_SLOTS": "44", "ENGINE_PREFILL_CHUNK_TOKENS": "7", "ENGINE_PREFETCH": "off"},
    "middling": {"ENGINE_EXPERT_SLOTS": "150", "ENGINE_PREFILL_CHUNK_TOKENS": "50"},
    "ample": {**BARE, "ENGINE_WORKERS": "2", "ENGINE_MAX_SEQUENCES": "7", "ENGINE_PREFILL_CHUNK_TOKENS": "512"},
}


class Report:
    def __init__(self) -> None:
        self.answers: Counter[str] = Counter()
        self.others = 0  # answers of the clients that made the load
        self.wrong: list[str] = []
        self.trouble: list[str] = []

    def __str__(self) -> str:
        each = ", ".join(f"{name} {count}" for name, count in self.answers.items())
        return (
            f"{len(ASKED)} requests (greedy, seeded) {sum(self.answers.values())} times under load, by engine: {each}; "
            f"{self.others} answers to others meanwhile; wrong {len(self.wrong)}, other trouble {len(self.trouble)}"
        )


def drill(
    store: Path, folder: Path, engines: Sequence[str], times: int, load_clients: int, device: str = "cpu"
) -> Report:
    report = Report()
    for name in ("reference", *engines):
        (folder / name).mkdir()
    with Fleet(
        store, folder / "reference", engines=1, redis_mb=0, ENGINE_DEVICE=device, **WORKERS, **REFERENCE
    ) as reference:
        expected = expected_answers(reference.url)
    for number, name in enumerate(engines):
        share = times * (number + 1) // len(engines) - times * number // len(engines)
        settings = WORKERS | {"ENGINE_DEVICE": device} | ENGINES[name]
        stored = {} if "ENGINE_HOT_STATES_GB" in settings else {"redis_mb": 64}
        with Fleet(store, folder / name, engines=1, **({"redis_mb": 0} | stored), **settings) as fleet:  # type: ignore[arg-type]
            asking(report, fleet, name, share, load_clients, expected)
        print(f"{name}: {report}", flush=True)
    return report


def asking(
    report: Report, fleet: Fleet, name: str, times: int, load_clients: int, expected: dict[Question, list[Any]]
) -> None:
    """Each of ASKED so many times, while a crowd has the engine busy."""
    over = threading.Event()
    members: list[Client] = []

    def crowded() -> None:
        while not over.is_set():
            members.extend(crowd(fleet.url, load_clients, 3.0, expected))

    load = threading.Thread(target=crowded)
    load.start()
    try:
        with httpx.Client(base_url=fleet.url, timeout=HANG_S) as http:
            for question in ASKED * times:
                reply = http.post("/v1/chat/completions", json=question.body("asker", stream=False))
                if reply.status_code != 200:
                    report.trouble.append(f"{name}: {reply.status_code} {reply.text[:100]}")
                    continue
                report.answers[name] += 1
                judge(report, name, question, said(reply.json()["choices"][0]), expected)
    finally:
        over.set()
        load.join()
    for member in members:
        report.others += member.seen.answers
        report.wrong += ["of the crowd"] * member.seen.wrong
        report.trouble += [*member.seen.failures] + ["hang"] * member.seen.hangs


def judge(report: Report, name: str, question: Question, got: list[Any], expected: dict[Question, list[Any]]) -> None:
    if got != expected[question]:
        at = next((n for n, pair in enumerate(zip(got, expected[question], strict=False)) if pair[0] != pair[1]), None)
        report.wrong.append(f"{name}: seed {question.seed}, differs at token {at}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--clients", type=int, default=4, help="that make the load (default: 4)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="append the figures to this CSV file (its name names the machine)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        store = repack(DEMO, Path(name) / "demo", say=lambda text: None).folder
        report = drill(store, Path(name), list(ENGINES), args.times, args.clients, args.device)
    print(report, *report.wrong[:10], *report.trouble[:10], sep="\n")
    if args.out:
        note = f"demo model on {args.device}, tokens and log probabilities to the bit; {report}"
        figures.append(args.out, "determinism.wrong", len(report.wrong), "answers", note)
    return 1 if report.wrong or report.trouble else 0


if __name__ == "__main__":
    sys.exit(main())
