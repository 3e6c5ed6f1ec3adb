"""Times that a busy machine does not spoil: work beside a test makes a try late, never early."""

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
