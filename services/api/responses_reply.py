"""The shape of what a client of OpenAI's responses gets: an object with output items, whole or as events. Owns names of
fields, the numbers of events and the order in which items open and close."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from services.api.answer import Done, Usage
from services.api.choices import Choices
from services.api.errors import ApiError
from services.api.parsers.answer import Content, Delta, Reasoning
from services.api.parsers.tool_calls import CallArguments, CallStart
from services.api.responses_request import ResponseRequest
from services.api.sse import Wire

Event = dict[str, Any]


def failure(error: ApiError) -> Event:
    return {"type": "error", "code": error.code, "message": str(error), "param": error.param, "sequence_number": 0}


WIRE = Wire(named=True, end=b"", failure=failure)


class ResponseReply:
    """One response. `object` is what is known of it so far."""

    def __init__(
        self, request: ResponseRequest, choices: Choices, on_end: Callable[["ResponseReply"], None] | None
    ) -> None:
        self.choices = choices
        self.ended = asyncio.Event()
        self._on_end = on_end
        self._number = 0
        self._open = False  # the last item is not complete
        self._output: list[Event] = []
        self.object: Event = {
            "id": choices.id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": bool(request.background),
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": request.model,
            "output": self._output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
            "store": request.store is not False,
            "temperature": request.temperature,
            "text": {"format": _format(request)},
            "tool_choice": request.tool_choice or "auto",
            "tools": [tool.model_dump() | {"strict": bool(tool.strict)} for tool in request.tools or []],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def first(self, index: int) -> list[Event]:
        return [
            self._event("response.created", response={**self.object, "output": []}),
            self._event("response.in_progress", response={**self.object, "output": []}),
        ]

    def piece(self, index: int, delta: Delta) -> list[Event]:
        if isinstance(delta, CallStart):
            item = {"id": f"fc_{delta.id}", "type": "function_call", "call_id": delta.id, "name": delta.name}
            return [*self._close(), *self._begin({**item, "arguments": "", "status": "in_progress"})]
        if isinstance(delta, CallArguments):
            self._output[-1]["arguments"] += delta.json
            return [self._event("response.function_call_arguments.delta", **self._place(), delta=delta.json)]
        kind, part = ("reasoning", "reasoning_text") if isinstance(delta, Reasoning) else ("message", "output_text")
        began: list[Event] = []
        if not (self._open and self._output[-1]["type"] == kind):
            began = [*self._close(), *self._begin(self._item(kind)), *self._begin_part(part)]
        self._output[-1]["content"][0]["text"] += delta.text
        more: Event = {"logprobs": []} if isinstance(delta, Content) else {}
        place = self._place()
        return [*began, self._event(f"response.{part}.delta", **place, content_index=0, delta=delta.text, **more)]

    def last(self, index: int, done: Done) -> list[Event]:
        closed = self._close("completed" if done.finish_reason in ("stop", "tool_calls") else "incomplete")
        ended = {"length": "incomplete", "cancelled": "cancelled"}.get(done.finish_reason, "completed")
        self.object |= {"status": ended, "usage": usage_of(done.usage)}
        if ended == "incomplete":
            self.object["incomplete_details"] = {"reason": "max_output_tokens"}
        self._end()
        name = "response.completed" if ended == "completed" else "response.incomplete"
        return [*closed, self._event(name, response=self.object)]

    def fail(self, error: ApiError) -> None:
        """The end of one that nobody is told of."""
        self.object |= {"status": "failed", "error": {"code": error.code, "message": str(error)}}
        self._end()

    def _end(self) -> None:
        self.ended.set()
        if self._on_end is not None:
            self._on_end(self)

    def ending(self, dones: Sequence[Done]) -> list[Event]:
        return []

    def whole(self, dones: Sequence[Done]) -> Event:
        said = self.choices.answers[0].message
        deltas: list[Delta] = [Reasoning(said.reasoning)] if said.reasoning else []
        deltas += [Content(said.content)] if said.content or not said.calls else []
        for number, call in enumerate(said.calls or []):
            deltas.append(CallStart(number, call["id"], call["function"]["name"]))
            deltas.append(CallArguments(number, call["function"]["arguments"]))
        for delta in deltas:
            self.piece(0, delta)
        self.last(0, dones[0])
        return self.object

    def _item(self, kind: str) -> Event:
        mark = {"reasoning": "rs", "message": "msg"}[kind]
        name = f"{mark}_{self.choices.id.partition('_')[2]}_{len(self._output)}"
        more: Event = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
        return {"id": name, "type": kind, "status": "in_progress", "content": [], **more}

    def _begin(self, item: Event) -> list[Event]:
        self._output.append(item)
        self._open = True
        place = {"output_index": len(self._output) - 1}
        shown = {**item, "content": []} if "content" in item else dict(item)
        return [self._event("response.output_item.added", **place, item=shown)]

    def _begin_part(self, kind: str) -> list[Event]:
        part: Event = {"type": kind, "text": ""}
        if kind == "output_text":
            part |= {"annotations": [], "logprobs": []}
        self._output[-1]["content"].append(part)
        return [self._event("response.content_part.added", **self._place(), content_index=0, part=dict(part))]

    def _close(self, status: str = "completed") -> list[Event]:
        """Complete the last item, if it is not."""
        if not self._open:
            return []
        self._open = False
        item = self._output[-1]
        item["status"] = status
        place = self._place()
        if item["type"] == "function_call":
            more = {"arguments": item["arguments"], "name": item["name"]}
            events = [self._event("response.function_call_arguments.done", **place, **more)]
        else:
            part = item["content"][0]
            more = {"logprobs": []} if part["type"] == "output_text" else {}
            events = [
                self._event(f"response.{part['type']}.done", **place, content_index=0, text=part["text"], **more),
                self._event("response.content_part.done", **place, content_index=0, part=part),
            ]
        return [
            *events,
            self._event("response.output_item.done", output_index=place["output_index"], item=item),
        ]

    def _place(self) -> Event:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}


def _format(request: ResponseRequest) -> Event:
    found = request.text.format if request.text else None
    return {"type": "text"} if found is None else found.model_dump(by_alias=True, exclude_none=True)


def usage_of(counts: Usage) -> Event:
    return {
        "input_tokens": counts.prompt_tokens,
        "input_tokens_details": {"cached_tokens": counts.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": counts.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
    }
