"""Documents that nobody can go on with but by looking back: lists said again, tables that are asked, calls with their
values, patterns that were shown once. Their words are drawn anew every time, so there is nothing else to learn.

A word that is repeated mostly stands behind another sign than before, and a tokenizer cuts it otherwise there: what has
to be learnt is to copy letters, not ids, and how each of the tokenizer's entries is spelled. Owns the forms. Never
draws a word of the exam, but those that are among a language's most usual; and none at all in a call.
"""

import json
from collections.abc import Callable, Sequence

from services.tools.train_demo.lesson_slots import WORDS, Found, Slots

Piece = tuple[str, bool]  # a text, and whether it is to be learnt
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
# How the items of a list are shown: what stands before each, and behind it.
_STYLES = (
    (" ", ""), ("\n", ""), ("\n- ", ""), (", ", ""), (' "', '"'), ("\n<", ">"), ("/", ""), (" (", ")"), ("=", ";"),
    ("\n", "\n"), (">", "<"), ("_", ""), (": ", "."), (" and ", ""), ("\n* ", ","), ("[", "]"), ("|", "|"),
)  # fmt: skip
_TURNS = ("\n", "\n\n", " ->", "\nAgain:", "\nOnce more:", "\nCopy:", " =>", "\nThe same:", "\n---")
_ASKS = ("\n{}?", "\nWhat is {}?", "\n{} =", "\n{}:", "\nAnd {}?", '\n"{}" is', "\nLook up {}:")
_TIES = ("{}: {}", "{} = {}", "{} is {}", "{} -> {}", '"{}": "{}"', "{}\t{}", "{} ({})", "{} has {}")


