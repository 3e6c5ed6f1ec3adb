"""What fills the slots of made-up chats: names, places, things, numbers, phrases, most of them drawn from thousands, so
that what is learnt is to read and to copy. A model that sees 40 names learns 40 names.

Owns no sentence of a chat. Never draws a word that the exam asks about, but for `usual`, which only copying does.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.tools.score.questions import held_out_words

WORDS: dict[str, list[str]] = json.loads((Path(__file__).parent / "words.json").read_text(encoding="utf-8"))
_NAME = re.compile(r"(?<=[a-z,] )[A-Z][a-z]{2,9}\b")
_WORD = re.compile(r"\b[a-z]{3,10}\b")
_PHRASE = re.compile(r"\b[a-z]+(?: [a-z]+){2,6}\b")
USUAL, USUAL_NAMES = 3000, 600  # words that most tokenizers have an entry for, whatever an exam asks
_NUMBERS = {"number": (2, 99), "few": (2, 12), "degrees": (-9, 35), "large": (12, 990)}


@dataclass(frozen=True)
class Found:
    """Words of a corpus, none of the exam's but among those that are most usual."""

    names: Sequence[str] = ()
    words: Sequence[str] = ()
    phrases: Sequence[str] = ()
    usual: Sequence[str] = ()

    @staticmethod
    def of(texts: Iterable[str]) -> "Found":
        names, words, phrases = Counter[str](), Counter[str](), dict[str, None]()
        for text in texts:
            names.update(_NAME.findall(text))
            words.update(_WORD.findall(text))
            phrases |= dict.fromkeys(_PHRASE.findall(text)[:4])
        held = held_out_words()
        ordered = [[word for word, _ in one.most_common()] for one in (names, words)]
        free = [[word for word in one if word.lower() not in held] for one in ordered]
        usual = set(ordered[1][:USUAL])
        return Found(
            [name for name in free[0] if name.lower() not in usual][:3000],
            free[1][150:9000],
            [phrase for phrase in phrases if not held.intersection(phrase.split())][:40000],
            ordered[1][:USUAL] + ordered[0][:USUAL_NAMES],
        )


class Slots:
    """Draws from `random` only, so that one seed gives one sequence."""

    def __init__(self, seed: int, countries: dict[str, str], found: Found) -> None:
        self.random = random.Random(seed)
        self.countries, self._found = countries, found
        self.held = held_out_words()
        self._known = {
            "thing": WORDS["THINGS"],
            "room": WORDS["ROOMS"],
            "sky": WORDS["SKIES"],
            "language": WORDS["LANGUAGES"],
            "meaning": WORDS["MEANINGS"],
            "onoff": ["on", "off"],
            "country": list(countries),
        }

    def coined(self) -> str:
        pick = self.random.choice
        while True:
            word = "".join(
                pick(WORDS["ONSETS"]) + pick(WORDS["VOWELS"]) + pick(WORDS["CODAS"])
                for _ in range(self.random.choice((1, 2, 2, 3)))
            )
            if word not in self.held:
                return word

    def name(self) -> str:
        share = self.random.random()
        if share < 0.25:
            return self.random.choice(WORDS["KNOWN_NAMES"])
        if self._found.names and share < 0.6:
            return self.random.choice(self._found.names)
        return (self.blend() if share < 0.75 else self.coined()).title()

    def names(self, count: int) -> list[str]:
        found: list[str] = []
        while len(found) < count:
            name = self.name()
            if name not in found:
                found.append(name)
        return found

    def word(self) -> str:
        share = self.random.random()
        if not self._found.words or share < 0.2:
            return self.coined()
        return self.random.choice(self._found.words) if share > 0.45 else self.blend()

    def blend(self) -> str:
        """The beginning of one word and the end of another: pieces that a tokenizer knows, in an order it never saw.

        How a piece is spelled where it is cut otherwise has to be known piece by piece: of a word that is never drawn
        it could only be guessed.
        """
        while self._found.words:
            begin, end = self.random.choices(self._found.words, k=2)
            word = begin[: self.random.randint(2, 5)] + end[self.random.randint(2, 5) :]
            if 3 <= len(word) <= 11 and word not in self.held:
                return word
        return self.coined()

    def usual(self) -> str:
        """One of a language's most usual words and names, the exam's among them: what is copied asks nothing."""
        return self.random.choice(self._found.usual) if self._found.usual else self.word()

    def thing(self) -> str:
        return self.random.choice(WORDS["THINGS"]) if self.random.random() < 0.4 else self.word()

    def place(self) -> str:
        share = self.random.random()
        capitals = [city for city in self.countries.values() if city.lower() not in self.held]
        return self.random.choice(capitals) if share < 0.2 and capitals else self.name()

    def phrase(self) -> str:
        share, pick = self.random.random(), self.random.choice
        if share < 0.5 and self._found.phrases:
            return pick(self._found.phrases)
        if share < 0.8:
            when = pick(("", "", " today", " at six", " tomorrow", " on Monday", " tonight"))
            return f"{pick(WORDS['VERBS'])} the {self.thing()}{when}"
        return " ".join(self.word() for _ in range(self.random.randint(2, 5)))

    def slot(self, kind: str) -> str:
        draw, pick = self.random.randint, self.random.choice
        if kind.startswith("="):
            return kind[1:]
        if kind in ("room", "thing", "language") and self.random.random() < (0.1 if kind == "language" else 0.55):
            return self.word().title() if kind == "language" else self.word()
        if kind in self._known:
            return str(pick(self._known[kind]))
        if kind in _NUMBERS:
            return str(draw(*_NUMBERS[kind]))
        if kind == "time":
            return f"{draw(0, 23):02}:{draw(0, 59):02}"
        if kind == "phone":
            return f"{draw(100, 999)}-{draw(1000, 9999)}"
        return {"city": self.place, "name": self.name, "phrase": self.phrase}.get(kind, self.word)()
