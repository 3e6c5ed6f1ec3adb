"""On a GPU: prompts by a sweep. Near the CPU engine, the same bits however they are cut, shared or placed."""

from collections.abc import Generator, Iterator, Sequence

import pytest
import torch
from test_device_model import SIZES, opened
from tokenizers import Tokenizer
from torch import Tensor

from services.engine.experts.store import Store
from services.engine.experts.streamer import open_experts
from services.engine.gpu.ledger import RING_GROUPS
from services.engine.gpu.open import Device
from services.engine.model import Model, Segment
from services.engine.state import State
from services.tools.parity import MEAN_KL_BAR, divergence
from services.tools.passages import PROSE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

RANDOM = torch.Generator().manual_seed(3)
PROMPT = torch.randint(12, 4000, (331,), generator=RANDOM).tolist()
OTHER = torch.randint(12, 4000, (77,), generator=RANDOM).tolist()
FULL = torch.randint(12, 4000, (SIZES.context_tokens,), generator=RANDOM).tolist()


@pytest.fixture(scope="module")
def device(demo_store: Store) -> Iterator[Device]:
    with opened(demo_store, pages=40) as found:
        yield found


def read(device: Device, *parts: tuple[State, Sequence[int]]) -> Tensor:
    return rest_of(device.model.reading([Segment(state, ids, sweep=True) for state, ids in parts]))


def rest_of(running: Generator[float, None, Tensor]) -> Tensor:
    while True:
        try:
            next(running)
        except StopIteration as end:
            logits: Tensor = end.value
            return logits


def alone(device: Device, prompt: Sequence[int], *cuts: int) -> Tensor:
    """Logits after the prompt and after two more tokens, that are decoded."""
    state = device.model.new_state(len(prompt) + 2)
    for begin, end in zip((0, *cuts), (*cuts, len(prompt)), strict=True):
        logits = read(device, (state, prompt[begin:end]))
    more = [device.model.forward([Segment(state, [id_])])[0] for id_ in (5, 6)]
    state.release()
    return torch.stack([logits[0], *more])


def test_it_is_near_the_cpu_engine(device: Device, demo_store: Store) -> None:
    text = Tokenizer.from_file(str(demo_store.folder / "tokenizer.json")).encode(PROSE, add_special_tokens=False).ids
    experts = open_experts(demo_store, slots=sum(map(len, demo_store.blocks)))
    cpu = Model(demo_store.dense(), demo_store.config, experts)
    theirs = cpu.forward_all([Segment(cpu.new_state(len(text)), text)])
    experts.close()
    lengths = [1, 2, 9, 16, 63, 64, 65, 128, 150, len(text)]
    ours = torch.stack([alone(device, text[:length])[0] for length in lengths])
    expected = theirs[[length - 1 for length in lengths]]
    found = divergence(expected, ours)
    print(f"mean KL {float(found.mean()):.6f}, most {float(found.max()):.6f}")
    assert float(found.mean()) <= MEAN_KL_BAR
    assert float(divergence(expected, ours.roll(1, 0)).mean()) > 0.1, "other logits must show"


def test_a_cut_does_not_show(device: Device) -> None:
    whole = alone(device, PROMPT)  # in chunks of 64
    assert torch.equal(alone(device, PROMPT, 1, 50, 200, 201), whole)
    assert not torch.equal(alone(device, PROMPT[1:]), whole)


def test_prompts_that_share_a_sweep_are_as_if_alone(device: Device) -> None:
    states = [device.model.new_state(len(prompt)) for prompt in (OTHER, PROMPT)]
    logits = read(device, (states[0], OTHER), (states[1], PROMPT))
    for state in states:
        state.release()
    assert torch.equal(logits[0], alone(device, OTHER)[0])
    assert torch.equal(logits[1], alone(device, PROMPT)[0])


@pytest.mark.parametrize(
    "change",
    [{"slots": 60}, {"slots": 8, "readers": 2}, {"chunk_tokens": 512}, {"chunk_tokens": 17}, {"chunk_tokens": 2048}],
    ids=str,
)
def test_placement_and_chunks_do_not_change_a_bit(device: Device, demo_store: Store, change: dict[str, int]) -> None:
    expected = alone(device, PROMPT)
    with opened(demo_store, pages=40, **change) as other:
        assert torch.equal(alone(other, PROMPT), expected)


def test_a_prompt_may_have_the_whole_context(device: Device) -> None:
    found = []
    for cuts in ((), (200, 511)):
        state = device.model.new_state(len(FULL))
        for begin, end in zip((0, *cuts), (*cuts, len(FULL)), strict=True):
            logits = read(device, (state, FULL[begin:end]))
        found.append(logits[0])
        state.release()
    assert torch.equal(*found)
    assert bool(found[0].isfinite().all())


def test_a_long_prompt_takes_no_more_of_the_card(demo_store: Store) -> None:
    """Another process may have taken the rest since the start."""
    with opened(demo_store, pages=40, chunk_tokens=512) as other:
        reserved = torch.cuda.memory_reserved()
        alone(other, FULL[:-2])
        assert torch.cuda.memory_reserved() == reserved


def test_the_smallest_ring_and_chunk_read_as_any_other(device: Device, demo_store: Store) -> None:
    """What a card with little room gets: a ring of three blocks, parts of a few rows; most blocks from the disk."""
    expected = alone(device, PROMPT)
    with opened(demo_store, pages=40, slots=60, chunk_tokens=9, rows=(1,), sequences=1) as least:
        assert least.model.sweep
        experts = least.model.sweep.experts
        assert len(experts.places) == RING_GROUPS
        assert torch.equal(alone(least, PROMPT), expected)
        moved = experts.copied_bytes / (experts.named_blocks * experts.layout.block_bytes)
        assert moved < 1.05, "each block once a chunk"


def test_answers_go_on_between_the_layers_of_a_sweep(device: Device) -> None:
    expected, alone_answer = alone(device, PROMPT)[0], []
    state = device.model.new_state(64)
    for id_ in OTHER[:40]:
        alone_answer.append(device.model.forward([Segment(state, [id_])])[0])
    state.release()
    reader, answerer = device.model.new_state(len(PROMPT)), device.model.new_state(64)
    running = device.model.reading([Segment(reader, PROMPT, sweep=True)])
    for id_, wanted in zip(OTHER[:40], alone_answer, strict=True):
        next(running)
        assert torch.equal(device.model.forward([Segment(answerer, [id_])])[0], wanted)
    assert torch.equal(rest_of(running)[0], expected)
    reader.release()
    answerer.release()


def test_a_sweep_that_is_given_up_spoils_its_state_alone(device: Device) -> None:
    expected = alone(device, OTHER)
    state = device.model.new_state(len(PROMPT))
    running = device.model.reading([Segment(state, PROMPT, sweep=True)])
    for _ in range(7):
        next(running)
    running.close()
    assert state.spoiled
    state.release()
    assert torch.equal(alone(device, OTHER), expected)
