"""Anthropic's messages request, checked, and as the chat that it means. Owns its fields; unknown ones are ignored."""

import functools
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from services.api.messages import Content, Function, FunctionCall, Message, Tool, ToolCall, ToolName, without_hosted
from services.api.pictures import note
from services.api.schemas import ChatRequest, Effort
from services.api.structured import ResponseFormat
from services.api.validation import Body, JsonObject


class TextBlock(Body):
    type: Literal["text"]
    text: str


class ImageBlock(Body):
    """A picture, or a document's page as one. Its bytes become a note (pictures.py)."""

    type: Literal["image"]
    source: JsonObject

    @property
    def text(self) -> str:
        return note(self.model_dump())

    @model_validator(mode="after")
    def _is_whole(self) -> "ImageBlock":
        _ = self.text
        return self


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: str


class RedactedBlock(Body):
    """Thinking that a client keeps without reading it; nothing that we ever sent."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Content = None


Block = Annotated[
    TextBlock | ImageBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]
HEARD_BLOCKS = ("text", "image", "tool_result")
KNOWN_BLOCKS = ("text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result")


class Turn(Body):
    """One of `messages`."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    @model_validator(mode="before")
    @classmethod
    def _known_blocks(cls, data: Any) -> Any:
        content = data.get("content") if isinstance(data, dict) else None
        for block in content if isinstance(content, list) else []:
            kind = block.get("type") if isinstance(block, dict) else None
            if kind not in KNOWN_BLOCKS:
                text = "a block of type {kind} is not supported: this server takes text, images, thinking and tools"
                raise PydanticCustomError("unsupported", text, {"kind": repr(kind), "param": "content"})
        return data

    @model_validator(mode="after")
    def _says_something(self) -> "Turn":
        """An assistant's turn may be empty, but no other; and only it thinks and calls tools."""
        if self.role == "assistant" or isinstance(self.content, str):
            return self
        wrong = [block.type for block in self.content if block.type not in HEARD_BLOCKS]
        if wrong or not self.content:
            text = "a turn of the {role}'s needs text, images or tool results, not {kind}"
            kind = wrong[0] if wrong else "nothing"
            raise PydanticCustomError("content", text, {"role": self.role, "kind": kind, "param": "content"})
        return self

    def messages(self) -> Iterator[Message]:
        """Tool results are messages of their own; an assistant's blocks are one message, as it was answered."""
        blocks: Sequence[Any] = self.content if isinstance(self.content, list) else [_text(self.content)]
        if self.role == "assistant":
            yield _assistant(blocks)
            return
        texts: list[str] = []
        for block in blocks:
            if isinstance(block, ToolResultBlock):
                yield from _user(self.role, texts)
                texts = []
                yield Message(role="tool", tool_call_id=block.tool_use_id, content=block.content or "")
            elif isinstance(block, TextBlock | ImageBlock):
                texts.append(block.text)
        yield from _user(self.role, texts)


class CustomTool(Body):
    """One that the client runs."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = None

    def function(self) -> Function:
        return Function(name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict)


OwnTools = Annotated[list[CustomTool], BeforeValidator(functools.partial(without_hosted, ours=(None, "custom")))]


class ToolChoice(Body):
    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _has_name(self) -> "ToolChoice":
        if self.type == "tool" and self.name is None:
            raise PydanticCustomError("missing", "a tool needs a name", {"param": "name"})
        return self

    def openai(self) -> str | dict[str, Any]:
        """The same in OpenAI's words."""
        if self.type == "tool":
            return {"type": "function", "name": self.name}
        return "required" if self.type == "any" else self.type


class Metadata(Body):
    user_id: str | None = None


class OutputFormat(ResponseFormat):
    param = "output_format"


class OutputConfig(Body):
    format: OutputFormat | None = None
    effort: Effort | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=0, lt=2**31)


class CountRequest(Body):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: list[Turn] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: OwnTools | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None

    @model_validator(mode="after")
    def _no_prefill(self) -> "CountRequest":
        if self.messages[-1].role == "assistant":
            text = "messages: the last one must be the user's; an answer cannot be begun for the model"
            raise PydanticCustomError("unsupported", text, {"param": "messages"})
        return self

    def chat(self) -> ChatRequest:
        """The same as a chat."""
        system = [Message(role="system", content=text)] if (text := self._system()) else []
        turns = [message for turn in self.messages for message in turn.messages()]
        tools = [Tool(function=tool.function()) for tool in self.tools or []]
        chat = ChatRequest(model=self.model, messages=[*system, *turns], tools=tools or None)
        if self.tool_choice is not None:
            chat.tool_choice = self.tool_choice.openai()
            chat.parallel_tool_calls = not self.tool_choice.disable_parallel_tool_use
        if self.thinking is not None:
            chat.reasoning_effort = "none" if self.thinking.type == "disabled" else "high"
            chat.thinking_budget = self.thinking.budget_tokens
        return chat

    def _system(self) -> str:
        if isinstance(self.system, list):
            return "\n".join(block.text for block in self.system)
        return self.system or ""


class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    stream: bool | None = None
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    metadata: Metadata | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    stop_sequences: list[str] | None = Field(default=None, max_length=16)

    @model_validator(mode="after")
    def _stops(self) -> "MessagesRequest":
        if "" in (self.stop_sequences or []):
            raise PydanticCustomError("stop", "an empty stop sequence stops nothing", {"param": "stop_sequences"})
        return self

    def chat(self) -> ChatRequest:
        chat = super().chat()
        chat.max_tokens, chat.stream, chat.stop = self.max_tokens, self.stream, self.stop_sequences
        config = self.output_config or OutputConfig()
        chat.response_format = self.output_format or config.format
        if chat.reasoning_effort == "high" and config.effort is not None:  # it thinks at all
            chat.reasoning_effort = config.effort
        chat.temperature, chat.top_p, chat.top_k = self.temperature, self.top_p, self.top_k
        return chat


def _text(text: str) -> TextBlock:
    return TextBlock(type="text", text=text)


def _user(role: Literal["user", "system"], texts: Sequence[str]) -> list[Message]:
    return [Message(role=role, content="\n".join(texts))] if texts else []


def _assistant(blocks: Sequence[Any]) -> Message:
    calls = [
        ToolCall(id=block.id, function=FunctionCall(name=block.name, arguments=block.input))
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    return Message(
        role="assistant",
        content="".join(block.text for block in blocks if isinstance(block, TextBlock)) or None,
        reasoning_content="".join(thoughts) or None,
        tool_calls=calls or None,
    )
