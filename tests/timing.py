"""Times that a busy machine does not spoil: work beside a test makes a try late, never early."""

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")
TRIES = 8


def in_some_try(measure: Callable[[], Found], good: Callable[[Found], bool]) -> Found:
    """The first of some tries that is good, else the last. What is always too slow is so in all of them."""
    for _ in range(TRIES - 1):
        found = measure()
        if good(found):
            return found
    return measure()


def in_time(condition: Callable[[], bool], within_s: float = 20) -> bool:
    """Whether it came true; looks a hundred times a second."""
    until = time.monotonic() + within_s
    while not (true := condition()) and time.monotonic() < until:
        time.sleep(0.01)
    return true
