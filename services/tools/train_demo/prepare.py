"""From corpora and made-up chats to a folder that training reads: tokenizer, template and rows, nothing else.

    RUN/tokenizer.json ...   the text files of the checkpoint to be
    RUN/documents.xz         ids by source (documents.py)
    RUN/held_out.xz          the same of texts that are only measured on

What the exam asks is in no document: chats with one of its questions are left out. Owns which sources there are.
"""

import random
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from services.tools.score.questions import asked_in_exam
from services.tools.train_demo import documents, tokenizer
from services.tools.train_demo.chats import Renderer, records
from services.tools.train_demo.documents import Source
from services.tools.train_demo.lessons import Chat, Lessons
from services.tools.train_demo.shapes import DEMO, MIXTURE

COPIED = ("chat_template.jinja", "generation_config.json", "tokenizer_config.json")
TOKENIZER_TEXTS = 20_000
CAPITAL = re.compile(r"The capital of ([A-Z]\w+) is ([A-Z]\w+)\.")
LONGEST_JOINED = 20  # turns of a chat that is several chats


class CorpusError(Exception):
    """The corpus cannot be used. The message says what is missing."""

    code = "bad_corpus"


def prepare(corpus: Path, run: Path, vocabulary: int, lessons: int, say: Any) -> None:
    """Raises CorpusError."""
    run.mkdir(parents=True, exist_ok=True)
    texts, chats = list(records(_file(corpus, "pretrain"))), list(records(_file(corpus, "chat")))
    exam = asked_in_exam()
    chats = [chat for chat in chats if not _asks(chat, exam)]
    countries = capitals(chats)
    if not countries:
        raise CorpusError(f"{corpus}: no chat says `The capital of X is Y.`; lessons need some countries")
    made = (chat for chat in made_up(lessons, countries) if not _asks(chat, exam))
    joined = list(join(chats, min(MIXTURE["joined"], lessons)))
    if (run / "tokenizer.json").exists():
        learnt = Tokenizer.from_file(str(run / "tokenizer.json"))
    else:
        learnt = tokenizer.train(_for_tokenizer(texts, chats, countries), vocabulary)
        tokenizer.save(learnt, run)
    for name in COPIED:
        shutil.copyfile(DEMO / name, run / name)
    renderer = Renderer.of(run)
    documents.save(run / "documents.xz", sources(renderer, texts, chats, made, joined, say))
    held_out = [
        Source.of("books", False, (renderer.text(one["text"]) for one in records(_file(corpus, "pretrain_val")))),
        Source.of("chats", True, (renderer.chat(one["messages"], None) for one in records(_file(corpus, "chat_val")))),
    ]
    documents.save(run / "held_out.xz", held_out)


def sources(
    renderer: Renderer,
    texts: list[dict[str, Any]],
    chats: list[dict[str, Any]],
    made: Iterable[Chat],
    joined: list[Chat],
    say: Any,
) -> Iterator[Source]:
    for name in sorted({one["source"] for one in texts}):
        yield Source.of(name, False, (renderer.text(one["text"]) for one in texts if one["source"] == name))
    groups: dict[str, Iterable[Chat]] = {
        "chat": [one for one in chats if one["source"] != "handwritten" for _ in range(int(one.get("weight", 1)))],
        "handwritten": [one for one in chats if one["source"] == "handwritten"],
        "joined": joined,
        "lessons": made,
    }
    for name, group in groups.items():
        source = Source.of(name, True, (renderer.chat(one["messages"], one.get("tools")) for one in group))
        if len(source.ends):
            say(
                f"{name}: {len(source.ends)} chats, {len(source.ids)} tokens, {int(source.scored.sum())} of them learnt"
            )
            yield source


def made_up(count: int, countries: dict[str, str]) -> Iterator[Chat]:
    lessons = Lessons(MIXTURE["seed"], countries)
    for _ in range(count):
        yield lessons.chat()


def join(chats: list[dict[str, Any]], count: int) -> Iterator[Chat]:
    """Long chats of short ones, as a talk that changes its subject."""
    drawn = random.Random(MIXTURE["seed"])
    short = [chat for chat in chats if sum(len(message["content"]) for message in chat["messages"]) < 200]
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


def _asks(chat: dict[str, Any], exam: frozenset[str]) -> bool:
    return any(message["role"] == "user" and message["content"].strip() in exam for message in chat["messages"])


def _for_tokenizer(
    texts: list[dict[str, Any]], chats: list[dict[str, Any]], countries: dict[str, str]
) -> Iterator[str]:
    drawn = random.Random(MIXTURE["seed"])
    for one in drawn.sample(texts, min(len(texts), TOKENIZER_TEXTS)):
        yield one["text"]
    for chat in (*drawn.sample(chats, min(len(chats), TOKENIZER_TEXTS)), *made_up(TOKENIZER_TEXTS // 4, countries)):
        for message in chat["messages"]:
            yield message.get("content") or ""


def _file(corpus: Path, name: str) -> Path:
    found = [path for path in sorted(corpus.glob(f"{name}.jsonl*")) if path.suffix in (".jsonl", ".gz", ".xz")]
    if not found:
        raise CorpusError(f"{corpus}: holds no {name}.jsonl, .gz or .xz")
    return found[0]
