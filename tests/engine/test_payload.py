"""Snapshot payloads: exact both ways; whatever is not this engine's own is refused with a reason."""

import struct
from dataclasses import replace

import pytest
import torch
import xxhash
from tiny import CONFIG, dump, equal, fed, feed, load

from services.engine.errors import OutOfPagesError, PayloadError
from services.engine.pages import PAGE_TOKENS, PagePool
from services.engine.snapshots import memory
from services.engine.snapshots.hot import HotStates
from services.engine.snapshots.payload import (
    CHECKSUM_BYTES,
    CHUNK_BYTES,
    HEADER,
    NAME_BYTES,
    Loader,
    PayloadFormat,
    state_id,
)
from services.engine.state import State

FORMAT = PayloadFormat(CONFIG, "00ff", "aa11")
TOKENS = 70
FIELDS = {"magic": 0, "version": 1, "model": 2, "arithmetic": 3, "sizes": 4, "tokens": 15, "size": 16}


@pytest.fixture
def pool() -> PagePool:
    return PagePool(CONFIG, 6)


@pytest.fixture
def whole(pool: PagePool) -> bytes:
    state = fed(pool, TOKENS)
    data = b"".join(dump(FORMAT, state)[0])
    state.release()
    return data


@pytest.fixture
def blocks(pool: PagePool) -> list[bytes]:
    state = fed(pool, TOKENS)
    found = [FORMAT.dump_block(state, 0)]
    state.release()
    return found


def sealed(data: bytes) -> bytes:
    """With a checksum that fits, as someone who forges a payload would do."""
    return data[:-CHECKSUM_BYTES] + struct.pack("<Q", xxhash.xxh3_64_intdigest(data[:-CHECKSUM_BYTES]))


def forged(data: bytes, **changes: object) -> bytes:
    fields = list(HEADER.unpack_from(data))
    for name, value in changes.items():
        fields[FIELDS[name]] = value
    return sealed(HEADER.pack(*fields) + data[HEADER.size :])


def refusal(data: bytes, pool: PagePool, form: PayloadFormat = FORMAT) -> str:
    with pytest.raises(PayloadError) as caught:
        load(form, [data], [], pool)
    assert pool.free == pool.total, "a refused payload leaves no page behind"
    return str(caught.value)


