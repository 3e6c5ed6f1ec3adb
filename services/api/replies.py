"""The shape of what a client gets: OpenAI's chat completion objects, whole and in chunks. Owns names of fields only."""

import secrets
import time
from typing import Any

from services.api.answer import Answer, Done, Usage
from services.api.parsers.answer import Content, Delta, Reasoning
from services.api.parsers.tool_calls import CallStart


class ChatReply:
    """All objects of one answer share an id and a time."""

    def __init__(self, model: str, answer: Answer, include_usage: bool) -> None:
        self._answer = answer
        self._include_usage = include_usage
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": answer.fingerprint,
        }

    def first(self) -> dict[str, Any]:
        return self._chunk({"role": "assistant", "content": ""})

    def piece(self, delta: Delta) -> dict[str, Any]:
        if isinstance(delta, Content):
            return self._chunk({"content": delta.text})
        if isinstance(delta, Reasoning):
            # Two names are in use among clients, and each reads only its own.
            return self._chunk({"reasoning_content": delta.text, "reasoning": delta.text})
        if isinstance(delta, CallStart):
            function = {"name": delta.name, "arguments": ""}
            call = {"index": delta.index, "id": delta.id, "type": "function", "function": function}
            return self._chunk({"tool_calls": [call]})
        return self._chunk({"tool_calls": [{"index": delta.index, "function": {"arguments": delta.json}}]})

    def last(self, done: Done) -> list[dict[str, Any]]:
        """The chunk that says why it ended, and the usage if the client asked for it."""
        chunks = [self._chunk({}, done.finish_reason) | {"timings": timings(done.usage)}]
        if self._include_usage:
            chunks.append(self._chunk({}) | {"choices": [], "usage": usage(done.usage)})
        return chunks

    def whole(self, done: Done) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": self._answer.message.content or None,
            "refusal": None,
        }
        if not self._answer.message.calls:
            message["content"] = self._answer.message.content
        if self._answer.message.reasoning:
            message |= dict.fromkeys(("reasoning_content", "reasoning"), self._answer.message.reasoning)
        if self._answer.message.calls:
            message["tool_calls"] = self._answer.message.calls
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": done.finish_reason}
        extras = {"choices": [choice], "usage": usage(done.usage), "timings": timings(done.usage)}
        return {"object": "chat.completion", **self._head, **extras}

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        chunk = {"object": "chat.completion.chunk", **self._head, "choices": [choice]}
        return chunk | {"usage": None} if self._include_usage else chunk


def usage(counts: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
    }


def timings(counts: Usage) -> dict[str, Any]:
    """Named as llama.cpp's: `cache_n` tokens were restored, `prompt_n` run by the model, `predicted_n` sampled."""
    found: dict[str, Any] = {"cache_n": counts.cached_tokens, "predicted_n": counts.completion_tokens}
    if counts.queue_s is not None and counts.prefill_s is not None and counts.decode_s is not None:
        found |= {
            "prompt_n": counts.executed_tokens,
            "queue_ms": round(counts.queue_s * 1e3, 3),
            "prompt_ms": round(counts.prefill_s * 1e3, 3),
            "predicted_ms": round(counts.decode_s * 1e3, 3),
        }
        if counts.executed_tokens and counts.prefill_s > 0:
            found["prompt_per_second"] = round(counts.executed_tokens / counts.prefill_s, 2)
        if counts.completion_tokens > 1 and counts.decode_s > 0:
            found["predicted_per_second"] = round((counts.completion_tokens - 1) / counts.decode_s, 2)
    return found
