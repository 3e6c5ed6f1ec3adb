"""Reasoning, tool calls and stop strings: the same result for every way to cut the text."""

import json
import random
from typing import Any

import pytest

from services.api.parsers.answer import AnswerParser, Content, Reasoning
from services.api.parsers.tool_calls import CallArguments, CallStart

TOOLS: dict[str, dict[str, Any]] = {
    "weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "metric": {"type": "boolean"}}},
    "write": {"properties": {"path": {"type": "string"}, "text": {"type": "string"}, "meta": {"type": "object"}}},
}


def call(name: str, *parameters: tuple[str, str], end: str = "</tool_call>\n") -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{body}</function>\n{end}"


def parse(
    pieces: list[str], thinking: bool = False, tools: Any = None, stops: tuple[str, ...] = (), cut: bool = False
) -> dict[str, Any]:
    parser = AnswerParser(thinking, tools, stops)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish(cut)
    result: dict[str, Any] = {"reasoning": "", "content": "", "calls": []}
    for delta in deltas:
        if isinstance(delta, Reasoning):
            assert delta.text
            result["reasoning"] += delta.text
        elif isinstance(delta, Content):
            assert delta.text
            result["content"] += delta.text
        elif isinstance(delta, CallStart):
            assert delta.index == len(result["calls"])
            assert delta.id.startswith("call_")
            result["calls"].append([delta.name, ""])
        else:
            assert isinstance(delta, CallArguments)
            assert delta.index == len(result["calls"]) - 1
            result["calls"][-1][1] += delta.json
    return result


