"""Dialogs while the snapshot store is full, slow, full of rubbish, or has payloads of an older version: each turn held
against a fleet that has no store. `python tests/drills/store_troubles.py --out FILE` runs the long one.

The engine keeps no state of its own, so that every turn asks the store.
"""

import argparse
import contextlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
import xxhash
from fleet import Fleet
from kill_drill import DEMO
from twenty_turns import settle

from services.tools import figures
from services.tools.repack import repack

PAUSE_MS = 2000
STORE_MB = 64


@dataclass
class Report:
    turns: int = 0
    wrong: int = 0
    cached_tokens: int = 0
    slowest_s: float = 0.0

    @property
    def found(self) -> bool:
        return self.cached_tokens > 0


def fill_up(client: Any) -> None:
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", 1)


def spoil(client: Any) -> None:
    for name in client.keys("*"):
        client.delete(name)
        client.set(name, b"rubbish")


def flip(client: Any) -> None:
    """Sizes, types and numbers of chunks stay as they were: only the bytes are wrong."""
    for name in client.keys("*:state:*"):
        data = bytearray(client.hget(name, "0"))
        data[len(data) // 2] ^= 1
        client.hset(name, "0", bytes(data))


def age(client: Any) -> None:
    """Payloads of the format before this one, as sound as they were then."""
    for name in client.keys("*:state:*"):
        data = bytearray(b"".join(client.hget(name, str(n)) for n in range(client.hlen(name) - 1)))
        data[8:12] = (1).to_bytes(4, "little")
        data[-8:] = xxhash.xxh3_64_intdigest(bytes(data[:-8])).to_bytes(8, "little")
        for start in range(0, len(data), 1 << 20):
            client.hset(name, str(start >> 20), bytes(data[start : start + (1 << 20)]))


def nothing(client: Any) -> None:
    """The control: with a sound store the dialog is found again."""


TROUBLES: dict[str, Callable[[Any], None]] = {
    "sound": nothing,
    "full": fill_up,
    "rubbish": spoil,
    "changed": flip,
    "old": age,
    "slow": nothing,
}
FOUND = {"sound", "full"}  # what a full store has, it has


@contextlib.contextmanager
def slow(url: str) -> Iterator[None]:
    """Every command waits for up to two seconds: as soon as a pause ends, the next one begins."""
    over = threading.Event()

    def pause() -> None:
        with redis.Redis.from_url(url) as client:
            while not over.is_set():
                client.client_pause(PAUSE_MS)

    thread = threading.Thread(target=pause)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def open_fleet(store: Path, folder: Path) -> Iterator[Fleet]:
    # What is slow only because a machine is busy is no trouble; what is paused is slower than this.
    settings = {"ENGINE_WORKERS": "1", "ENGINE_HOT_STATES_GB": "0", "API_REDIS_TIMEOUT_MS": str(PAUSE_MS // 2)}
    with Fleet(store, folder, engines=1, redis_mb=STORE_MB, **settings) as fleet:
        yield fleet


def run(fleet: Fleet, reference: Fleet, name: str, turns: int) -> Report:
    """One dialog; the trouble begins with the first answer, comes again after each, and is gone in the end."""
    report = Report()
    dialog: list[Any] = [{"role": "system", "content": f"The store is {name}."}]
    dialog.append({"role": "user", "content": "What is the capital of France?"})
    with redis.Redis.from_url(fleet.redis_url) as client:
        with slow(fleet.redis_url) if name == "slow" else contextlib.nullcontext():
            for turn in range(turns):
                begin = time.monotonic()
                answer = fleet.chat(dialog)
                report.slowest_s = max(report.slowest_s, time.monotonic() - begin)
                expected = reference.chat(dialog)["choices"][0]["message"]
                report.turns += 1
                report.wrong += answer["choices"][0]["message"]["content"] != expected["content"]
                report.cached_tokens += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                dialog += [expected, {"role": "user", "content": f"What is {turn} + 4?"}]
                settle(fleet)
                TROUBLES[name](client)
        client.flushall()
        client.config_set("maxmemory", STORE_MB << 20)
        client.config_set("maxmemory-policy", "allkeys-lru")
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=10, help="of each dialog (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="append the figures to this CSV file (its name names the machine)")
    args = parser.parse_args()
    bad = False
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        store = repack(DEMO, folder / "demo", say=lambda text: None).folder
        for name in ("reference", "fleet"):
            (folder / name).mkdir()
        bare = {"ENGINE_HOT_STATES_GB": "0", "API_READ_AHEAD": "false"}
        with (
            Fleet(store, folder / "reference", engines=1, redis_mb=0, ENGINE_WORKERS="1", **bare) as reference,
            open_fleet(store, folder / "fleet") as fleet,
        ):
            for name in TROUBLES:
                report = run(fleet, reference, name, args.turns)
                bad |= report.wrong > 0 or report.found != (name in FOUND)
                note = (
                    f"demo model, store {name}; {report.turns} turns, {report.cached_tokens} prompt tokens came from it"
                )
                print(f"{report.wrong} wrong answers: {note}; slowest {report.slowest_s:.1f} s", flush=True)
                if args.out:
                    figures.append(args.out, f"snapshot.store_{name}_wrong", report.wrong, "answers", note)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
