"""Made-up chats that count: sums to a hundred, one or many in a row, and word problems, with thinking and without."""

from typing import Any

from services.tools.score.questions import held_out_sums
from services.tools.train_demo.lesson_slots import WORDS, Slots

Chat = dict[str, Any]

_ASKS = {
    "+": ("What is {a} + {b}?", "{a} + {b} = ?", "What is {a} plus {b}?", "Can you tell me what {a} plus {b} is?",
          "Calculate {a} + {b}.", "{a} plus {b}?", "Add {a} and {b}.", "{a} + {b}",
          "What do you get if you add {b} to {a}?", "How much does {a} plus {b} make?"),
    "-": ("What is {a} - {b}?", "{a} - {b} = ?", "What is {a} minus {b}?", "Can you tell me what {a} minus {b} is?",
          "Calculate {a} - {b}.", "{a} minus {b}?", "Take {b} away from {a}.", "{a} - {b}", "Subtract {b} from {a}.",
          "How much does {a} minus {b} make?"),
    "*": ("What is {a} * {b}?", "What is {a} x {b}?", "What is {a} times {b}?",
          "Can you tell me what {a} times {b} is?", "Calculate {a} x {b}.", "How much is {a} times {b}?",
          "{a} times {b}?", "{a} x {b}", "Multiply {a} by {b}."),
}  # fmt: skip
_SIGNS = {"+": "plus", "-": "minus", "*": "times"}


def _sum(slots: Slots) -> tuple[str, str, str]:
    """Question, answer, steps of a sum that is not in the exam."""
    draw, pick = slots.random.randint, slots.random.choice
    while True:
        kind = pick("++--*")
        if kind == "+":
            a = draw(1, 98)
            b = draw(1, 100 - a)
        elif kind == "-":
            a = draw(2, 100)
            b = draw(1, a)
        else:
            a, b = draw(2, 12), draw(2, 12)
        if (a, kind, b) not in held_out_sums():
            break
    value = {"+": a + b, "-": a - b, "*": a * b}[kind]
    word = _SIGNS[kind]
    answer = pick((f"{a} {kind} {b} = {value}.", f"{a} {word} {b} is {value}.", f"The answer is {value}."))
    return pick(_ASKS[kind]).format(a=a, b=b), answer, steps(a, kind, b, value)


def steps(a: int, kind: str, b: int, value: int) -> str:
    if kind == "+" and a > 9 and b > 9 and b % 10:
        tens = a + b // 10 * 10
        return f"{a} + {b // 10 * 10} = {tens}. {tens} + {b % 10} = {value}."
    if kind == "-" and b > 9 and b % 10:
        left = a - b // 10 * 10
        return f"{a} - {b // 10 * 10} = {left}. {left} - {b % 10} = {value}."
    return f"{a} {kind} {b} = {value}."


def sums(slots: Slots) -> Chat:
    """Mostly many in a row; of one alone, the steps to it in three of ten."""
    count = slots.random.choice((1, 1, 4, 6, 8, 10))
    messages: list[dict[str, Any]] = []
    for _ in range(count):
        ask, answer, told = _sum(slots)
        messages += [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]
        if count == 1 and slots.random.random() < 0.3:
            messages[-1]["reasoning_content"] = told
    return {"messages": messages}


def order(slots: Slots) -> Chat:
    """What comes before and after, more and less, double and half, counting."""
    draw, pick = slots.random.randint, slots.random.choice
    a = draw(1, 99)
    b = pick([n for n in (draw(1, 99), draw(1, 99)) if n != a] or [a + 1])
    end = a + draw(2, 6)
    half = draw(1, 50)
    counted = ", ".join(map(str, range(a, end + 1)))
    ask, answer = pick(
        (
            (f"Which number comes after {a}?", f"After {a} comes {a + 1}."),
            (f"Which number comes before {a}?", f"Before {a} comes {a - 1}."),
            (f"What comes right after {a}?", f"{a + 1} comes after {a}."),
            (f"Tell me the number just before {a}.", f"{a - 1} comes before {a}."),
            (f"What is one less than {a}?", f"One less than {a} is {a - 1}."),
            (f"What is the next number after {a}?", f"The next number is {a + 1}."),
            (f"What is one more than {a}?", f"One more than {a} is {a + 1}."),
            (f"Which is bigger, {a} or {b}?", f"{max(a, b)} is bigger."),
            (f"Which is smaller, {a} or {b}?", f"{min(a, b)} is smaller."),
            (f"What is double {half}?", f"Double {half} is {2 * half}."),
            (f"What is the half of {2 * half}?", f"Half of {2 * half} is {half}."),
            (f"Half of {2 * half}?", f"Half of {2 * half} is {half}."),
            (f"Count from {a} to {end}.", f"{counted}."),
            (f"Please count from {a} to {end}.", f"{counted}."),
        )
    )
    return {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]}


def word_problem(slots: Slots) -> Chat:
    draw, pick = slots.random.randint, slots.random.choice
    who, other = slots.names(2)
    thing = pick([*WORDS["FOODS"], *(f"{thing}s" for thing in WORDS["THINGS"]), f"{slots.word()}s"])
    have = value = draw(3, 85)
    told, worked = [], list[str]()
    for _ in range(pick((1, 2, 2, 2, 3))):
        more = value < 8 or (value < 92 and slots.random.random() < 0.5)
        n = draw(1, min(40, 99 - value) if more else min(40, value - 1))
        now = value + n if more else value - n
        told.append(pick(_MORE if more else _LESS).format(who=who, other=other, n=n))
        worked.append(steps(value, "+" if more else "-", n, now))
        value = now
    story = f"{who} has {have} {thing}. " + _told(slots, who, told)
    end = pick(("now", "left", "in the end", "at the end", "then"))
    ask = pick((f"How many {thing} does {who} have {end}?", f"How many {thing} are there {end}?"))
    said = {"role": "assistant", "content": f"{who} has {value} {thing}."}
    if slots.random.random() < 0.65:
        said["reasoning_content"] = f"Start: {have}. " + " ".join(worked)
    return {"messages": [{"role": "user", "content": f"{story} {ask}"}, said]}


_MORE = ("{who} finds {n} more", "{who} gets {n} more from {other}", "{who} buys {n} more", "{who} wins {n} more",
         "{other} gives {who} {n} more", "{other} brings {who} {n} more", "{who} makes {n} more")  # fmt: skip
_LESS = ("{who} gives {n} to {other}", "{who} loses {n}", "{who} sells {n}", "{who} uses {n}", "{who} throws away {n}",
         "{who} gives {other} {n}", "{other} takes {n} from {who}")  # fmt: skip


def _told(slots: Slots, who: str, parts: list[str]) -> str:
    """A sentence each, or joined where the same person goes on."""
    text = parts[0]
    for part in parts[1:]:
        if (
            part.startswith(f"{who} ")
            and text.rsplit(". ", 1)[-1].startswith(f"{who} ")
            and slots.random.random() < 0.5
        ):
            text += slots.random.choice((" and then ", " and ")) + part.removeprefix(f"{who} ")
        else:
            text += ". " + slots.random.choice(("", "", "Then ")) + part
    return text + "."
