"""What form a client wants an answer in: JSON, JSON by a schema, a regular expression, a choice, a grammar. Owns the
fields that say so, in OpenAI's, vLLM's and llama.cpp's words, and what each means; call_grammar.py owns tool calls.
What a schema or grammar really allows is the engine's to find out.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from services.api.validation import Body, JsonObject, refuse_constant, shallow
from services.rpc import engine_pb2 as pb

MOST_CHOICES = 1000
SPACE = r" |\n {0,16}"  # between the parts of a JSON text: what pretty printing needs, and no endless row of it


@dataclass(frozen=True)
class Form:
    """A form by the field that asked for it. `rule` is the right side of a Lark rule, None where it cannot be one."""

    param: str
    grammar: pb.Grammar
    rule: str | None = None


def json_rule(schema: Mapping[str, Any] | bool, strict: bool) -> str:
    """A JSON text by a schema, as a part of a Lark grammar."""
    return f"%json {_schema_text(schema, strict)}"


def literal(text: str) -> str:
    """A text as it stands, in a Lark grammar."""
    return _dump(text, ensure_ascii=False)


def _schema_text(schema: Mapping[str, Any] | bool, strict: bool) -> str:
    """Not strict: keywords that the engine does not know allow everything."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return _dump({**schema, "x-guidance": {"whitespace_pattern": SPACE, "lenient": not strict}})


def _dump(value: Any, ensure_ascii: bool = True) -> str:
    """JSON without the one control character that JSON leaves as it is and Lark does not take."""
    return json.dumps(value, ensure_ascii=ensure_ascii).replace("\x7f", "\\u007f")


def _json(param: str, schema: Mapping[str, Any], strict: bool) -> Form:
    text = _schema_text(schema, strict)
    return Form(param, pb.Grammar(json_schema=text), f"%json {text}")


class StructuredOutputs(Body):
    """vLLM's: one of these."""

    json_: str | JsonObject | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = Field(default=None, max_length=MOST_CHOICES)
    grammar: str | None = None


class JsonSchema(Body):
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's. In its responses and in others' words, the schema lies beside the type."""

    param: ClassVar[str] = "response_format"

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    json_schema: JsonSchema | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        if self.type == "json_schema" and self.given is None:
            raise PydanticCustomError("missing", "json_schema needs a schema", {"param": "json_schema.schema"})
        return self

    @property
    def given(self) -> Mapping[str, Any] | None:
        return self.schema_ if self.json_schema is None else self.json_schema.schema_

    def form(self) -> Form | None:
        if self.type == "text":
            return None
        strict = bool(self.strict or (self.json_schema and self.json_schema.strict))
        return _json(self.param, self.given or {"type": "object"}, strict)


class Structured(Body):
    """The fields of a request; at most one of them may ask for a form."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | JsonObject | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(default=None, max_length=MOST_CHOICES)
    guided_grammar: str | None = None
    grammar: str | None = None  # llama.cpp's, as the next one
    json_schema: JsonObject | None = None

    @model_validator(mode="after")
    def _one_form(self) -> "Structured":
        asked = [form.param for form in self._forms()]
        if len(asked) > 1:
            text = "{param} and {other} each ask for a form of the answer: keep one"
            raise PydanticCustomError("form", text, {"param": asked[1], "other": asked[0]})
        return self

    @property
    def form(self) -> Form | None:
        return next(iter(self._forms()), None)

    def _forms(self) -> list[Form]:
        outputs = self.structured_outputs or StructuredOutputs()
        found = [
            self.response_format.form() if self.response_format else None,
            _json("structured_outputs", {"type": "object"}, False) if outputs.json_object else None,
            _by_schema("structured_outputs", outputs.json_),
            _by_regex("structured_outputs", outputs.regex),
            _by_choice("structured_outputs", outputs.choice),
            _by_grammar("structured_outputs", outputs.grammar),
            _by_schema("guided_json", self.guided_json),
            _by_regex("guided_regex", self.guided_regex),
            _by_choice("guided_choice", self.guided_choice),
            _by_grammar("guided_grammar", self.guided_grammar),
            _by_grammar("grammar", self.grammar),
            _by_schema("json_schema", self.json_schema),
        ]
        return [form for form in found if form is not None]


def _by_schema(param: str, schema: str | Mapping[str, Any] | None) -> Form | None:
    if isinstance(schema, str):
        try:
            schema = shallow(json.loads(schema, parse_constant=refuse_constant))
        except (ValueError, RecursionError, PydanticCustomError):
            schema = None
        if not isinstance(schema, dict):
            raise PydanticCustomError("schema", "{param} is no JSON Schema: give an object", {"param": param})
    return None if schema is None else _json(param, schema, strict=False)


def _by_regex(param: str, regex: str | None) -> Form | None:
    return Form(param, pb.Grammar(regex=regex)) if regex else None


def _by_choice(param: str, choice: list[str] | None) -> Form | None:
    if not choice:
        return None
    if "" in choice:
        raise PydanticCustomError("choice", "{param} has an empty text", {"param": param})
    rule = " | ".join(map(literal, choice))
    return Form(param, pb.Grammar(lark=f"start: {rule}"), rule)


def _by_grammar(param: str, grammar: str | None) -> Form | None:
    return Form(param, pb.Grammar(gbnf=grammar)) if grammar else None
