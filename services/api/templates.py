"""The checkpoint's own chat template: messages to marked text (see tokens.py), and where turns begin and end in it.

Owns the protection of client strings; rendering.py has the template run, within limits. Knows no HTTP and no snapshot;
`Prompt.boundaries` are the offsets at which a later request can share this text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.api.errors import ModelFolderError, TemplateRefused
from services.api.pictures import PLACE
from services.api.rendering import SHARED, Rendering, RenderRefused, TemplateBroken, Turns
from services.api.shown import TOKEN, Shown, expand, parts
from services.api.tokens import TextTokenizer

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


@dataclass(frozen=True)
class Prompt:
    """Rendered, not yet tokenised. All offsets are in `text` and lie before an added token of the template, so that
    text and ids can be cut there without changing each other."""

    text: str
    boundaries: tuple[int, ...]  # ascending: before every turn's end, and before every turn but the first
    first_turn_end: int | None  # after the first turn, usually system prompt and tools
    history_end: int | None  # before the generation prompt
    starts_thinking: bool
    shown: tuple[Shown, ...] = ()  # its pictures, in order


class ChatTemplate:
    """Renders dialogs. Safe to use from several threads; an event loop has them run by `turns`."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], tokenizer: TextTokenizer, rendering: Rendering = SHARED
    ) -> None:
        """Raises TemplateBroken, or ModelFolderError if it renders no plain message."""
        self.turns = Turns()
        self._rendering = rendering
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._tokenizer = tokenizer
        self._takes_parts = False
        self._turn_start, self._turn_end = self._learn_turns()
        self._takes_parts = self._learn_parts()

    @property
    def turn_tokens(self) -> tuple[str, str]:
        """The literals that begin and end a turn; empty if this template has none that can be recognised."""
        return self._turn_start, self._turn_end

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        options: Mapping[str, Any] | None = None,
        shown: Sequence[Shown] = (),
    ) -> Prompt:
        """The dialog with the beginning of the answer; `shown` are its pictures, in order. Raises TemplateRefused if
        the template cannot render it."""
        text = expand(self.render(messages, tools, options, generation_prompt=True), shown)
        starts = self._offsets(text, self._turn_start)
        ends = self._offsets(text, self._turn_end)
        return Prompt(
            text=text,
            boundaries=tuple(sorted({*starts[1:], *ends})),
            first_turn_end=starts[1] if len(starts) > 1 else None,
            history_end=starts[-1] if len(starts) > 1 else None,
            starts_thinking=text.rstrip().endswith(THINK_OPEN),
            shown=tuple(shown),
        )

    def answered(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        options: Mapping[str, Any] | None,
        shown: Sequence[Shown] = (),
    ) -> str | None:
        """The dialog up to the end of its last message, before the token that ends the turn: what a later request that
        goes on from there will begin with. None if the template shows no such place."""
        text = expand(self.render(messages, tools, options, generation_prompt=False), shown)
        ends = self._offsets(text, self._turn_end)
        return text[: ends[-1]] if ends else None

    def upcoming(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        options: Mapping[str, Any] | None,
        shown: Sequence[Shown] = (),
    ) -> Prompt | None:
        """The dialog as the next request will show it, up to where its own turn begins. Clients send no thinking back;
        a template may drop it anyhow. None if the template shows no such place; raises TemplateRefused."""
        last = {key: value for key, value in messages[-1].items() if key != "reasoning_content"}
        role = "tool" if last.get("tool_calls") else "user"
        probe = {"role": role, "content": "x", "tool_call_id": "x"}
        text = expand(self.render([*messages[:-1], last, probe], tools, options, generation_prompt=False), shown)
        starts = self._offsets(text, self._turn_start)
        if len(starts) < 2:
            return None
        text = text[: starts[-1]]
        ends = self._offsets(text, self._turn_end)
        return Prompt(
            text=text,
            boundaries=tuple(sorted({*starts[1:], *ends})),
            first_turn_end=starts[1],
            history_end=None,
            starts_thinking=False,
            shown=tuple(shown),
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        options: Mapping[str, Any] | None,
        generation_prompt: bool,
    ) -> str:
        """Marked text. `options` are the template's variables, such as enable_thinking."""
        variables = {k: self._protect(v) for k, v in (options or {}).items() if k not in RESERVED}
        try:
            return self._rendering.render(
                self._source,
                self._special_tokens
                | variables
                | {
                    "messages": [self._protect_message(message) for message in messages],
                    "tools": self._protect(tools) if tools else None,
                    "documents": None,
                    "add_generation_prompt": generation_prompt,
                },
            )
        except RenderRefused as error:
            raise TemplateRefused(f"the model's chat template refuses these messages: {error}", "messages") from error

    def _protect(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._tokenizer.protect(value)
        if isinstance(value, Mapping):
            return {self._protect(key): self._protect(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._protect(inner) for inner in value]
        return value

    def _protect_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        protected: dict[str, Any] = self._protect(message)
        content = message.get("content")
        if self._takes_parts and message.get("role") == "user" and isinstance(content, str) and PLACE in content:
            protected["content"] = parts(content, self._tokenizer.protect)
            return protected
        may_be_tagged = message.get("role") == "assistant" and message.get("reasoning_content") is None
        if may_be_tagged and isinstance(content, str) and THINK_CLOSE in content:
            # Clients that send thinking back inside the content mean the tags: templates cut there.
            before, _, after = content.partition(THINK_CLOSE)
            lead, opening, inside = before.rpartition(THINK_OPEN)
            pieces = (self._protect(lead), opening, self._protect(inside), THINK_CLOSE, self._protect(after))
            protected["content"] = "".join(pieces)
        return protected

    def _offsets(self, text: str, literal: str) -> list[int]:
        found = []
        at = text.find(literal) if literal else -1
        while at >= 0:
            found.append(at)
            at = text.find(literal, at + len(literal))
        return found

    def _learn_turns(self) -> tuple[str, str]:
        """What the template writes only when asked for an answer begins with the token that starts a turn; the last
        token before that ends one."""
        probe = [{"role": "user", "content": "x"}]
        try:
            closed = self.render(probe, None, None, generation_prompt=False)
            opened = self.render(probe, None, None, generation_prompt=True)
        except TemplateRefused as error:
            raise ModelFolderError(f"chat_template.jinja does not render a plain message: {error}") from error
        if not opened.startswith(closed) or opened == closed:
            return "", ""
        added = self._tokenizer.added
        starts = [literal for literal in added if opened[len(closed) :].startswith(literal)]
        ends = [literal for literal in added if closed.rstrip().endswith(literal)]
        return (max(starts, key=len), max(ends, key=len)) if starts and ends else ("", "")

    def _learn_parts(self) -> bool:
        """Whether the template has a way of its own to show a picture among a message's parts."""
        content = [{"type": "image"}, {"type": "text", "text": "Which?"}]
        try:
            text = self.render([{"role": "user", "content": content}], None, None, generation_prompt=False)
        except TemplateRefused:
            return False
        return text.count(TOKEN) == 1 and text.count("Which?") == 1 and "'type'" not in text


def load_template(folder: Path, tokenizer: TextTokenizer) -> ChatTemplate:
    """From chat_template.jinja and tokenizer_config.json. Raises ModelFolderError."""
    try:
        source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        special = {key: _content(config[key]) for key in SPECIAL_KEYS if config.get(key) is not None}
        return ChatTemplate(source, special, tokenizer)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ModelFolderError(f"{folder}: cannot read the chat template: {error}") from error
    except TemplateBroken as error:
        raise ModelFolderError(f"{folder}/chat_template.jinja is not a valid template: {error}") from error


SPECIAL_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)
