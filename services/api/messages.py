"""A dialog as clients write it: messages, tools, calls; and as the chat template wants it. Owns their fields only."""

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from services.api.pictures import KINDS, note
from services.api.validation import Body, JsonObject, refuse_constant, shallow


def _join_parts(content: Any) -> Any:
    """Text of a content: as it is, or its parts, one a line; of a picture a note (pictures.py)."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in KINDS:
            texts.append(note(part))
            continue
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise PydanticCustomError(
                "unsupported", "content parts must have type text or image_url, not {kind}", {"kind": repr(kind)}
            )
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise PydanticCustomError("text_type", "a text part needs a string in `text`")
        texts.append(text)
    return "\n".join(texts)


_PART = {"type": "object", "required": ["type"], "properties": {"type": {"type": "string"}}}
Content = Annotated[
    str | None,
    BeforeValidator(_join_parts),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]}),
]


class FunctionCall(Body):
    name: str
    arguments: str | JsonObject | None = None

    def mapping(self) -> dict[str, Any]:
        """The arguments as templates want them. What is not a JSON object is kept as it was written, so that a dialog
        with a broken call in it can go on."""
        if isinstance(self.arguments, dict):
            return self.arguments
        text = self.arguments or "{}"
        try:
            parsed = shallow(json.loads(text, parse_constant=refuse_constant))
        except (ValueError, RecursionError, PydanticCustomError):
            parsed = None
        return parsed if isinstance(parsed, dict) else {"arguments": text}


class ToolCall(Body):
    id: str | None = None
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.mapping()}
        return {"id": self.id, "type": "function", "function": function}


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_name_for_reasoning(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("reasoning_content") is None:
            other = data.get("reasoning") or data.get("thinking")
            return {**data, "reasoning_content": other} if isinstance(other, str) else data
        return data

    @model_validator(mode="after")
    def _has_content(self) -> "Message":
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError(
                "missing", "a {role} message needs content", {"role": self.role, "param": "content"}
            )
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as the chat template expects it."""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        if self.role == "assistant" and self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.role == "assistant" and self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


# A name is written between the angle brackets of the model's call format.
ToolName = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\s<>]+$")]


class Function(Body):
    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None  # also where a call is the model's own choice, its arguments must fit


class Tool(Body):
    type: Literal["function"] = "function"
    function: Function

    def for_template(self) -> dict[str, Any]:
        """The tool as the chat template expects it."""
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


def without_hosted(tools: Any, ours: tuple[str | None, ...]) -> Any:
    """Tools of other types than `ours` would be run by a vendor's servers. Agents name some beside their own, and work
    without: the model is not told of them. A request that has no others is left to be refused."""
    if not isinstance(tools, list):
        return tools
    return [tool for tool in tools if not isinstance(tool, dict) or tool.get("type") in ours] or tools
