"""Gives a tokenizer.json to the library that is to read it, and some text to what comes of it. A program of its own,
for vocabulary.py: it may come to any end. It imports nothing of ours, and nothing of the working directory's.

    python -I vocabulary_trial.py tokenizers|llguidance MEMORY_BYTES CPU_SECONDS IDS FOLDER...
    FOLDER  where the libraries may be, in the order of who asks: -I leaves out what PYTHONPATH names
    stdin   the file
    stdout  nothing if it can be used, else why not
    exits   0; by a signal where the library ends its process, or takes too much of it
"""

import resource
import sys
from collections.abc import Callable

MOST_WHY = 500
MOST_IDS_A_BYTE = 4  # normal forms may make a letter several; a byte-level vocabulary has at most one for a byte
LETTERS = "".join(chr(code) for code in range(0x2000) if not 0xD800 <= code < 0xE000)
PROBES = (
    " a",  # first, so that what makes a million letters of one is known at little cost
    "é",
    "Hello, world! It's 12345.678 o'clock; x = [1, 2]\r\n\tdef f(a):\n        return a\n\n",
    LETTERS,
    "".join(reversed(LETTERS)),
    " " * 3000 + "\n" * 300 + "a" * 3000 + "é" * 1000,
    "日本語のテキスト。한국어 텍스트. 🦊👩‍👩‍👧‍👦🏳️‍🌈 Ａ\u0301\u0301\u0301 \ufffd\U0010ffff",
)


def with_tokenizers(text: str) -> str:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(text)
    return _too_many(lambda probe: len(tokenizer.encode(probe, add_special_tokens=False).ids))


def with_llguidance(text: str, ids: int) -> str:
    from llguidance import LLMatcher, LLTokenizer

    tokenizer = LLTokenizer(text, n_vocab=ids)
    if why := _too_many(lambda probe: len(tokenizer.tokenize_str(probe))):
        return why
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_regex("(?s:.*)"), log_level=0)
    matcher.compute_bitmask()
    return matcher.get_error() if matcher.is_error() else ""


def _too_many(count: Callable[[str], int]) -> str:
    for probe in PROBES:
        tokens, size = count(probe), len(probe.encode())
        if tokens > MOST_IDS_A_BYTE * size:
            return f"it makes {tokens} tokens of {size} bytes of text"
    return ""


def main() -> int:
    library, memory_bytes, cpu_s, ids = sys.argv[1], *map(int, sys.argv[2:5])
    sys.path = sys.argv[5:]
    for what, limit in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (limit, limit))
    try:
        text = sys.stdin.buffer.read().decode("utf-8", "surrogatepass")
        why = with_tokenizers(text) if library == "tokenizers" else with_llguidance(text, ids)
    except ImportError:
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        why = f"the {library} library says: {error!r}"
    sys.stdout.buffer.write(why[:MOST_WHY].encode("utf-8", "replace"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
