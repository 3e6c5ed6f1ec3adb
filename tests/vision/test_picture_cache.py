"""Embeddings kept in RAM: a budget that holds, names that mean their rows, and pins for prompts that wait."""

import threading

import pytest
import torch

from services.engine.errors import PictureError, PictureGoneError, QueueFullError
from services.engine.request import Picture
from services.engine.vision.cache import PictureCache

ROW_BYTES = 4 * 8


def rows(tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(tokens, 8, generator=torch.Generator().manual_seed(seed))


def key(name: str) -> tuple[bytes, tuple[int, int]]:
    return name.encode(), (2, 2)


@pytest.fixture
def cache() -> PictureCache:
    return PictureCache(10 * ROW_BYTES)


def test_the_longest_unused_leaves_first(cache: PictureCache) -> None:
    first, second = cache.put(key("a"), rows(4, 1)), cache.put(key("b"), rows(4, 2))
    assert cache.find(key("a")) is first
    cache.put(key("c"), rows(4, 3))
    assert cache.find(key("b")) is None
    assert cache.find(key("a")) is first
    assert second.handle != first.handle
    cache.check()
    assert cache.used_bytes == 8 * ROW_BYTES


def test_equal_rows_have_one_name_and_one_place(cache: PictureCache) -> None:
    one = cache.put(key("a"), rows(4, 1))
    assert cache.put(key("a"), rows(4, 1)) is one
    assert cache.put(key("other pixels, same rows"), rows(4, 1)) is one
    assert PictureCache(1000).put(key("elsewhere"), rows(4, 1)).handle == one.handle
    assert cache.used_bytes == 4 * ROW_BYTES
    cache.check()


def test_what_a_prompt_waits_for_stays(cache: PictureCache) -> None:
    entry = cache.put(key("a"), rows(6, 1))
    held = cache.hold([Picture(entry.handle, 3, 6)])
    with pytest.raises(QueueFullError, match="ask again later"):
        cache.put(key("b"), rows(6, 2))
    assert cache.find(key("a")) is entry
    held.release()
    held.release()
    assert entry.pins == 0
    cache.put(key("b"), rows(6, 2))
    assert cache.find(key("a")) is None
    with pytest.raises(PictureGoneError, match="send it again"):
        cache.hold([Picture(entry.handle, 3, 6)])
    cache.check()


def test_a_picture_that_can_never_be_kept_says_what_to_do(cache: PictureCache) -> None:
    with pytest.raises(PictureError, match="THIMBLE_ENGINE_PICTURE_CACHE_GB"):
        cache.put(key("a"), rows(11, 1))


def test_a_wrong_size_pins_nothing(cache: PictureCache) -> None:
    entry = cache.put(key("a"), rows(4, 1))
    with pytest.raises(PictureError, match="has 4 tokens, not 3"):
        cache.hold([Picture(entry.handle, 0, 4), Picture(entry.handle, 9, 3)])
    assert entry.pins == 0


def test_rows_of_any_cut_are_the_same(cache: PictureCache) -> None:
    """However a prompt is cut into chunks, each place gets its own row once."""
    one, two = cache.put(key("a"), rows(4, 1)), cache.put(key("b"), rows(3, 2))
    held = cache.hold([Picture(one.handle, 2, 4), Picture(two.handle, 7, 3), Picture(one.handle, 10, 4)])
    whole = torch.cat([one.rows, two.rows, one.rows])
    for cut in range(1, 16):
        pieces = [row for start in range(0, 16, cut) for row in held.rows(start, start + cut)]
        assert torch.equal(torch.cat(pieces), whole)
    assert held.rows(0, 2) == held.rows(6, 7) == held.rows(14, 99) == []
    assert one.pins == 2
    held.release()
    assert one.pins == two.pins == 0


def test_threads_do_not_lose_count() -> None:
    cache = PictureCache(40 * ROW_BYTES)

    def work(seed: int) -> None:
        for turn in range(200):
            try:
                entry = cache.put(key(f"{(seed * turn) % 17}"), rows(3 + turn % 2, (seed * turn) % 17))
                held = cache.hold([Picture(entry.handle, 0, len(entry.rows))])
            except (QueueFullError, PictureGoneError):
                continue
            assert len(held.rows(0, 99)) == 1
            held.release()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2, 3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cache.check()
    assert all(entry.pins == 0 for entry in cache._entries.values())
