"""Chats about pictures that are told in words, where a picture would stand: the model learns to answer of one before
`thimble teach` has it see any, and that command finds a model that knows what it will be asked.

Owns the form of these chats; what is in a picture and what is asked are train_vision's.
"""

import random
from typing import Any

from services.tools.train_vision import scenes


def told(choice: random.Random) -> dict[str, Any]:
    seen = scenes.scene(choice, choice.choice(scenes.KINDS))
    messages: list[dict[str, Any]] = []
    for _ in range(choice.choice((1, 1, 2))):
        asked = scenes.ask(seen, choice.choice(scenes.topics(seen)), choice)
        shown = "" if messages else f"<img>{scenes.told(seen, choice)}</img>\n"
        messages += [
            {"role": "user", "content": shown + asked.question},
            {"role": "assistant", "content": asked.answer},
        ]
    return {"messages": messages}
