"""What is to be seen in a picture, as data: things of a colour and a shape, a number, a word, the rows of an invoice,
nothing; and what may be asked of it. Knows no pixels: `drawings.py` draws a scene, `told` says it in words.

Words come from train_demo's lists, or are made up of syllables, so that reading is learnt and not a list of words.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any, Literal

_FOLDER = Path(__file__).parent
_WORDS: dict[str, list[str]] = json.loads((_FOLDER.parent / "train_demo" / "words.json").read_text(encoding="utf-8"))
_TEXTS: dict[str, Any] = json.loads((_FOLDER / "questions.json").read_text(encoding="utf-8"))

COLOURS = ("red", "green", "blue", "yellow", "orange", "purple", "pink", "brown", "black", "white", "grey")
SHAPES = ("circle", "square", "triangle", "cross", "star", "heart")
# Neither is drawn on the other, nor are both in one picture: whether they differ is a matter of taste.
_ALIKE = (
    "red pink, red orange, red brown, orange yellow, orange brown, pink purple, blue purple, grey white, grey black"
)
ALIKE = {
    frozenset(pair.split()) for pair in f"{_ALIKE}, brown black, brown purple, grey pink, yellow white".split(", ")
}
MOST = 5
DIGITS = 5
LETTERS = 8
ROWS = 4
Kind = Literal["things", "number", "word", "invoice", "nothing"]
KINDS: tuple[Kind, ...] = ("things", "number", "word", "invoice", "nothing")
Topic = Literal[
    "what", "shape", "colour", "count", "background", "whether", "number", "word", "quantity", "price", "row"
]
TOPICS: tuple[Topic, ...] = (
    "what",
    "shape",
    "colour",
    "count",
    "background",
    "whether",
    "number",
    "word",
    "quantity",
    "price",
    "row",
)
ORDINALS = ("first", "second", "third", "fourth")


@dataclass(frozen=True)
class Group:
    count: int
    colour: str
    shape: str


@dataclass(frozen=True)
class Row:
    item: str
    quantity: str
    price: str


@dataclass(frozen=True)
class Scene:
    """`text` is the number or the word; `ink` its colour."""

    kind: Kind
    background: str
    groups: tuple[Group, ...] = ()
    text: str = ""
    ink: str = "black"
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True)
class Asked:
    topic: Topic
    question: str
    answer: str


def scene(choice: random.Random, kind: Kind, held_out: bool = False, most: int = 0) -> Scene:
    """`held_out`: words are those of the lists that are in no other scene. `most`: a simple scene, of one kind of
    things, at most so many, or a number of so many digits or up to two fewer."""
    background = choice.choice(("white", "white", "grey", *COLOURS)) if kind != "invoice" else "white"
    if kind == "things":
        if most:
            one = Group(choice.randint(1, most), choice.choice(unlike((background,))), choice.choice(SHAPES))
            return Scene(kind, background, (one,))
        return Scene(kind, background, _groups(choice, background))
    ink = choice.choice(unlike((background,)))
    if kind == "number":
        length = choice.randint(max(1, most - 2), most) if most else choice.choice((1, 2, 3, 4, 4, 4, 5))
        return Scene(kind, background, text=f"{choice.randrange(10**length):0{length}d}", ink=ink)
    if kind == "word":
        return Scene(kind, background, text=_word(choice, held_out), ink=ink)
    if kind == "invoice":
        items: list[str] = []
        for _ in range(choice.randrange(2, ROWS + 1)):
            items.append(next(word for word in iter(lambda: _word(choice, held_out), "") if word not in items))
        return Scene(kind, background, rows=tuple(_row(choice, item) for item in items))
    return Scene(kind, background)


def unlike(colours: Sequence[str]) -> list[str]:
    """Colours that cannot be taken for one of these."""
    return [one for one in COLOURS if all(one != other and frozenset((one, other)) not in ALIKE for other in colours)]


def named(group: Group) -> str:
    return f"{group.count} {group.colour} {_plural(group.shape, group.count)}"


def told(seen: Scene, choice: random.Random) -> str:
    """The scene in words, for a model that reads before it sees."""
    if seen.kind == "things":
        said = " and ".join(named(group) for group in seen.groups)
    elif seen.kind in ("number", "word"):
        said = f"the {seen.kind} {seen.text}"
    elif seen.kind == "invoice":
        said = "an invoice: " + "; ".join(f"{row.item} {row.quantity} {row.price}" for row in seen.rows)
    else:
        said = "nothing"
    return choice.choice((f"{said} on {seen.background}", f"{seen.background}: {said}"))


def topics(seen: Scene) -> tuple[Topic, ...]:
    """What may be asked of it, each as often as it is to be asked."""
    return {
        "things": ("what", "what", "shape", "colour", "count", "count", "background", "whether"),
        "number": ("what", "number", "number", "number", "number", "background"),
        "word": ("what", "word", "word", "word", "word", "background"),
        "invoice": ("quantity", "price", "row", "quantity", "price", "row", "what"),
        "nothing": ("what", "background", "whether", "count"),
    }[seen.kind]  # type: ignore[return-value]


def ask(seen: Scene, topic: Topic, choice: random.Random, held_out: bool = False) -> Asked:
    """A question on that topic; `held_out` puts it in words that are in no other question."""
    slots, answer = _slots(seen, topic, choice)
    forms = _TEXTS["held out" if held_out else "taught"][topic]
    plain = [text for text in forms if {name for _, name, _, _ in Formatter().parse(text) if name} == slots.keys()]
    return Asked(topic, choice.choice(plain).format(**slots), answer)


def _slots(seen: Scene, topic: Topic, choice: random.Random) -> tuple[dict[str, str], str]:
    """What a question names, and its answer. With two kinds of things, colour, shape and count are of one of them."""
    groups = seen.groups
    one = choice.choice(groups) if groups else Group(0, "", choice.choice(SHAPES))
    several = len(groups) > 1
    if topic == "what":
        if groups:
            return {}, " and ".join(named(group) for group in groups) + "."
        return {}, {"nothing": "Nothing.", "invoice": f"An invoice with {len(seen.rows)} rows."}.get(
            seen.kind, f"The {seen.kind} {seen.text}."
        )
    if topic == "background":
        return {}, f"{seen.background.capitalize()}."
    if topic == "shape":
        return ({"colour": one.colour} if several else {}), f"{one.shape.capitalize()}."
    if topic == "colour":
        return ({"shape": _plural(one.shape, one.count)} if several else {}), f"{one.colour.capitalize()}."
    if topic == "count":
        if several or choice.random() < 0.5:
            return {"shape": _plural(one.shape, 2)}, f"{one.count}."
        return {}, f"{one.count}."
    if topic == "whether":
        return _whether(seen, choice)
    if topic in ("number", "word"):
        return {}, f"It says {seen.text}."
    place = choice.randrange(len(seen.rows))
    row = seen.rows[place]
    if topic == "row":
        return {"place": ORDINALS[place]}, f"It is {row.item}."
    return {"item": row.item}, f"{row.quantity if topic == 'quantity' else row.price}."


def _whether(seen: Scene, choice: random.Random) -> tuple[dict[str, str], str]:
    """Is there a red circle, a circle, anything red? As often yes as no, if there is anything."""
    wanted = choice.random() < 0.5 and bool(seen.groups)
    form = choice.choice(("colour", "shape", "both"))
    there = [(group.colour, group.shape) for group in seen.groups]
    while True:
        colour, shape = choice.choice(there) if wanted else (choice.choice(COLOURS), choice.choice(SHAPES))
        if not wanted and there and form == "both" and choice.random() < 0.6:  # nearly so
            colour, shape = choice.choice(((there[0][0], shape), (colour, there[0][1])))
        found: list[object] = [one[0] if form == "colour" else one[1] if form == "shape" else one for one in there]
        asked: object = {"colour": colour, "shape": shape, "both": (colour, shape)}[form]
        near = any(frozenset((colour, other)) in ALIKE for other, _ in there) or colour == seen.background
        if (asked in found) == wanted and (wanted or form == "shape" or not near):
            break
    slots = {"colour": colour} if form == "colour" else {"shape": shape}
    return (slots | {"colour": colour} if form == "both" else slots), "Yes." if wanted else "No."


def _groups(choice: random.Random, background: str) -> tuple[Group, ...]:
    colour, shape = choice.choice(unlike((background,))), choice.choice(SHAPES)
    first = Group(choice.choice((1, 1, 2, 3, 4, 5)), colour, shape)
    others = unlike((background, colour))
    if choice.random() < 0.75 or not others:
        return (first,)
    left = choice.choice([one for one in SHAPES if one != shape])
    return (Group(min(3, first.count), colour, shape), Group(choice.randrange(1, 4), choice.choice(others), left))


def _row(choice: random.Random, item: str) -> Row:
    quantity = choice.choice((choice.randrange(1, 10), choice.randrange(10, 100)))
    price = choice.choice((choice.randrange(0, 10), choice.randrange(10, 100)))
    return Row(item, str(quantity), f"{price}.{choice.randrange(100):02d}")


def _word(choice: random.Random, held_out: bool) -> str:
    if held_out or choice.random() < 0.5:
        return choice.choice(HELD_OUT_WORDS if held_out else KNOWN_WORDS)
    parts = (_WORDS["ONSETS"], _WORDS["VOWELS"], _WORDS["CODAS"])
    coined = "".join(choice.choice(part) for _ in range(choice.choice((1, 2, 2))) for part in parts)
    return coined[:LETTERS] if len(coined) > 1 else _word(choice, held_out)


def _plural(shape: str, count: int) -> str:
    return shape if count == 1 else f"{shape}es" if shape.endswith("s") else f"{shape}s"


def _known() -> list[str]:
    lists = (
        *(_WORDS[kind] for kind in ("THINGS", "ROOMS", "ANIMALS", "JOBS", "SKIES", "KNOWN_NAMES")),
        _TEXTS["words"],
    )
    found = {word.lower() for words in lists for word in words}
    return sorted(word for word in found if word.isalpha() and len(word) <= LETTERS)


HELD_OUT_WORDS = _known()[::6]
KNOWN_WORDS = [word for word in _known() if word not in HELD_OUT_WORDS]
