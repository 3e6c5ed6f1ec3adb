"""What cannot fit is refused before the work of reading it is done: a body of 32 MB is no prompt, but its tokens would
take a minute and gigabytes. Owns how that is known early; how long a prompt really is, is known when it is tokenised.
"""

from collections.abc import Sequence
from typing import Any

from services.api.errors import ContextTooLong, InvalidRequest
from services.api.tokens import TextTokenizer

MOST_MESSAGES = 10_000  # and tools: each is rendered, and looked through for the places where turns begin
MOST_COUNTED_CHARS = 4_000_000  # by /tokenize, if the context holds less
CHARS_A_TOKEN = 8  # about twice what prose has: what is longer than the context by this is most likely too long
SLACK_TOKENS = 64  # where a text is cut, a word may take more tokens than it does as a whole
GROWTH = 4


def refuse_too_many(messages: Sequence[Any], tools: Sequence[Any] | None) -> None:
    """Raises InvalidRequest."""
    for name, values in (("messages", messages), ("tools", tools or ())):
        if len(values) > MOST_MESSAGES:
            raise InvalidRequest(f"{name}: {len(values)} of them, at most {MOST_MESSAGES} are taken", name)


def refuse_far_too_long(tokenizer: TextTokenizer, text: str, context_tokens: int, name: str) -> None:
    """Raises ContextTooLong if a beginning of the text (marked, as in tokens.py) is too long by itself. Takes time in
    proportion to the context, not to the text."""
    size = CHARS_A_TOKEN * context_tokens
    while size < len(text):
        tokens = len(tokenizer.encode(text[:size]))
        if tokens > context_tokens + context_tokens // 8 + SLACK_TOKENS:
            raise ContextTooLong(
                f"{name}: the first {size} of {len(text)} characters are {tokens} tokens, but the model's context is "
                f"{context_tokens} tokens, answer included: shorten it",
                name,
            )
        size *= GROWTH


def refuse_to_count(text: str, context_tokens: int) -> None:
    """Raises InvalidRequest if counting a text's tokens is more work than anybody needs."""
    most = max(MOST_COUNTED_CHARS, 2 * CHARS_A_TOKEN * context_tokens)
    if len(text) > most:
        raise InvalidRequest(f"a text of {len(text)} characters: at most {most} are counted at once", "prompt")
