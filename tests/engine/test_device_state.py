"""States at fixed places of a device, here the CPU: whole payloads out and in, several at once, places given back."""

from itertools import zip_longest

import pytest
import torch
from tiny import CONFIG, dump, feed

from services.engine.errors import OutOfPagesError
from services.engine.gpu.ledger import Kv
from services.engine.gpu.memory import DevicePool, DeviceState, staging
from services.engine.snapshots.payload import Loader, PayloadFormat

FORM = PayloadFormat(CONFIG, "model", "arithmetic", kv_number_bytes=2)
TOKENS = 2 * FORM.block_tokens + 5


@pytest.fixture
def pool() -> DevicePool:
    return DevicePool(CONFIG, torch.device("cpu"), places=4, pages=40)


def fed(pool: DevicePool, seed: int) -> DeviceState:
    state = DeviceState(CONFIG, pool)
    feed(state, TOKENS, seed)
    return state


def empty(pool: DevicePool) -> tuple[DeviceState, Loader]:
    state = DeviceState(CONFIG, pool)
    state.reserve(TOKENS)
    return state, Loader(FORM, state)


def pieces(chunk: bytes, size: int) -> list[bytes]:
    return [chunk[start : start + size] for start in range(0, len(chunk), size)]


def same(a: DeviceState, b: DeviceState) -> bool:
    keys = [torch.cat([s.pool.keys[:, page] for page in s.pages], 1)[:, :TOKENS] for s in (a, b)]
    values = [torch.cat([s.pool.values[:, page] for page in s.pages], 1)[:, :TOKENS] for s in (a, b)]
    pairs = [(a.conv, b.conv), (a.ssm, b.ssm), keys, values]
    return a.ids == b.ids and all(torch.equal(first, second) for first, second in pairs)


def test_two_payloads_that_arrive_at_once_while_a_third_is_sent(pool: DevicePool) -> None:
    sources = [fed(pool, seed) for seed in (1, 2)]
    sent = [dump(FORM, source) for source in sources]
    assert not same(*sources), "the two must be told apart"
    targets = [empty(pool) for _ in sources]
    arriving = [[piece for chunk in chunks for piece in pieces(chunk, 7)] for chunks, _ in sent]
    for turn in zip_longest(*arriving):
        for (_, loader), piece in zip(targets, turn, strict=True):
            if piece is not None:
                loader.feed(piece)
        dump(FORM, sources[0])
    for (_, loader), (_, blocks) in zip(targets, sent, strict=True):
        assert len(set(blocks)) == len(blocks) == 2
        for number in loader.missing:
            loader.put_block(number, blocks[number])
        loader.finish()
    for source, (target, _) in zip(sources, targets, strict=True):
        assert same(source, target)


def test_places_are_given_back_once(pool: DevicePool) -> None:
    states = [fed(pool, seed) for seed in range(4)]
    pool.check([state.pages for state in states])
    with pytest.raises(OutOfPagesError, match="all 4 states on the GPU are in use"):
        DeviceState(CONFIG, pool)
    states[0].release()
    states[0].release()
    pool.check([state.pages for state in states[1:]])
    assert not DeviceState(CONFIG, pool).ssm.any(), "a place that was used before is clean"
    with pytest.raises(AssertionError):
        pool.check([state.pages for state in states[1:]])


def test_scales_are_of_fp8_pages_only(pool: DevicePool) -> None:
    small = DevicePool(CONFIG, torch.device("cpu"), places=1, pages=1, kv="fp8")
    assert (pool.pages_of(0, 0.01, 0.02).key_scale, pool.pages_of(0, 0.01, 0.02).value_scale) == (1.0, 1.0)
    assert (small.pages_of(0, 0.01, 0.02).key_scale, small.pages_of(0, 0.01, 0.02).value_scale) == (0.01, 0.02)


def test_a_copy_is_independent(pool: DevicePool) -> None:
    state = fed(pool, 3)
    copy = state.clone()
    assert same(state, copy)
    copy.ssm.add_(1.0)
    assert not same(state, copy)


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize("tokens", [1, FORM.block_tokens, TOKENS])
def test_a_hot_state_goes_back_as_a_whole(kv: Kv, tokens: int) -> None:
    pool = DevicePool(CONFIG, torch.device("cpu"), places=2, pages=40, kv=kv)
    form = PayloadFormat(CONFIG, "model", "arithmetic", kv_number_bytes=pool.keys.element_size())
    state, copy = DeviceState(CONFIG, pool), DeviceState(CONFIG, pool)
    feed(state, tokens, 1)
    own = memoryview(bytearray(form.own_bytes(tokens)))
    form.dump(state, own)
    blocks = [form.dump_block(state, number) for number in range(form.blocks(tokens))]
    form.load(own, blocks, copy)
    assert copy.tokens == tokens
    again = memoryview(bytearray(len(own)))
    form.dump(copy, again)
    assert again == own
    assert [form.dump_block(copy, number) for number in range(form.blocks(tokens))] == blocks
    loaded = Loader(form, DeviceState(CONFIG, DevicePool(CONFIG, torch.device("cpu"), places=1, pages=40, kv=kv)))
    loaded.feed(bytes(own))
    own[-100] ^= 1
    form.load(own, blocks, copy)
    form.dump(copy, again)
    assert again[: len(own) - 8] == own[: len(own) - 8], "the control: what is loaded is what is there, unchecked"


@pytest.mark.parametrize("refused", [torch.AcceleratorError("CUDA error: out of memory"), None])
def test_a_system_that_locks_no_more_costs_speed_alone(
    monkeypatch: pytest.MonkeyPatch, refused: Exception | None
) -> None:
    asked = []

    def empty(size: int, *, dtype: torch.dtype, pin_memory: bool = False) -> torch.Tensor:
        asked.append(pin_memory)
        if pin_memory and refused is not None:
            raise refused
        return torch.zeros(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", empty)
    assert staging(100, locked=True).shape == staging(100, locked=False).shape == (100,)
    assert asked == ([True, False, False] if refused is not None else [True, False])
