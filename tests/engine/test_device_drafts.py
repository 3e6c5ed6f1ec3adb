"""On a GPU: the model's own multi-token-prediction block. Answers with its drafts have the bits of answers without; the
drafts are those of the CPU's block, wherever its experts lie and however late the host is.

The model is a small random one whose block is often right, or with THIMBLE_TEST_DRAFTING the checkpoint in that folder.
"""

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting_model import drafting_model, foreseeable_store, new_state
from test_device_model import PROMPTS, SIZES, move
from test_speculation import SEEDED, Running, engine
from torch import Tensor

from services.engine.experts.store import Store
from services.engine.experts.streamer import open_experts
from services.engine.gpu.memory import DeviceState
from services.engine.gpu.model import DeviceModel
from services.engine.gpu.open import AWAKE_US, open_device
from services.engine.model import Segment
from services.engine.request import Form, Grammar, Restore
from services.engine.snapshots.payload import PayloadFormat
from services.tools.parity import divergence
from services.tools.repack import repack

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TOKENS = 24
RANDOM = random.Random(5)
IDS = RANDOM.choices(range(3, 2000), k=40)  # fed to both blocks, whatever either would say
SAID = [tuple(RANDOM.choices(range(3, 2000), k=RANDOM.randrange(1, 90))) for _ in range(4)]
SETTINGS = {"device": "cuda", "context_tokens": 512, "max_sequences": 4, "prefill_chunk_tokens": 64}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("drafting")
    given = os.environ.get("THIMBLE_TEST_DRAFTING")
    made = repack(Path(given), folder / "store", say=lambda _: None) if given else foreseeable_store(folder)
    assert made.draft_file is not None, "the checkpoint has no multi-token-prediction block"
    return made


@contextmanager
def opened(store: Store, **sizes: Any) -> Iterator[DeviceModel]:
    """With the block; all that was taken is given back."""
    slots = sum(map(len, store.layers))
    experts = open_experts(store, slots=slots, workers=4, spin_us=AWAKE_US, drafts=True)
    try:
        device = open_device(store, experts, replace(SIZES, **{"drafts": True, "head": True, **sizes}))
        yield device.model
        experts.check()
        device.pool.check([])
    finally:
        experts.close()


@pytest.fixture(scope="module")
def model(store: Store) -> Iterator[DeviceModel]:
    with opened(store) as found:
        yield found


@pytest.fixture(scope="module")
def plain(store: Store) -> list[Tensor]:
    """For each prompt the logits behind it and behind each of TOKENS greedy ids, on an engine that cannot draft."""
    with opened(store, drafts=False, head=False) as other:
        return [answer(other, prompt) for prompt in PROMPTS]


def answer(model: DeviceModel, prompt: Sequence[int]) -> Tensor:
    state = model.new_state(len(prompt) + TOKENS)
    rows = [model.forward([Segment(state, prompt)])[0].clone()]
    for _ in range(TOKENS):
        rows.append(model.forward([Segment(state, [int(rows[-1].argmax())])])[0].clone())
    state.release()
    return torch.stack(rows)


class Answers:
    """Greedy answers to several prompts at once, in steps with the block's own drafts."""

    def __init__(self, model: DeviceModel, prompts: Sequence[Sequence[int]]) -> None:
        self.model, self.right, self.wrong = model, 0, 0
        self.states = [model.new_state(len(prompt) + TOKENS + 2) for prompt in prompts]
        first = model.forward([Segment(s, p) for s, p in zip(self.states, prompts, strict=True)])
        self.logits = [[row.clone()] for row in first]

    def step(self) -> None:
        assert self.model.head is not None
        last = [int(rows[-1].argmax()) for rows in self.logits]
        asked = [number for number, state in enumerate(self.states) if state.can_draft]
        drafts: dict[int, tuple[int]] = {}
        if asked:
            found = self.model.head.logits([self.states[n] for n in asked], [last[n] for n in asked])
            drafts = {number: (int(row.argmax()),) for number, row in zip(asked, found, strict=True)}
        segments = [Segment(s, [last[n]], drafts=drafts.get(n, ())) for n, s in enumerate(self.states)]
        found = self.model.forward(segments)
        of_each = torch.split(found, [1 + len(segment.drafts) for segment in segments])
        for segment, rows, logits in zip(segments, of_each, self.logits, strict=True):
            logits.append(rows[0].clone())
            if segment.drafts:
                right = segment.drafts[0] == int(rows[0].argmax())
                self.model.settle(segment.state, int(right))
                self.right, self.wrong = self.right + right, self.wrong + (not right)
                logits += [rows[1].clone()] * right

    def all(self) -> list[Tensor]:
        while min(map(len, self.logits)) <= TOKENS:
            self.step()
        for state in self.states:
            state.release()
        return [torch.stack(rows[: TOKENS + 1]) for rows in self.logits]


