"""On a GPU: answers with drafts have the bits of answers without, whatever becomes of the drafts. Here they are told,
or copies; the model's own are test_device_drafts.py's."""

import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from test_device_model import PROMPTS, move, opened
from test_speculation import SEEDED, engine, oracle
from torch import Tensor

from services.engine.drafts import Copying
from services.engine.experts.store import Store
from services.engine.gpu.memory import DeviceState
from services.engine.gpu.model import DeviceModel
from services.engine.gpu.open import Device
from services.engine.model import Segment
from services.engine.snapshots.payload import PayloadFormat

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TOKENS = 24


@pytest.fixture(scope="module")
def device(demo_store: Store) -> Iterator[Device]:
    with opened(demo_store, drafts=True) as found:
        yield found


@pytest.fixture(scope="module")
def plain(demo_store: Store) -> list[Tensor]:
    """For each prompt the logits behind it and behind each of TOKENS greedy ids, on an engine that cannot draft."""
    with opened(demo_store) as other:
        return [answers(other.model, [prompt], lambda number, place: None)[0] for prompt in PROMPTS]


def answers(model: DeviceModel, prompts: Sequence[Sequence[int]], drafted, between=lambda states: None) -> list[Tensor]:
    """Greedy. `drafted(number, place)`: the draft of a prompt's answer at a place, or None."""
    states = [model.new_state(len(prompt) + TOKENS + 2) for prompt in prompts]
    logits = [[row] for row in model.forward([Segment(s, p) for s, p in zip(states, prompts, strict=True)])]
    while any(len(rows) <= TOKENS for rows in logits):
        between(states)
        going = [number for number, rows in enumerate(logits) if len(rows) <= TOKENS]
        segments = []
        for number in going:
            draft = drafted(number, len(logits[number]))
            last = int(logits[number][-1].argmax())
            segments.append(Segment(states[number], [last], drafts=() if draft is None else (draft,)))
        found = torch.split(model.forward(segments), [1 + len(segment.drafts) for segment in segments])
        for number, segment, rows in zip(going, segments, found, strict=True):
            logits[number].append(rows[0].clone())
            if segment.drafts:
                right = segment.drafts[0] == int(rows[0].argmax())
                model.settle(segment.state, int(right))
                if right:
                    logits[number].append(rows[1].clone())
    for state in states:
        state.release()
    return [torch.stack(rows[: TOKENS + 1]) for rows in logits]


def told(plain: list[Tensor], share: float):
    """Drafts that are right in a share of cases; at some places there is none."""
    chance = random.Random(4)
    said = [rows.argmax(1).tolist() for rows in plain]

    def draft(number: int, place: int) -> int | None:
        if place > TOKENS or chance.random() < 0.2:
            return None
        return said[number][place] if chance.random() < share else said[number][place] ^ 1

    return draft


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_logits_with_wrong_mixed_and_right_drafts(device: Device, plain: list[Tensor], share: float) -> None:
    for number, rows in enumerate(plain):
        draft = told(plain, share)
        (found,) = answers(device.model, [PROMPTS[number]], lambda _, place, n=number, d=draft: d(n, place))
        assert torch.equal(found, rows)
    assert not torch.equal(plain[0], plain[1]), "another answer must show"


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_logits_of_several_sequences(device: Device, plain: list[Tensor], share: float) -> None:
    for count in (2, 3, 4):
        found = answers(device.model, PROMPTS[:count], told(plain, share))
        assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=False)), count


def test_a_draft_that_is_kept_though_it_is_wrong_shows(device: Device, plain: list[Tensor]) -> None:
    """The control: the comparison sees a state that a draft has touched."""
    model, state = device.model, device.model.new_state(TOKENS + len(PROMPTS[0]))
    last = int(model.forward([Segment(state, PROMPTS[0])])[0].argmax())
    rows = model.forward([Segment(state, [last], drafts=(int(plain[0][1].argmax()) ^ 1,))])
    assert torch.equal(rows[0], plain[0][1])
    model.settle(state, 1)
    state.ids.pop()
    assert not torch.equal(model.forward([Segment(state, [int(rows[0].argmax())])])[0], plain[0][2])
    state.release()


def test_states_are_stored_and_copied_between_drafts(device: Device, plain: list[Tensor], demo_store: Store) -> None:
    """Between any two steps the state goes out and comes back in another place, as a snapshot or as a copy."""
    form, model, swaps = PayloadFormat(demo_store.config, "m", "a", kv_number_bytes=2), device.model, 0

    def elsewhere(states: list[DeviceState]) -> None:
        nonlocal swaps
        (state,), swaps = states, swaps + 1
        if swaps % 2:
            states[0] = state.clone()
        else:
            states[0] = model.new_state(state.tokens + 2)
            move(form, state, states[0])
        state.release()

    (found,) = answers(model, PROMPTS[:1], told(plain, 0.6), elsewhere)
    assert swaps > TOKENS // 2
    assert torch.equal(found, plain[0])


def test_words_of_the_engine_with_copies_and_with_an_oracle(demo_store: Store) -> None:
    settings = {"device": "cuda", "context_tokens": 512, "max_sequences": 2, "prefill_chunk_tokens": 64}
    prompts = [tuple(range(100, 140)), (5, 6, 7, 8) * 8, tuple(PROMPTS[0])]
    with engine(demo_store, "off", **settings) as off:
        asked = [(prompt, how) for prompt in prompts for how in ({}, SEEDED)]
        expected = [off.say(prompt, 48, **how) for prompt, how in asked]
    greedy = dict(zip(prompts, expected[::2], strict=True))
    copies = lambda speculation: setattr(speculation, "sources", [Copying()])  # noqa: E731
    for change in (copies, oracle(greedy, 0.7, "ngram")):
        with engine(demo_store, "on", change, **settings) as on:
            assert [on.say(prompt, 48, **how) for prompt, how in asked] == expected
            kind = on.speculation.sources[0].kind
            assert on.counted("spec_decode_num_accepted_tokens_total", kind=kind) > 0
