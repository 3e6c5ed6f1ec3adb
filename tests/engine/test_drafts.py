"""Drafts that a call tries leave no trace unless they are right, and then they are as if they had been fed."""

from collections.abc import Iterator

import pytest
import torch
from drafting_model import drafting_model, new_state, small_store
from tiny import dump, equal, load
from torch import Tensor

import kernels.nvfp4.reference as nvfp4
from services.engine.errors import OutOfPagesError
from services.engine.experts.store import Store
from services.engine.model import Model, Segment
from services.engine.mtp import DraftHead
from services.engine.pages import PagePool
from services.engine.snapshots.payload import PayloadFormat
from services.engine.state import State
from services.engine.vision.ids import FIRST
from services.tools.train_demo import network

IDS = torch.randint(3, 96, (90,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return small_store(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def both(store: Store) -> Iterator[tuple[Model, DraftHead]]:
    with drafting_model(store) as made:
        yield made


@pytest.fixture(scope="module")
def model(both: tuple[Model, DraftHead]) -> Model:
    return both[0]


@pytest.fixture(scope="module")
def head(both: tuple[Model, DraftHead]) -> DraftHead:
    return both[1]


@pytest.fixture(scope="module")
def whole(model: Model) -> Tensor:
    return model.forward_all([Segment(new_state(model), IDS)])


def read(model: Model, count: int) -> State:
    state = new_state(model)
    model.forward([Segment(state, IDS[:count])])
    return state


def same(one: State, other: State) -> bool:
    """Also in what the block remembers."""
    kept = [state.drafting for state in (one, other)]
    assert kept[0] is not None
    assert kept[1] is not None
    layer = len(one.config.attention_layers)
    keys = [s.read_kv(layer, s.tokens)[part][kept[0].begin :] for s in (one, other) for part in (0, 1)]
    return (
        equal(one, other)
        and kept[0].begin == kept[1].begin
        and torch.equal(kept[0].hidden, kept[1].hidden)
        and torch.equal(keys[0], keys[2])
        and torch.equal(keys[1], keys[3])
    )


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65])
@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_logits_are_those_of_feeding_and_the_state_is_that_of_what_was_accepted(
    model: Model, whole: Tensor, count: int, accepted: int
) -> None:
    state, before = read(model, count), read(model, count)
    right, wrong = IDS[count + 1 : count + 4], 1
    drafts = [*right[:accepted], *[wrong] * (3 - accepted)]
    logits = model.forward([Segment(state, [IDS[count]], drafts=drafts)])
    assert logits.shape == (4, 96)
    assert torch.equal(logits[: accepted + 1], whole[count : count + accepted + 1])
    model.forward([Segment(before, [IDS[count]])])
    assert equal(state, before), "not settled yet, it is as if nothing had been tried"
    model.settle(state, accepted)
    for number in range(accepted):
        model.forward([Segment(before, [right[number]])])
    assert state.ids == IDS[: count + 1 + accepted]
    assert same(state, before)
    following = [Segment(each, IDS[each.tokens : each.tokens + 2]) for each in (state, before)]
    assert torch.equal(*(model.forward([segment]) for segment in following))


def test_to_accept_what_is_wrong_is_noticed(model: Model, whole: Tensor) -> None:
    """The control of the test above."""
    state, before = read(model, 20), read(model, 21)
    model.forward([Segment(state, [IDS[20]], drafts=[1])])
    model.settle(state, 1)
    assert not equal(state, before)
    assert not torch.equal(model.forward([Segment(state, [IDS[21]])])[0], whole[21])


def test_sequences_with_and_without_drafts_share_a_call(model: Model, whole: Tensor) -> None:
    one, two, three = read(model, 10), read(model, 30), new_state(model)
    segments = [Segment(one, [IDS[10]], drafts=[IDS[11]]), Segment(two, [IDS[30]]), Segment(three, IDS[:5], drafts=[1])]
    logits = model.forward(segments)
    assert torch.equal(logits[:4], whole[[10, 11, 30, 4]])
    assert logits.shape == (5, 96)
    for state, accepted in ((one, 1), (three, 0)):
        model.settle(state, accepted)
    assert [state.tokens for state in (one, two, three)] == [12, 31, 5]
    assert torch.equal(model.forward([Segment(one, [IDS[12]]), Segment(three, [IDS[5]])]), whole[[12, 5]])


def test_drafts_need_pages_too(model: Model) -> None:
    state = new_state(model, pages=1)
    model.forward([Segment(state, IDS[:63])])
    with pytest.raises(OutOfPagesError):
        model.forward([Segment(state, [IDS[63]], drafts=[1])])
    assert not state.spoiled
    model.forward([Segment(state, [IDS[63]])])


def guesses(model: Model, head: DraftHead, cut: list[int]) -> list[Tensor]:
    """What the block says behind each part."""
    state, found = new_state(model), []
    for count in cut:
        model.forward([Segment(state, IDS[state.tokens : state.tokens + count])])
        found.append(head.logits([state], [IDS[state.tokens]])[0])
    return found


def test_the_block_computes_what_was_trained(model: Model, head: DraftHead, store: Store) -> None:
    """Against the network that trains it, whose attention sees all tokens at once."""
    trained = network.Draft(model.config)
    weights = store.draft()
    assert weights is not None
    values: dict[str, Tensor] = {}
    for name in trained.state_dict():
        full = f"mtp.{name}"
        if ".experts." in name and "shared" not in name:
            parts = [head_expert(store, expert)[name.endswith("down_proj")] for expert in range(8)]
            values[name] = torch.stack(parts)
        else:
            values[name] = weights.plain(full)
    trained.load_state_dict(values)
    seen: list[Tensor] = []
    follow = head.follow
    head.follow = lambda state, embedded, hidden: (seen.append(hidden), follow(state, embedded, hidden))[1]  # type: ignore
    model.forward([Segment(new_state(model), IDS[:40])])
    head.follow = follow  # type: ignore[method-assign]
    run = network.start(torch.zeros(1, 40, dtype=torch.long), None, False)
    with torch.no_grad():
        states = trained(seen[0][None], model.embeddings[IDS[1:41]][None], run)[0]
        expected = states @ model.lm_head.T
    found = guesses(model, head, [1, 5, 34])
    for place, ours in zip((0, 5, 39), found, strict=True):
        assert torch.allclose(ours, expected[place], rtol=2e-3, atol=2e-3 * float(expected.abs().max()))
        assert not torch.allclose(ours, expected[place - 1], rtol=2e-3, atol=2e-3 * float(expected.abs().max()))


def head_expert(store: Store, expert: int) -> tuple[Tensor, Tensor]:
    """Up and down as float32, from the store's block."""
    block = store.layers[-1][expert]
    up, up_scale, down, down_scale = (torch.from_numpy(p) for p in store.layout.unpack(store.read_block(2, expert)))
    return nvfp4.dequantise(up, up_scale, block.up_scale), nvfp4.dequantise(down, down_scale, block.down_scale)


def test_cuts_and_tried_drafts_do_not_show_in_the_blocks_guesses(model: Model, head: DraftHead) -> None:
    (expected,) = guesses(model, head, [70])
    for cut in ([1] * 70, [64, 6], [69, 1]):
        assert torch.equal(guesses(model, head, cut)[-1], expected)
    state = read(model, 66)
    for drafts, accepted in (([IDS[67]], 1), ([1], 0), ([IDS[70]], 1)):
        head.logits([state], [IDS[state.tokens]])
        model.forward([Segment(state, [IDS[state.tokens]], drafts=drafts)])
        model.settle(state, accepted)
    assert state.tokens == 71
    assert torch.equal(head.logits([state], [IDS[71]])[0], guesses(model, head, [71])[0])


def test_the_block_without_a_compiler(model: Model, head: DraftHead, store: Store) -> None:
    with drafting_model(store, python=True) as (other, other_head):
        assert torch.equal(guesses(other, other_head, [9])[0], guesses(model, head, [9])[0])


def test_places_of_pictures_are_followed_by_their_rows(model: Model, head: DraftHead) -> None:
    ids = [5, 6, *range(FIRST, FIRST + 3), 7, 8]
    rows, others = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0))
    states = [new_state(model) for _ in range(3)]
    model.forward([Segment(states[0], ids, [rows])])
    model.forward([Segment(states[1], ids[:3], [rows[:1]])])
    model.forward([Segment(states[1], ids[3:], [rows[1:]])])
    model.forward([Segment(states[2], ids, [others])])
    found = head.logits(states[:2], [9, 9])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(head.logits(states[2:], [9])[0], found[0])


