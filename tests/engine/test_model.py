"""The model's bits: the same for any cut of a prompt, any batch mates, any thread count, and after a restore."""

import importlib
import itertools
from collections.abc import Iterator

import pytest
import torch
from recorded_experts import RecordedExperts
from tiny import dump, load
from torch import Tensor

from kernels.linear import reference as linear
from services.engine.errors import OutOfPagesError
from services.engine.experts.store import Store
from services.engine.experts.streamer import PythonExperts
from services.engine.model import Model, Segment
from services.engine.pages import PagePool
from services.engine.snapshots.payload import PayloadFormat
from services.engine.state import State

IDS = torch.randint(20, 4096, (70,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def experts(demo_store: Store) -> Iterator[RecordedExperts]:
    experts = RecordedExperts(demo_store, slots=10_000)
    yield experts
    experts.check()
    experts.close()


@pytest.fixture(scope="module")
def model(demo_store: Store, experts: RecordedExperts) -> Model:
    return Model(demo_store.dense(), demo_store.config, experts)


@pytest.fixture
def pool(model: Model) -> Iterator[PagePool]:
    pool = PagePool(model.config, 8)
    pool.keys.fill_(float("nan"))
    pool.values.fill_(float("nan"))
    return pool


@pytest.fixture(scope="module")
def whole(model: Model) -> Tensor:
    """Logits after every id of IDS, read at once, on one thread."""
    return model.forward_all([Segment(State(model.config, PagePool(model.config, 2)), IDS)])


@pytest.mark.parametrize("cut", [[1] * 70, [69, 1], [1, 69], [3, 40, 27], [64, 6]], ids=lambda cut: str(cut[:3]))
def test_any_cut_of_a_prompt_gives_the_same_bits(model: Model, pool: PagePool, whole: Tensor, cut: list[int]) -> None:
    state, done = State(model.config, pool), 0
    for count in cut:
        logits = model.forward([Segment(state, IDS[done : done + count])])
        done += count
        assert torch.equal(logits[0], whole[done - 1])
    assert state.ids == IDS


def test_batch_mates_do_not_show(model: Model, pool: PagePool, whole: Tensor) -> None:
    one, two, three = (State(model.config, pool) for _ in range(3))
    model.forward([Segment(one, IDS[:20]), Segment(two, IDS[:7])])
    logits = model.forward([Segment(three, IDS[30:40]), Segment(two, IDS[7:8]), Segment(one, IDS[20:50])])
    assert torch.equal(logits[1], whole[7])
    assert torch.equal(logits[2], whole[49])
    logits = model.forward([Segment(state, [IDS[state.tokens]]) for state in (one, two)])
    assert torch.equal(logits, whole[[50, 8]])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_and_repeats_do_not_show(model: Model, pool: PagePool, whole: Tensor, threads: int) -> None:
    torch.set_num_threads(threads)
    logits = model.forward_all([Segment(State(model.config, pool), IDS)])
    torch.set_num_threads(1)
    assert torch.equal(logits, whole)


def without_small_kernels(patch: pytest.MonkeyPatch) -> None:
    for name in ("norm", "router", "mamba", "attention"):
        patch.setattr(importlib.import_module(f"kernels.{name}.cpu"), "bind", lambda *_: None)


def test_without_a_compiler_the_bits_are_the_same(demo_store: Store, whole: Tensor, monkeypatch) -> None:
    without_small_kernels(monkeypatch)
    monkeypatch.setattr("services.engine.model.linear", linear.linear)
    experts = PythonExperts(demo_store, slots=45)
    model = Model(demo_store.dense(), demo_store.config, experts)
    state = State(model.config, PagePool(model.config, 1))
    logits = [model.forward([Segment(state, ids)])[0] for ids in (IDS[:3], IDS[3:4])]
    assert torch.equal(torch.stack(logits), whole[2:4])


def test_a_small_cache_and_the_references_do_not_show(demo_store: Store, whole: Tensor, monkeypatch) -> None:
    """A tenth of the experts in RAM, and every small kernel as its definition in torch."""
    without_small_kernels(monkeypatch)
    experts = RecordedExperts(demo_store, slots=45)
    model = Model(demo_store.dense(), demo_store.config, experts)
    state = State(model.config, PagePool(model.config, 2))
    logits = torch.cat([model.forward([Segment(state, IDS[:50])]), model.forward([Segment(state, IDS[50:])])])
    assert torch.equal(logits, whole[[49, 69]])
    assert experts.counters().evictions > 0
    experts.check()
    experts.close()


def test_another_prompt_does_show(model: Model, pool: PagePool, whole: Tensor) -> None:
    logits = model.forward([Segment(State(model.config, pool), [IDS[0] + 1, *IDS[1:]])])
    assert not torch.equal(logits[0], whole[-1])


def test_a_copy_goes_on_with_the_same_bits(model: Model, pool: PagePool, whole: Tensor) -> None:
    state = State(model.config, pool)
    model.forward([Segment(state, IDS[:30])])
    copy = state.clone()
    model.forward([Segment(state, IDS[5:25])])
    assert torch.equal(model.forward([Segment(copy, IDS[30:])])[0], whole[-1])
    pool.check([state.pages, copy.pages])


def test_a_restored_state_goes_on_with_the_same_bits(model: Model, pool: PagePool, whole: Tensor) -> None:
    form, state = PayloadFormat(model.config, "m", "a"), State(model.config, pool)
    model.forward([Segment(state, IDS[:66])])
    restored = load(form, *dump(form, state), PagePool(model.config, 3))
    assert torch.equal(model.forward([Segment(restored, IDS[66:])])[0], whole[-1])
    assert torch.equal(model.forward([Segment(state, IDS[66:])])[0], whole[-1])
    assert dump(form, state) == dump(form, restored)


def test_a_state_that_lost_a_bit_shows(model: Model, pool: PagePool, whole: Tensor) -> None:
    """Else the equalities above could hold for states that nothing reads."""
    for name, layer in itertools.product(("conv", "ssm", "keys", "values"), (0, -1)):
        state = State(model.config, pool)
        model.forward([Segment(state, IDS[:69])])
        tensor = getattr(state, name)[layer] if name in ("conv", "ssm") else getattr(pool, name)[layer, state.pages[0]]
        tensor[0, 0] += 1.0
        assert not torch.equal(model.forward([Segment(state, IDS[69:])])[0], whole[-1]), name
        state.release()


def test_without_pages_nothing_is_touched(model: Model, pool: PagePool, whole: Tensor) -> None:
    one, two = State(model.config, pool), State(model.config, pool)
    model.forward([Segment(one, IDS[:60])])
    with pytest.raises(OutOfPagesError):
        model.forward([Segment(one, IDS[60:69]), Segment(two, IDS * 7)])
    assert (one.tokens, two.tokens, pool.free) == (60, 0, 7)
    assert torch.equal(model.forward([Segment(one, IDS[60:])])[0], whole[-1])


def test_a_step_that_fails_spoils_its_states(
    model: Model, experts: RecordedExperts, pool: PagePool, monkeypatch
) -> None:
    one, other = State(model.config, pool), State(model.config, pool)

    def fail(layer: int, *_: object) -> Tensor:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(experts, "step", fail)
        with pytest.raises(OSError, match="gone"):
            model.forward([Segment(one, IDS[:5])])
    assert one.spoiled
    assert not other.spoiled
    with pytest.raises(AssertionError):
        model.forward([Segment(one, IDS[:5])])
    one.release()
    assert pool.free == pool.total
    model.forward([Segment(other, IDS[:5])])


def test_misuse_is_our_own_bug(model: Model, pool: PagePool) -> None:
    state = State(model.config, pool)
    for segments in ([], [Segment(state, [])], [Segment(state, [5]), Segment(state, [6])]):
        with pytest.raises(AssertionError):
            model.forward(segments)


def test_the_next_routers_guess_is_often_right(model: Model, experts: RecordedExperts, pool: PagePool) -> None:
    config = model.config
    state, right, asked, chance = State(config, pool), 0, 0, config.experts_per_token / config.experts
    logits = model.forward([Segment(state, IDS[:4])])
    for _ in range(24):
        experts.asked.clear()
        logits = model.forward([Segment(state, [int(logits[0].argmax())])])
        assert [layer for layer, _ in experts.asked] == list(range(7))
        for layer, ids in experts.asked[1:]:
            assert len(experts.guesses[layer]) == 4  # of six choices the first two thirds are worth reading ahead
            right += len(set(experts.guesses[layer]) & set(ids[0].tolist()))
            asked += 4
    assert right / asked > 0.75 > 4 * chance


def test_a_guess_for_many_tokens_names_each_expert_once(model: Model, experts: RecordedExperts, pool: PagePool) -> None:
    model.forward([Segment(State(model.config, pool), IDS[:20])])
    for layer in range(1, 7):
        assert len(set(experts.guesses[layer])) == len(experts.guesses[layer]) > 6
