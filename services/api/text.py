"""Text without a dialog: completions of a prompt, and what the tokenizer and the template make of text. Owns the
request bodies and replies of these endpoints; nothing is stored for a later request.
"""

import time
from collections.abc import Sequence
from typing import Any

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from services.api.answer import Done, PromptProgress
from services.api.choices import Choices
from services.api.messages import Message, Tool
from services.api.parsers.answer import Content, Delta
from services.api.replies import of_prompts, prompt_progress, timings, usage
from services.api.sampling import Sampling
from services.api.schemas import MOST_LOGPROBS, StreamOptions, refuse_what_is_not_built
from services.api.structured import Structured
from services.api.validation import Body

MOST_PROMPTS = 64


class CompletionRequest(Sampling, Structured):
    """POST /v1/completions."""

    model: str
    prompt: str | list[int] | list[str] | list[list[int]]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    user: str | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        return refuse_what_is_not_built(data)

    @model_validator(mode="after")
    def _has_prompts(self) -> "CompletionRequest":
        if not self.prompts or not all(self.prompts) or len(self.prompts) > MOST_PROMPTS:
            text = "prompt must be text or token ids, or a list of up to {limit} of them, none of them empty"
            raise PydanticCustomError("prompt", text, {"limit": MOST_PROMPTS, "param": "prompt"})
        return self

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        one = isinstance(self.prompt, str) or (bool(self.prompt) and isinstance(self.prompt[0], int))
        return [self.prompt] if one else self.prompt  # type: ignore[list-item, return-value]  # `one` tells them apart


class TokenizeRequest(Body):
    """POST /tokenize: a text under vLLM's or llama.cpp's name for it, or a dialog."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    tools: list[Tool] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_text(self) -> "TokenizeRequest":
        if sum(given is not None for given in (self.prompt, self.content, self.messages)) != 1:
            raise PydanticCustomError("text", "give a text in `prompt`, or a dialog in `messages`", {"param": "prompt"})
        return self


class DetokenizeRequest(Body):
    """POST /detokenize."""

    tokens: list[int]


class TextReply:
    """OpenAI's text completion objects. All of one request share an id and a time."""

    def __init__(self, request: CompletionRequest, choices: Choices) -> None:
        self._request = request
        self._choices = choices
        self._include_usage = bool(request.stream_options and request.stream_options.include_usage)
        self._told_logprobs = [0] * choices.count
        self._told_letters = [0] * choices.count
        self._head = {
            "id": choices.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": request.model,
            "system_fingerprint": choices.answers[0].fingerprint,
        }

    def first(self, index: int) -> list[dict[str, Any]]:
        return []

    def piece(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        assert isinstance(delta, Content), "nothing else is looked for in a text"
        return [self._chunk([self._choice(index, delta.text, None)])]

    def progress(self, index: int, progress: PromptProgress) -> list[dict[str, Any]]:
        return [self._chunk([self._choice(index, "", None)]) | {"prompt_progress": prompt_progress(progress)}]

    def last(self, index: int, done: Done) -> list[dict[str, Any]]:
        return [self._chunk([self._choice(index, "", done.finish_reason)]) | {"timings": timings(done.usage)}]

    def ending(self, dones: Sequence[Done]) -> list[dict[str, Any]]:
        return [self._chunk([]) | {"usage": self._usage(dones)}] if self._include_usage else []

    def whole(self, dones: Sequence[Done]) -> dict[str, Any]:
        choices = [
            self._choice(index, self._choices.answers[index].message.content, done.finish_reason)
            for index, done in enumerate(dones)
        ]
        return {**self._head, "choices": choices, "usage": self._usage(dones)}

    def _usage(self, dones: Sequence[Done]) -> dict[str, Any]:
        return usage(of_prompts([done.usage for done in dones], self._request.n or 1))

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "choices": choices}
        return chunk | {"usage": None} if self._include_usage else chunk

    def _choice(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        logprobs = None if self._request.logprobs is None else self._new_logprobs(index)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _new_logprobs(self, index: int) -> dict[str, Any]:
        found = self._choices.answers[index].logprobs[self._told_logprobs[index] :]
        self._told_logprobs[index] += len(found)
        offsets = []
        for entry in found:
            offsets.append(self._told_letters[index])
            self._told_letters[index] += len(entry["token"])
        return {
            "tokens": [entry["token"] for entry in found],
            "token_logprobs": [entry["logprob"] for entry in found],
            "top_logprobs": [{top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in found],
            "text_offset": offsets,
        }
