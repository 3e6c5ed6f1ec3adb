"""The model's own `reading`: the bits of `forward`, however a prompt is cut, shared, sliced and interleaved."""

from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry
from recorded_experts import RecordedExperts
from scripted_network import Asked
from tiny import equal
from torch import Tensor
from toy_engine import INFO

from services.engine.errors import OutOfPagesError
from services.engine.experts.store import Store
from services.engine.experts.trace import Header, Recorder, read_trace
from services.engine.metrics import Metrics
from services.engine.model import Model, Segment
from services.engine.pages import PagePool
from services.engine.request import Request
from services.engine.scheduler import Scheduler
from services.engine.snapshots.hot import HotStates
from services.engine.snapshots.payload import PayloadFormat
from services.engine.state import State

random = torch.Generator().manual_seed(5)
PROMPTS = [tuple(torch.randint(20, 4096, (count,), generator=random).tolist()) for count in (41, 23, 6)]
ANSWER = 6


@pytest.fixture(scope="module")
def experts(demo_store: Store) -> Iterator[RecordedExperts]:
    experts = RecordedExperts(demo_store, slots=10_000)
    yield experts
    experts.close()


@pytest.fixture(scope="module")
def model(demo_store: Store, experts: RecordedExperts) -> Model:
    return Model(demo_store.dense(), demo_store.config, experts)


class Witness:
    """The model, and the logits after every last id that it was given, by all ids up to there."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.logits: dict[tuple[int, ...], Tensor] = {}
        self.shared = self.between = 0  # readings of several prompts; tokens that came in between
        self.at_layer: Callable[[list[Segment]], None] = lambda segments: None
        self._reads = False

    def forward(self, segments: list[Segment], give_way: Callable[[], bool] | None = None) -> Tensor:
        self.between += self._reads
        return self._keep(segments, self.model.forward(segments, give_way))

    def reading(self, segments: list[Segment]) -> Generator[float, None, Tensor]:
        self._reads = True
        self.shared += len(segments) > 1
        running = self.model.reading(segments)
        while True:
            try:
                share = next(running)
            except StopIteration as end:
                self._reads = False
                return self._keep(segments, end.value)
            yield share
            self.at_layer(segments)

    def _keep(self, segments: list[Segment], logits: Tensor) -> Tensor:
        self.logits |= {tuple(segment.state.ids): row for segment, row in zip(segments, logits, strict=True)}
        return logits


def run(network: Witness, experts: RecordedExperts, chunk_tokens: int, slice_s: float, prompts: int) -> list[Asked]:
    """The first of the prompts, the third of them some steps behind the others, to the ends of their answers."""
    config = network.model.config
    pool = PagePool(config, 8)
    hot = HotStates(PayloadFormat(config, "m", "a"), "a", 1 << 24)
    metrics = Metrics(INFO, experts, CollectorRegistry())
    scheduler = Scheduler(network, pool, hot, metrics, 4, chunk_tokens, slice_s=slice_s)
    asked = []
    for number, ids in enumerate(PROMPTS[:prompts]):
        asked.append(Asked(scheduler, Request("r", ids, ANSWER, snapshot_at=(3,), user=str(number))))
        if number == 1:
            scheduler.step(), scheduler.step()
    while scheduler.runnable:
        scheduler.step()
        scheduler.check()
    assert pool.free == pool.total
    return asked


@pytest.fixture(scope="module")
def expected(model: Model) -> dict[tuple[int, ...], Tensor]:
    """The logits after every id of prompts and greedy answers, each read at once and then fed one by one."""
    found = {}
    for prompt in PROMPTS:
        ids, state = list(prompt), model.new_state(64)
        rows = model.forward_all([Segment(state, ids)])
        for _ in range(ANSWER):
            found |= {tuple(ids[: len(ids) - len(rows) + 1 + place]): row for place, row in enumerate(rows)}
            ids.append(int(rows[-1].argmax()))
            rows = model.forward([Segment(state, ids[-1:])])
        state.release()
    return found


@pytest.mark.parametrize("slice_s", [0.0, 60.0])
@pytest.mark.parametrize("chunk_tokens", [5, 16, 500])
def test_the_bits_are_the_same_however_it_is_read(
    model: Model, experts: RecordedExperts, expected: dict[tuple[int, ...], Tensor], chunk_tokens: int, slice_s: float
) -> None:
    network = Witness(model)
    asked = run(network, experts, chunk_tokens, slice_s, 3)
    for one in asked:
        assert len(one.tokens) == ANSWER
    assert len(network.logits) > 3 * ANSWER
    assert [ids for ids, row in network.logits.items() if not torch.equal(row, expected[ids])] == []
    assert network.shared, "prompts were read together"
    assert bool(network.between) == (slice_s == 0.0), "answers went on between two layers"


def test_a_state_that_is_touched_between_two_layers_would_show(
    model: Model, experts: RecordedExperts, expected: dict[tuple[int, ...], Tensor]
) -> None:
    """The control of the test above."""
    network = Witness(model)

    def touches(segments: list[Segment]) -> None:
        segments[0].state.ssm[-1] += 1.0

    network.at_layer = touches
    run(network, experts, 16, 0.0, 1)
    assert [ids for ids, row in network.logits.items() if ids in expected and not torch.equal(row, expected[ids])]


def test_it_stops_before_every_layer_and_says_how_far_it_is(model: Model) -> None:
    state, layers = model.new_state(64), len(model.config.layers)
    running, told = model.reading([Segment(state, PROMPTS[0])]), []
    while True:
        try:
            told.append(next(running))
        except StopIteration as end:
            logits = end.value
            break
    assert told == [layer / layers for layer in range(layers)]
    again = model.new_state(64)
    assert torch.equal(logits, model.forward([Segment(again, PROMPTS[0])]))
    assert equal(state, again)
    assert logits.shape == (1, model.config.vocab_size)


def test_closed_early_it_leaves_its_states_spoiled_and_others_alone(model: Model) -> None:
    pool = PagePool(model.config, 8)
    one, two, other, apart = (State(model.config, pool) for _ in range(4))
    running = model.reading([Segment(one, PROMPTS[0]), Segment(two, PROMPTS[1])])
    next(running), next(running)
    between = model.forward([Segment(other, PROMPTS[2])])
    running.close()
    assert (one.spoiled, two.spoiled, other.spoiled) == (True, True, False)
    assert torch.equal(between, model.forward([Segment(apart, PROMPTS[2])]))
    for state in (one, two, other, apart):
        state.release()
    assert pool.free == pool.total


def test_without_room_nothing_changes(model: Model) -> None:
    state = State(model.config, PagePool(model.config, 1))
    with pytest.raises(OutOfPagesError):
        next(model.reading([Segment(state, PROMPTS[0] * 4)]))
    assert not state.spoiled
    assert not state.pages


def test_a_trace_has_whole_calls(demo_store: Store, experts: RecordedExperts, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "trace", Header.of(demo_store, "demo"), 1 << 20)
    model = Model(demo_store.dense(), demo_store.config, experts, recorder)
    with pytest.raises(StopIteration):
        next(model.reading([Segment(model.new_state(64), PROMPTS[1])]))
    recorder.close()
    rows = read_trace(tmp_path / "trace").rows
    assert len(rows[rows["ahead"] == 0]) == len(PROMPTS[1]) * len(model.config.moe_layers)
    assert set(rows["call"]) == {0}
