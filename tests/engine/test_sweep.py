"""A prompt read by a sweep, in Triton's interpreter: near the CPU engine, the same bits however it is cut or shared."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.experts.host.binding import Host
from kernels.workers.pool import Workers
from services.engine.experts.store import Store
from services.engine.experts.streamer import catalog, open_experts
from services.engine.gpu.expert_sweep import ExpertSweep
from services.engine.gpu.ledger import (
    RING_GROUPS,
    SWEEP_KERNEL_BYTES,
    sweep_bytes,
    sweep_room_bytes,
    sweep_scratch_bytes,
)
from services.engine.gpu.memory import DevicePool, DeviceState
from services.engine.gpu.model import chunks
from services.engine.gpu.room import Room
from services.engine.gpu.sweep import Sweep
from services.engine.gpu.weights import DeviceWeights
from services.engine.model import Model, Segment
from services.engine.model_config import LAYER_WORDS
from services.engine.vision.ids import FIRST
from services.tools.parity import divergence
from services.tools.synth import synthesise
from services.tools.synthetic_shapes import SHAPES, SMALL

CPU = torch.device("cpu")
VOCABULARY = 32  # the interpreter takes half a second for 64 logits
PROMPT = [1, 17, 30, 4, 9, 31, 25, 16, 10, 2, 20, 7, 7]
OTHER = [3, 28, 12, 22]


@dataclass
class Reader:
    """A sweep, for any number of states."""

    sweep: Sweep
    host: Host

    def state(self, tokens: int) -> DeviceState:
        state = DeviceState(self.sweep.weights.config, self.sweep.pool)
        state.reserve(tokens)
        return state

    def read(self, *segments: Segment) -> Tensor:
        self.sweep.experts.room.memory.fill_(0xFF)  # others have used it since
        running = self.sweep.run(segments, [segment.state for segment in segments])  # type: ignore[misc]
        while True:
            try:
                next(running)
            except StopIteration as end:
                logits: Tensor = end.value
                break
        for segment in segments:
            segment.state.ids.extend(segment.ids)
        return logits

    def alone(self, prompt: Sequence[int], *cuts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Logits after the prompt, read in pieces, and what the sequence then remembers."""
        state = self.state(len(prompt))
        for begin, end in zip((0, *cuts), (*cuts, len(prompt)), strict=True):
            logits = self.read(Segment(state, prompt[begin:end]))
        found = logits[0], state.conv.clone(), state.ssm.clone()
        state.release()
        return found


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Of one layer of each kind: the interpreter takes seconds for a layer."""
    layers = tuple(LAYER_WORDS[word] for word in "ME*")
    shape = replace(SMALL, layers=layers, vocab_size=VOCABULARY, experts=8, experts_per_token=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "tiny", shape)
        return synthesise(tmp_path_factory.mktemp("tiny"), "tiny")


def reader(store: Store, slots: int = 8, tokens: int = 32) -> Reader:
    host = Host(catalog(store), Workers(1), slots=slots, readers=2, poison=True)
    weights = DeviceWeights.load(store.dense(), store.config, CPU)
    pool = DevicePool(store.config, CPU, places=4, pages=16)
    room = Room(torch.full((sweep_room_bytes(store.config, tokens),), 0xFF, dtype=torch.uint8))
    experts = ExpertSweep(host, store.config.experts_per_token, tokens, room, sweep_scratch_bytes(store.config, tokens))
    sweep = Sweep(weights, pool, experts, tokens, context_tokens=256)
    # What no kernel writes must not be read: nothing of it is finite.
    for buffer in (sweep.x, sweep.latent, experts.h, experts.y):
        buffer.fill_(torch.nan)
    experts.places.fill_(0xFF)
    return Reader(sweep, host)


@pytest.fixture(scope="module")
def shared(store: Store) -> Iterator[Reader]:
    made = reader(store)
    yield made
    made.host.check()
    made.host.close()


@pytest.fixture(scope="module")
def whole(shared: Reader) -> tuple[Tensor, Tensor, Tensor]:
    return shared.alone(PROMPT)


def test_it_is_near_the_cpu_engine(whole: tuple[Tensor, Tensor, Tensor], store: Store) -> None:
    experts = open_experts(store, slots=8)
    model = Model(store.dense(), store.config, experts)
    theirs = model.forward([Segment(model.new_state(len(PROMPT)), PROMPT)])
    others = model.forward([Segment(model.new_state(len(PROMPT)), PROMPT[:-1])])
    experts.close()
    logits, _, _ = whole
    assert float(divergence(theirs, logits[None])) < 0.01
    assert not torch.equal(theirs[0], logits), "it has its own arithmetic"
    assert float(divergence(others, logits[None])) > 0.1, "other logits must show"


def test_a_cut_does_not_show(shared: Reader, whole: tuple[Tensor, Tensor, Tensor]) -> None:
    assert all(map(torch.equal, shared.alone(PROMPT, 1, 6), whole))


def test_the_smallest_ring_and_chunk_give_the_same_bits(store: Store, whole: tuple[Tensor, Tensor, Tensor]) -> None:
    """A group of the ring is one block then; parts of a chunk are 3 rows and 2."""
    least = reader(store, tokens=5)
    try:
        assert len(least.sweep.experts.places) == RING_GROUPS
        assert least.sweep.part == 3
        assert all(map(torch.equal, least.alone(PROMPT, 5, 10), whole))
        least.host.check()
    finally:
        least.host.close()


def test_a_sweep_takes_what_the_ledger_says(shared: Reader, store: Store) -> None:
    """Every tensor, but for what sorting takes for a while, and the kernels."""
    sweep, experts, top_k = shared.sweep, shared.sweep.experts, store.config.experts_per_token
    held = [*vars(sweep).values(), *sweep.norms, *vars(sweep.workspace).values(), *vars(experts).values()]
    memories = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held if isinstance(t, Tensor)}
    host_bytes = experts.counts.untyped_storage().nbytes()
    sorting = sweep.tokens * top_k * (3 * 8 + 4)
    said = sweep_bytes(store.config, sweep.tokens, context_tokens=256)
    assert said == sum(memories.values()) - host_bytes + sorting + SWEEP_KERNEL_BYTES


def test_prompts_that_share_a_sweep_are_as_if_alone(shared: Reader, whole: tuple[Tensor, Tensor, Tensor]) -> None:
    states = [shared.state(len(prompt)) for prompt in (OTHER, PROMPT)]
    logits = shared.read(*(Segment(state, prompt) for state, prompt in zip(states, (OTHER, PROMPT), strict=True)))
    assert torch.equal(logits[1], whole[0])
    assert torch.equal(logits[0], shared.alone(OTHER)[0])
    assert not torch.equal(logits[0], logits[1])
    for state in states:
        state.release()


def test_few_slots_give_the_same_bits(store: Store, whole: tuple[Tensor, Tensor, Tensor]) -> None:
    few = reader(store, slots=4)
    try:
        assert all(map(torch.equal, few.alone(PROMPT, 6), whole))
        assert few.host.counters()["misses"] > 8, "most blocks came from the disk"
        few.host.check()
    finally:
        few.host.close()


def test_blocks_that_come_before_the_router_has_named_them_change_nothing(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(
        SMALL, layers=(LAYER_WORDS["E"],) * 2, vocab_size=VOCABULARY, experts=8, experts_per_token=3, shared_width=32
    )
    monkeypatch.setitem(SHAPES, "tiny", shape)
    found, copied = [], []
    two_layers = synthesise(tmp_path_factory.mktemp("two"), "tiny")
    made = reader(two_layers, slots=16)
    try:
        made.alone(PROMPT)  # all that it names is in RAM from now on
        for lookups in (1e9, 0):
            monkeypatch.setattr("services.engine.gpu.expert_sweep.GUESSED_LOOKUPS", lookups)
            before, named = made.sweep.experts.copied_bytes, made.sweep.experts.named_blocks
            found.append(made.alone(PROMPT[:2])[0])
            named = made.sweep.experts.named_blocks - named
            copied.append((made.sweep.experts.copied_bytes - before) // two_layers.layout.block_bytes - named)
        route = made.sweep._route

        def failing(*words: Any) -> None:
            if made.sweep.experts.feed.guessed is not None:
                raise RuntimeError("given up")
            route(*words)

        with monkeypatch.context() as patch:
            patch.setattr(made.sweep, "_route", failing)
            with pytest.raises(RuntimeError, match="given up"):
                made.alone(PROMPT[:2])
        made.host.check()
        assert torch.equal(made.alone(PROMPT[:2])[0], found[0])
    finally:
        made.host.close()
    assert torch.equal(*found)
    assert copied[0] == 0, "each named block once"
    assert copied[1] > 0, "others came too, so that there was a guess"


def test_a_sweep_that_is_given_up_lets_go_of_everything(shared: Reader, whole: tuple[Tensor, Tensor, Tensor]) -> None:
    state = shared.state(len(PROMPT))
    running = shared.sweep.run([Segment(state, PROMPT)], [state])
    shares = [next(running) for _ in range(2)]
    running.close()
    state.release()
    assert shares == sorted(shares)
    assert 0 <= shares[0] < shares[-1] < 1
    shared.host.check()
    assert torch.equal(shared.alone(PROMPT)[0], whole[0])


def test_rows_of_pictures_stand_for_their_places(shared: Reader, whole: tuple[Tensor, Tensor, Tensor]) -> None:
    rows = shared.sweep.weights.embeddings.rows(torch.tensor(PROMPT))
    ids = [FIRST + place if 3 <= place < 9 else id_ for place, id_ in enumerate(PROMPT)]
    state = shared.state(len(ids))
    assert torch.equal(shared.read(Segment(state, ids, [rows[3:5], rows[5:9]]))[0], whole[0])
    state.release()
    state = shared.state(len(ids))
    shared.read(Segment(state, ids[:7], [rows[3:5], rows[5:7]]))
    assert torch.equal(shared.read(Segment(state, ids[7:], [rows[7:9]]))[0], whole[0]), "cut inside of a picture"
    state.release()


def test_chunks_of_several_prompts() -> None:
    marked = [10, FIRST, FIRST + 1, 11, FIRST + 2]
    pictures = [torch.ones(2, 4), 2 * torch.ones(1, 4)]
    segments = [
        Segment(None, marked, pictures, sweep=True),  # type: ignore[arg-type]
        Segment(None, [1, 2]),  # type: ignore[arg-type]
        Segment(None, list(range(7)), sweep=True),  # type: ignore[arg-type]
    ]
    made = chunks(segments, 4)
    assert [[(number, len(segment.ids)) for number, segment in chunk] for chunk in made] == [
        [(0, 4)],
        [(0, 1), (2, 3)],
        [(2, 4)],
    ]
    assert [sum(map(len, segment.rows)) for chunk in made for _, segment in chunk] == [2, 1, 0, 0]
    assert float(made[1][0][1].rows[0][0, 0]) == 2