class Copying:
    """Documents without end from one seed."""

    def __init__(self, seed: int, found: Found | None = None) -> None:
        self.slots = Slots(seed, {}, found or Found())
        self.random = self.slots.random
        self._kinds: list[tuple[float, Callable[[], list[Piece]]]] = [
            (3, self.again), (3, self.table), (4, self.call), (3, self.pattern), (4, self.spelling),
        ]  # fmt: skip

    def document(self) -> list[Piece]:
        return self.random.choices([kind for _, kind in self._kinds], [share for share, _ in self._kinds])[0]()

    def item(self, free: bool = False) -> str:
        """A word, a name, a number, several words; `free` of words of the exam."""
        share, pick, draw = self.random.random(), self.random.choice, self.random.randint
        if share < 0.42:
            return self.slots.usual() if share < 0.26 and not free else self.slots.word()
        if share < 0.5:
            return self.slots.coined()
        if share < 0.68:
            return self.slots.name()
        if share < 0.78:
            return str(draw(0, pick((9, 99, 99, 999, 9999))))
        if share < 0.84:
            return self.snake()
        if share < 0.88:
            return "".join(pick(_LETTERS) for _ in range(draw(2, 7)))
        if share < 0.92:
            return self.slots.slot(pick(("time", "phone")))
        return self.slots.phrase() if share < 0.96 else " ".join(self.slots.word() for _ in range(draw(2, 3)))

    def items(self, count: int, free: bool = False) -> list[str]:
        found: dict[str, None] = {}
        while len(found) < count:
            found[self.item(free)] = None
        return list(found)

    def snake(self) -> str:
        """As functions are named."""
        pick, parts = self.random.choice, [self.slots.word() for _ in range(self.random.choice((1, 2, 2, 3)))]
        if self.random.random() < 0.5:
            parts[self.random.randrange(len(parts))] = pick(WORDS["PARTS"])
        name = "_".join(parts)
        return self.snake() if name in self.slots.held else name

    def again(self) -> list[Piece]:
        """A list, then the same list in other signs; sometimes from its end."""
        items, pick = self.items(self.random.choice((1, 2, 3, 4, 6, 8, 12, 16))), self.random.choice
        pieces, turn = [(_shown(items, pick(_STYLES)).lstrip(), False)], pick(_TURNS)
        if backwards := self.random.random() < 0.15:
            turn = pick(("\nBackwards:", "\nFrom the end:"))
        for _ in range(pick((1, 1, 2, 3))):
            shown = items[::-1] if backwards else items
            pieces += [(turn, False), (_shown(shown, pick(_STYLES)) + "\n", True)]
        return pieces

    def table(self) -> list[Piece]:
        """Keys and values; then some of them are asked, from either side."""
        pick, count = self.random.choice, self.random.choice((1, 2, 3, 4, 6, 9))
        words = self.items(2 * count)
        pairs, tie = list(zip(words[:count], words[count:], strict=True)), pick(_TIES)
        between = pick(("\n", "\n", "\n", "; ", ". "))
        pieces: list[Piece] = [(between.join(tie.format(*pair) for pair in pairs), False)]
        sign, backwards = pick((" ", " ", "\n")), self.random.random() < 0.25
        ask = pick(("\nWhose is {}?", "\nWhich one goes with {}?")) if backwards else pick(_ASKS)
        for key, value in self.random.choices(pairs, k=self.random.randint(1, 2 * count)):
            known, wanted = (value, key) if backwards else (key, value)
            pieces += [(ask.format(known), False), (f"{sign}{wanted}{pick(('', '.')) if sign == ' ' else ''}", True)]
        return [*pieces, ("\n", True)]

    def call(self) -> list[Piece]:
        """Functions with parameters, lines that name one of them by its mark, and the calls that are meant."""
        pick = self.random.choice
        names, functions = self.items(pick((1, 2, 3, 4)), free=True), dict[str, tuple[str, list[str]]]()
        for mark in names:
            functions[mark] = (self.snake(), list(dict.fromkeys(self._key() for _ in range(pick((1, 1, 2, 2, 3))))))
        told = "".join(
            f"<function>\n<name>{name}</name>\n<description>{mark}</description>\n"
            + "".join(f"<parameter>\n<name>{key}</name>\n</parameter>\n" for key in keys)
            + "</function>\n"
            for mark, (name, keys) in functions.items()
        )
        pieces: list[Piece] = [(told, False)]
        for _ in range(pick((1, 2, 3))):
            mark = pick(names)
            name, keys = functions[mark]
            values = self.items(len(keys), free=True)
            given = list(zip(keys, values, strict=True))
            said = pick((", ".join(values), " and ".join(values), "; ".join(f"{k} {v}" for k, v in given),
                         json.dumps(dict(given)), ", ".join(f"{v} as {k}" for k, v in given)))  # fmt: skip
            filled = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given)
            pieces += [
                (pick(("{m}: {s}\n", "{m} {s}\n", "Please {m} {s}.\n", "{s}: {m}\n")).format(m=mark, s=said), False),
                (f"<tool_call>\n<function={name}>\n{filled}</function>\n</tool_call>\n", True),
            ]
        return pieces

    def _key(self) -> str:
        return self.slots.word() if self.random.random() < 0.6 else self.snake()

    def pattern(self) -> list[Piece]:
        """Lines of one form, and what is to be read from each; the first shows how."""
        pick, random = self.random.choice, self.random
        count = pick((1, 2, 2, 2, 3))
        places = [f"{{{n}}}" for n in range(count)]
        words = [self.slots.word() for _ in range(count + 1)]
        form = " ".join(f"{word} {place}" for word, place in zip(words, places, strict=False))
        form = (pick(("{0} " + form.replace("{0}", "", 1), form)) if count == 1 else form) + pick(("", f" {words[-1]}"))
        keys, order = [self.slots.word() for _ in places], random.sample(range(count), count)
        shape = pick(("{k}={v}", "{k}: {v}", "<parameter={k}>\n{v}\n</parameter>", '"{k}": "{v}"', "{v}", "{v}"))
        joint = "\n" if "\n" in shape else pick((", ", "\n", " "))
        end, turn = pick((".", "?", "", "!")), pick(("\n", " => ", " -> ", "\nA: "))
        pieces: list[Piece] = []
        for number in range(random.randint(2, 6)):
            values = self.items(count)
            line = form.format(*values) + end + turn
            answer = joint.join(shape.format(k=keys[n], v=values[n]) for n in order)
            pieces += [(line, False), (answer + "\n", number > 0)]
        return pieces

    def spelling(self) -> list[Piece]:
        """Words letter by letter, and letters as words."""
        pieces: list[Piece] = []
        sign, tie = self.random.choice(("-", " ", ", ", ".")), self.random.choice((": ", " = ", " is spelled "))
        joined = self.random.random() < 0.4
        for _ in range(self.random.randint(2, 8)):
            slots = self.slots
            word = self.random.choice((slots.usual, slots.usual, slots.word, slots.blend, slots.name))()
            letters = sign.join(word)
            said, wanted = (letters, word) if joined else (word, letters)
            pieces += [(said + tie, False), (wanted + "\n", True)]
        return pieces


def _shown(items: Sequence[str], style: tuple[str, str]) -> str:
    before, behind = style
    return "".join(f"{before}{item}{behind}" for item in items)
