"""Grammars for answers that call tools, in the model's own form (parsers/tool_calls.py shows it). Owns which tools a
request wants called, how many, and how arguments are written; an answer's own form comes from structured.py.

Keys come in the order of the tool's schema, as in JSON by a schema. A string is whatever text its end tag follows; any
other argument is JSON by its schema, or Python's words for true, false and null, as templates write them.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.api.errors import InvalidRequest
from services.api.messages import Function, Tool
from services.api.parsers.reasoning import CALL
from services.api.parsers.tool_calls import END_CALL, END_FUNCTION, END_PARAMETER, FUNCTION, PARAMETER
from services.api.parsers.values import resolved, types_of
from services.api.structured import Form, json_rule, literal
from services.rpc import engine_pb2 as pb

# NL is what models write before and between calls; TEXT is any text, which holds no added token.
COMMON = rf"""
NL: /\n{{1,2}}/
TEXT: /(?s:.+)/
KEY: /[^\s<>]+/
string[suffix="\n{END_PARAMETER}\n"]: /(?s:.*)/
"""
WRITABLE_KEY = re.compile(r"\S([^>\n]*\S)?")  # between the tags' brackets
PYTHON_WORDS = {"boolean": ("True", "False"), "null": ("None",)}
DEEPEST = 8  # branches of a schema that are looked into


@dataclass(frozen=True)
class ToolChoice:
    """`names`: only these tools may be called; None: all."""

    required: bool
    names: frozenset[str] | None = None
    many: bool = True


def tool_choice(value: str | Mapping[str, Any] | None, parallel: bool | None) -> ToolChoice:
    """OpenAI's field, of chats or responses. Raises InvalidRequest."""
    many = parallel is not False
    if value in (None, "auto", "none", "required"):
        return ToolChoice(value == "required", None, many)
    if isinstance(value, Mapping) and value.get("type") == "function":
        return ToolChoice(True, frozenset([_name(value)]), many)
    if isinstance(value, Mapping) and value.get("type") == "allowed_tools":
        allowed = value.get("allowed_tools", value)
        tools = allowed.get("tools") if isinstance(allowed, Mapping) else None
        if isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools):
            return ToolChoice(allowed.get("mode") == "required", frozenset(map(_name, tools)), many)
    raise InvalidRequest("tool_choice must be auto, none, required, or an object that names functions", "tool_choice")


def answer_form(tools: Sequence[Tool], choice: ToolChoice, form: Form | None, added: Iterable[str]) -> Form | None:
    """What the whole answer must be; None: anything. `added` are the tokenizer's added tokens.

    Raises InvalidRequest.
    """
    usable = [tool.function for tool in tools if choice.names is None or tool.function.name in choice.names]
    missing = (choice.names or frozenset()) - {function.name for function in usable}
    if missing:
        raise InvalidRequest(
            f"tool_choice names {', '.join(sorted(missing))}, which tools does not have", "tool_choice"
        )
    if choice.required and not usable:
        raise InvalidRequest("tool_choice needs tools: there are none", "tool_choice")
    strict = any(function.strict for function in usable)
    if not choice.required and (not usable or (form is None and not strict and choice.many and choice.names is None)):
        return form
    if not choice.required and form is not None and form.rule is None:
        return form  # cannot be put beside calls
    calls = "call (NL call)*" if choice.many else "call"
    if choice.required:
        start = f"NL? {calls} NL?"
    elif form is not None:
        start = f"NL? ({form.rule} | {calls}) NL?"
    else:
        start = "TEXT? (call TEXT?)*" if choice.many else "TEXT? call?"
    begin, end = (tag if tag in set(added) else literal(tag) for tag in (CALL, END_CALL))
    rules = [f"start: {start}", f'call: {begin} "\\n{FUNCTION}" function "{END_FUNCTION}\\n" {end}']
    rules.append("function: " + " | ".join(f"function{number}" for number in range(len(usable))))
    values: dict[str, str] = {}
    for number, function in enumerate(usable):
        rules += _rules(number, function, choice.required or bool(function.strict), values)
    rules += [f"{name}: {rule}" for rule, name in values.items()]
    return Form("tools" if form is None else form.param, pb.Grammar(lark="\n".join(rules) + COMMON))


def _rules(number: int, function: Function, typed: bool, values: dict[str, str]) -> list[str]:
    """One tool: its own rule, and one for each of its arguments. Names of rules for their values are added to `values`,
    so that equal ones are written once."""
    schema = function.parameters or {}
    properties = schema.get("properties")
    head = literal(f"{function.name}>\n")
    if not isinstance(properties, Mapping) or not properties:
        closed = isinstance(properties, Mapping) and schema.get("additionalProperties", True) is False
        any_arguments = "" if closed else f' ("{PARAMETER}" KEY ">\\n" string)*'
        return [f"function{number}: {head}{any_arguments}"]
    required = wanted if isinstance(wanted := schema.get("required"), list) else []
    parts, rules = [], []
    for place, (key, argument) in enumerate(properties.items()):
        if not WRITABLE_KEY.fullmatch(key):
            continue
        name = f"argument{number}x{place}"
        parts.append(name if key in required else f"{name}?")
        value = _value(argument, schema, bool(function.strict)) if typed else None
        end = "string"
        if value is not None:
            end = f'{values.setdefault(value, f"value{len(values)}")} "\\n{END_PARAMETER}\\n"'
        rules.append(f"{name}: {literal(f'{PARAMETER}{key}>' + chr(10))} {end}")
    return [f"function{number}: {' '.join([head, *parts])}", *rules]


def _value(schema: Any, root: Mapping[str, Any], strict: bool, depth: int = 0) -> str | None:
    """How an argument is written, as the right side of a rule; None: as any text."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth == DEEPEST:
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        return " | ".join(literal(value if isinstance(value, str) else json.dumps(value)) for value in values)
    for several in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(several), list) and branches and "type" not in schema:
            found = [_value(branch, root, strict, depth + 1) for branch in branches]
            return None if None in found else " | ".join(filter(None, found))
    types = types_of(schema)
    if not types or "string" in types:
        return None
    words = [literal(word) for kind in sorted(types & set(PYTHON_WORDS)) for word in PYTHON_WORDS[kind]]
    refers = "$ref" in json.dumps(schema)
    shared = {key: root[key] for key in ("$defs", "definitions") if refers and key in root}
    return " | ".join([json_rule({**schema, **shared}, strict), *words])


def _name(value: Mapping[str, Any]) -> str:
    """Of a function, as chats write it or as responses do."""
    function = value.get("function")
    name = function.get("name") if isinstance(function, Mapping) else value.get("name")
    if not isinstance(name, str):
        raise InvalidRequest("tool_choice: a function has no name", "tool_choice")
    return name
