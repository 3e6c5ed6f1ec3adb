"""How much of a text's end must wait, because more text could turn it into a marker. Owns nothing else."""

from collections.abc import Iterable


def held_length(text: str, markers: Iterable[str]) -> int:
    """Length of the longest end of `text` that is a proper beginning of a marker."""
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return longest


def trailing_space(text: str) -> int:
    """Length of the white space at the end of `text`."""
    return len(text) - len(text.rstrip())
