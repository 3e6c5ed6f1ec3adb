"""How an answer is drawn, as far as a request may say: lengths, temperature, penalties, stop strings. Owns the fields
that chat and text completions share, their limits, and what they are in the contract's words.
"""

import secrets
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from services.api.errors import InvalidRequest
from services.api.model_folder import GenerationDefaults
from services.api.validation import Body
from services.rpc import engine_pb2 as pb

MOST_STOPS = 16
MOST_CHOICES = 16
MOST_BIASES = 1024
LARGEST_BIAS = 100.0


def _by_id(bias: Any) -> Any:
    """JSON's keys are strings: {"42": -100} as {42: -100.0}."""
    if not isinstance(bias, dict):
        return bias
    if not all(isinstance(key, str) and key.isdecimal() and len(key) < 10 for key in bias):
        raise PydanticCustomError("bias", "keys must be token ids")
    if not all(type(value) in (int, float) and abs(value) <= LARGEST_BIAS for value in bias.values()):
        raise PydanticCustomError("bias", "values must be numbers from -{limit} to {limit}", {"limit": LARGEST_BIAS})
    return {int(key): float(value) for key, value in bias.items()}


def _unlimited(tokens: Any) -> Any:
    """-1, as clients of llama.cpp and LM Studio write that there is no limit."""
    return None if type(tokens) is int and tokens == -1 else tokens


MostTokens = Annotated[
    Annotated[int, Field(ge=1)] | None,
    BeforeValidator(_unlimited),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"const": -1}, {"type": "null"}]}),
]


class Sampling(Body):
    """Unset fields are the model's defaults."""

    max_tokens: MostTokens = None
    min_tokens: int | None = Field(default=None, ge=0)
    ignore_eos: bool | None = None
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    min_p: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2, allow_inf_nan=False)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10, allow_inf_nan=False)
    logit_bias: Annotated[
        Annotated[dict[int, float], Field(max_length=MOST_BIASES)] | None, BeforeValidator(_by_id)
    ] = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: str | list[str] | None = None
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)

    @model_validator(mode="after")
    def _few_stops(self) -> "Sampling":
        if len(self.stops) > MOST_STOPS or "" in self.stops:
            text = "stop takes up to {limit} strings, none of them empty"
            raise PydanticCustomError("stop", text, {"limit": MOST_STOPS, "param": "stop"})
        return self

    @model_validator(mode="after")
    def _least_below_most(self) -> "Sampling":
        most = self.longest
        if most is not None and (self.min_tokens or 0) > most:
            text = "min_tokens is more than the answer's limit of {limit} tokens"
            raise PydanticCustomError("min_tokens", text, {"limit": most, "param": "min_tokens"})
        return self

    @property
    def longest(self) -> int | None:
        """The most tokens the client wants."""
        return self.max_tokens

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def least(self, max_tokens: int) -> int:
        """How many tokens must come before the answer may end, of at most `max_tokens`."""
        return max_tokens if self.ignore_eos else min(self.min_tokens or 0, max_tokens)

    def message(self, defaults: GenerationDefaults, vocab_size: int, choice: int) -> pb.Sampling:
        """For the engine; every choice of a request has its own seed. Raises InvalidRequest."""
        bias = self.logit_bias or {}
        if max(bias, default=0) >= vocab_size:
            raise InvalidRequest(
                f"logit_bias has {max(bias)}, but the model's token ids are 0 to {vocab_size - 1}", "logit_bias"
            )
        seed = secrets.randbits(64) if self.seed is None else self.seed + choice
        return pb.Sampling(
            temperature=defaults.temperature if self.temperature is None else self.temperature,
            top_p=defaults.top_p if self.top_p is None else self.top_p,
            seed=seed % 2**64,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            logit_bias=bias,
        )
