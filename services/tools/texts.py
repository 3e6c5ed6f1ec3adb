"""Texts from files, as token ids with the tokens that count. Used to measure a checkpoint and to calibrate one.

    *.txt               one document
    *.jsonl, *.jsonl.gz one JSON object a line: {"text": ...} a document, {"messages": [...]} a chat

Documents longer than the window are cut into windows that know nothing of each other. In a chat only the assistant's
tokens count (its <|im_end|> included), rendered by the checkpoint's own template without thinking.
"""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.api.rendering import SHARED, RenderRefused, TemplateBroken
from services.vocabulary import is_panic, read_vocabulary


class TextError(Exception):
    """A text file that cannot be used. The message says what is wrong with it."""

    code = "bad_text"


@dataclass(frozen=True)
class Window:
    """`scored[i]`: ids[i] counts, given what precedes it. `scored_bytes` is the UTF-8 size of what counts."""

    ids: list[int]
    scored: list[bool]
    scored_bytes: int


class Texts:
    """Reads with one checkpoint's tokenizer and template; `window` in tokens."""

    def __init__(self, checkpoint: Path, window: int) -> None:
        from tokenizers import Tokenizer

        self._window = window
        try:
            self._tokenizer = Tokenizer.from_str(read_vocabulary(checkpoint / "tokenizer.json", "tokenizers"))
            self._template = (checkpoint / "chat_template.jinja").read_text(encoding="utf-8")
        except Exception as error:  # tokenizers raises Exception itself
            raise TextError(f"{checkpoint}: no usable tokenizer.json or chat_template.jinja: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def windows(self, path: Path) -> Iterator[Window]:
        """Raises TextError if the file cannot be read or a line of it is neither a text nor a chat."""
        for number, record in enumerate(_records(path), start=1):
            text, messages = (record.get(key) if isinstance(record, dict) else None for key in ("text", "messages"))
            if isinstance(text, str):
                yield from self._document(text)
            elif isinstance(messages, list) and all(isinstance(m, dict) and "role" in m for m in messages):
                yield from self._chat(messages)
            else:
                raise TextError(f"{path}, record {number}: has neither text nor messages with roles")

    def _encoding(self, text: str) -> Any:
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        except BaseException as error:
            if not is_panic(error):
                raise
            raise TextError("a text that the tokenizer cannot split: is it endless white space?") from error

    def _document(self, text: str) -> Iterator[Window]:
        encoding = self._encoding(text)
        for first in range(0, len(encoding.ids), self._window):
            ids = encoding.ids[first : first + self._window]
            if len(ids) < 2:
                return
            offsets = encoding.offsets[first : first + self._window]
            scored = text[offsets[1][0] : offsets[-1][1]]
            yield Window(ids, [False] + [True] * (len(ids) - 1), len(scored.encode()))

    def _chat(self, messages: list[dict[str, Any]]) -> Iterator[Window]:
        text = self._render(messages)
        scored_text = [False] * len(text)
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                begin = len(self._render(messages[:index], add_generation_prompt=True))
                end = len(self._render(messages[: index + 1]).rstrip("\n"))
                scored_text[begin:end] = [True] * (end - begin)
        encoding = self._encoding(text)
        scored = [scored_text[begin] for begin, _ in encoding.offsets]
        ids, scored = encoding.ids[: self._window], scored[: self._window]
        size = sum(
            len(text[begin:end].encode()) for (begin, end), s in zip(encoding.offsets, scored, strict=False) if s
        )
        if any(scored):
            yield Window(ids, scored, size)

    def _render(self, messages: list[dict[str, Any]], **more: bool) -> str:
        """In the api's sandbox: the template is the checkpoint's maker's."""
        try:
            return SHARED.render(self._template, {"messages": messages, **more})
        except (RenderRefused, TemplateBroken) as error:
            raise TextError(f"the checkpoint's chat_template.jinja does not render a chat: {error}") from error


def _records(path: Path) -> Iterator[Any]:
    try:
        if path.suffix == ".txt":
            yield {"text": path.read_text(encoding="utf-8")}
            return
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        yield from map(json.loads, data.decode("utf-8").splitlines())
    except (OSError, ValueError) as error:
        raise TextError(f"{path}: cannot be read as text or JSON lines: {error}") from error
