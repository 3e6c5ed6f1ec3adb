"""Places inside a long text at which reading it may begin again: about every so many characters, where a text is cut
into the same tokens whether it is read as a whole or from there on. Owns how such a place is told from others; it
depends on nothing but the text before it and a little behind it, so that a text that was changed further on has the
same ones.
"""

import re

CHARS_PER_TOKEN = 4  # of English prose and of code, about
# Tokenizers cut a text into pieces before they look for tokens: none reaches over a line break into a word, nor over
# the space between two words.
_LINE = re.compile(r"(?<=\n)(?=[^\W_])")
_WORD = re.compile(r"(?<=[^\W_])(?= [^\W\d_])")


def places(text: str, every_tokens: int, end: int) -> tuple[int, ...]:
    """Ascending offsets below `end`; none for `every_tokens` 0. A stretch with neither lines nor words has none."""
    every = every_tokens * CHARS_PER_TOKEN
    found: list[int] = []
    for start in range(every, end, every) if every else ():
        stop = min(start + every // 2, end)
        match = _LINE.search(text, start, stop) or _WORD.search(text, start, stop)
        if match is not None:
            found.append(match.start())
    return tuple(found)
