"""The pool that teaching draws from: rooms by lesson, the oldest replaced; what drawing raised is raised in use."""

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from services.tools.train_vision.batches import Batch
from services.tools.train_vision.lessons import LESSONS
from services.tools.train_vision.pool import Feed, Pool

ALL = [1.0] * len(LESSONS)


def batch(numbers: list[int], lesson: int) -> Batch:
    one = torch.tensor(numbers)
    return Batch(*[one[:, None]] * 6, torch.full((len(numbers),), lesson, dtype=torch.int8))


def test_the_oldest_of_a_lesson_go_and_other_lessons_stay() -> None:
    pool = Pool(200, "cpu")
    first = [*range(40)]
    pool.put(batch(first, 5))
    pool.put(batch([1000, 1001], 0))
    assert {*pool.take(500, ALL).patches.flatten().tolist()} == {*first, 1000, 1001}
    pool.put(batch([*range(100, 140)], 5))  # of 56 that there is room for
    found = {*pool.take(2000, ALL).patches.flatten().tolist()}
    assert found == {*range(24, 40), *range(100, 140), 1000, 1001}
    assert (pool.drawn, pool.taken) == (82, 2500)


def test_lessons_come_by_their_weights_if_anything_of_them_is_drawn() -> None:
    pool = Pool(200, "cpu")
    pool.put(batch([1, 2, 3], 0))
    pool.put(batch([4, 5, 6], 1))
    taken = Counter(pool.take(4000, [3.0, 1.0, 50.0, 0, 0, 0, 0, 0]).lessons.tolist())
    assert taken.keys() == {0, 1}
    assert 2.5 < taken[0] / taken[1] < 3.6
    assert {*pool.take(50, [0.0, 0.0, 1.0, 0, 0, 0, 0, 0]).lessons.tolist()} == {0, 1}  # better those than none


def test_a_feed_gives_what_there_is_in_order_and_what_went_wrong() -> None:
    def batches() -> Iterator[Batch]:
        for number in range(12):
            yield batch([number], 0)
        raise OSError("no more ink")

    feed = Feed(batches(), pin=False)
    found = [feed.next(wait=True) for _ in range(12)]
    assert [int(one.patches[0, 0]) for one in found if one is not None] == [*range(12)]
    with pytest.raises(OSError, match="ink"):
        feed.next(wait=True)
    assert feed.next(wait=False) is None
    feed.close()


def test_a_feed_that_is_not_emptied_ends_when_told() -> None:
    def forever() -> Iterator[Batch]:
        while True:
            yield batch([1], 0)

    feed = Feed(forever(), pin=False)
    assert feed.next(wait=True) is not None
    feed.close()
    assert not feed._thread.is_alive()