def test_logits_of_one_sequence_are_those_without_drafts(model: DeviceModel, plain: list[Tensor]) -> None:
    right = wrong = 0
    for prompt, rows in zip(PROMPTS, plain, strict=True):
        answers = Answers(model, [prompt])
        assert torch.equal(answers.all()[0], rows)
        right, wrong = right + answers.right, wrong + answers.wrong
    assert min(right, wrong) > 3
    assert model.head is not None
    assert all(decoder.graph is not None and decoder._tokens for decoder in model.head.decoders), "also of two ids"
    assert not torch.equal(plain[0], plain[1]), "another answer must show"


@pytest.mark.parametrize("count", [2, 3, 4])
def test_logits_of_several_sequences(model: DeviceModel, plain: list[Tensor], count: int) -> None:
    answers = Answers(model, PROMPTS[:count])
    assert all(torch.equal(one, other) for one, other in zip(answers.all(), plain, strict=False))
    assert min(answers.right, answers.wrong) > 0


def test_a_state_that_is_moved_begins_anew_and_says_the_same(
    model: DeviceModel, plain: list[Tensor], store: Store
) -> None:
    """Copied, or stored and restored, now and then: what the block knew of it is gone, no word is."""
    form, answers, moved = PayloadFormat(store.config, "m", "a", kv_number_bytes=2), Answers(model, PROMPTS[:1]), 0
    while len(answers.logits[0]) <= TOKENS:
        answers.step()
        answers.step()
        state, moved = answers.states[0], moved + 1
        if moved % 2:
            other = state.clone()
        else:
            other = model.new_state(state.tokens + 2)
            move(form, state, other)
        assert isinstance(other, DeviceState)
        assert state.can_draft
        assert not other.can_draft
        state.release()
        answers.states[0] = other
    assert moved > 3
    assert answers.right + answers.wrong > 3
    assert torch.equal(answers.all()[0], plain[0])


def drafted(model: DeviceModel) -> Tensor:
    """The block's logits for every id of IDS but the first, each fed behind it."""
    assert model.head is not None
    state, found = model.new_state(len(IDS) + 1), []
    for id_ in IDS:
        if state.ids:
            found.append(model.head.logits([state], [id_])[0])
        model.forward([Segment(state, [id_])])
    state.release()
    return torch.stack(found)


@pytest.fixture(scope="module")
def drafts(model: DeviceModel) -> Tensor:
    return drafted(model)


def test_drafts_are_near_those_of_the_cpu(store: Store, drafts: Tensor) -> None:
    """Both blocks have followed the same ids from the second on. Where the likeliest is another, it is all but as
    likely to the CPU."""
    with drafting_model(store) as (cpu, head):
        state, theirs = new_state(cpu), []
        for id_ in IDS:
            if state.ids:
                theirs.append(head.logits([state], [id_])[0])
            cpu.forward([Segment(state, [id_])])
    exact = torch.stack(theirs)
    found = float(divergence(exact, drafts).mean())
    same = float((drafts.argmax(1) == exact.argmax(1)).float().mean())
    print(f"mean KL {found:.6f}, {same:.1%} of drafts the same")
    assert found < 0.005
    assert same > 0.9
    assert float(divergence(exact, drafts.roll(1, 0)).mean()) > 0.1, "other places must show"


