"""The fixed questions and what counts as right. Owns the rules; the questions are the data files beside it.

questions.jsonl   100: turns of which the last is judged, by one of: any (and none), number, items, least_words
tool_calls.json   50: tools, what is asked, the call that is wanted, what the function returns, what must be said of it
problems.jsonl    30 word problems with a number for an answer
dialog.json       20 turns of one chat
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_MARKERS = re.compile(
    r"<\|?/?(im_start|im_end|think|tool_call|tool_response|function|parameter|s)\b|\b(user|assistant)\n"
)
LONGEST_ANSWER_WORDS = 150  # of a chat's turn
_ORDINARY = frozenset(
    (
        "and",
        "bakery",
        "bill",
        "box",
        "capital",
        "date",
        "france",
        "green",
        "hill",
        "how",
        "invoice",
        "the",
        "thank",
        "total",
        "what",
        "where",
        "which",
        "who",
    )
)
_LANGUAGES = {"danish", "dutch", "italian", "spanish"}  # there are not enough to keep some back


def questions() -> list[dict[str, Any]]:
    return _lines("questions.jsonl")


def problems() -> list[dict[str, Any]]:
    return _lines("problems.jsonl")


def dialog() -> list[str]:
    turns: list[str] = json.loads((_HERE / "dialog.json").read_text(encoding="utf-8"))
    return turns


def tool_calls() -> list[dict[str, Any]]:
    """`tools` are whole definitions, as a client sends them."""
    data = json.loads((_HERE / "tool_calls.json").read_text(encoding="utf-8"))
    functions = {one["function"]["name"]: one for one in data["functions"]}
    return [call | {"tools": [functions[name] for name in call["tools"]]} for call in data["calls"]]


def asked_in_exam() -> frozenset[str]:
    """Every question that is judged: what no training text may ask. Turns that lead up to one are ordinary chat."""
    judged = [one["turns"][-1] for one in questions() if len(one["turns"]) == 1]
    return frozenset([*judged, *(one["ask"] for one in problems()), *(one["ask"] for one in tool_calls())])


def held_out_words() -> frozenset[str]:
    """In small letters: functions, their parameters, and the names and things that are asked about with them, in word
    problems, in reading and in memory. What is drawn at random for training must not be one of these."""
    told = [turn for one in questions() if one["kind"] in ("reading", "memory") for turn in one["turns"]]
    told += [one["ask"] for one in problems()]
    names = {word.lower() for text in told for word in re.findall(r"[A-Z][a-z]{2,}", text)} - _ORDINARY
    for one in tool_calls():
        values = [str(value) for value in one["arguments"].values()]
        names |= {one["call"], *one["arguments"], *(value.lower() for value in values if value[0].isalpha())}
    return frozenset(names - {"on", "off"} - _LANGUAGES)


def sums_in(text: str) -> frozenset[tuple[int, str, int]]:
    """Additions and subtractions that a text asks for, whatever their words."""
    found = re.findall(r"\b(\d+) (\+|-|plus|minus) (\d+)\b", text)
    return frozenset((int(a), {"plus": "+", "minus": "-"}.get(sign, sign), int(b)) for a, sign, b in found)


def held_out_sums() -> frozenset[tuple[int, str, int]]:
    return frozenset().union(*(sums_in(one["turns"][-1]) for one in questions()))


def is_right(rule: Mapping[str, Any], answer: str) -> bool:
    """Words count whatever their case; of numbers the last one is the answer."""
    words = re.findall(r"[\w'.:-]*\w", answer.lower())
    if "number" in rule:
        return last_number(answer) == int(rule["number"])
    if "items" in rule:
        found = {item for item in rule["items"] if item in words or f"{item}s" in words or f"{item}es" in words}
        return len(found) >= int(rule["least"])
    if len(words) < rule.get("least_words", 0) or (len(words) >= 40 and len(set(words)) < 0.3 * len(words)):
        return False
    said = any(one in words for one in rule["any"])
    return said and not any(one in words for one in rule.get("none", ()))


def last_number(answer: str) -> int | None:
    found = re.findall(r"(?<![\w.])-?\d+(?![\w])(?!\.\d)", answer)
    return int(found[-1]) if found else None


def is_right_call(wanted: Mapping[str, Any], calls: Sequence[tuple[str, Mapping[str, Any]]]) -> bool:
    """One call, of the right function, with the right arguments; numbers may come as text."""
    if len(calls) != 1 or calls[0][0] != wanted["call"]:
        return False
    given = {key: str(value).strip() for key, value in calls[0][1].items()}
    return given == {key: str(value) for key, value in wanted["arguments"].items()}


def uses_result(wanted: Mapping[str, Any], answer: str) -> bool:
    """Says what the function returned, or at least something if that was only that it is done."""
    return bool(answer.strip()) and all(one.lower() in answer.lower() for one in wanted["answer"])


def in_format(answer: str, finished: bool, before: Sequence[str]) -> bool:
    """An answer that ends by itself, is not empty nor endless, shows no marker of the format, is not what was said
    three times already."""
    words = answer.split()
    return (
        finished
        and 0 < len(words) <= LONGEST_ANSWER_WORDS
        and not _MARKERS.search(answer)
        and list(before).count(answer) < 3
    )


def _lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (_HERE / name).read_text(encoding="utf-8").splitlines()]