def test_others_do_not_show_in_the_blocks_guesses(model: Model, head: DraftHead) -> None:
    one, two = read(model, 10), read(model, 40)
    alone = [head.logits([state], [IDS[state.tokens]])[0] for state in (one, two)]
    assert torch.equal(head.logits([two, one], [IDS[40], IDS[10]]), torch.stack(alone[::-1]))


def test_a_snapshot_is_the_same_with_and_without_the_block(model: Model, head: DraftHead, store: Store) -> None:
    form = PayloadFormat(model.config, "0123", "4567")
    state = read(model, 70)
    model.forward([Segment(state, [IDS[70]], drafts=[IDS[71]])])
    model.settle(state, 1)
    payload = dump(form, state)
    model.head = None
    bare = new_state(model)
    model.forward([Segment(bare, IDS[:72])])
    model.head = head
    assert dump(form, bare) == payload
    restored = load(form, *payload, PagePool(model.config, 3, drafts=True))
    assert equal(restored, bare)
    assert restored.drafting is None
    model.forward([Segment(restored, IDS[72:75])])
    assert restored.drafting is not None
    assert restored.drafting.begin == 73
    assert torch.isfinite(head.logits([restored], [IDS[75]])).all()


def test_a_copy_goes_its_own_way(model: Model, head: DraftHead) -> None:
    state = read(model, 64)
    copy = state.clone()
    for each in (state, copy):
        head.logits([each], [IDS[64] if each is state else 1])
        model.forward([Segment(each, IDS[64:66] if each is state else [1, 2])])
    assert torch.equal(head.logits([state], [IDS[66]])[0], guesses(model, head, [66])[0])
    state.pool.check([state.pages, copy.pages])
