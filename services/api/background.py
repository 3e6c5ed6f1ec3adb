"""Requests that a chat program makes on its own beside its user's dialog. Owns how they are recognised."""

from collections.abc import Sequence

from services.api.messages import Message

# Open WebUI asks for titles, tags, follow-ups, search queries and completions of what is being typed with the model
# that the user talks to. All its prompts begin like this, and hold one of the marks below.
BEGINNING = "### Task:"
MARKS = ("<chat_history>", "autocompletion system")


def is_background(messages: Sequence[Message]) -> bool:
    """Whether a dialog is a task of this kind: one message of the user's, no answer yet."""
    users = [message for message in messages if message.role == "user"]
    if len(users) != 1 or messages[-1] is not users[0]:
        return False
    text = (users[0].content or "").lstrip()
    return text.startswith(BEGINNING) and any(mark in text for mark in MARKS)
