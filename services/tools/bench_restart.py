"""`thimble bench restart STORE`: how long after a restart the first reply is as quick as replies were before it.

The CPU engine with a part of the experts in RAM, the rest on an emulated drive. An engine answers some questions over
and over; how long each takes then is its steady time. It is closed and opened again, some seconds pass, and the
question whose turn it is is asked: the cache is where it was before, as far as it has been read back by then. As a
control, the same without knowing what was in RAM. Answers are compared: they must not differ.
"""

import argparse
import queue
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry

from kernels.experts.host.drives import EmulatedDrive
from services.api.model_folder import load_model_folder
from services.engine.config import EngineConfig
from services.engine.engine import Engine
from services.engine.experts.store import Store
from services.engine.experts.warm import NAME
from services.engine.load import load
from services.engine.request import Event, Failed, Finish, Request, Token
from services.tools import figures
from services.tools.amounts import amount, none_or_more, whole
from services.tools.record import DIALOGS

GOAL = 1.3  # times the steady time
LIMIT_S = 600.0  # of an answer


@dataclass(frozen=True)
class Reply:
    seconds: float
    tokens: tuple[int, ...]
    missing: int  # lookups that did not find their block in RAM


class Opened:
    """An engine, and how to ask it."""

    def __init__(self, engine: Engine, registry: CollectorRegistry) -> None:
        self.engine, self._registry = engine, registry

    def ask(self, ids: tuple[int, ...], tokens: int) -> Reply:
        """The answer's first `tokens` tokens, whatever they are."""
        events: queue.Queue[Event] = queue.Queue()
        missing, begun = self._missing(), time.perf_counter()
        handle = self.engine.submit(Request("restart", ids, tokens), events.put)
        found: list[int] = []
        while not isinstance(event := events.get(timeout=LIMIT_S), Finish):
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Token):
                found.append(event.id)
        seconds = time.perf_counter() - begun
        handle.cancel()
        return Reply(seconds, tuple(found), self._missing() - missing)

    def _missing(self) -> int:
        model, total = self.engine.info.model, 0.0
        for phase in ("prefill", "decode"):
            labels = {"model_name": model, "tier": "nvme", "phase": phase}
            total += self._registry.get_sample_value("thimble_expert_lookups_total", labels) or 0.0
        return int(total)


@contextmanager
def opened(store: Store, slots: int, warm_dir: Path, drive: EmulatedDrive) -> Iterator[Opened]:
    """No state is kept from one answer to the next, and no drafts are tried: when they are goes by the clock."""
    registry = CollectorRegistry()
    config = EngineConfig(
        store=store.folder,
        expert_slots=slots,
        readers=8,
        warm_dir=str(warm_dir),
        hot_states_gb=0.0,
        speculation="off",
    )
    parts = load(config, registry, say=lambda _: None, drives=[drive])
    engine = Engine(parts.info, parts.scheduler, parts.experts, parts.grammars, parts.sight)
    try:
        yield Opened(engine, registry)
    finally:
        engine.close()
    engine.ended.result()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", type=Path, help="folder that `thimble repack` wrote")
    parser.add_argument("--share", type=amount, default=0.75, help="of all experts in RAM (default 0.75)")
    parser.add_argument("--disk", type=amount, default=0.02, metavar="GB/S", help="emulated (default 0.02)")
    parser.add_argument(
        "--waits", type=none_or_more, default=[0, 0.5, 1, 2], metavar="S", help="after the restart (default 0,0.5,1,2)"
    )
    parser.add_argument("--tokens", type=whole, default=16, help="of an answer (default 16)")
    parser.add_argument("--rounds", type=whole, default=3, help="of which the medians are taken (default 3)")
    parser.add_argument("--out", type=Path, help="append the figures to this CSV file (its name names the machine)")


