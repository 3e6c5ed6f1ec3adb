"""An engine around a toy network: real states, pages, payloads and scheduler; arithmetic that a test can redo by hand.

The toy's next id depends on every id fed so far, through the SSM state (their order) and through the KV pages (their
sum), so a state restored wrongly gives another answer.
"""

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from services.engine.engine import Engine, Handle
from services.engine.experts.streamer import Counters
from services.engine.grammar import Grammars
from services.engine.metrics import Metrics
from services.engine.model import GaveWay, Segment
from services.engine.model_config import ModelConfig
from services.engine.pages import PagePool
from services.engine.request import Event, Failed, Finish, Info, Request, Token
from services.engine.scheduler import Scheduler
from services.engine.snapshots.hot import HotStates
from services.engine.snapshots.payload import PayloadFormat

VOCAB = 50
PRIME = 65521
CONFIG = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    layers=("mamba", "moe", "attention"),
    norm_eps=1e-5,
    context_tokens=4096,
    attention_heads=2,
    kv_heads=1,
    head_dim=2,
    mamba_heads=2,
    mamba_head_dim=16,
    mamba_state=8,
    mamba_groups=1,
    conv_kernel=4,
    experts=8,
    experts_per_token=2,
    expert_width=16,
    latent_size=32,
    shared_width=16,
    routed_scale=1.0,
    norm_topk=True,
)
INFO = Info(
    model="toy",
    model_fingerprint="0123",
    arithmetic_fingerprint="4567",
    vocab_size=VOCAB,
    context_tokens=1024,
    max_sequences=2,
    queue_limit=3,
    vision=False,
    device="cpu",
    version="0",
)
NO_COUNTS = Counters(0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0, 8, 0)


class ToyExperts:
    """Counts as if each forward call had looked up two experts per token: one there, one read."""

    def __init__(self) -> None:
        self.now = NO_COUNTS
        self.closed = False

    def ran(self, tokens: int) -> None:
        now = self.now
        self.now = replace(
            now,
            hits=now.hits + tokens,
            misses=now.misses + tokens,
            demand_read_bytes=now.demand_read_bytes + 4096 * tokens,
            disk_wait_s=now.disk_wait_s + 0.25,
            slots_used=3,
        )

    def counters(self) -> Counters:
        return self.now

    def check(self) -> None:
        assert self.now.slots_used <= self.now.slots_total

    def close(self) -> None:
        self.closed = True

    prefetching = False

    def step(self, layer: int, ids: Tensor, weights: Tensor, x: Tensor) -> Tensor:
        raise NotImplementedError

    def prefetch(self, layer: int, ids: Tensor) -> None:
        raise NotImplementedError


def next_logits(order: int, total: int) -> Tensor:
    return torch.sin(torch.arange(1, VOCAB + 1) * float(order % 1009 + total % 97 + 1))


def feed(order: int, id_: int) -> int:
    return (order * 31 + id_ + 7) % PRIME


def answer(prompt: list[int], count: int) -> list[int]:
    """The toy's greedy answer, worked out without any engine."""
    ids = list(prompt)
    for _ in range(count):
        order = 0
        for id_ in ids:
            order = feed(order, id_)
        ids.append(int(next_logits(order, sum(ids)).argmax()))
    return ids[len(prompt) :]


class ToyModel:
    """`before` is called with each call's segments, on the engine's thread: a test may block or raise there."""

    def __init__(self, experts: ToyExperts) -> None:
        self.experts = experts
        self.calls: list[list[int]] = []  # ids per segment, one list a call
        self.before: Callable[[list[Segment]], None] = lambda segments: None
        self.poison: int | None = None  # an id whose logits are NaN

    def forward(self, segments: list[Segment], give_way: Callable[[], bool] | None = None) -> Tensor:
        self.calls.append([len(segment.ids) for segment in segments])
        self.before(segments)
        if give_way is not None and give_way():
            raise GaveWay
        return self._run(segments)

    def reading(self, segments: list[Segment]) -> Generator[float, None, Tensor]:
        self.calls.append([len(segment.ids) for segment in segments])
        self.before(segments)
        yield 0.0
        return self._run(segments)

    def _run(self, segments: list[Segment]) -> Tensor:
        rows = [self._feed(segment) for segment in segments]
        self.experts.ran(sum(len(segment.ids) for segment in segments))
        return torch.stack(rows)

    def _feed(self, segment: Segment) -> Tensor:
        state = segment.state
        assert state.pages_missing(len(segment.ids)) == 0, "pages are reserved before"
        for id_ in segment.ids:
            state.ssm[0, 0, 0, 0] = feed(int(state.ssm[0, 0, 0, 0]), id_)
            state.write_kv(0, torch.full((1, 1, 2), float(id_)), torch.full((1, 1, 2), float(id_)))
            state.ids.append(id_)
        total = int(state.read_kv(0, state.tokens)[0][:, 0, 0].sum())
        logits = next_logits(int(state.ssm[0, 0, 0, 0]), total)
        return logits * float("nan") if self.poison in segment.ids else logits


