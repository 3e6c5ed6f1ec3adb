"""Chats that are made up: every name, place, thing, number and function is drawn anew, so that what is learnt is to
read and to copy. The corpus has no tool calls, no thinking and few names; a model that sees 40 names learns 40 names.

Owns what is said; how it is rendered is the chat template's.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.tools.train_vision import scenes

Chat = dict[str, Any]  # {"messages": [...], "tools": [...]}

PURPOSES = json.loads((Path(__file__).parent / "purposes.json").read_text(encoding="utf-8"))
WORDS: dict[str, list[str]] = json.loads((Path(__file__).parent / "words.json").read_text(encoding="utf-8"))


class Lessons:
    """Chats without end from one seed."""

    def __init__(self, seed: int, countries: dict[str, str]) -> None:
        self.random = random.Random(seed)
        self._countries = countries
        self._kinds: list[tuple[float, Callable[[], Chat]]] = [
            (3, self.tool_call),
            (2, self.sum),
            (2, self.word_problem),
            (2, self.facts),
            (2, self.name_memory),
            (1, self.repeat),
            (1, self.capitals),
            (1, self.tools_unneeded),
            (2, self.described_picture),
        ]

    def chat(self) -> Chat:
        weights = [weight for weight, _ in self._kinds]
        return self.random.choices([kind for _, kind in self._kinds], weights)[0]()

    # What fills the slots.

    def coined(self) -> str:
        pick = self.random.choice
        return "".join(
            pick(WORDS["ONSETS"]) + pick(WORDS["VOWELS"]) + pick(WORDS["CODAS"])
            for _ in range(self.random.choice((1, 2, 2, 3)))
        )

    def name(self) -> str:
        return self.random.choice(WORDS["KNOWN_NAMES"]) if self.random.random() < 0.4 else self.coined().capitalize()

    def names(self, count: int) -> list[str]:
        found: list[str] = []
        while len(found) < count:
            name = self.name()
            if name not in found:
                found.append(name)
        return found

    def slot(self, kind: str) -> str:
        draw, pick = self.random.randint, self.random.choice
        if kind.startswith("="):
            return kind[1:]
        known = {
            "thing": WORDS["THINGS"],
            "room": WORDS["ROOMS"],
            "sky": WORDS["SKIES"],
            "language": WORDS["LANGUAGES"],
            "phrase": WORDS["DOING"],
            "meaning": WORDS["MEANINGS"],
            "onoff": ["on", "off"],
            "country": list(self._countries),
        }
        if kind in known and (kind != "thing" or self.random.random() < 0.7):
            return str(pick(known[kind]))
        numbers = {"number": (2, 99), "few": (2, 12), "degrees": (-9, 35), "large": (12, 990)}
        if kind in numbers:
            return str(draw(*numbers[kind]))
        if kind == "time":
            return f"{draw(0, 23):02}:{draw(0, 59):02}"
        if kind == "phone":
            return f"{draw(100, 999)}-{draw(1000, 9999)}"
        return (
            self.coined().capitalize() if kind in ("city", "name") and self.random.random() < 0.7 else self._other(kind)
        )

    def _other(self, kind: str) -> str:
        if kind == "city":
            return self.random.choice(list(self._countries.values()))
        return self.name() if kind == "name" else self.coined()

    # Functions.

    def function(self, purpose: dict[str, Any]) -> tuple[dict[str, Any], str, dict[str, str]]:
        """A tool, its name, and the names of its parameters by slot."""
        pick = self.random.choice
        name = pick(purpose["names"])
        if self.random.random() < 0.6:
            name = pick(
                (
                    f"{self.coined()}_{name}",
                    f"{name}_{self.coined()}",
                    self.coined(),
                    f"{self.coined()}_{self.coined()}",
                )
            )
        keys = {slot: slot if self.random.random() < 0.6 else self.coined() for slot in purpose["slots"]}
        numeric = ("number", "few")
        properties = {
            keys[slot]: {
                "type": "integer" if kind in numeric else "string",
                "description": purpose["describe"][slot],
            }
            for slot, kind in purpose["slots"].items()
        }
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        described = {"name": name, "description": pick(purpose["about"]), "parameters": parameters}
        return {"type": "function", "function": described}, name, keys

    def tool_call(self) -> Chat:
        pick = self.random.choice
        purposes = self.random.sample(PURPOSES, self.random.randint(1, 4))
        made = [self.function(purpose) for purpose in purposes]
        messages: list[dict[str, Any]] = []
        for _ in range(self.random.choice((1, 1, 1, 2))):
            which = self.random.randrange(len(purposes))
            purpose, (_, name, keys) = purposes[which], made[which]
            values = {slot: self.slot(kind) for slot, kind in purpose["slots"].items()}
            numbers = {slot: int(v) if purpose["slots"][slot] in ("number", "few") else v for slot, v in values.items()}
            result = {key: self._result(kind, numbers) for key, kind in purpose["result"].items()}
            ask = pick(purpose["asks"]).format(**values)
            call = {
                "type": "function",
                "function": {"name": name, "arguments": {keys[s]: v for s, v in numbers.items()}},
            }
            calling: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
            if self.random.random() < 0.3:
                calling["reasoning_content"] = f"The user asks: {ask} I should call {name}."
            messages += [
                {"role": "user", "content": ask},
                calling,
                {"role": "tool", "content": json.dumps(result)},
                {"role": "assistant", "content": pick(purpose["answer"]).format(**values, **result)},
            ]
        return {"messages": messages, "tools": [tool for tool, _, _ in made]}

    def _result(self, kind: str, numbers: dict[str, Any]) -> str | int:
        if kind in ("a+b", "a*b"):
            return int(numbers["a"] + numbers["b"] if kind == "a+b" else numbers["a"] * numbers["b"])
        value = self.slot(kind)
        return int(value) if kind in ("number", "few", "degrees", "large") else value

    def tools_unneeded(self) -> Chat:
        tools = [self.function(purpose)[0] for purpose in self.random.sample(PURPOSES, self.random.randint(1, 3))]
        return {**self.random.choice((self.sum, self.facts, self.name_memory))(), "tools": tools}

    # Reading, counting, remembering.

    def sum(self) -> Chat:
        draw, pick = self.random.randint, self.random.choice
        kind = pick("+-*")
        if kind == "+":
            a = draw(1, 98)
            b = draw(1, 99 - a)
        elif kind == "-":
            a = draw(2, 99)
            b = draw(1, a)
        else:
            a, b = draw(2, 10), draw(2, 10)
        value = {"+": a + b, "-": a - b, "*": a * b}[kind]
        word = {"+": "plus", "-": "minus", "*": "times"}[kind]
        ask = pick(
            (
                f"What is {a} {kind} {b}?",
                f"{a} {kind} {b} = ?",
                f"How much is {a} {word} {b}?",
                f"What is {a} {word} {b}?",
                f"Can you tell me what {a} {word} {b} is?",
                f"Calculate {a} {kind} {b}.",
            )
        )
        answer = pick((f"{a} {kind} {b} = {value}.", f"{a} {word} {b} is {value}.", f"The answer is {value}."))
        return self._asked(ask, answer, self._steps(a, kind, b, value))

    def _steps(self, a: int, kind: str, b: int, value: int) -> str:
        if kind == "+" and a > 9 and b > 9:
            tens = a + b // 10 * 10
            return f"{a} + {b // 10 * 10} = {tens}. {tens} + {b % 10} = {value}."
        if kind == "-" and b > 9:
            left = a - b // 10 * 10
            return f"{a} - {b // 10 * 10} = {left}. {left} - {b % 10} = {value}."
        return f"{a} {kind} {b} = {value}."

    def word_problem(self) -> Chat:
        draw, pick = self.random.randint, self.random.choice
        who, other = self.names(2)
        thing = pick(WORDS["THINGS"]) + "s" if self.random.random() < 0.7 else self.coined() + "s"
        have, value, told, steps = draw(5, 60), 0, "", []
        value, told = have, f"{who} has {have} {thing}."
        for _ in range(pick((1, 2, 2, 3))):
            kind = pick(("gets", "loses", "gives", "twice") if value < 25 else ("gets", "loses", "gives"))
            n = draw(1, max(1, min(30, value - 1)))
            if kind == "twice":
                told, now = f"{told} Then {who} gets as many again.", 2 * value
                steps.append(f"{value} * 2 = {now}.")
            elif kind == "gets":
                phrase = pick((f"finds {n} more", f"gets {n} more from {other}", f"buys {n} more"))
                told, now = f"{told} {who} {phrase}.", value + n
                steps.append(self._steps(value, "+", n, now))
            else:
                phrase = f"gives {n} to {other}" if kind == "gives" else pick((f"loses {n}", f"sells {n}", f"uses {n}"))
                told, now = f"{told} {who} {phrase}.", value - n
                steps.append(self._steps(value, "-", n, now))
            value = now
        ask = f"{told} How many {thing} does {who} have {pick(('now', 'left', 'in the end'))}?"
        return self._asked(ask, f"{who} has {value} {thing}.", f"Start: {have}. " + " ".join(steps), think=0.6)

    def facts(self) -> Chat:
        pick, names = self.random.choice, self.names(self.random.choice((2, 2, 3)))
        table, verb, ask, phrase = pick(
            (
                (WORDS["ROOMS"], "is in the", "Where is {}?", "{} is in the {}."),
                (WORDS["COLOURS"], "likes the colour", "Which colour does {} like?", "{} likes {}."),
                (WORDS["ANIMALS"], "has a", "What animal does {} have?", "{} has a {}."),
                (WORDS["JOBS"], "is a", "What is the job of {}?", "{} is a {}."),
                (WORDS["THINGS"], "has the", "What does {} have?", "{} has the {}."),
                ([self.coined().capitalize() for _ in range(6)], "lives in", "Where does {} live?", "{} lives in {}."),
            )
        )
        what = dict(zip(names, self.random.sample(table, len(names)), strict=True))
        told = " ".join(f"{name} {verb} {value}." for name, value in what.items())
        asked = self.random.sample(names, self.random.choice((1, 1, 2)))
        messages = [
            {"role": "user", "content": f"{told} {ask.format(asked[0])}"},
            {"role": "assistant", "content": phrase.format(asked[0], what[asked[0]])},
        ]
        for name in asked[1:]:
            follow = pick((f"And {name}?", f"And what about {name}?", ask.format(name)))
            messages += [
                {"role": "user", "content": follow},
                {"role": "assistant", "content": phrase.format(name, what[name])},
            ]
        return {"messages": messages}

    def name_memory(self) -> Chat:
        pick, name = self.random.choice, self.name()
        told, asks, answer = pick(
            (
                (
                    f"My name is {name}.",
                    ("What is my name?", "Do you remember my name?", "Who am I?"),
                    f"Your name is {name}.",
                ),
                (f"I live in {name}.", ("Where do I live?", "Which town do I live in?"), f"You live in {name}."),
                (
                    f"My {pick(WORDS['ANIMALS'])} is called {name}.",
                    ("What is my pet called?", "What is the name of my pet?"),
                    f"It is called {name}.",
                ),
                (
                    f"My friend is called {name}.",
                    ("What is my friend called?", "Who is my friend?"),
                    f"Your friend is called {name}.",
                ),
            )
        )
        hello = pick(("Nice to meet you!", "I will remember that.", "Thank you for telling me."))
        messages = [{"role": "user", "content": told}, {"role": "assistant", "content": hello}]
        for _ in range(pick((0, 0, 1, 1, 2, 4))):
            messages += pick((self.sum, self.facts))()["messages"]
        for message in messages:
            message.pop("reasoning_content", None)
        return {
            "messages": [*messages, {"role": "user", "content": pick(asks)}, {"role": "assistant", "content": answer}]
        }

    def repeat(self) -> Chat:
        words = [
            pick()
            for pick in self.random.choices(
                (self.coined, self.name, lambda: self.slot("thing")), k=self.random.randint(1, 5)
            )
        ]
        text = " ".join(words)
        ask = self.random.choice(
            (f"Repeat: {text}", f"Say {text}.", f"Please repeat after me: {text}", f"Write: {text}")
        )
        if self.random.random() < 0.3:
            last = self.random.choice((("first", words[0]), ("last", words[-1])))
            return self._asked(f"What is the {last[0]} word of: {text}", f"The {last[0]} word is {last[1]}.", None)
        return self._asked(ask, text, None)

    def capitals(self) -> Chat:
        chosen = self.random.sample(list(self._countries), self.random.choice((1, 2, 3)))
        messages = []
        for number, country in enumerate(chosen):
            follow = self.random.choice((f"And of {country}?", f"And what about {country}?", f"And {country}?"))
            ask = follow if number else f"What is the capital of {country}?"
            answer = f"The capital of {country} is {self._countries[country]}."
            messages += [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]
        return {"messages": messages}

    def described_picture(self) -> Chat:
        """Told where a picture would stand: the model can answer of one before `thimble teach` has it see any."""
        seen = scenes.scene(self.random, self.random.choice(scenes.KINDS))
        messages: list[dict[str, Any]] = []
        for _ in range(self.random.choice((1, 1, 2))):
            asked = scenes.ask(seen, self.random.choice(scenes.topics(seen)), self.random)
            shown = "" if messages else f"<img>{scenes.told(seen, self.random)}</img>\n"
            messages += [
                {"role": "user", "content": shown + asked.question},
                {"role": "assistant", "content": asked.answer},
            ]
        return {"messages": messages}

    def _asked(self, ask: str, answer: str, steps: str | None, think: float = 0.3) -> Chat:
        said = {"role": "assistant", "content": answer}
        if steps and self.random.random() < think:
            said["reasoning_content"] = steps
        return {"messages": [{"role": "user", "content": ask}, said]}
