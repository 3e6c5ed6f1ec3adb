"""A sequence's state: keys and values across pages, copies that share pages, room asked for before it is used."""

import pytest
import torch
from tiny import CONFIG, equal, fed, feed

from services.engine.errors import OutOfPagesError
from services.engine.pages import PAGE_TOKENS, PagePool
from services.engine.state import State, state_bytes


@pytest.fixture
def pool() -> PagePool:
    pool = PagePool(CONFIG, 8)
    pool.keys.fill_(float("nan"))
    pool.values.fill_(float("nan"))
    return pool


@pytest.mark.parametrize("steps", [[1], [64], [65], [63, 1, 1], [1] * 130, [100, 100], [10, 118, 2]], ids=str)
def test_what_is_written_is_read(pool: PagePool, steps: list[int]) -> None:
    state, rows = State(CONFIG, pool), torch.randn(sum(steps), 2, 1, 2)
    at = 0
    for count in steps:
        state.reserve(count)
        state.write_kv(1, rows[at : at + count, 0], rows[at : at + count, 1])
        state.ids += [0] * count
        at += count
        key, value = state.read_kv(1, at)
        assert torch.equal(key, rows[:at, 0])
        assert torch.equal(value, rows[:at, 1])
    assert torch.isnan(pool.keys[0]).all()  # another layer
    pool.check([state.pages])


def test_a_copy_goes_its_own_way(pool: PagePool) -> None:
    state = fed(pool, 100)
    copy = state.clone()
    assert equal(state, copy)
    assert pool.free == 6, "pages are shared"
    feed(state, 1, seed=1)
    assert pool.free == 5, "the writer took its own last page"
    assert not equal(state, copy)
    assert copy.tokens == 100
    once = fed(PagePool(CONFIG, 8), 100)
    assert equal(copy, once), "the writer did not touch the copy's keys"
    feed(copy, 1, seed=1)
    assert equal(state, copy)
    assert pool.free == 5, "the copy is alone with its page and writes there"
    pool.check([state.pages, copy.pages])
    state.release()
    copy.release()
    assert pool.free == 8


def test_a_copy_at_a_page_end_shares_all(pool: PagePool) -> None:
    state = fed(pool, 2 * PAGE_TOKENS)
    copy = state.clone()
    feed(copy, 1)
    assert pool.free == 8 - 3
    pool.check([state.pages, copy.pages])


def test_a_copy_leaves_reserved_room_behind(pool: PagePool) -> None:
    state = fed(pool, 10)
    state.reserve(3 * PAGE_TOKENS)
    copy = state.clone()
    assert len(copy.pages) == 1
    pool.check([state.pages, copy.pages])


def test_without_room_nothing_changes(pool: PagePool) -> None:
    other, state = fed(pool, 6 * PAGE_TOKENS), fed(pool, 10)
    pages = list(state.pages)
    assert state.pages_missing(2 * PAGE_TOKENS) == 2
    with pytest.raises(OutOfPagesError):
        state.reserve(2 * PAGE_TOKENS)
    assert state.pages == pages
    pool.check([other.pages, state.pages])
    copy = state.clone()
    assert copy.pages_missing(PAGE_TOKENS) == 2, "one for itself, one for the shared last page"
    with pytest.raises(OutOfPagesError):
        copy.reserve(PAGE_TOKENS)
    assert copy.pages == pages
    pool.check([other.pages, state.pages, copy.pages])


def test_missing_pages_are_what_reserve_takes(pool: PagePool) -> None:
    for tokens in (0, 1, 63, 64, 100):
        for more in (0, 1, 28, 64, 65, 200):
            for copied in (False, True):
                state = fed(pool, tokens)
                copy = state.clone() if copied else None
                free, missing = pool.free, state.pages_missing(more)
                state.reserve(more)
                assert free - pool.free == missing
                state.release()
                if copy:
                    copy.release()
                assert pool.free == 8


def test_release_is_final_and_may_be_repeated(pool: PagePool) -> None:
    state = fed(pool, 100)
    state.release()
    state.release()
    assert pool.free == 8
    assert state.spoiled
    with pytest.raises(AssertionError):
        state.clone()


def test_bytes_are_counted(pool: PagePool) -> None:
    assert State(CONFIG, pool).size_bytes == state_bytes(CONFIG) == 4 * 2 * (6 * 3 + 4)
