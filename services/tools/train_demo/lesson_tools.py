"""Made-up chats with functions: which one, with which arguments, and what its result means. Names of functions and of
parameters are drawn anew, so that they have to be read. Owns purposes.json."""

import json
from pathlib import Path
from typing import Any

from services.tools.train_demo.lesson_slots import WORDS, Slots

Chat = dict[str, Any]  # {"messages": [...], "tools": [...]}

PURPOSES = json.loads((Path(__file__).parent / "purposes.json").read_text(encoding="utf-8"))
_NUMERIC = ("number", "few")


def function(slots: Slots, purpose: dict[str, Any]) -> tuple[dict[str, Any], str, dict[str, str]]:
    """A tool, its name, and the names of its parameters by slot."""
    random = slots.random
    name = _function_name(slots, purpose)
    keys: dict[str, str] = {}
    for slot in purpose["slots"]:
        while (key := _key(slots, slot)) in keys.values():
            pass
        keys[slot] = key
    order = list(purpose["slots"])
    if random.random() < 0.2:
        random.shuffle(order)
    properties = {
        keys[slot]: {
            "type": "integer" if purpose["slots"][slot] in _NUMERIC else "string",
            "description": purpose["describe"][slot],
        }
        for slot in order
    }
    if random.random() < 0.1:
        for described in properties.values():
            del described["description"]
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    tool = {"name": name, "description": random.choice(purpose["about"]), "parameters": parameters}
    return {"type": "function", "function": tool}, name, keys


def _function_name(slots: Slots, purpose: dict[str, Any]) -> str:
    random, pick = slots.random, slots.random.choice
    name: str = pick(purpose["names"])
    share = random.random()
    if share < 0.2:
        return name
    parts = [pick(WORDS["PARTS"]), slots.word(), pick(WORDS["PARTS"])]
    if share < 0.4:
        return pick((f"{parts[0]}_{name}", f"{name}_{parts[0]}", f"{name}_{parts[1]}"))
    if share < 0.9:
        return "_".join(random.sample(parts, pick((1, 2, 2, 2, 3))))
    return parts[0] + parts[1].title()


def _key(slots: Slots, slot: str) -> str:
    share, pick = slots.random.random(), slots.random.choice
    if share < 0.2 and slot not in slots.held:
        return slot
    if share < 0.5:
        return str(pick(WORDS["KEYS"]))
    return slots.word() if share < 0.8 else f"{slots.word()}_{pick(WORDS['KEYS'])}"


def tool_call(slots: Slots) -> Chat:
    random, pick = slots.random, slots.random.choice
    purposes = _purposes(slots, pick((1, 2, 2, 3, 3, 4)))
    made = [function(slots, purpose) for purpose in purposes]
    messages: list[dict[str, Any]] = []
    rounds = pick((1, 1, 2, 2, 3))
    for number in range(1, rounds + 1):
        which = random.randrange(len(purposes))
        purpose, (tool, name, keys) = purposes[which], made[which]
        values = {slot: slots.slot(kind) for slot, kind in purpose["slots"].items()}
        typed = {slot: int(v) if purpose["slots"][slot] in _NUMERIC else v for slot, v in values.items()}
        result = {key: _result(slots, kind, typed) for key, kind in purpose["result"].items()}
        ask = pick(("", "", "", "", "Please: ", "Hello! ", "I have a question. ", "Can you help? ", "Now: ")) + pick(
            purpose["asks"]
        ).format(**values)
        by_key = {keys[slot]: value for slot, value in typed.items()}
        arguments = {key: by_key[key] for key in tool["function"]["parameters"]["properties"]}
        calling: dict[str, Any] = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
        }
        answer = {"role": "assistant", "content": pick(purpose["answer"]).format(**values, **result)}
        if number == rounds and random.random() < 0.2:  # the template drops earlier thinking
            calling["reasoning_content"] = f"The user asks: {ask} I should call {name}."
            answer["reasoning_content"] = f"{name} says {json.dumps(result)}. I can answer."
        messages += [
            {"role": "user", "content": ask},
            calling,
            {"role": "tool", "content": json.dumps(result)},
            answer,
        ]
    return {"messages": messages, "tools": [tool for tool, _, _ in made]}


def _purposes(slots: Slots, count: int) -> list[dict[str, Any]]:
    """Half the time such as take the same kinds of values, so that only what is asked tells one from the other."""
    random = slots.random
    first = random.choice(PURPOSES)
    others = [purpose for purpose in PURPOSES if purpose is not first]
    alike = [purpose for purpose in others if set(purpose["slots"].values()) & set(first["slots"].values())]
    chosen = random.sample(alike, min(len(alike), count - 1)) if random.random() < 0.5 else []
    chosen += random.sample([purpose for purpose in others if purpose not in chosen], count - 1 - len(chosen))
    return random.sample([first, *chosen], count)


def _result(slots: Slots, kind: str, typed: dict[str, Any]) -> str | int:
    if kind in ("a+b", "a*b"):
        return int(typed["a"] + typed["b"] if kind == "a+b" else typed["a"] * typed["b"])
    value = slots.slot(kind)
    return int(value) if kind in ("number", "few", "degrees", "large") else value
