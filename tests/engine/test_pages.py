"""The KV pool: nothing is lost, nothing is given twice, too little is said before anything happens."""

import random

import pytest
import torch
from tiny import CONFIG

from services.engine.errors import OutOfPagesError
from services.engine.pages import PAGE_TOKENS, PagePool, page_bytes, pages_for


def test_pages_are_given_once_and_come_back() -> None:
    pool = PagePool(CONFIG, 10)
    first, second = pool.allocate(4), pool.allocate(6)
    assert sorted(first + second) == list(range(10))
    assert pool.free == 0
    pool.check([first, second])
    pool.release(second)
    assert pool.free == 6
    pool.check([first])


def test_too_few_pages_take_none() -> None:
    pool = PagePool(CONFIG, 5)
    held = pool.allocate(3)
    with pytest.raises(OutOfPagesError, match="3 KV pages of 64 tokens are needed, 2 of 5 are free"):
        pool.allocate(3)
    assert pool.free == 2
    pool.check([held])


def test_a_shared_page_is_free_after_its_last_owner() -> None:
    pool = PagePool(CONFIG, 3)
    pages = pool.allocate(2)
    pool.share(pages)
    assert pool.is_shared(pages[0])
    pool.check([pages, pages])
    pool.release(pages)
    assert pool.free == 1
    assert not pool.is_shared(pages[0])
    pool.release(pages)
    assert pool.free == 3
    pool.check([])


def test_a_second_release_is_our_own_bug() -> None:
    pool = PagePool(CONFIG, 3)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="is free"):
        pool.release(pages)
    with pytest.raises(AssertionError, match="is free"):
        pool.share(pages)


def test_the_check_sees_a_leak_a_double_use_and_a_lost_page() -> None:
    pool = PagePool(CONFIG, 4)
    pages = pool.allocate(2)
    with pytest.raises(AssertionError):
        pool.check([])
    with pytest.raises(AssertionError):
        pool.check([pages, pages[:1]])
    pool.check([pages])
    pool._free.pop()
    with pytest.raises(AssertionError, match="2 used"):
        pool.check([pages])


def test_nothing_is_lost_over_many_random_steps() -> None:
    pool, rng, held = PagePool(CONFIG, 40), random.Random(0), []
    for _ in range(2000):
        match rng.randrange(3):
            case 0 if pool.free:
                held.append(pool.allocate(rng.randint(1, min(5, pool.free))))
            case 1 if held:
                shared = rng.choice(held)
                pool.share(shared)
                held.append(list(shared))
            case 2 if held:
                pool.release(held.pop(rng.randrange(len(held))))
        pool.check(held)


def test_copy_takes_all_layers_of_one_page() -> None:
    pool = PagePool(CONFIG, 3)
    pool.keys.copy_(torch.arange(pool.keys.numel()).view_as(pool.keys))
    before = pool.keys.clone()
    pool.copy(0, 2)
    assert torch.equal(pool.keys[:, 2], before[:, 0])
    assert torch.equal(pool.keys[:, :2], before[:, :2])


def test_sizes_are_what_is_held() -> None:
    assert PagePool(CONFIG, 7).size_bytes == 7 * page_bytes(CONFIG)
    assert [pages_for(n) for n in (0, 1, PAGE_TOKENS, PAGE_TOKENS + 1)] == [0, 1, 1, 2]
