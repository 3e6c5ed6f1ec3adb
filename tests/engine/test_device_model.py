"""On a GPU: the demo through captured graphs. The same bits wherever experts lie, near the CPU engine's logits."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from services.engine.experts.store import Store
from services.engine.experts.streamer import open_experts
from services.engine.gpu.memory import DeviceState
from services.engine.gpu.open import AWAKE_US, Device, Sizes, open_device
from services.engine.model import Model, Segment
from services.engine.snapshots.payload import PayloadFormat
from services.engine.state import State, state_bytes
from services.tools.parity import divergence

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIZES = Sizes(sequences=4, rows=(1, 2, 3, 4), context_tokens=512, pages=32, chunk_tokens=64)
PROMPTS = [[1, 17, 300, 4, 9, 77, 512, 33], [2, 5, 8], [90, 91, 92, 93, 94, 95], [1000]]


@contextmanager
def opened(
    store: Store, *, slots: int | None = None, readers: int = 4, workers: int = 4, **sizes: Any
) -> Iterator[Device]:
    slots = sum(map(len, store.blocks)) if slots is None else slots
    experts = open_experts(store, slots=slots, readers=readers, workers=workers, spin_us=AWAKE_US)
    try:
        yield open_device(store, experts, replace(SIZES, **sizes))
        experts.check()
    finally:
        experts.close()


@pytest.fixture(scope="module")
def device(demo_store: Store) -> Iterator[Device]:
    with opened(demo_store) as found:
        yield found


def answer(device: Device, prompt: Sequence[int], tokens: int = 12) -> Tensor:
    """Logits after the prompt and after each of `tokens` greedy ids."""
    state = device.model.new_state(len(prompt) + tokens)
    rows = [device.model.forward([Segment(state, prompt)])[0]]
    for _ in range(tokens):
        rows.append(device.model.forward([Segment(state, [int(rows[-1].argmax())])])[0])
    state.release()
    return torch.stack(rows)


def test_logits_are_near_those_of_the_cpu(device: Device, demo_store: Store) -> None:
    experts = open_experts(demo_store, slots=sum(map(len, demo_store.blocks)))
    cpu = Model(demo_store.dense(), demo_store.config, experts)
    ids = [id_ for prompt in PROMPTS for id_ in prompt] * 5
    state = device.model.new_state(len(ids))
    ours = device.model.forward_all([Segment(state, ids)])
    state.release()
    theirs = cpu.forward_all([Segment(cpu.new_state(len(ids)), ids)])
    experts.close()
    assert float(divergence(theirs, ours).mean()) < 0.001
    assert not torch.equal(ours, theirs)
    assert float(divergence(theirs, ours.roll(1, 0)).mean()) > 0.1, "other logits must show"


def test_bits_do_not_depend_on_batch_mates_or_the_cut_of_a_prompt(device: Device) -> None:
    alone = [answer(device, prompt, 0)[0] for prompt in PROMPTS]
    for count in range(1, 5):
        states = [device.model.new_state(len(prompt)) for prompt in PROMPTS[:count]]
        segments = [Segment(state, prompt) for state, prompt in zip(states, PROMPTS, strict=False)]
        together = device.model.forward(segments)
        for state in states:
            state.release()
        assert all(torch.equal(row, one) for row, one in zip(together, alone, strict=False)), count
    state = device.model.new_state(len(PROMPTS[0]))
    device.model.forward([Segment(state, PROMPTS[0][:3])])
    assert torch.equal(device.model.forward([Segment(state, PROMPTS[0][3:])])[0], alone[0])
    state.release()


@pytest.mark.parametrize("split", [(4,), (3, 1), (1, 3), (2, 2), (2, 1, 1), (1, 1, 1, 1), (3,), (7, 4)], ids=str)
def test_rows_of_a_sequence_have_the_bits_of_steps_of_their_own(device: Device, split: tuple[int, ...]) -> None:
    """Logits after every id, and after one more, which what is left in the states decides."""
    model = device.model

    def begun() -> list[DeviceState]:
        states = [model.new_state(len(prompt) + 9) for prompt, _ in zip(PROMPTS, split, strict=False)]
        model.forward([Segment(state, prompt) for state, prompt in zip(states, PROMPTS, strict=False)])
        return states

    def ended(states: list[DeviceState], last: Tensor) -> Tensor:
        for state in states:
            state.release()
        return last

    wanted = [[100 * number + token for token in range(tokens)] for number, tokens in enumerate(split)]
    alone = begun()
    one_by_one = [model.forward([Segment(alone[n], [id_])])[0] for n, ids in enumerate(wanted) for id_ in ids]
    last = ended(alone, torch.cat([model.forward([Segment(state, [5])]) for state in alone]))
    together = begun()  # in the others' places: there are only so many
    joined = model.forward_all([Segment(state, ids) for state, ids in zip(together, wanted, strict=True)])
    assert torch.equal(ended(together, model.forward([Segment(state, [5]) for state in together])), last)
    assert torch.equal(joined, torch.stack(one_by_one))
    if split == (7, 4):
        assert not torch.equal(joined[1:], joined[:-1]), "another token must show"


@pytest.mark.parametrize(
    "change",
    [
        {"slots": 44},
        {"slots": 8, "readers": 2},
        {"share": 0},
        {"share": 6},
        {"share": 2, "workers": 1, "guesses": False},
        {"workers": 7, "sequences": 1, "rows": (1, 2, 4)},
        {"sequences": 1, "rows": (1,)},
    ],
    ids=str,
)
def test_placement_does_not_change_a_bit(device: Device, demo_store: Store, change: dict[str, Any]) -> None:
    expected = answer(device, PROMPTS[0])
    with opened(demo_store, **change) as other:
        assert torch.equal(answer(other, PROMPTS[0]), expected)


def test_a_host_that_stalls_in_a_token_changes_nothing(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answer(device, PROMPTS[0])
    decoder = device.model.decoders[0]
    serve, served = decoder.turns.serve, 0

    def stalls(turns: int) -> int:
        nonlocal served
        served += 1
        done = serve(min(turns, served % 9))
        if done < min(turns, served % 9):
            return done
        torch.cuda.synchronize()  # the GPU gives up and ends its graph
        return done + serve(turns - done)

    late = device.model.late
    monkeypatch.setattr(decoder.turns, "serve", stalls)
    found = answer(device, PROMPTS[0])
    assert device.model.late > late + 10
    assert torch.equal(found, expected)


def test_a_state_goes_out_and_comes_back_to_the_bit(device: Device, demo_store: Store) -> None:
    state = device.model.new_state(200)
    device.model.forward([Segment(state, PROMPTS[0] * 16)])
    copy = device.model.new_state(200)
    move(PayloadFormat(demo_store.config, "m", "a", kv_number_bytes=2), state, copy)
    expected = device.model.forward([Segment(state, [5, 6, 7])])
    assert torch.equal(device.model.forward([Segment(copy, [5, 6, 7])]), expected)
    twin = state.clone()
    following: Callable[[State], Tensor] = lambda each: device.model.forward([Segment(each, [8])])  # noqa: E731
    assert torch.equal(following(twin), following(state))
    for each in (state, copy, twin):
        each.release()


def move(form: PayloadFormat, source: State, target: State) -> None:
    """All of a state by the pieces that a payload has."""
    target.ids = list(source.ids)
    rest = memoryview(bytearray(state_bytes(source.config)))
    source.write_fixed(rest)
    for there in target.import_fixed():
        there[:], rest = rest[: len(there)], rest[len(there) :]
    assert not rest
    for start in range(0, source.tokens, form.block_tokens):
        stop = min(source.tokens, start + form.block_tokens)
        pieces = [bytes(piece) for piece in source.export_kv(start, stop)]
        for piece, there in zip(pieces, target.import_kv(start, stop), strict=True):
            there[:] = piece