@pytest.mark.parametrize("tokens", [0, 1, 63, 64, 65, 300])
@pytest.mark.parametrize("chunk_bytes", [1, 7, 100, 1 << 20])
def test_a_state_comes_back_equal(pool: PagePool, tokens: int, chunk_bytes: int, monkeypatch) -> None:
    monkeypatch.setattr(memory, "CHUNK_BYTES", chunk_bytes)
    state = fed(pool, tokens)
    chunks, blocks = dump(FORMAT, state)
    assert sum(map(len, chunks)) == FORMAT.own_bytes(tokens)
    assert sum(map(len, chunks + blocks)) == FORMAT.size_bytes(tokens)
    assert [len(block) for block in blocks] == [FORMAT.block_bytes] * (tokens // PAGE_TOKENS)
    assert all(len(chunk) == chunk_bytes for chunk in chunks[:-1])
    other_pool = PagePool(CONFIG, 6)
    monkeypatch.undo()
    copy = load(FORMAT, chunks, blocks, other_pool)
    assert equal(state, copy)
    feed(state, 5, seed=9)
    feed(copy, 5, seed=9)
    assert equal(state, copy)
    for one, other in zip(dump(FORMAT, state), dump(FORMAT, copy), strict=True):
        assert b"".join(one) == b"".join(other)
    other_pool.check([copy.pages])


def test_a_large_state_goes_in_full_chunks() -> None:
    config = replace(CONFIG, mamba_heads=16, mamba_head_dim=64, mamba_state=256)
    form, state = PayloadFormat(config, "m", "a"), State(config, PagePool(config, 1))
    feed(state, 3)
    chunks, _ = dump(form, state)
    assert len(chunks) == 3
    assert {len(chunk) for chunk in chunks[:-1]} == {CHUNK_BYTES}
    assert equal(state, load(form, chunks, [], PagePool(config, 1)))


def test_blocks_are_no_larger_than_a_chunk() -> None:
    config = replace(CONFIG, attention_heads=64, kv_heads=64, head_dim=64)
    form, pool = PayloadFormat(config, "m", "a"), PagePool(config, 3)
    assert (form.block_tokens, form.block_bytes) == (16, CHUNK_BYTES)
    assert form.sizes[-1] == 16
    state = State(config, pool)
    feed(state, 70)
    chunks, blocks = dump(form, state)
    assert len(blocks) == 4
    assert equal(state, load(form, chunks, blocks, PagePool(config, 2)))


def test_a_later_state_of_a_dialog_shares_its_blocks(pool: PagePool) -> None:
    """And only those that are really the same: a copy that goes another way has other ones."""
    state = fed(pool, 2 * PAGE_TOKENS + 5)
    before = FORMAT.name_blocks(state)
    other = state.clone()
    feed(state, PAGE_TOKENS, seed=1)
    feed(other, PAGE_TOKENS, seed=2)
    names = [FORMAT.name_blocks(state), FORMAT.name_blocks(other)]
    assert len(before) == 2
    assert [name[:2] for name in names] == [before, before]
    assert names[0][2] != names[1][2]
    fresh = fed(PagePool(CONFIG, 6), 2 * PAGE_TOKENS + 5)
    assert FORMAT.name_blocks(fresh) == before, "a name is of the content alone"
    assert {len(name) for name in before} == {NAME_BYTES}


def test_a_block_is_checked(whole: bytes, blocks: list[bytes], pool: PagePool) -> None:
    for data in (blocks[0][:-1], b"", blocks[0] + b"x", bytes(len(blocks[0])), blocks[0][:-1] + b"x"):
        with pytest.raises(PayloadError, match="block 0 is not what its name says"):
            load(FORMAT, [whole], [data], pool)
    with pytest.raises(PayloadError, match="block 1 is not one that is missing"):
        load(FORMAT, [whole], blocks * 2, pool)
    assert "1 of its 1 blocks are missing" in refusal(whole, pool)


def test_a_state_that_was_refused_is_empty_again_after_a_reset(
    whole: bytes, blocks: list[bytes], pool: PagePool
) -> None:
    state = State(CONFIG, pool)
    state.reserve(TOKENS)
    loader = Loader(FORMAT, state)
    with pytest.raises(PayloadError):
        loader.feed(whole[:-1] + bytes([whole[-1] ^ 1]))
    state.reset()
    assert equal(state, State(CONFIG, pool))
    assert not torch.any(state.ssm)
    again = Loader(FORMAT, state)
    again.feed(whole)
    again.put_block(0, blocks[0])
    again.finish()
    assert equal(state, load(FORMAT, [whole], blocks, pool))


def test_memory_of_a_state_before_is_cleared_or_written_over(whole: bytes, blocks: list[bytes], pool: PagePool) -> None:
    """Whichever comes first: also when the payload turns out to be damaged."""
    pool.most_spares = 1

    def used() -> State:
        fed(pool, 3, seed=5).release()
        assert pool.spares
        assert torch.any(pool.spares[0][1]), "the control: the memory is not clean"
        return State(CONFIG, pool)

    fresh = used()
    assert not torch.any(fresh.conv)
    assert not torch.any(fresh.ssm)
    pool.spares.clear()
    restored = used()
    loader = Loader(FORMAT, restored)
    loader.feed(whole)
    loader.put_block(0, blocks[0])
    loader.finish()
    assert equal(restored, load(FORMAT, [whole], blocks, pool))
    pool.spares.clear()
    refused = used()
    with pytest.raises(PayloadError):
        Loader(FORMAT, refused).feed(whole[:300] + bytes([whole[300] ^ 1]) + whole[301:])
    refused.reset()
    assert equal(refused, State(CONFIG, PagePool(CONFIG, 6)))


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_every_changed_byte_is_refused(whole: bytes, pool: PagePool, flip: int) -> None:
    for at in range(len(whole)):
        data = bytearray(whole)
        data[at] ^= flip
        assert refusal(bytes(data), pool)


def test_every_length_but_the_right_one_is_refused(whole: bytes, blocks: list[bytes], pool: PagePool) -> None:
    for size in range(1, len(whole)):
        assert "too early" in refusal(whole[:size], pool)
    assert "follow its end" in refusal(whole + b"\0", pool)
    assert load(FORMAT, [whole], blocks, pool).tokens == TOKENS


def test_foreign_payloads_are_refused_by_name(whole: bytes, pool: PagePool) -> None:
    assert "another model" in refusal(whole, pool, PayloadFormat(CONFIG, "00fe", "aa11"))
    assert "another arithmetic" in refusal(whole, pool, PayloadFormat(CONFIG, "00ff", "aa12"))
    assert "sizes" in refusal(whole, pool, PayloadFormat(replace(CONFIG, mamba_state=3), "00ff", "aa11"))
    assert "not a snapshot" in refusal(forged(whole, magic=b"THUMBLE\n"), pool)
    assert "version 1" in refusal(forged(whole, version=1), pool)


def test_forged_lengths_are_refused_before_memory_is_taken(whole: bytes, pool: PagePool) -> None:
    assert "tokens" in refusal(forged(whole, tokens=1 << 60, size=1 << 62), pool)
    assert "bytes" in refusal(forged(whole, tokens=TOKENS + 1), pool)
    assert "bytes" in refusal(forged(whole, size=FORMAT.own_bytes(TOKENS) + 1), pool)
    ids = HEADER.size + 4 * TOKENS
    longer = forged(whole[:ids] + bytes(4) + whole[ids:], tokens=TOKENS + 1, size=FORMAT.own_bytes(TOKENS + 1))
    assert "too early" in refusal(longer, pool)


def test_ids_outside_the_vocabulary_are_refused(whole: bytes, blocks: list[bytes], pool: PagePool) -> None:
    data = bytearray(whole)
    struct.pack_into("<I", data, HEADER.size, CONFIG.vocab_size)
    assert "id 100 is outside" in refusal(sealed(bytes(data)), pool)
    struct.pack_into("<I", data, HEADER.size, CONFIG.vocab_size - 1)
    assert load(FORMAT, [sealed(bytes(data))], blocks, pool).ids[0] == 99


@pytest.mark.parametrize("size", [0, CHUNK_BYTES + 1])
def test_chunks_of_a_wrong_size_are_refused(pool: PagePool, size: int) -> None:
    assert f"a chunk of {size} bytes" in refusal(bytes(size), pool)


def test_a_full_pool_is_said_and_nothing_is_kept(whole: bytes, pool: PagePool) -> None:
    pages = pool.allocate(5)
    with pytest.raises(OutOfPagesError):
        load(FORMAT, [whole], [], pool)
    pool.check([pages])


def test_a_payload_of_more_pages_than_there_are_is_refused(whole: bytes) -> None:
    small = PagePool(CONFIG, 1)
    assert f"at most {PAGE_TOKENS}" in refusal(whole, small)


def test_the_state_id_is_of_arithmetic_ids_and_blocks() -> None:
    ids, block = [1, 2, 3], bytes(16)
    different = [("a", ids, ()), ("b", ids, ()), ("a", [1, 2], ()), ("a", [3, 2, 1], ()), ("a", [], ())]
    different += [("a", ids, (block,)), ("a", ids, (block, block)), ("a", [*ids, 0, 0, 0, 0], ())]
    names = [state_id(*one) for one in different]
    assert len(set(names)) == len(different)
    assert {len(name) for name in names} == {32}
    assert state_id("a", tuple(ids), []) == names[0]


def test_two_states_of_the_same_ids_are_never_mixed(pool: PagePool) -> None:
    """As a GPU has them: the same text, swept in one dialog and decoded in another."""
    swept, decoded = fed(pool, PAGE_TOKENS + 3, seed=1), fed(pool, PAGE_TOKENS + 3, seed=2)
    decoded.ids = list(swept.ids)
    hot = HotStates(FORMAT, "arithmetic", 1 << 30)
    (one, how), (other, how_other) = hot.take(swept, False), hot.take(decoded, False)
    assert (how, how_other) == ("taken", "taken"), "one in the place of the other would have the other's blocks"
    assert one is not None
    assert other is not None
    assert one.ref.state_id != other.ref.state_id
    for state, stored in ((swept, one), (decoded, other)):
        ref = replace(stored.ref, size_bytes=0)
        chosen = hot.choose([ref], [*state.ids, 1])
        assert chosen is not None
        assert hot.get(chosen) is stored
        restored = State(CONFIG, pool)
        hot.load(stored, restored)
        assert equal(restored, state)
        restored.release()
    mixed = replace(one.ref, blocks=other.ref.blocks)
    assert hot.choose([mixed], [*swept.ids, 1]) is None
    assert hot.take(swept, False) == (one, "held"), "the control: the same bits are one state"
