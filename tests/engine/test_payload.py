"""Snapshot payloads: exact both ways; whatever is not this engine's own is refused with a reason."""

import struct
from collections.abc import Iterator
from dataclasses import replace

import pytest
import xxhash
from tiny import CONFIG, equal, fed, feed

from services.engine.errors import OutOfPagesError, PayloadError
from services.engine.pages import PAGE_TOKENS, PagePool
from services.engine.snapshots import payload
from services.engine.snapshots.payload import CHECKSUM_BYTES, CHUNK_BYTES, HEADER, PayloadFormat, state_id
from services.engine.state import State

FORMAT = PayloadFormat(CONFIG, "00ff", "aa11")
TOKENS = 70
FIELDS = {"magic": 0, "version": 1, "model": 2, "arithmetic": 3, "sizes": 4, "tokens": 13, "size": 14}


@pytest.fixture
def pool() -> PagePool:
    return PagePool(CONFIG, 6)


@pytest.fixture
def whole(pool: PagePool) -> bytes:
    state = fed(pool, TOKENS)
    data = b"".join(FORMAT.dump(state))
    state.release()
    return data


def sealed(data: bytes) -> bytes:
    """With a checksum that fits, as someone who forges a payload would do."""
    return data[:-CHECKSUM_BYTES] + struct.pack("<Q", xxhash.xxh64_intdigest(data[:-CHECKSUM_BYTES]))


def forged(data: bytes, **changes: object) -> bytes:
    fields = list(HEADER.unpack_from(data))
    for name, value in changes.items():
        fields[FIELDS[name]] = value
    return sealed(HEADER.pack(*fields) + data[HEADER.size :])


def refusal(data: bytes, pool: PagePool, form: PayloadFormat = FORMAT) -> str:
    with pytest.raises(PayloadError) as caught:
        form.load([data], pool)
    assert pool.free == pool.total, "a refused payload leaves no page behind"
    return str(caught.value)


@pytest.mark.parametrize("tokens", [0, 1, 63, 64, 65, 300])
@pytest.mark.parametrize("chunk_bytes", [1, 7, 100, 1 << 20])
def test_a_state_comes_back_equal(pool: PagePool, tokens: int, chunk_bytes: int, monkeypatch) -> None:
    monkeypatch.setattr(payload, "CHUNK_BYTES", chunk_bytes)
    state = fed(pool, tokens)
    chunks = list(FORMAT.dump(state))
    assert len(chunks) == FORMAT.chunks(tokens)
    assert sum(map(len, chunks)) == FORMAT.size_bytes(tokens)
    assert all(len(chunk) == chunk_bytes for chunk in chunks[:-1])
    other_pool = PagePool(CONFIG, 6)
    copy = FORMAT.load(chunks, other_pool)
    assert equal(state, copy)
    feed(state, 5, seed=9)
    feed(copy, 5, seed=9)
    assert equal(state, copy)
    assert b"".join(FORMAT.dump(state)) == b"".join(FORMAT.dump(copy))
    other_pool.check([copy.pages])


def test_a_large_state_goes_in_full_chunks() -> None:
    config = replace(CONFIG, mamba_heads=16, mamba_head_dim=64, mamba_state=256)
    form, state = PayloadFormat(config, "m", "a"), State(config, PagePool(config, 1))
    feed(state, 3)
    chunks = list(form.dump(state))
    assert len(chunks) == form.chunks(3) == 3
    assert {len(chunk) for chunk in chunks[:-1]} == {CHUNK_BYTES}
    assert equal(state, form.load(iter(chunks), PagePool(config, 1)))


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_every_changed_byte_is_refused(whole: bytes, pool: PagePool, flip: int) -> None:
    for at in range(len(whole)):
        data = bytearray(whole)
        data[at] ^= flip
        assert refusal(bytes(data), pool)


def test_every_length_but_the_right_one_is_refused(whole: bytes, pool: PagePool) -> None:
    for size in range(1, len(whole)):
        assert "too early" in refusal(whole[:size], pool)
    assert "follow its end" in refusal(whole + b"\0", pool)
    assert FORMAT.load([whole], pool).tokens == TOKENS


def test_foreign_payloads_are_refused_by_name(whole: bytes, pool: PagePool) -> None:
    assert "another model" in refusal(whole, pool, PayloadFormat(CONFIG, "00fe", "aa11"))
    assert "another arithmetic" in refusal(whole, pool, PayloadFormat(CONFIG, "00ff", "aa12"))
    assert "sizes" in refusal(whole, pool, PayloadFormat(replace(CONFIG, mamba_state=3), "00ff", "aa11"))
    assert "not a snapshot" in refusal(forged(whole, magic=b"THUMBLE\n"), pool)
    assert "version 2" in refusal(forged(whole, version=2), pool)


def test_forged_lengths_are_refused_before_memory_is_taken(whole: bytes, pool: PagePool) -> None:
    assert "tokens" in refusal(forged(whole, tokens=1 << 60, size=1 << 62), pool)
    assert "bytes" in refusal(forged(whole, tokens=TOKENS + 1), pool)
    assert "bytes" in refusal(forged(whole, size=FORMAT.size_bytes(TOKENS) + 1), pool)
    ids = HEADER.size + 4 * TOKENS
    longer = forged(whole[:ids] + bytes(4) + whole[ids:], tokens=TOKENS + 1, size=FORMAT.size_bytes(TOKENS + 1))
    assert "too early" in refusal(longer, pool)


def test_ids_outside_the_vocabulary_are_refused(whole: bytes, pool: PagePool) -> None:
    data = bytearray(whole)
    struct.pack_into("<I", data, HEADER.size, CONFIG.vocab_size)
    assert "id 100 is outside" in refusal(sealed(bytes(data)), pool)
    struct.pack_into("<I", data, HEADER.size, CONFIG.vocab_size - 1)
    assert FORMAT.load([sealed(bytes(data))], pool).ids[0] == 99


@pytest.mark.parametrize("size", [0, CHUNK_BYTES + 1])
def test_chunks_of_a_wrong_size_are_refused(pool: PagePool, size: int) -> None:
    assert f"a chunk of {size} bytes" in refusal(bytes(size), pool)


def test_a_full_pool_is_said_and_nothing_is_kept(whole: bytes, pool: PagePool) -> None:
    pages = pool.allocate(5)
    with pytest.raises(OutOfPagesError):
        FORMAT.load([whole], pool)
    pool.check([pages])


def test_a_stream_that_fails_leaves_no_page_behind(whole: bytes, pool: PagePool) -> None:
    def broken() -> Iterator[bytes]:
        yield whole[:-50]
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        FORMAT.load(broken(), pool)
    assert pool.free == pool.total


def test_no_chunk_is_asked_for_after_the_last(whole: bytes, pool: PagePool) -> None:
    def endless() -> Iterator[bytes]:
        yield whole
        pytest.fail("the reader went on")

    assert FORMAT.load(endless(), pool).tokens == TOKENS


def test_a_payload_of_more_pages_than_there_are_is_refused(whole: bytes) -> None:
    small = PagePool(CONFIG, 1)
    assert f"at most {PAGE_TOKENS}" in refusal(whole, small)


def test_the_state_id_is_of_arithmetic_and_ids() -> None:
    ids = [1, 2, 3]
    names = [state_id("a", ids), state_id("b", ids), state_id("a", [1, 2]), state_id("a", [3, 2, 1]), state_id("a", [])]
    assert len(set(names)) == 5
    assert {len(name) for name in names} == {32}
    assert state_id("a", tuple(ids)) == names[0]
