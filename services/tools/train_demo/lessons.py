"""Chats that are made up: reading, remembering, repeating, lists, and what lesson_sums.py and lesson_tools.py make.

The corpus has no tool calls, no thinking and few names. Owns what is said and how often; how it is rendered is the chat
template's.
"""

from collections.abc import Callable, Sequence
from typing import Any

from services.tools.train_demo import lesson_sums, lesson_tools
from services.tools.train_demo.lesson_slots import WORDS, Found, Slots

Chat = dict[str, Any]  # {"messages": [...], "tools": [...]}
Messages = list[dict[str, Any]]


class Lessons:
    """Chats without end from one seed; `short` are chats of a corpus that may come between others."""

    def __init__(
        self, seed: int, countries: dict[str, str], found: Found | None = None, short: Sequence[Messages] = ()
    ) -> None:
        self.slots = Slots(seed, countries, found or Found())
        self.random = self.slots.random
        self._short = short
        self._kinds: list[tuple[float, Callable[[], Chat]]] = [
            (9, lambda: lesson_tools.tool_call(self.slots)),
            (2, lambda: lesson_sums.sums(self.slots)),
            (2, lambda: lesson_sums.order(self.slots)),
            (3.5, lambda: lesson_sums.word_problem(self.slots)),
            (4, self.facts),
            (1.5, self.told),
            (2.5, self.memory),
            (0.7, self.repeat),
            (0.8, self.capitals),
            (0.7, self.calendar),
            (1.5, self.lists),
            (1, self.tools_unneeded),
        ]

    def chat(self) -> Chat:
        weights = [weight for weight, _ in self._kinds]
        return self.random.choices([kind for _, kind in self._kinds], weights)[0]()

    def tools_unneeded(self) -> Chat:
        purposes = self.random.sample(lesson_tools.PURPOSES, self.random.randint(1, 3))
        tools = [lesson_tools.function(self.slots, purpose)[0] for purpose in purposes]
        about = self.random.choice((self.facts, self.told, self._aside, self._aside))
        return {"messages": about()["messages"], "tools": tools}

    def _aside(self) -> Chat:
        """Something else, of the corpus if there is any."""
        if self._short and self.random.random() < 0.7:
            return {"messages": [dict(message) for message in self.random.choice(self._short)]}
        return self.random.choice((self.facts, lambda: lesson_sums.order(self.slots)))()

    def facts(self) -> Chat:
        """Two or three things are told of somebody each; one or two are asked, from either side."""
        pick, slots = self.random.choice, self.slots
        names = slots.names(pick((2, 2, 3)))
        jobs, animals = WORDS["JOBS"] + WORDS["MORE_JOBS"], WORDS["ANIMALS"] + WORDS["MORE_ANIMALS"]
        rooms = [*WORDS["ROOMS"], *WORDS["MORE_PLACES"], *(slots.word() for _ in range(8))]
        things = [slots.thing() for _ in range(6)]
        foods = [*WORDS["FOODS"], *(f"{slots.word()}s" for _ in range(8))]
        towns = [slots.place() for _ in range(6)]
        table, phrase, asks, of_value = pick(
            (
                (rooms, "{} is in the {}.", ("Where is {}?", "In which room is {}?"), "Who is in the {}?"),
                (rooms, "{} went to the {}.", ("Where did {} go?", "Where is {} now?"), "Who went to the {}?"),
                (WORDS["COLOURS"], "{} likes the colour {}.", ("Which colour does {} like?",), "Who likes {}?"),
                (foods, "{} likes {}.", ("What does {} like?", "What does {} like to eat?"), "Who likes {}?"),
                (foods, "{} bought {}.", ("What did {} buy?", "What has {} bought?"), "Who bought {}?"),
                (animals, "{} has a {}.", ("What animal does {} have?", "Which pet does {} have?"), "Who has a {}?"),
                (
                    jobs,
                    "{} is a {}.",
                    ("What is the job of {}?", "What does {} do?"),
                    pick(("Who is the {}?", "Who is a {}?")),
                ),
                (things, "{} has the {}.", ("What does {} have?",), "Who has the {}?"),
                (towns, "{} lives in {}.", ("Where does {} live?", "In which town does {} live?"), "Who lives in {}?"),
                (WORDS["SPOTS"], "The {} is {}.", ("Where is the {}?", "Where can I find the {}?"), "What is {}?"),
                (WORDS["ADJECTIVES"], "The {} box is {}.", ("How is the {} box?",), "Which box is {}?"),
            )
        )
        if phrase == "The {} box is {}.":
            names = self.random.sample(WORDS["COLOURS"], 2)
        elif phrase == "The {} is {}.":
            names = list(dict.fromkeys(things))[:3]
        table = list(dict.fromkeys(table))
        what = dict(zip(names, self.random.sample(table, min(len(names), len(table))), strict=False))
        told = " ".join(phrase.format(name, value) for name, value in what.items())
        asked = self.random.sample(list(what), min(len(what), pick((1, 1, 2))))
        backwards = self.random.random() < 0.3
        messages: Messages = []
        for number, name in enumerate(asked):
            ask = of_value.format(what[name]) if backwards else pick(asks).format(name)
            if number and not backwards:
                the = "the " if phrase == "The {} is {}." else ""
                ask = pick((f"And {the}{name}?", f"And what about {the}{name}?", f"What about {the}{name}?", ask))
            answer = phrase.format(name, what[name])
            messages += [
                {"role": "user", "content": ask if number else f"{told} {ask}"},
                {"role": "assistant", "content": answer},
            ]
        return {"messages": messages}

    def told(self) -> Chat:
        """One or two sentences of a story, and a question about them."""
        pick, slots = self.random.choice, self.slots
        (name, other), animal = slots.names(2), pick(WORDS["ANIMALS"] + WORDS["MORE_ANIMALS"])
        kind, spot = pick(WORDS["ADJECTIVES"][:12]), pick(WORDS["ROOMS"] + WORDS["MORE_PLACES"])
        food, thing, town = pick(WORDS["FOODS"]), slots.thing(), slots.place()
        more, less = pick((("taller", "shorter"), ("older", "younger"), ("faster", "slower"), ("bigger", "smaller")))
        lived = f"{name} was a {kind} {animal} who lived in the {spot}."
        went = f"{name} went to the {spot} and bought {food}."
        gave = f"{name} gave the {thing} to {other}."
        met = f"{name} from {town} met {other} in the {spot}."
        ask, answer = pick(
            (
                (f"{lived} What was the name of the {animal}?", f"The {animal} was called {name}."),
                (f"{lived} Who lived in the {spot}?", f"{name} lived in the {spot}."),
                (f"{lived} Where did {name} live?", f"{name} lived in the {spot}."),
                (f"{lived} What was {name}?", f"{name} was a {kind} {animal}."),
                (f"{went} What did {name} buy?", f"{name} bought {food}."),
                (f"{went} Where did {name} go?", f"{name} went to the {spot}."),
                (f"{gave} Who has the {thing} now?", f"{other} has the {thing} now."),
                (f"{gave} What did {other} get?", f"{other} got the {thing}."),
                (f"{met} Where is {name} from?", f"{name} is from {town}."),
                (f"{met} Whom did {name} meet?", f"{name} met {other}."),
                (f"{name} is {more} than {other}. Who is {more}?", f"{name} is {more}."),
                (f"{name} is {more} than {other}. Who is {less}?", f"{other} is {less}."),
            )
        )
        return {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]}

    def memory(self) -> Chat:
        """Something is told, then other things are talked about, then it is asked."""
        pick, slots = self.random.choice, self.slots
        name, friend, colour, food = *slots.names(2), pick(WORDS["COLOURS"]), pick(WORDS["FOODS"])
        pet = pick(WORDS["ANIMALS"] + WORDS["MORE_ANIMALS"])
        kin = pick(("friend", "sister", "brother", "mother", "father", "teacher", "aunt", "uncle", "neighbour"))
        mine = (("What is my name?", "Do you remember my name?", "Who am I?", "Tell me my name.", "What am I called?"),
                f"Your name is {name}.")  # fmt: skip
        theirs = ((f"What is my {kin} called?", f"What is the name of my {kin}?", f"What is my {kin}'s name?"),
                  f"Your {kin} is called {friend}.")  # fmt: skip
        pets = ((f"What is my {pet} called?", f"What is the name of my {pet}?", f"What is my {pet}'s name?",
                 "What is my pet called?"), f"Your {pet} is called {name}.")  # fmt: skip
        favourite = pick(("favorite", "favourite"))
        color = pick(("color", "colour"))
        colours = ((f"What is my {favourite} {color}?", f"Which {color} do I like best?", f"Which {color} do I like?"),
                   f"Your favorite color is {colour}.")  # fmt: skip
        foods = ((f"What is my {favourite} food?", "What do I like to eat?"), f"You like {food}.")
        towns = (("Where do I live?", "Which town do I live in?", "In which town is my home?"), f"You live in {name}.")
        introduced = pick(
            (f"My name is {name}.", f"I am called {name}.", f"Hi, I am {name}.", f"Hello, my name is {name}!",
             f"I'm {name}.", f"Call me {name}.", f"Hi, my name is {name}.", f"Hello! I am called {name}.")
        )  # fmt: skip
        told, (asks, answer) = pick(
            (
                (introduced, mine),
                (introduced, mine),
                (f"{introduced.rstrip('.!')} and my {kin} is called {friend}.", pick((mine, theirs))),
                (pick((f"My {kin} is called {friend}.", f"My {kin}'s name is {friend}.")), theirs),
                (pick((f"My {pet} is called {name}.", f"My {pet}'s name is {name}.", f"I have a {pet} called {name}.")),
                 pets),
                (pick((f"I live in {name}.", f"My home is in {name}.", f"I am from {name}, I live there.")), towns),
                (pick((f"My {favourite} {color} is {colour}.", f"I like {colour} best of all colors.")), colours),
                (pick((f"My {favourite} food is {food}.", f"I like to eat {food}.")), foods),
            )
        )  # fmt: skip
        hello = pick(
            ("Nice to meet you!", "I will remember that.", "Thank you for telling me.", "That is good to know.")
        )
        messages: Messages = [{"role": "user", "content": told}, {"role": "assistant", "content": hello}]
        for _ in range(pick((0, 0, 1, 1, 2, 3, 5))):
            messages += self._aside()["messages"]
        messages += [{"role": "user", "content": pick(asks)}, {"role": "assistant", "content": answer}]
        return {"messages": messages}

    def repeat(self) -> Chat:
        slots = self.slots
        kinds = (slots.word, slots.name, slots.thing)
        words = [kind() for kind in self.random.choices(kinds, k=self.random.randint(1, 6))]
        text = slots.phrase() if self.random.random() < 0.3 else " ".join(words)
        ask = self.random.choice(
            (f"Repeat: {text}", f"Say {text}.", f"Please repeat after me: {text}", f"Write: {text}")
        )
        if self.random.random() < 0.3:
            which, word = self.random.choice((("first", words[0]), ("last", words[-1])))
            ask, text = f"What is the {which} word of: {' '.join(words)}", f"The {which} word is {word}."
        return {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": text}]}

    def capitals(self) -> Chat:
        countries = self.slots.countries
        chosen = self.random.sample(list(countries), min(len(countries), self.random.choice((1, 2, 3))))
        messages: Messages = []
        for number, country in enumerate(chosen):
            asks = (
                (f"And of {country}?", f"And what about {country}?", f"And {country}?", f"What about {country}?")
                if number
                else (
                    f"What is the capital of {country}?",
                    f"Which city is the capital of {country}?",
                    f"Tell me the capital of {country}.",
                    f"Do you know the capital of {country}?",
                    f"The capital of {country}, please.",
                    f"And {country}'s capital?",
                    f"{country}: what is its capital?",
                )
            )
            answer = f"The capital of {country} is {countries[country]}."
            messages += [
                {"role": "user", "content": self.random.choice(asks)},
                {"role": "assistant", "content": answer},
            ]
        return {"messages": messages}

    def calendar(self) -> Chat:
        """What follows what, and how many there are."""
        pick = self.random.choice
        word, names = pick((("day", WORDS["DAYS"]), ("month", WORDS["MONTHS"])))
        at = self.random.randrange(len(names))
        one, before, after = names[at], names[at - 1], names[(at + 1) % len(names)]
        asked, answer = pick(
            (
                ((f"Which {word} is after {one}?", f"What {word} follows {one}?", f"{one} is over. What comes next?",
                  f"Today it is {one}. What is the next {word}?", f"Which {word} comes next after {one}?"),
                 pick((f"After {one} comes {after}.", f"{after} comes after {one}."))),
                ((f"Which {word} is before {one}?", f"What comes just before {one}?", f"Before {one} is which {word}?"),
                 pick((f"Before {one} comes {before}.", f"{before} comes before {one}."))),
                (("How many days does a week have?", "Count the days of a week.", "A week has how many days?",
                  "How long is a week?"), "A week has 7 days."),
                (("How many months does a year have?", "A year has how many months?", "Count the months of a year.",
                  "How many months make a year?"), "A year has 12 months."),
            )
        )  # fmt: skip
        return {"messages": [{"role": "user", "content": pick(asked)}, {"role": "assistant", "content": answer}]}

    def lists(self) -> Chat:
        pick = self.random.choice
        plural, items = pick(
            (
                ("animals", WORDS["ANIMALS"] + WORDS["MORE_ANIMALS"]),
                ("farm animals", WORDS["FARM"]),
                ("animals that live on a farm", WORDS["FARM"]),
                ("fruits", WORDS["FRUITS"]),
                ("vegetables", WORDS["VEGETABLES"]),
                (pick(("colors", "colours")), WORDS["COLOURS"]),
                ("jobs", WORDS["JOBS"] + WORDS["MORE_JOBS"]),
                ("days of the week", WORDS["DAYS"]),
                ("months", WORDS["MONTHS"]),
                ("rooms of a house", WORDS["ROOMS"]),
            )
        )
        count = self.random.randint(2, 5)
        chosen = self.random.sample(items, count)
        word = ("two", "three", "four", "five")[count - 2]
        ask = pick(
            (f"Name {word} {plural}.", f"Tell me {word} {plural}.", f"List {word} {plural}.",
             f"Give me {word} {plural}.",
             f"Can you name {word} {plural}?", f"Please list {word} {plural}.", f"I need {word} {plural}.",
             f"Name {count} {plural}.")
        )  # fmt: skip
        if plural in ("days of the week", "months") and self.random.random() < 0.4:
            chosen = items
            plural = "months of the year" if plural == "months" else plural
            ask = pick(
                (f"List the {plural}.", f"What are the {plural}?", f"Tell me all the {plural}.", f"Name the {plural}.")
            )
        first, *rest = (one if plural.startswith(("days", "months")) else one.lower() for one in chosen)
        answer = f"{', '.join([first.capitalize(), *rest[:-1]])} and {rest[-1]}."
        if self.random.random() < 0.3:
            answer = "\n".join(f"{n}. {one.capitalize()}" for n, one in enumerate((first, *rest), 1))
        return {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]}
