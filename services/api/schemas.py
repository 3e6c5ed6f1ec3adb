"""What a client may send: the request bodies, checked. Owns types, limits and names of fields; what they mean for the
engine is decided in chat.py. Unknown fields are ignored; wrong types are an InvalidRequest that names the field.
"""

from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from services.api.messages import Message, Tool
from services.api.sampling import MostTokens, Sampling
from services.api.structured import Structured
from services.api.validation import Body, JsonObject

MOST_LOGPROBS = 20

# Fields that would change the answer and are not built: anything but these values is refused, not ignored.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (None, True),
    "audio": (None,),
    "best_of": (None, 1),
    "continue_final_message": (None, False),  # a last message of the assistant's is answered by a new one
    "echo": (None, False),
    "function_call": (None, "auto", "none"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "suffix": (None, ""),
    "typical_p": (None, 1),
}
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
WRONG_CHOICE = "tool_choice must be auto, none, required, or name a function"
BUDGET_NAMES = ("thinking_budget", "thinking_token_budget", "thinking_budget_tokens", "reasoning_budget")


def refuse_what_is_not_built(data: Any) -> Any:
    """Raises PydanticCustomError of type unsupported, which validate turns into Unsupported."""
    for name, neutral in NEUTRAL.items():
        if isinstance(data, dict) and data.get(name) not in neutral:
            raise PydanticCustomError(
                "unsupported", "{param} is not supported yet: leave it out or use its default", {"param": name}
            )
    return data


class StreamOptions(Body):
    include_usage: bool | None = None


class ChatRequest(Sampling, Structured):
    """POST /v1/chat/completions."""

    model: str
    messages: list[Message] = Field(min_length=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None  # a stream tells how far the prompt is read
    max_completion_tokens: MostTokens = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    tools: list[Tool] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    thinking_budget: int | None = Field(
        default=None, ge=0, lt=2**31
    )  # tokens; other servers' names for it are taken too
    user: str | None = None
    safety_identifier: str | None = None
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        return refuse_what_is_not_built(data)

    @model_validator(mode="before")
    @classmethod
    def _one_name_for_the_budget(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        found = [data[name] for name in BUDGET_NAMES if data.get(name) is not None]
        return {**data, BUDGET_NAMES[0]: found[0]} if found else data

    @model_validator(mode="after")
    def _logprobs_first(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError(
                "top_logprobs", "top_logprobs needs logprobs to be true", {"param": "top_logprobs"}
            )
        return self

    @model_validator(mode="after")
    def _choice_of_tools(self) -> "ChatRequest":
        if isinstance(self.tool_choice, str) and self.tool_choice not in ("auto", "none", "required"):
            raise PydanticCustomError("tool_choice", WRONG_CHOICE, {"param": "tool_choice"})
        return self

    @property
    def longest(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def user_name(self) -> str | None:
        return self.safety_identifier or self.user

    @property
    def usable_tools(self) -> list[Tool]:
        """None are shown to the model when it must not call one."""
        return [] if self.tool_choice == "none" else self.tools or []


class ControlRequest(Body):
    """POST /v1/chat/completions/control: named as llama.cpp's."""

    id: str
    action: Literal["reasoning_end"]
