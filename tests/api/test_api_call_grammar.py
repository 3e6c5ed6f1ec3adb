"""Grammars of tool calls: what a choice of tools lets the model say, and that the parser reads it as it was meant."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from grammars import accepts, call

from services.api.call_grammar import answer_form, tool_choice
from services.api.errors import InvalidRequest
from services.api.messages import Function, Tool
from services.api.parsers.answer import AnswerParser, Content
from services.api.parsers.tool_calls import CallArguments, CallStart
from services.api.structured import Form, Structured
from services.rpc import engine_pb2 as pb

ADDED = ("<tool_call>", "</tool_call>")
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "exact": {"type": "boolean"},
        "where": {"$ref": "#/$defs/Place"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "count": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
    "required": ["city", "days"],
    "$defs": {"Place": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]}},
}
CLOSED = {"type": "object", "properties": {}, "additionalProperties": False}


def tool(name: str, parameters: Mapping[str, Any] | None = None, strict: bool | None = None) -> Tool:
    return Tool(function=Function(name=name, parameters=parameters, strict=strict))  # type: ignore[arg-type]


WEATHER, TIME, ANY = tool("weather", PARAMETERS), tool("time", CLOSED), tool('any"thing\\')
TOOLS = [WEATHER, TIME, ANY]
JSON = Structured(response_format={"type": "json_object"}).form  # type: ignore[arg-type]


def grammar(choice: Any, tools: list[Tool] = TOOLS, parallel: bool | None = None, form: Form | None = None) -> Any:
    found = answer_form(tools, tool_choice(choice, parallel), form, ADDED)
    return None if found is None else found.grammar


def test_a_call_is_required() -> None:
    wanted = grammar("required")
    calls = [
        call("weather", city="Paris", days=3),
        call("weather", city="", unit="F", days=3, exact="True", where={"lat": -1.5}, note="None", count="None"),
        call("weather", city="two\nlines, <b>, </parameter> and }", days=9, exact="false", count=4),
        call("time"),
        call('any"thing\\', x="5", other="y"),
    ]
    for one in calls:
        assert accepts(wanted, one), one
        assert accepts(wanted, f"\n{one}\n{calls[0]}\n")
    for wrong in (
        "The weather is fine.",
        "",
        call("whether", city="Paris", days=3),
        call("weather", city="Paris"),
        call("weather", city="Paris", days="three"),
        call("weather", city="Paris", days=10),
        call("weather", city="Paris", unit="K", days=3),
        call("weather", city="Paris", days=3, exact="maybe"),
        call("weather", city="Paris", days=3, where={"lat": "x"}),
        call("weather", days=3, city="Paris"),
        call("weather", city="Paris", days=3, more="x"),
        call("time", zone="UTC"),
        call("time").replace("</function>\n", ""),
        f"Let me see. {call('time')}",
        f"{call('time')} That was it.",
    ):
        assert not accepts(wanted, wrong), wrong


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "function": {"name": "time"}},
        {"type": "function", "name": "time"},
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "time"}}]},
        },
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "time"}]},
    ],
)
def test_one_function_is_named(choice: dict[str, Any]) -> None:
    wanted = grammar(choice)
    assert accepts(wanted, call("time"))
    assert not accepts(wanted, call("weather", city="Paris", days=3))


def test_only_one_call() -> None:
    two = f"{call('time')}\n{call('time')}"
    assert accepts(grammar("required", parallel=True), two)
    assert not accepts(grammar("required", parallel=False), two)
    assert accepts(grammar("required", parallel=False), call("time"))
    free = grammar("auto", parallel=False)
    assert accepts(free, f"Let me see. {call('time')}")
    assert accepts(free, "It is noon.")
    assert not accepts(free, f"Let me see. {two}")


def test_the_models_own_choice_is_free_unless_a_tool_is_strict() -> None:
    for choice in (None, "auto", "none"):
        assert grammar(choice) is None
    assert grammar("auto", tools=[]) is None
    strict = grammar("auto", tools=[tool("weather", PARAMETERS, strict=True), TIME])
    good = call("weather", city="Paris", days=3)
    for text in ("It is noon.", good, f"Let me see.\n{good}\n{call('time')}\nDone."):
        assert accepts(strict, text), text
    for text in (call("weather", city="Paris", days="x"), call("whether")):
        assert not accepts(strict, text)


def test_some_tools_are_allowed() -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "time"}]}
    wanted = grammar(choice)
    assert accepts(wanted, "It is noon.")
    assert accepts(wanted, call("time"))
    assert not accepts(wanted, call("weather", city="Paris", days=3))


def test_a_form_and_tools() -> None:
    wanted = grammar("auto", form=JSON)
    assert accepts(wanted, '{"a": 1}')
    assert accepts(wanted, call("time"))
    assert not accepts(wanted, "It is noon.")
    assert not accepts(grammar("required", form=JSON), '{"a": 1}')
    other = Structured(guided_regex="a+").form
    assert grammar("auto", form=other) == pb.Grammar(regex="a+"), "cannot be put beside calls"


@pytest.mark.parametrize(
    ("choice", "tools", "words"),
    [
        ("required", [], "there are none"),
        ({"type": "function", "function": {"name": "f"}}, TOOLS, "names f, which tools does not have"),
        ({"type": "function"}, TOOLS, "has no name"),
        ({"type": "web_search"}, TOOLS, "must be auto"),
        ({"type": "allowed_tools", "tools": "all"}, TOOLS, "must be auto"),
    ],
)
def test_what_is_wrong_with_a_choice(choice: Any, tools: list[Tool], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        grammar(choice, tools=tools)
    assert caught.value.param == "tool_choice"


def test_where_the_tags_are_no_tokens_they_are_text() -> None:
    found = answer_form([TIME], tool_choice("required", None), None, added=())
    assert found is not None
    assert '"<tool_call>"' in found.grammar.lark


def test_the_parser_reads_what_the_grammar_allows() -> None:
    """Types as the schema has them, also behind a reference."""
    text = call("weather", city="7", days=7, exact="True", where={"lat": 2}, note="null", count="None")
    assert accepts(grammar("required"), text)
    parser = AnswerParser(False, {"weather": PARAMETERS}, ())
    deltas = [*parser.feed(text), *parser.finish(cut=False)]
    assert not [delta for delta in deltas if isinstance(delta, Content)]
    assert [delta.name for delta in deltas if isinstance(delta, CallStart)] == ["weather"]
    arguments = json.loads("".join(delta.json for delta in deltas if isinstance(delta, CallArguments)))
    expected = {"city": "7", "days": 7, "exact": True, "where": {"lat": 2}, "note": None, "count": None}
    assert arguments == expected


def test_keys_that_the_form_cannot_hold_are_left_out() -> None:
    odd = {"type": "object", "properties": {"a>b": {"type": "string"}, " c": {}, "d e": {"type": "integer"}}}
    wanted = grammar("required", tools=[tool("f", odd)])
    assert accepts(wanted, "<tool_call>\n<function=f>\n<parameter=d e>\n1\n</parameter>\n</function>\n</tool_call>")
    assert not accepts(wanted, call("f", **{"a>b": "x"}))


def test_a_hundred_tools_are_one_grammar() -> None:
    many = [tool(f"tool_{number}", PARAMETERS) for number in range(100)]
    wanted = grammar("required", tools=many)
    assert len(wanted.lark) < 60_000, "values are written once"
    assert accepts(wanted, call("tool_99", city="Paris", days=3))
