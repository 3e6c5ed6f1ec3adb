"""From corpora and made-up chats to a folder that training reads: tokenizer, template and rows, nothing else.

    RUN/tokenizer.json ...    the text files of the checkpoint to be
    RUN/documents/NAME.xz     ids by source (documents.py)
    RUN/held_out/NAME.xz      the same of texts that are only measured on

The tokenizer and sources that are there already are kept: delete what is to be made anew. What the exam asks is in no
document: chats with one of its questions are left out, and what was written is searched for them once more. Owns which
sources there are.
"""

import os
import random
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from services.tools.score.questions import asked_in_exam, held_out_sums, sums_in
from services.tools.train_demo import documents, lesson_pictures, tokenizer
from services.tools.train_demo.chats import Renderer, records
from services.tools.train_demo.documents import Source
from services.tools.train_demo.lesson_copying import Copying
from services.tools.train_demo.lesson_slots import Found
from services.tools.train_demo.lessons import Chat, Lessons
from services.tools.train_demo.shapes import DEMO, MIXTURE, STAGES

COPIED = ("chat_template.jinja", "generation_config.json", "tokenizer_config.json")
TOKENIZER_TEXTS = 20_000
CAPITAL = re.compile(r"The capital of ([A-Z]\w+) is ([A-Z]\w+)\.")
LONGEST_JOINED = 20  # turns of a chat that is several chats
BLOCK = 2500  # made-up chats of one seed


class CorpusError(Exception):
    """The corpus cannot be used. The message says what is missing."""

    code = "bad_corpus"


