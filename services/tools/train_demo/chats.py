"""Texts and chats as token ids, with which of them are to be learnt: all of a text, in a chat what the assistant says.

A chat is rendered by the checkpoint's own template. Its answers begin where a generation would: behind the generation
prompt, with thinking or without as the answer has it. Owns no file but what it is given.
"""

import gzip
import json
import lzma
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

END = "<|im_end|>"


class Renderer:
    """`folder` holds tokenizer.json and chat_template.jinja."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self._tokenizer = tokenizer
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
        self._template = environment.from_string(template)

    @staticmethod
    def of(folder: Path) -> "Renderer":
        return Renderer(
            Tokenizer.from_file(str(folder / "tokenizer.json")), (folder / "chat_template.jinja").read_text()
        )

    def ids(self, text: str) -> npt.NDArray[np.uint16]:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.uint16)

    def text(self, text: str) -> tuple[list[int], list[bool]]:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids, [True] * len(ids)

    def chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> tuple[list[int], list[bool]]:
        """An answer that the template would not show like this behind its own prompt is read, not learnt."""
        whole = self._template.render(messages=messages, tools=tools)
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._template.render(
                messages=messages[:index],
                tools=tools,
                add_generation_prompt=True,
                enable_thinking="reasoning_content" in message,
            )
            end = whole.find(END, len(prompt)) + len(END)
            if whole.startswith(prompt) and end >= len(END):
                spans.append((len(prompt), end))
        return self._scored(whole, spans)

    def pieces(self, pieces: Iterable[tuple[str, bool]]) -> tuple[list[int], list[bool]]:
        """A text in pieces, each with whether it is learnt."""
        whole, spans = "", []
        for text, learnt in pieces:
            if learnt:
                spans.append((len(whole), len(whole) + len(text)))
            whole += text
        return self._scored(whole, spans)

    def _scored(self, whole: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[bool]]:
        """Ids of `whole`; learnt are those that begin in one of `spans`."""
        encoding = self._tokenizer.encode(whole, add_special_tokens=False)
        scored, at = [False] * len(encoding.ids), 0
        for place, (begin, _) in enumerate(encoding.offsets):
            while at < len(spans) and begin >= spans[at][1]:
                at += 1
            scored[place] = at < len(spans) and begin >= spans[at][0]
        return list(encoding.ids), scored


def records(path: Path) -> Iterator[dict[str, Any]]:
    """JSON lines of *.jsonl, *.jsonl.gz or *.jsonl.xz, one at a time."""
    data = path.read_bytes()
    unpacked = {".gz": gzip.decompress, ".xz": lzma.decompress}.get(path.suffix, bytes)(data)
    yield from map(json.loads, unpacked.decode("utf-8").splitlines())