# text, thinking, tools, stops, cut -> reasoning, content, calls
CASES: dict[str, tuple[str, bool, Any, tuple[str, ...], bool, tuple[str, str, list[Any]]]] = {
    "plain": ("Hello there.", False, None, (), False, ("", "Hello there.", [])),
    "plain keeps its spaces": (" a\n b \n", False, None, (), False, ("", " a\n b \n", [])),
    "spaces only": (" \n", False, None, (), False, ("", " \n", [])),
    "thinking": ("Let me see.\n</think>\nFour.", True, None, (), False, ("Let me see.", "Four.", [])),
    "thinking with space around": ("\n  a\n\nb \n</think>\n\n c\n", True, None, (), False, ("a\n\nb", "c\n", [])),
    "empty thinking": ("\n</think>\n\nFour.", True, None, (), False, ("", "Four.", [])),
    "never closed": ("I wonder </thin", True, None, (), True, ("I wonder </thin", "", [])),
    "never closed, trailing space": ("I wonder\n", True, None, (), True, ("I wonder", "", [])),
    "no answer": ("I wonder</think>\n", True, None, (), False, ("I wonder", "", [])),
    "half of the closing tag inside": ("a </think b</think>c", True, None, (), False, ("a </think b", "c", [])),
    "opens itself": ("\n<think>hm</think>ok", False, None, (), False, ("hm", "ok", [])),
    "looks like opening": ("<thinker>", False, None, (), False, ("", "<thinker>", [])),
    "second close is text": ("a</think>b</think>c", True, None, (), False, ("a", "b</think>c", [])),
    "no tools, no calls": (call("weather"), False, None, (), False, ("", call("weather"), [])),
    "call": (
        "\n" + call("weather", ("city", "Oslo"), ("days", "3"), ("metric", "True")),
        False, TOOLS, (), False, ("", "", [["weather", {"city": "Oslo", "days": 3, "metric": True}]]),
    ),
    "text, call": (
        "I look.\n" + call("weather", ("city", "Oslo")), False, TOOLS, (), False,
        ("", "I look.", [["weather", {"city": "Oslo"}]]),
    ),
    "two calls": (
        call("weather", ("city", "Oslo")) + call("weather", ("city", "Rome")), False, TOOLS, (), False,
        ("", "", [["weather", {"city": "Oslo"}], ["weather", {"city": "Rome"}]]),
    ),
    "call, text": (call("weather") + "Done.", False, TOOLS, (), False, ("", "\nDone.", [["weather", {}]])),
    "thinking ends in a call": (
        "I need it.\n" + call("weather", ("city", "Oslo")), True, TOOLS, (), False,
        ("I need it.", "", [["weather", {"city": "Oslo"}]]),
    ),
    "unicode, newlines, quotes": (
        call("write", ("text", 'line "1"\n\n\tżółć \\ 日本\n'), ("path", "ä b")), False, TOOLS, (), False,
        ("", "", [["write", {"text": 'line "1"\n\n\tżółć \\ 日本\n', "path": "ä b"}]]),
    ),
    "nested JSON": (
        call("write", ("meta", '{"a": [1, {"b": "</parameter>"}], "c": null}')), False, TOOLS, (), False,
        ("", "", [["write", {"meta": {"a": [1, {"b": "</parameter>"}], "c": None}}]]),
    ),
    "an argument quotes the format": (
        call("write", ("text", "use <tool_call> and\n</parameter> and <function=weather> </function> x")),
        False, TOOLS, (), False,
        ("", "", [["write", {"text": "use <tool_call> and\n</parameter> and <function=weather> </function> x"}]]),
    ),
    "empty value": (call("write", ("text", "")), False, TOOLS, (), False, ("", "", [["write", {"text": ""}]])),
    "wrong type becomes a string": (
        call("weather", ("days", "many")), False, TOOLS, (), False, ("", "", [["weather", {"days": "many"}]]),
    ),
    "unknown tool, unknown parameter": (
        call("fly", ("where", "up")), False, TOOLS, (), False, ("", "", [["fly", {"where": "up"}]]),
    ),
    "parameter not closed": (
        "<tool_call>\n<function=write>\n<parameter=text>\nabc\n</function>\n</tool_call>", False, TOOLS, (), False,
        ("", "", [["write", {"text": "abc"}]]),
    ),
    "function not closed": (
        "<tool_call>\n<function=write>\n<parameter=text>\nabc\n</parameter>\n</tool_call>", False, TOOLS, (), False,
        ("", "", [["write", {"text": "abc"}]]),
    ),
    "ended by the model inside a value": (
        "<tool_call>\n<function=write>\n<parameter=text>\nabc\n</parameter>\n", False, TOOLS, (), False,
        ("", "", [["write", {"text": "abc"}]]),
    ),
    "ended by the model behind the name": (
        "<tool_call>\n<function=write>\n", False, TOOLS, (), False, ("", "", [["write", {}]]),
    ),
    "nothing but the tag": ("<tool_call>\n", False, TOOLS, (), False, ("", "<tool_call>\n", [])),
    "cut off inside the name": ("ok\n<tool_call>\n<function=wri", False, TOOLS, (), True, ("", "ok", [])),
    "JSON form": (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>', False, TOOLS, (), False,
        ("", "", [["weather", {"city": "Oslo"}]]),
    ),
    "unknown form": (
        "<tool_call>weather Oslo</tool_call> ok", False, TOOLS, (), False,
        ("", "<tool_call>weather Oslo</tool_call> ok", []),
    ),
    "stop": ("one two three", False, None, ("two",), False, ("", "one ", [])),
    "stop, first to be complete": ("xxabcd", False, None, ("abcd", "bc"), False, ("", "xxa", [])),
    "stop, almost": ("END of", False, None, ("ENDE",), False, ("", "END of", [])),
    "stop held at the end": ("the EN", False, None, ("END",), False, ("", "the EN", [])),
    "stop not in thinking": ("a two b</think>one two three", True, None, ("two",), False, ("a two b", "one ", [])),
    "stop not in an argument": (
        call("weather", ("city", "END")) + "x END y", False, TOOLS, ("END",), False,
        ("", "\nx ", [["weather", {"city": "END"}]]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_cut_gives_the_same(name: str) -> None:
    text, thinking, tools, stops, cut, (reasoning, content, calls) = CASES[name]
    whole = parse([text], thinking, tools, stops, cut)
    assert (whole["reasoning"], whole["content"]) == (reasoning, content)
    assert [[call_name, json.loads(arguments)] for call_name, arguments in whole["calls"]] == calls
    assert parse(list(text), thinking, tools, stops, cut) == whole
    for at in range(len(text) + 1):
        assert parse([text[:at], text[at:]], thinking, tools, stops, cut) == whole, at
    rng = random.Random(7)
    for _ in range(50):
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(1, 6)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parse(pieces, thinking, tools, stops, cut) == whole, pieces


FRAGMENTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=write>", "<function=weather>", "</function>",
    "<parameter=text>", "<parameter=meta>", "</parameter>", "\n", " ", "a", '"', "{", "<", "</", "STOP", "ST", "é",
]  # fmt: skip


def test_random_garbage_gives_the_same_for_every_cut() -> None:
    rng = random.Random(11)
    for _ in range(1500):
        text = "".join(rng.choice(FRAGMENTS) for _ in range(rng.randrange(1, 16)))
        arguments = (rng.random() < 0.5, rng.choice([None, TOOLS]), rng.choice([(), ("STOP",)]), rng.random() < 0.5)
        whole = parse([text], *arguments)
        assert parse(list(text), *arguments) == whole, (text, arguments)
        at = rng.randrange(len(text) + 1)
        assert parse([text[:at], text[at:]], *arguments) == whole, (text, arguments, at)
        if arguments[2]:
            assert "STOP" not in whole["content"]


def test_the_cut_check_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: parsers that hold nothing back give another result when the text comes letter by letter."""
    text, thinking, tools, stops, cut, _ = CASES["thinking ends in a call"]
    whole = parse([text], thinking, tools, stops, cut)
    for module in ("reasoning", "tool_calls", "stops"):
        monkeypatch.setattr(f"services.api.parsers.{module}.held_length", lambda text, markers: 0)
    assert parse([text], thinking, tools, stops, cut) == whole
    assert parse(list(text), thinking, tools, stops, cut) != whole


def test_an_argument_cut_by_the_token_limit_stays_incomplete() -> None:
    text = "<tool_call>\n<function=write>\n<parameter=text>\nrm -rf /tm"
    arguments = parse(list(text), tools=TOOLS, cut=True)["calls"][0][1]
    assert arguments == '{"text":"rm -rf /tm'
    with pytest.raises(json.JSONDecodeError):
        json.loads(arguments)


def test_a_string_argument_streams_while_it_is_written() -> None:
    parser = AnswerParser(False, TOOLS, ())
    parser.feed("<tool_call>\n<function=write>\n<parameter=text>\n")
    assert [d.json for d in parser.feed("first line") if isinstance(d, CallArguments)] == ["first line"]


def test_types_come_from_the_schema() -> None:
    from services.api.parsers.values import to_json

    for text, schema, expected in [
        ("5", {"type": "integer"}, "5"),
        ("5.0", {"type": "integer"}, "5"),
        ("007", {"type": "integer"}, '"007"'),
        ("-1.50e3", {"type": "number"}, "-1.50e3"),
        ("NaN", {"type": "number"}, '"NaN"'),
        ("FALSE", {"type": "boolean"}, "false"),
        ("yes", {"type": "boolean"}, '"yes"'),
        ("None", {"type": ["string", "null"]}, "null"),
        ("x", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, '"x"'),
        ("null", {"anyOf": [{"type": "object"}, {"type": "null"}]}, "null"),
        ("{broken", {"anyOf": [{"type": "object"}, {"type": "null"}]}, '"{broken"'),
        ("[1, 2]", {"type": "array"}, "[1, 2]"),
        ("[1, 2]", {"type": "object"}, '"[1, 2]"'),
        ('{"a": NaN}', {"type": "object"}, '"{\\"a\\": NaN}"'),
        ("3", {"enum": [1, 2, 3]}, "3"),
        ("3", {"type": {"odd": 1}, "anyOf": 7}, '"3"'),
        ('["\\ud800"]', {"type": "array"}, '["\\ud800"]'),
    ]:
        assert to_json(text, schema) == expected, (text, schema)
        to_json(text, schema).encode()
