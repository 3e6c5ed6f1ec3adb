"""OpenAI's responses request, checked, and as the chat that it means. Owns its fields; unknown ones are ignored."""

import functools
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from services.api.messages import Content, Function, FunctionCall, Message, Tool, ToolCall, ToolName, without_hosted
from services.api.schemas import WRONG_CHOICE, ChatRequest, Effort
from services.api.structured import ResponseFormat
from services.api.validation import Body, JsonObject

MOST_METADATA = 16
ITEMS = {  # and the fields that they cannot be without
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}


class ReasoningText(Body):
    text: str


class Item(Body):
    """One of `input`: a message if it has no type."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content = None
    thoughts: list[ReasoningText] | None = None
    call_id: str | None = None
    name: ToolName | None = None
    arguments: str | None = None
    output: Content = None

    @model_validator(mode="before")
    @classmethod
    def _is_whole(cls, data: Any) -> Any:
        kind = data.get("type", "message") if isinstance(data, dict) else None
        if not isinstance(kind, str) or kind not in ITEMS:
            text = "items of type {kind} are not supported: this server takes messages, function calls and reasoning"
            raise PydanticCustomError("unsupported", text, {"kind": repr(kind), "param": "type"})
        for name in ITEMS[kind]:
            if data.get(name) is None:
                raise PydanticCustomError("missing", "a {kind} needs {param}", {"kind": kind, "param": name})
        # Its parts are of another kind than a message's.
        return {**data, "content": None, "thoughts": data.get("content")} if kind == "reasoning" else data


class FunctionTool(Body):
    """One that the client runs."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None

    def function(self) -> Function:
        return Function(name=self.name, description=self.description, parameters=self.parameters, strict=self.strict)


OwnTools = Annotated[list[FunctionTool], BeforeValidator(functools.partial(without_hosted, ours=("function",)))]


class TextFormat(ResponseFormat):
    param = "text.format"


class TextConfig(Body):
    format: TextFormat | None = None


class Reasoning(Body):
    effort: Effort | None = None


class ResponseRequest(Body):
    """POST /v1/responses."""

    model: str
    input: str | list[Item]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    tools: OwnTools | None = None
    tool_choice: str | JsonObject | None = None
    reasoning: Reasoning | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    user: str | None = None
    safety_identifier: str | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = Field(default=None, max_length=MOST_METADATA)

    @model_validator(mode="after")
    def _is_built(self) -> "ResponseRequest":
        if self.background and (self.stream or self.store is False):
            text = "{param} is not supported with stream or without store"
            raise PydanticCustomError("unsupported", text, {"param": "background"})
        if isinstance(self.tool_choice, str) and self.tool_choice not in ("auto", "none", "required"):
            raise PydanticCustomError("tool_choice", WRONG_CHOICE, {"param": "tool_choice"})
        if not self.input:
            raise PydanticCustomError("missing", "input is empty", {"param": "input"})
        return self

    def chat(self, before: Sequence[Message]) -> ChatRequest:
        """The same as a chat; `before` is what the previous response read and answered, without its instructions."""
        system = [Message(role="system", content=self.instructions)] if self.instructions else []
        tools = [Tool(function=tool.function()) for tool in self.tools or []]
        chat = ChatRequest(
            model=self.model,
            messages=[*system, *before, *self.messages()],
            tools=tools or None,
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
        )
        if self.text is not None:
            chat.response_format = self.text.format
        if self.reasoning is not None:
            chat.reasoning_effort = self.reasoning.effort
        return chat

    def messages(self) -> list[Message]:
        """The input. What an assistant thought, said and called in a row is one message, as it was answered."""
        if isinstance(self.input, str):
            return [Message(role="user", content=self.input)]
        found: list[Message] = []
        answering = False  # the last message is an assistant's that may go on
        for item in self.input:
            ours = item.type in ("reasoning", "function_call") or item.role == "assistant"
            if ours and not answering:
                found.append(Message(role="assistant"))
            answering = ours
            if ours:
                _go_on(found[-1], item)
            elif item.type == "function_call_output":
                found.append(Message(role="tool", tool_call_id=item.call_id, content=item.output))
            else:
                assert item.role is not None
                found.append(Message(role=item.role, content=item.content))
        return found


def _go_on(message: Message, item: Item) -> None:
    """Add an assistant's item to its message."""
    if item.type == "reasoning":
        said = "".join(part.text for part in item.thoughts or [])
        message.reasoning_content = (message.reasoning_content or "") + said
    elif item.type == "function_call":
        assert item.name is not None
        call = ToolCall(id=item.call_id, function=FunctionCall(name=item.name, arguments=item.arguments))
        message.tool_calls = [*(message.tool_calls or []), call]
    else:
        message.content = (message.content or "") + (item.content or "")