def prepare(corpus: Path, run: Path, vocabulary: int, lessons: int, say: Callable[[str], None]) -> None:
    """Raises CorpusError."""
    run.mkdir(parents=True, exist_ok=True)
    texts, chats = list(records(_file(corpus, "pretrain"))), list(records(_file(corpus, "chat")))
    chats = [chat for chat in chats if not asks_exam(chat)]
    countries = capitals(chats)
    if not countries:
        raise CorpusError(f"{corpus}: no chat says `The capital of X is Y.`; lessons need some countries")
    found = Found.of(one["text"] for one in texts)
    short = [chat["messages"] for chat in chats if len(chat["messages"]) == 2 and _size(chat) < 160]
    made = partial(made_up, countries=countries, found=found, short=short)
    if (run / "tokenizer.json").exists():
        learnt = Tokenizer.from_file(str(run / "tokenizer.json"))
    else:
        learnt = tokenizer.train(_for_tokenizer(texts, chats, made(0, TOKENIZER_TEXTS // 4)), vocabulary)
        tokenizer.save(learnt, run)
    for name in COPIED:
        shutil.copyfile(DEMO / name, run / name)
    renderer = Renderer.of(run)
    _write_texts(run, renderer, texts, say)
    groups: dict[str, Callable[[], Iterable[Chat]]] = {
        "chat": lambda: (
            one for one in chats if one["source"] != "handwritten" for _ in range(int(one.get("weight", 1)))
        ),
        "handwritten": lambda: (one for one in chats if one["source"] == "handwritten"),
        "joined": lambda: join(chats, min(MIXTURE["joined"], lessons)),
        "pictures": lambda: pictures(min(MIXTURE["pictures"], lessons)),
    }
    for name, group in groups.items():
        _write(run, name, partial(_rendered_all, renderer, group), say)
    sizes = [min(BLOCK, lessons - first) for first in range(0, lessons, BLOCK)]
    rendered = partial(_rendered, run=run, countries=countries, found=found, short=short)
    with ProcessPoolExecutor(os.cpu_count()) if len(sizes) > 1 else nullcontext() as pool:
        run_each = pool.map if pool else map
        _write(run, "lessons", lambda: chain.from_iterable(run_each(rendered, range(len(sizes)), sizes)), say)
    _write(run, "copying", lambda: copying(renderer, found, min(MIXTURE["copying"], lessons)), say)
    held_out = [
        Source.of("books", False, (renderer.text(one["text"]) for one in records(_file(corpus, "pretrain_val")))),
        Source.of("chats", True, (renderer.chat(one["messages"], None) for one in records(_file(corpus, "chat_val")))),
    ]
    for source in held_out:
        documents.save(run / "held_out", source)
    if asked := asked_in(run, renderer):
        raise CorpusError(f"{run}: documents ask what the exam asks: {'; '.join(asked)}")


def _write_texts(run: Path, renderer: Renderer, texts: list[dict[str, Any]], say: Callable[[str], None]) -> None:
    """Those that a stage takes."""
    taken = {name for stage in STAGES for name in MIXTURE[stage]}
    for name in sorted({one["source"] for one in texts} & taken):
        own = [one["text"] for one in texts if one["source"] == name]
        kept = own[: round(len(own) * MIXTURE["kept"].get(name, 1))]
        _write(run, name, partial(map, renderer.text, kept), say, whole=False)


def _write(
    run: Path,
    name: str,
    rendered: Callable[[], Iterable[tuple[list[int], list[bool]]]],
    say: Callable[[str], None],
    whole: bool = True,
) -> None:
    if (run / "documents" / f"{name}.xz").exists():
        return
    source = Source.of(name, whole, rendered())
    if not len(source.ends):
        return
    documents.save(run / "documents", source)
    say(f"{name}: {len(source.ends)} documents, {len(source.ids)} tokens, {int(source.scored.sum())} of them learnt")


def pictures(count: int) -> Iterator[Chat]:
    drawn = random.Random(MIXTURE["seed"])
    for _ in range(count):
        yield lesson_pictures.told(drawn)


def copying(renderer: Renderer, found: Found, count: int) -> Iterator[tuple[list[int], list[bool]]]:
    made = Copying(MIXTURE["seed"], found)
    for _ in range(count):
        yield renderer.pieces(made.document())


def made_up(
    block: int, count: int, countries: dict[str, str], found: Found, short: list[list[dict[str, Any]]]
) -> Iterator[Chat]:
    lessons = Lessons(MIXTURE["seed"] + block, countries, found, short)
    for _ in range(count):
        yield lessons.chat()


def _rendered_all(renderer: Renderer, group: Callable[[], Iterable[Chat]]) -> Iterator[tuple[list[int], list[bool]]]:
    for one in group():
        yield renderer.chat(one["messages"], None)


def _rendered(
    block: int, count: int, run: Path, countries: dict[str, str], found: Found, short: list[list[dict[str, Any]]]
) -> list[tuple[list[int], list[bool]]]:
    renderer = Renderer.of(run)
    made = made_up(block, count, countries, found, short)
    return [renderer.chat(one["messages"], one.get("tools")) for one in made if not asks_exam(one)]


def asked_in(run: Path, renderer: Renderer) -> list[str]:
    """Questions of the exam that a user's turn in the written documents consists of."""
    haystacks = [source.ids.tobytes() for source in documents.load(run / "documents").values() if source.whole]
    found = []
    for question in sorted(asked_in_exam()):
        needle = renderer.ids(f"<|im_start|>user\n{question}<|im_end|>").tobytes()
        if any(_aligned(haystack, needle) for haystack in haystacks):
            found.append(question)
    return found


def _aligned(haystack: bytes, needle: bytes) -> bool:
    at = haystack.find(needle)
    while at % 2 and at >= 0:
        at = haystack.find(needle, at + 1)
    return at >= 0


def join(chats: list[dict[str, Any]], count: int) -> Iterator[Chat]:
    """Long chats of short ones, as a talk that changes its subject."""
    drawn = random.Random(MIXTURE["seed"])
    short = [chat for chat in chats if _size(chat) < 200]
    for _ in range(count if short else 0):
        messages: list[Any] = []
        turns = 2 * drawn.randint(3, LONGEST_JOINED)
        while len(messages) < turns:
            messages += drawn.choice(short)["messages"]
        yield {"messages": messages}


def capitals(chats: list[dict[str, Any]]) -> dict[str, str]:
    """Countries and capitals that the corpus names."""
    said = (message["content"] for chat in chats for message in chat["messages"] if message["role"] == "assistant")
    return dict(sorted({match[1]: match[2] for text in said for match in CAPITAL.finditer(text)}.items()))


def asks_exam(chat: Chat) -> bool:
    """Whether a user's turn is one of the exam's questions, or asks one of its sums in other words."""
    asked = [message["content"] for message in chat["messages"] if message["role"] == "user"]
    return any(text.strip() in _EXAM or not _SUMS.isdisjoint(sums_in(text)) for text in asked)


_EXAM = asked_in_exam()
_SUMS = held_out_sums()


def _size(chat: Chat) -> int:
    return sum(len(message["content"]) for message in chat["messages"])


def _for_tokenizer(texts: list[dict[str, Any]], chats: list[dict[str, Any]], made: Iterable[Chat]) -> Iterator[str]:
    drawn = random.Random(MIXTURE["seed"])
    for one in drawn.sample(texts, min(len(texts), TOKENIZER_TEXTS)):
        yield one["text"]
    for chat in (*drawn.sample(chats, min(len(chats), TOKENIZER_TEXTS)), *made):
        for message in chat["messages"]:
            yield message.get("content") or ""


def _file(corpus: Path, name: str) -> Path:
    found = [path for path in sorted(corpus.glob(f"{name}.jsonl*")) if path.suffix in (".jsonl", ".gz", ".xz")]
    if not found:
        raise CorpusError(f"{corpus}: holds no {name}.jsonl, .gz or .xz")
    return found[0]