@dataclass
class Toy:
    engine: Engine
    model: ToyModel
    pool: PagePool
    hot: HotStates
    metrics: Metrics
    experts: ToyExperts
    scheduler: Scheduler

    def ask(self, request: Request) -> "Call":
        return Call(self.engine, request)

    def value(self, name: str, **labels: str) -> float:
        """A series as a scrape would see it."""
        found = self.metrics.registry.get_sample_value(f"thimble_{name}", {"model_name": "toy", **labels})
        assert found is not None, f"no series {name} {labels}"
        return found


@contextmanager
def toy(
    info: Info = INFO,
    config: ModelConfig = CONFIG,
    pages: int = 32,
    chunk_tokens: int = 8,
    slice_s: float = 60.0,  # a test that holds the model at a gate shall not cut its reading
    hot_bytes: int = 1 << 20,
    transit_bytes: int = 0,
    exchange_dir: Path | None = None,
    sound: bool = True,
    tokenizer_file: Path = Path("none"),
) -> Iterator[Toy]:
    experts = ToyExperts()
    model = ToyModel(experts)
    pool = PagePool(config, pages)
    payloads = PayloadFormat(config, info.model_fingerprint, info.arithmetic_fingerprint)
    hot = HotStates(payloads, info.arithmetic_fingerprint, hot_bytes, transit_bytes)
    metrics = Metrics(info, experts, CollectorRegistry())
    scheduler = Scheduler(model, pool, hot, metrics, info.max_sequences, chunk_tokens, slice_s=slice_s)
    grammars = Grammars(tokenizer_file, info.vocab_size, most_bytes=10_000, timeout_s=20.0)
    engine = Engine(info, scheduler, experts, grammars, exchange_dir=exchange_dir)
    try:
        yield Toy(engine, model, pool, hot, metrics, experts, scheduler)
    finally:
        model.before = lambda segments: None
        engine.close()
    assert experts.closed
    if not sound:
        return
    assert engine.ended.exception() is None
    assert pool.free == pool.total, "every page was given back"


@dataclass
class Call:
    """A submitted request and what has come of it."""

    engine: Engine
    request: Request
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._queue: queue.Queue[Event] = queue.Queue()
        self.handle: Handle = self.engine.submit(self.request, self._queue.put)

    def until(self, *kinds: type) -> Event:
        """Wait for the next event of these kinds."""
        while True:
            event = self._queue.get(timeout=60)
            self.events.append(event)
            if isinstance(event, kinds):
                return event
            assert not isinstance(event, Finish | Failed), f"ended with {event}"

    def finish(self) -> Finish:
        event = self.until(Finish, Failed)
        assert isinstance(event, Finish), event
        return event

    def fail(self) -> Failed:
        event = self.until(Finish, Failed)
        assert isinstance(event, Failed), event
        return event

    @property
    def tokens(self) -> list[int]:
        return [event.id for event in self.events if isinstance(event, Token)]


def soon(condition: Callable[[], bool]) -> bool:
    """Whether it becomes true within seconds."""
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


class Gate:
    """Holds back the model's calls: put it into `ToyModel.before`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._arrived = 0
        self._allowed = 0

    def __call__(self, segments: list[Segment]) -> None:
        with self._changed:
            self._arrived += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._arrived <= self._allowed, timeout=60)

    def allow(self, calls: int) -> None:
        """Let this many calls through, counted from the start."""
        with self._changed:
            self._allowed = calls
            self._changed.notify_all()

    def hold(self, call: int) -> None:
        """Let all calls before the `call`-th through, and wait until that one stands at the gate."""
        self.allow(call - 1)
        with self._changed:
            assert self._changed.wait_for(lambda: self._arrived == call, timeout=60)

    def open(self) -> None:
        self.allow(1 << 60)
