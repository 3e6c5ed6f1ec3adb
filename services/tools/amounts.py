"""Amounts as a command line gives them: a number, or several with commas. Refused if no machine could have them.

Owns the reading and what argparse says of what is no amount; what an amount means is the command's business.
"""

import argparse
import math

MOST = 10**15  # bytes, tokens, seconds or seeds: nobody means more


def amount(text: str) -> float:
    """More than nothing, and finite."""
    found = nothing_or_more(text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}: expected more than 0")
    return found


def nothing_or_more(text: str) -> float:
    try:
        found = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number") from error
    if not math.isfinite(found) or found < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number that is not negative")
    if found > MOST:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number up to {MOST:.0e}")
    return found


def amounts(text: str) -> list[float]:
    """`12,16,20`."""
    return [amount(word) for word in text.split(",")]


def wholes(text: str) -> list[int]:
    """`40,512`."""
    return [whole(word) for word in text.split(",")]


def none_or_more(text: str) -> list[float]:
    """`0,0.5,1`."""
    return [nothing_or_more(word) for word in text.split(",")]


def whole(text: str, least: int = 1) -> int:
    """A whole number from `least` on."""
    if not text.isdecimal() or len(text) > len(str(MOST)) or not least <= int(text) <= MOST:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from {least} on")
    return int(text)


def count(text: str) -> int:
    """0 too."""
    return whole(text, 0)
