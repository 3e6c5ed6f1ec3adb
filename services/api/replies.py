"""The shape of what a client gets: OpenAI's chat completion objects, whole and in chunks. Owns names of fields only."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from services.api.answer import Done, PromptProgress, Usage
from services.api.choices import Choices
from services.api.parsers.answer import Content, Delta, Reasoning
from services.api.parsers.tool_calls import CallStart
from services.api.schemas import ChatRequest

Number = TypeVar("Number", int, float)


class ChatReply:
    """All objects of one request share an id and a time. Choices are named by their number."""

    def __init__(self, request: ChatRequest, choices: Choices) -> None:
        self._choices = choices
        self._include_usage = bool(request.stream_options and request.stream_options.include_usage)
        self._logprobs = bool(request.logprobs)
        self._told_logprobs = [0] * choices.count
        self._head = {
            "id": choices.id,
            "created": int(time.time()),
            "model": request.model,
            "system_fingerprint": choices.answers[0].fingerprint,
        }

    def first(self, index: int) -> list[dict[str, Any]]:
        return [self._chunk(index, {"role": "assistant", "content": ""})]

    def piece(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        return [self._chunk(index, _delta(delta))]

    def progress(self, index: int, progress: PromptProgress) -> list[dict[str, Any]]:
        return [self._chunk(index, {}) | {"prompt_progress": prompt_progress(progress)}]

    def last(self, index: int, done: Done) -> list[dict[str, Any]]:
        """The chunk that says why a choice ended."""
        return [self._chunk(index, {}, done.finish_reason) | {"timings": timings(done.usage)}]

    def ending(self, dones: Sequence[Done]) -> list[dict[str, Any]]:
        """The usage, if the client asked for it: no choices, nothing after it."""
        if not self._include_usage:
            return []
        return [self._chunk(0, {}) | {"choices": [], "usage": usage(together([done.usage for done in dones]))}]

    def whole(self, dones: Sequence[Done]) -> dict[str, Any]:
        choices = [self._choice(index, done) for index, done in enumerate(dones)]
        counts = together([done.usage for done in dones])
        extras = {"choices": choices, "usage": usage(counts), "timings": timings(counts)}
        return {"object": "chat.completion", **self._head, **extras}

    def _choice(self, index: int, done: Done) -> dict[str, Any]:
        said = self._choices.answers[index].message
        message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
        if said.reasoning:
            message |= dict.fromkeys(("reasoning_content", "reasoning"), said.reasoning)
        if said.calls:
            message |= {"content": said.content or None, "tool_calls": said.calls}
        logprobs = self._new_logprobs(index)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": done.finish_reason}

    def _chunk(self, index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        logprobs = self._new_logprobs(index)
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk = {"object": "chat.completion.chunk", **self._head, "choices": [choice]}
        return chunk | {"usage": None} if self._include_usage else chunk

    def _new_logprobs(self, index: int) -> dict[str, Any] | None:
        """Those not told yet: text may be held back for a while, and its tokens come with the text that follows."""
        if not self._logprobs or index >= len(self._choices.answers):  # the next one is told of before it is begun
            return None
        found = self._choices.answers[index].logprobs[self._told_logprobs[index] :]
        self._told_logprobs[index] += len(found)
        return {"content": found, "refusal": None}


def _delta(delta: Delta) -> dict[str, Any]:
    if isinstance(delta, Content):
        return {"content": delta.text}
    if isinstance(delta, Reasoning):
        # Two names are in use among clients, and each reads only its own.
        return {"reasoning_content": delta.text, "reasoning": delta.text}
    if isinstance(delta, CallStart):
        function = {"name": delta.name, "arguments": ""}
        return {"tool_calls": [{"index": delta.index, "id": delta.id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.json}}]}


def prompt_progress(progress: PromptProgress) -> dict[str, Any]:
    """Named as llama.cpp's, which has no `left_ms`."""
    return {
        "total": progress.total_tokens,
        "cache": progress.cached_tokens,
        "processed": progress.done_tokens,
        "time_ms": round(progress.seconds * 1e3, 3),
        "left_ms": progress.left_ms,
    }


def together(counts: Sequence[Usage]) -> Usage:
    """The tokens and times of several answers to one prompt, which counts once."""
    first, *others = counts
    for other in others:
        first = replace(
            first,
            completion_tokens=first.completion_tokens + other.completion_tokens,
            reasoning_tokens=first.reasoning_tokens + other.reasoning_tokens,
            executed_tokens=_sum(first.executed_tokens, other.executed_tokens),
            queue_s=_sum(first.queue_s, other.queue_s),
            prefill_s=_sum(first.prefill_s, other.prefill_s),
            decode_s=_sum(first.decode_s, other.decode_s),
        )
    return first


def of_prompts(counts: Sequence[Usage], each: int) -> Usage:
    """Those of several prompts, `each` answers to one."""
    prompts = [together(counts[at : at + each]) for at in range(0, len(counts), each)]
    return replace(
        together(prompts),
        prompt_tokens=sum(prompt.prompt_tokens for prompt in prompts),
        cached_tokens=sum(prompt.cached_tokens for prompt in prompts),
    )


def _sum(one: Number | None, other: Number | None) -> Number | None:
    return None if one is None or other is None else one + other


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
