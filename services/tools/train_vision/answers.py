"""Whether an answer says what is in a picture, however it puts it. Knows words, no pictures.

What counts is what it names: colours, shapes and numbers, each as often, yes or no, and the text that is to be read.
"""

import re

from services.tools.train_vision.scenes import COLOURS, SHAPES, Asked

_NUMBERS = ("zero", "one", "two", "three", "four", "five")
_SAME = {
    **{word: str(number) for number, word in enumerate(_NUMBERS)},
    **{f"{shape}es" if shape.endswith("s") else f"{shape}s": shape for shape in SHAPES},
    "gray": "grey",
    "empty": "nothing",
}
_NAMED = {*COLOURS, *SHAPES, "yes", "no", "nothing"}
_OF_TEXT = ("number", "word", "row")


def is_right(asked: Asked, said: str) -> bool:
    """A word or number that is read must be the one; colours, shapes and counts must be those, together, and no
    others."""
    wanted, found = _words(asked.answer), _words(said)
    if asked.topic in _OF_TEXT:
        return wanted[-1] in found and not [word for word in found if word.isdigit() and word != wanted[-1]]
    if not any(word in _NAMED or _is_number(word) for word in wanted):  # a word, or an invoice
        return wanted[-1] in found
    return _named(asked.answer, asked.topic == "what") == _named(said, asked.topic == "what")


def _named(text: str, counted: bool) -> list[list[str]]:
    """What each part of a sentence names; `counted` things without a number are one."""
    parts = []
    for part in re.split(r" and |[,;\n]|\.(?!\d)", text.lower()):
        named = [word for word in _words(part) if word in _NAMED or _is_number(word)]
        if counted and any(word in SHAPES for word in named) and not any(_is_number(word) for word in named):
            named.append("1")
        parts += [sorted(named)] if named else []
    return sorted(parts)


def _is_number(word: str) -> bool:
    return word.replace(".", "").isdigit()


def _words(text: str) -> list[str]:
    found = re.findall(r"\d+(?:\.\d+)?|[a-z]+", text.lower())
    return [_SAME.get(one, one) for one in found]