def run(args: argparse.Namespace) -> int:
    store = Store.open(args.store)
    blocks, block_bytes = sum(map(len, store.blocks)), store.layout.block_bytes
    slots = max(store.config.experts_per_token, int(args.share * blocks))
    drive = EmulatedDrive(np.fromfile(store.experts_path, np.uint8), gb_s=args.disk)
    asked = questions(store)
    waits = sorted(args.waits)
    whole_s = slots * block_bytes / args.disk / 1e9
    print(
        f"{slots} of {blocks} experts in RAM, {slots * block_bytes / 1e6:.1f} MB at {args.disk:g} GB/s: {whole_s:.2f} s"
    )
    with tempfile.TemporaryDirectory() as folder:
        warm, cold = Path(folder, "warm"), Path(folder, "cold")
        warm.mkdir()
        cold.mkdir()
        with opened(store, slots, warm, drive) as engine:
            steady = [[engine.ask(ids, args.tokens) for ids in asked] for _ in range(args.rounds + 1)][1:]
        known = (warm / NAME).read_bytes()
        usual = Reply(
            statistics.median(replies[0].seconds for replies in steady),
            steady[0][0].tokens,
            round(statistics.median(replies[0].missing for replies in steady)),
        )
        print(f"{'':<24}{'ms':>8}{'over steady':>13}{'missing':>9}")
        tell("steady", usual, usual)
        found = {}
        for wait_s in waits:
            replies = []
            for _ in range(args.rounds):
                (warm / NAME).write_bytes(known)
                replies.append(first_reply(store, slots, warm, drive, wait_s, asked[0], args.tokens))
            found[wait_s] = middle(replies, usual)
            tell(f"{wait_s:g} s after a restart", found[wait_s], usual)
        replies = []
        for _ in range(args.rounds):
            (cold / NAME).unlink(missing_ok=True)
            replies.append(first_reply(store, slots, cold, drive, waits[-1], asked[0], args.tokens))
        without = middle(replies, usual)
        tell(f"{waits[-1]:g} s, nothing known", without, usual)
    reached = [wait_s for wait_s, reply in found.items() if reply.seconds <= GOAL * usual.seconds]
    print(f"within {GOAL} times the steady time: " + (f"after {min(reached):g} s" if reached else "not in these"))
    if args.out:
        said = (
            f"CPU engine, {store.source.get('folder', 'model')}, {args.share:.2f} of the experts in RAM "
            f"({slots * block_bytes / 1e6:.0f} MB), emulated drive of {args.disk:g} GB/s, {args.tokens} tokens"
        )
        for wait_s, reply in found.items():
            note = f"{wait_s:g} s after a restart, {said}"
            figures.append(args.out, "restart.first_reply_over_steady", reply.seconds / usual.seconds, "ratio", note)
        note = f"{waits[-1]:g} s after a restart that knew nothing, {said}"
        figures.append(args.out, "restart.cold_over_steady", without.seconds / usual.seconds, "ratio", note)
        if reached:
            figures.append(args.out, "restart.seconds", min(reached), "s", f"until within {GOAL} of steady, {said}")
    return 0 if reached else 1


def first_reply(
    store: Store, slots: int, folder: Path, drive: EmulatedDrive, wait_s: float, ids: tuple[int, ...], tokens: int
) -> Reply:
    with opened(store, slots, folder, drive) as engine:
        time.sleep(wait_s)
        return engine.ask(ids, tokens)


def middle(replies: list[Reply], usual: Reply) -> Reply:
    """The medians. Raises RuntimeError if an answer is another than before the restart."""
    if any(reply.tokens != usual.tokens for reply in replies):
        raise RuntimeError("an answer after a restart differs from the same one before it")
    seconds = statistics.median(reply.seconds for reply in replies)
    return Reply(seconds, usual.tokens, round(statistics.median(reply.missing for reply in replies)))


def tell(what: str, reply: Reply, usual: Reply) -> None:
    print(f"{what:<24}{1e3 * reply.seconds:>8.0f}{reply.seconds / usual.seconds:>13.2f}{reply.missing:>9}", flush=True)


def questions(store: Store) -> list[tuple[int, ...]]:
    """First turns of dialogs, as the template writes them."""
    words = load_model_folder(store.folder)
    found = []
    for turn, *_ in DIALOGS:
        rendered = words.template.prompt([{"role": "user", "content": turn}], options={"enable_thinking": False})
        found.append(tuple(words.tokenizer.encode(rendered.text)))
    return found
