"""`thimble bench speculation STORE`: answers with and without drafts, on the processor, in one run.

Every question is answered without drafts and with each kind of them; the words must be the same, or it stops. Who
answers finds loaded what the answer before has read: each way begins as often as the others, behind one that does not
count.
Sources that know the answer, and say it in a given share of cases, show the speed for any share of right
drafts, and from which share on drafts pay. Two more ways are there to decide by: the model's own block with nothing of
the prompt in its memory; and, where ids are drawn, its likeliest id instead of the one that the request would draw.
Owns the measurement; the questions are made up here.
"""

import argparse
import os
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TypeVar

from prometheus_client import CollectorRegistry

from services.api.model_folder import load_model_folder
from services.engine.config import EngineConfig
from services.engine.drafts import Copying, Source
from services.engine.experts.streamer import Experts
from services.engine.load import load
from services.engine.model import Model
from services.engine.mtp import DraftHead
from services.engine.request import Event, Request, Token
from services.engine.scheduler import Scheduler
from services.engine.sequence import Sequence
from services.engine.speculation import Speculation
from services.tools import figures
from services.tools.amounts import count, nothing_or_more, whole
from services.tools.told_drafts import DraftError, Told

FORMS = (
    "What is {}?",
    "Tell me a short story about {}.",
    "Write a poem about {}.",
    "Explain {} to a child.",
    "Say this again, word for word: all I know about {} I have read in a book about {}.",
)
TOPICS = (
    *(
        "a lighthouse",
        "the sea",
        "a red bicycle",
        "snow",
        "the moon",
        "a clock",
        "bread",
        "a river",
        "the wind",
        "Rome",
    ),
    *("a garden", "an old ship", "the stars", "a grey cat", "a railway", "honey", "a mountain", "glass", "a letter"),
    "the spring",
)
Way = TypeVar("Way")
TOLD, TOP_P = "told", 0.95
PLAIN, OWN, FORGETFUL, LIKELIEST = "without", "mtp", "mtp, nothing of the prompt", "mtp, the likeliest"


