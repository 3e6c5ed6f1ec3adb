"""What a client may send: the request bodies, checked. Owns types, limits and names of fields; what they mean for the
engine is decided in chat.py. Unknown fields are ignored; wrong types are an InvalidRequest that names the field.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from services.api.errors import InvalidRequest, MalformedJson, Unsupported

MOST_STOPS = 16
DEEPEST = 64  # nesting of tools and arguments: templates and parsers walk them recursively

# Fields that would change the answer and are not built: anything but these values is refused, not ignored.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None, "auto", "none"),
    "functions": (None, []),
    "grammar": (None, ""),
    "guided_choice": (None, []),
    "guided_grammar": (None, ""),
    "guided_json": (None,),
    "guided_regex": (None, ""),
    "ignore_eos": (None, False),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "modalities": (None, ["text"]),
    "n": (None, 1),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "tool_choice": (None, "auto", "none"),
    "top_k": (None, 0, -1),
    "top_logprobs": (None, 0),
    "typical_p": (None, 1),
}


class Part(BaseModel):
    """One part of a message's content; only text for now."""

    model_config = ConfigDict(strict=True)
    type: str
    text: str = ""


_SURROGATE = re.compile("[\ud800-\udfff]")


def _join_parts(content: Any) -> Any:
    """Text of a content: as it is, or its text parts, one a line."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("image_url", "input_image", "image"):
            raise PydanticCustomError("unsupported", "images are not available yet: this server cannot see pictures")
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise PydanticCustomError(
                "unsupported", "content parts must have type text, not {kind}", {"kind": repr(kind)}
            )
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise PydanticCustomError("text_type", "a text part needs a string in `text`")
        texts.append(text)
    return "\n".join(texts)


def _shallow(value: Any) -> Any:
    level = [value]
    for _ in range(DEEPEST):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return value
    raise PydanticCustomError("too_deep", "nested deeper than {limit} levels", {"limit": DEEPEST})


Content = Annotated[str | None, BeforeValidator(_join_parts)]
JsonObject = Annotated[dict[str, Any], BeforeValidator(_shallow)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class FunctionCall(_Body):
    name: str
    arguments: str | JsonObject | None = None

    def mapping(self) -> dict[str, Any]:
        """The arguments as templates want them. What is not a JSON object is kept as it was written, so that a dialog
        with a broken call in it can go on."""
        if isinstance(self.arguments, dict):
            return self.arguments
        text = self.arguments or "{}"
        try:
            parsed = _shallow(json.loads(text, parse_constant=_refuse_constant))
        except (ValueError, RecursionError, PydanticCustomError):
            parsed = None
        return parsed if isinstance(parsed, dict) else {"arguments": text}


class ToolCall(_Body):
    id: str | None = None
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.mapping()}
        return {"id": self.id, "type": "function", "function": function}


class Message(_Body):
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


class Function(_Body):
    # A name is written between the angle brackets of the model's call format.
    name: str = Field(min_length=1, max_length=256, pattern=r"^[^\s<>]+$")
    description: str | None = None
    parameters: JsonObject | None = None


class Tool(_Body):
    type: Literal["function"] = "function"
    function: Function


class StreamOptions(_Body):
    include_usage: bool | None = None


class ChatRequest(_Body):
    """POST /v1/chat/completions."""

    model: str
    messages: list[Message] = Field(min_length=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: str | list[str] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | JsonObject | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high"] | None = None
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_built(cls, data: Any) -> Any:
        for name, neutral in NEUTRAL.items():
            if isinstance(data, dict) and data.get(name) not in neutral:
                raise PydanticCustomError(
                    "unsupported", "{param} is not supported yet: leave it out or use its default", {"param": name}
                )
        return data

    @model_validator(mode="after")
    def _few_stops(self) -> "ChatRequest":
        if len(self.stops) > MOST_STOPS or "" in self.stops:
            text = "stop takes up to {limit} strings, none of them empty"
            raise PydanticCustomError("stop", text, {"limit": MOST_STOPS, "param": "stop"})
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def usable_tools(self) -> list[Tool]:
        """None are shown to the model when it must not call one."""
        return [] if self.tool_choice == "none" else self.tools or []


Body = TypeVar("Body", bound=BaseModel)


def parse_json(raw: bytes) -> Any:
    """Raises MalformedJson with the place."""
    try:
        return json.loads(raw, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise MalformedJson(f"the body is not JSON: {error.msg} at {place}") from error
    except UnicodeDecodeError as error:
        raise MalformedJson(f"the body is not UTF-8: byte {error.start} is wrong") from error
    except RecursionError as error:
        raise MalformedJson("the body is nested too deeply") from error
    except ValueError as error:  # NaN, or a number of thousands of digits
        raise MalformedJson(f"the body is not JSON: {error}") from error


def validate(kind: type[Body], data: Any) -> Body:
    """Raises InvalidRequest or Unsupported for the first thing that is wrong, with the field's name."""
    if not isinstance(data, dict):
        raise InvalidRequest("the body must be a JSON object")
    _check_text(data)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = _param(kind, first["loc"], first.get("ctx") or {})
        message = first["msg"] if first["msg"].startswith(param) else f"{param}: {first['msg']}"
        raise (Unsupported if first["type"] == "unsupported" else InvalidRequest)(message, param or None) from error


def _check_text(data: Any) -> None:
    """JSON can write half of a surrogate pair, which is no text: tokenizers and templates fail on it in odd ways."""
    left: list[tuple[str, Any]] = [("", data)]
    while left:
        path, value = left.pop()
        if isinstance(value, str):
            if not value.isascii() and _SURROGATE.search(value):
                raise InvalidRequest(f"{path}: half of a surrogate pair is not text", path)
        elif isinstance(value, list):
            left += [(f"{path}[{index}]", inner) for index, inner in enumerate(value)]
        elif isinstance(value, dict):
            left += [(path, key) for key in value]
            left += [(f"{path}.{key}" if path else key, inner) for key, inner in value.items()]


def _param(kind: type[BaseModel], loc: tuple[int | str, ...], context: Mapping[str, Any]) -> str:
    """`messages[0].content` from pydantic's location, without the names of union branches that it appends."""
    path = ""
    branches = {"str", "bool", "int", "float"}
    for step in loc:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step not in branches and not step.startswith(("list[", "dict[", "function-")):
            path += f".{step}" if path else step
    own = context.get("param", "")
    return own if not path else f"{path}.{own}" if own and own != path else path


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not allowed")
