"""The shape of what an Anthropic client gets: a message of blocks, whole or as events. Owns names of fields only."""

import json
from collections.abc import Sequence
from typing import Any

from services.api.answer import Done, Usage
from services.api.choices import Choices
from services.api.errors import ApiError
from services.api.parsers.answer import Content, Delta, Reasoning
from services.api.parsers.tool_calls import CallStart
from services.api.sse import Wire

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
SIGNATURE = "unsigned"  # clients keep it and send it back; nobody checks it
WIRE = Wire(named=True, end=b"", failure=ApiError.anthropic_body)

Event = dict[str, Any]


class MessageReply:
    """One answer. Its blocks are numbered in the order they begin; one is open at a time."""

    def __init__(self, model: str, choices: Choices) -> None:
        self._choices = choices
        self._model = model
        self._index = -1
        self._open = ""  # type of the open block

    def first(self, index: int) -> list[Event]:
        usage = {"input_tokens": self._choices.answers[0].prompt_tokens, "output_tokens": 0}
        return [{"type": "message_start", "message": self._message([], None, None, usage)}]

    def piece(self, index: int, delta: Delta) -> list[Event]:
        if isinstance(delta, Reasoning):
            began = self._begin({"type": "thinking", "thinking": "", "signature": ""})
            return [*began, self._delta({"type": "thinking_delta", "thinking": delta.text})]
        if isinstance(delta, Content):
            began = self._begin({"type": "text", "text": ""})
            return [*began, self._delta({"type": "text_delta", "text": delta.text})]
        if isinstance(delta, CallStart):
            block = {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
            return [*self._end(), *self._begin(block)]
        return [self._delta({"type": "input_json_delta", "partial_json": delta.json})]

    def last(self, index: int, done: Done) -> list[Event]:
        delta = {"stop_reason": _reason(done), "stop_sequence": done.stop_string}
        return [
            *self._end(),
            {"type": "message_delta", "delta": delta, "usage": usage_of(done.usage)},
            {"type": "message_stop"},
        ]

    def ending(self, dones: Sequence[Done]) -> list[Event]:
        return []

    def whole(self, dones: Sequence[Done]) -> Event:
        said, [done] = self._choices.answers[0].message, dones
        blocks: list[Event] = []
        if said.reasoning:
            blocks.append({"type": "thinking", "thinking": said.reasoning, "signature": SIGNATURE})
        if said.content:
            blocks.append({"type": "text", "text": said.content})
        for call in said.calls or []:
            try:
                arguments = json.loads(call["function"]["arguments"])
            except ValueError:
                continue  # cut by the token limit: nobody shall run half a call
            blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
        return self._message(blocks, _reason(done), done.stop_string, usage_of(done.usage))

    def _message(self, blocks: list[Event], reason: str | None, stop: str | None, usage: Event) -> Event:
        return {
            "id": self._choices.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": blocks,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }

    def _begin(self, block: Event) -> list[Event]:
        """Open a block, unless one of this type is open."""
        if self._open == block["type"]:
            return []
        ended = self._end()
        self._open = block["type"]
        self._index += 1
        return [*ended, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _end(self) -> list[Event]:
        if not self._open:
            return []
        signed = self._open == "thinking"
        self._open = ""
        signature = [self._delta({"type": "signature_delta", "signature": SIGNATURE})] if signed else []
        return [*signature, {"type": "content_block_stop", "index": self._index}]

    def _delta(self, delta: Event) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def usage_of(counts: Usage) -> Event:
    """Anthropic counts a prompt's restored tokens apart from the others."""
    return {
        "input_tokens": counts.prompt_tokens - counts.cached_tokens,
        "cache_read_input_tokens": counts.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": counts.completion_tokens,
        "output_tokens_details": {"thinking_tokens": counts.reasoning_tokens},
    }


def _reason(done: Done) -> str:
    return "stop_sequence" if done.stop_string is not None else REASONS[done.finish_reason]