@dataclass
class Sums:
    """Of one way to answer, behind the first tokens."""

    seconds: float = 0.0
    tokens: int = 0
    expert_bytes: int = 0
    drafted: int = 0
    accepted: int = 0
    answers: list[list[int]] = field(default_factory=list)

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def token_bytes(self) -> float:
        return self.expert_bytes / self.tokens

    @property
    def right(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


class Likeliest:
    """The block's drafts, whatever the request draws."""

    kind, costly = "mtp", True

    def __init__(self, head: DraftHead) -> None:
        self._head = head

    def draft(self, sequences: Seq[Sequence]) -> list[int | None]:
        (sequence,) = sequences
        assert sequence.state is not None
        return [int(self._head.logits([sequence.state], [sequence.last_id])[0].argmax())]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", type=Path, help="of a model with a tokenizer")
    parser.add_argument("--questions", type=whole, default=20, help=f"of {len(FORMS) * len(TOPICS)} (default: 20)")
    parser.add_argument("--tokens", type=whole, default=96, help="longest answer (default: %(default)s)")
    parser.add_argument(
        "--temperature", type=nothing_or_more, default=0.0, help="above 0, ids are drawn (default: greedy)"
    )
    parser.add_argument(
        "--right", type=nothing_or_more, nargs="*", default=[0.0, 0.6, 0.75, 0.85, 0.9, 1.0], metavar="SHARE"
    )
    parser.add_argument(
        "--slots", type=count, default=0, help="experts with a place in RAM (default: as the engine does)"
    )
    parser.add_argument("--out", type=Path, help="append the figures to this CSV file (its name names the machine)")


def run(args: argparse.Namespace) -> int:
    words = load_model_folder(args.store)
    asked = [form.replace("{}", topic) for topic, form in product(TOPICS, FORMS)][: args.questions]
    config = EngineConfig(
        store=args.store, device="cpu", warm_dir="-", hot_states_gb=0.01, speculation="on", expert_slots=args.slots
    )
    parts = load(config, CollectorRegistry(), lambda text: None)
    try:
        rig = Rig(parts.scheduler, parts.experts)
        ends = frozenset(t.id for t in words.tokenizer.added.values() if t.literal in words.template.turn_tokens)
        sums: dict[str, Sums] = {PLAIN: Sums()}
        for number, question in enumerate(asked):
            messages = [{"role": "user", "content": question}]
            prompt = words.tokenizer.encode(words.template.prompt(messages, options={"enable_thinking": False}).text)
            request = Request("bench", tuple(prompt), args.tokens, args.temperature, TOP_P, stop_ids=ends)
            expected = rig.answer(request, [], Sums())  # told to the ways, and not counted
            for name, sources in in_turn(list(rig.ways(args.right, expected).items()), number):
                found = rig.answer(request, sources, sums.setdefault(name, Sums()), name == FORGETFUL)
                if found != expected:
                    raise DraftError(f"{question!r} is answered differently with drafts: {name}")
    finally:
        parts.experts.close()
    for name, one in sums.items():
        print(
            f"{name:<28}{one.tok_s:8.2f} tok/s{one.tok_s / sums[PLAIN].tok_s:7.3f} times{100 * one.right:7.1f} % "
            f"of {one.drafted} drafts right{one.token_bytes / 1e6:9.3f} MB of experts a token"
        )
    if args.out:
        how = f"drawn at {args.temperature:g}" if args.temperature else "greedy"
        record(args.out, f"{args.store.resolve().name} on the CPU, {how}", sums)
    return 0


def in_turn(ways: Seq[Way], number: int) -> list[Way]:
    """Another one first for each number."""
    first = number % len(ways)
    return [*ways[first:], *ways[:first]]


def record(path: Path, what: str, sums: dict[str, Sums]) -> None:
    plain, answers = sums[PLAIN], len(sums[PLAIN].answers)
    load_ = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    for name, found in sums.items():
        note = f"{what}, {answers} answers, the same words; {name}; {100 * found.right:.1f} % right; {load_}"
        if found is not plain:
            figures.append(path, "mtp.gain", found.tok_s / plain.tok_s, "ratio", note)
        if found.drafted and not name.startswith(TOLD):
            figures.append(path, "mtp.demo_acceptance", found.right, "ratio", f"{found.drafted} drafts; {note}")
        figures.append(path, "mtp.token_bytes", found.token_bytes, "B", f"expert bytes a token that was said; {note}")


class Rig:
    """One engine's scheduler, in turns with and without drafts."""

    def __init__(self, scheduler: Scheduler, experts: Experts) -> None:
        assert isinstance(scheduler.model, Model)
        self.scheduler, self.model, self.experts = scheduler, scheduler.model, experts
        assert self.model.head is None or isinstance(self.model.head, DraftHead)
        self.head = self.model.head
        self.block_bytes = self.model.config.block.block_bytes
        self.sources = {source.kind: source for source in scheduler.speculation.sources}

    def ways(self, shares: Seq[float], answer: list[int]) -> dict[str, list[Source]]:
        """By name. None, the block's drafts alone, copies alone, and both."""
        found: dict[str, list[Source]] = {PLAIN: [], "ngram": [Copying()]}
        if self.head is not None:
            own = self.sources["mtp"]
            found |= {
                OWN: [own],
                "ngram and mtp": [Copying(), own],
                FORGETFUL: [own],
                LIKELIEST: [Likeliest(self.head)],
            }
        for share in shares:
            found[f"{TOLD}, {100 * share:g} % right"] = [Told(answer, share)]
        return found

    def answer(self, request: Request, sources: Seq[Source], sums: Sums, forgets: bool = False) -> list[int]:
        """Its ids; time and bytes are added to `sums`. `forgets`: the block begins with the answer."""
        scheduler = self.scheduler
        said: list[int] = []

        def sink(event: Event) -> None:
            if isinstance(event, Token):
                said.append(event.id)

        self.model.head = self.head if any(source.costly for source in sources) else None
        scheduler.speculation = speculation = Speculation(sources, self.model.settle, always=True)
        sequence = Sequence(request, sink)
        scheduler.add(sequence)
        while not said and not sequence.over:
            scheduler.step()
        if forgets and sequence.state is not None and sequence.state.drafting is not None:
            sequence.state.drafting.begin = sequence.state.tokens
        looked_up, begun, first = self.looked_up(), time.perf_counter(), len(said)
        while not sequence.over:
            scheduler.step()
        sums.seconds += time.perf_counter() - begun
        sums.tokens += len(said) - first
        sums.expert_bytes += (self.looked_up() - looked_up) * self.block_bytes
        sums.drafted += sum(judged.tried for judged in speculation.judgements.values())
        sums.accepted += sum(judged.accepted for judged in speculation.judgements.values())
        sums.answers.append(said)
        return said

    def looked_up(self) -> int:
        counters = self.experts.counters()
        return counters.hits + counters.misses
