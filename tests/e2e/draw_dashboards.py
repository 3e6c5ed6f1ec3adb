"""Pictures of the dashboards, from what a real Prometheus says of a real stack under a mixed load, into a folder:

    PYTHONPATH=.:tests/drills .venv/bin/python tests/e2e/draw_dashboards.py grafana/pictures

The stack is as `make up` starts it, with the demo model, but with room for fewer than half of the experts and for few
snapshots, and with a folder for states, so that disks have something to do. Each panel's queries are the dashboard's,
over the whole of the load; the drawing is dashboard_picture.py's, since Grafana is not needed for it. Ends with status
1 and their names if panels have no data.
"""

import argparse
import json
import math
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import openai
from dashboard_panels import Panel, panels_of
from dashboard_picture import Series, draw, key
from panels import DASHBOARDS
from running import Reply, Running, assistant, until, user
from scraped import Prometheus

from services.engine.experts.store import Store
from services.tools import demo

SLOTS_SHARE = 0.4  # of all experts
RATE_S = 12  # what $__rate_interval is for a scrape every second, so that a short load shows its course
STEP_S = 2
THINK_S = 1.5  # between an answer and a person's next question
QUESTIONS = (
    "Tell me a short story about a fox.",
    "What is 14 + 27?",
    "What does the fox do next?",
    "Say it in one sentence.",
    "Thanks! And what did you like best?",
)


def talk(stack: Running, plain: str, number: int, until_time: float) -> None:
    """A person with a dialog: later turns begin where the last one ended."""
    turns: list[dict[str, str]] = []
    while time.time() < until_time:
        if len(turns) > 8:
            turns = []
        turns.append(user(f"{QUESTIONS[len(turns) // 2]} I am number {number}."))
        reply = Reply(stack.client, plain, turns, max_tokens=48 + 16 * number, temperature=0.8, seed=number)
        turns.append(assistant(reply.content))
        time.sleep(THINK_S * (1 + number % 3))


def hand_in(stack: Running, plain: str, until_time: float) -> None:
    """A long text now and then: others' answers pause while it is read."""
    number = 0
    while time.time() < until_time:
        number += 1
        text = " ".join(f"In chapter {number} line {line} the fox met {line * number} geese." for line in range(60))
        Reply(stack.client, plain, [user(f"{text} What is this about?")], max_tokens=16)
        time.sleep(9)


def give_up(stack: Running, plain: str, until_time: float) -> None:
    """A client that hangs up in the middle, and one that asks for what there is not."""
    while time.time() < until_time:
        with stack.client.chat.completions.create(
            model=plain, messages=[user("Count to one hundred.")], stream=True, max_tokens=200
        ) as stream:
            for number, _ in enumerate(stream):
                if number == 8:
                    break
        try:
            Reply(stack.client, plain, [], max_tokens=1)
        except openai.BadRequestError:
            time.sleep(8)


def crowd(stack: Running, plain: str, until_time: float) -> None:
    """Eight at once in the middle of it, so that some wait."""
    time.sleep(max(0.0, (until_time - time.time()) / 2))
    run_all([partial(Reply, stack.client, plain, [user(f"What is {n} + {n}?")], max_tokens=40) for n in range(8)])


def run_all(calls: Sequence[Callable[[], object]]) -> None:
    """At once. Raises the first of what they raised."""
    raised: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in raised:
        raise error


def load(stack: Running, until_time: float) -> None:
    plain = stack.client.models.list().data[0].id
    people = [partial(talk, stack, plain, number, until_time) for number in range(3)]
    others = [partial(call, stack, plain, until_time) for call in (hand_in, give_up, crowd)]
    run_all([*people, *others])


def answers(prometheus: Prometheus, panels: Sequence[Panel], begin: float, end: float) -> dict[str, list[Series]]:
    """Each panel's series, named as Grafana would name them."""
    found: dict[str, list[Series]] = {}
    for panel in panels:
        for target in panel.targets:
            asked = target.asked(RATE_S, math.ceil(end - begin))
            for one in prometheus.series(asked, begin, end, STEP_S):
                points = [(float(at), float(value)) for at, value in one["values"]]
                found.setdefault(key(panel), []).append(Series(target.name(one["metric"]), points))
        if panel.kind == "bargauge":  # an instant query keeps its order, a range has none
            found.get(key(panel), []).sort(key=lambda series: -series.last)
    return found


def draw_all(out: Path, prometheus: Prometheus, begin: float, end: float) -> list[str]:
    """The panels without data."""
    empty = []
    note = f"drawn from Prometheus' data, not by Grafana · {datetime.fromtimestamp(end, UTC):%Y-%m-%d %H:%M} UTC"
    for dashboard in DASHBOARDS:
        panels = panels_of(dashboard)
        title = json.loads(dashboard.read_text())["title"]
        data: Mapping[str, list[Series]] = answers(prometheus, panels, begin, end)
        file = out / f"{dashboard.stem}.png"
        empty += [f"{title}: {panel}" for panel in draw(title, panels, data, file, note)]
        print(f"{file}: {len(panels)} panels, {file.stat().st_size / 1000:.0f} kB")
    return empty


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for one PNG a dashboard")
    parser.add_argument("--seconds", type=float, default=150.0, help="of load (default 150)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="thimble-dashboards-") as folder:
        store = Path(folder) / "store"
        demo.make(store)
        experts = sum(map(len, Store.open(store).blocks))
        environ = {
            "THIMBLE_ENGINE_STORE": str(store),
            "THIMBLE_ENGINE_EXPERT_SLOTS": str(int(SLOTS_SHARE * experts)),
            "THIMBLE_API_EMBEDDED_MEMORY_MB": "24",
            "THIMBLE_API_SNAPSHOT_DISK_DIR": str(Path(folder) / "states"),
            "THIMBLE_API_SNAPSHOT_DISK_GB": "0.2",
            "THIMBLE_API_SNAPSHOT_DISK_DAILY_GB": "0.5",
            "THIMBLE_API_SNAPSHOT_DISK_REST_S": "4",
        }
        stack = Running(Path(folder) / "run", **environ)
        try:
            stack.wait_until_ready()
            (Path(folder) / "prometheus").mkdir()
            prometheus = Prometheus(Path(folder) / "prometheus", stack)
            try:
                if not until(prometheus.is_up, 30):
                    raise SystemExit("Prometheus does not reach both services")
                begin = time.time()
                load(stack, begin + args.seconds)
                empty = draw_all(args.out, prometheus, begin + RATE_S, time.time())
            finally:
                prometheus.close()
        finally:
            stack.close()
    for name in empty:
        print(f"no data: {name}", file=sys.stderr)
    return 1 if empty else 0


if __name__ == "__main__":
    sys.exit(main())