@pytest.mark.parametrize("change", [{"share": 0}, {"share": 3}, {"kept_blocks": 6}, {"guesses": False}], ids=str)
def test_placement_does_not_change_a_bit(store: Store, drafts: Tensor, change: dict[str, Any]) -> None:
    with opened(store, **change) as other:
        assert torch.equal(drafted(other), drafts)


def test_a_host_that_stalls_in_the_block_changes_nothing(
    model: DeviceModel, drafts: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model.head is not None
    (alone, _), late = model.head.decoders, model.late
    serve, calls = alone.turns.serve, 0

    def stalls(turns: int) -> int:
        nonlocal calls
        calls += 1
        if calls % 3 == 1:
            torch.cuda.synchronize()  # the GPU gives up and ends its graph
        return serve(turns)

    monkeypatch.setattr(alone.turns, "serve", stalls)
    assert torch.equal(drafted(model), drafts)
    assert model.late > late + 3


def test_nothing_is_allocated_on_the_card_while_drafts_are_tried(model: DeviceModel) -> None:
    def allocations() -> int:
        return int(torch.cuda.memory_stats()["allocation.all.allocated"])

    answers = Answers(model, PROMPTS[:2])
    for _ in range(3):
        answers.step()
    before = allocations()
    for _ in range(6):
        answers.step()
    assert allocations() == before
    kept = torch.zeros(1, device="cuda")
    assert allocations() > before, "an allocation must show"
    del kept
    answers.all()


@pytest.fixture(scope="module")
def without(store: Store) -> Iterator[Running]:
    with engine(store, "off", **SETTINGS) as running:
        yield running


@pytest.fixture
def own(store: Store) -> Iterator[Running]:
    """With the block's drafts alone."""
    with engine(store, "on", lambda speculation: speculation.sources.pop(0), **SETTINGS) as running:
        assert [source.kind for source in running.speculation.sources] == ["mtp"]
        yield running
        tried = running.counted("spec_decode_num_draft_tokens_total", kind="mtp")
        accepted = running.counted("spec_decode_num_accepted_tokens_total", kind="mtp")
        print(f"{accepted:.0f} of {tried:.0f} drafts were right")
        assert 0 < accepted < tried, "right ones and wrong ones"


def test_words_greedy_and_drawn(own: Running, without: Running) -> None:
    ways: tuple[dict[str, Any], ...] = ({}, SEEDED, {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.2})
    for prompt in SAID:
        for how in ways:
            assert own.say(prompt, 48, **how) == without.say(prompt, 48, **how)


def test_words_of_four_at_once(own: Running, without: Running) -> None:
    expected = [without.say(prompt, 48) for prompt in SAID]
    calls = [own.ask(prompt, 48) for prompt in SAID]
    for call, words in zip(calls, expected, strict=True):
        call.finish()
        assert call.tokens == words


def test_words_in_a_grammar(own: Running, without: Running) -> None:
    more = {"grammar": Grammar(Form.REGEX, r"((one|two|three|four|five), ){8}six"), "stop_ids": frozenset({2, 11})}
    for how in ({}, SEEDED):
        assert own.say(SAID[0], 60, **more, **how) == without.say(SAID[0], 60, **more, **how)


def test_words_from_a_snapshot(own: Running, without: Running) -> None:
    """A state that was read beside drafts goes on in the same engine and in one that has none."""
    prompt = tuple(IDS) * 3
    place = len(prompt) - 5
    first = own.ask(prompt, 48, snapshot_at=(place,))
    snapshot = first.finish().snapshots[0]
    again = own.ask(prompt, 48, offers=(snapshot.state,))
    assert again.finish().cached_tokens == place
    elsewhere = without.ask(prompt, 48, offers=(snapshot.state,))
    elsewhere.until(Restore)
    for chunk in (*snapshot.chunks, *snapshot.blocks):
        elsewhere.handle.restore(chunk)
    assert elsewhere.finish().cached_tokens == place
    assert first.tokens == again.tokens == elsewhere.tokens
