"""The form of an answer: what each client's words for it become, and what is wrong with them."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grammars import accepts
from running_api import MODEL_DIR, RunningApi
from scripted_engine import Failure, ScriptedEngine

from services.api.config import ApiConfig
from services.rpc import engine_pb2 as pb

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ADA, WRONG = '{"name": "Ada", "age": 36}', '{"name": "Ada"}'
OPENAI = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}

# Fields of a request -> an answer that fits, one that does not.
WISHES: dict[str, tuple[dict[str, Any], str, str]] = {
    "json_object": ({"response_format": {"type": "json_object"}}, '{"a": [1, {"b": null}]}', "[1]"),
    "json_schema": ({"response_format": OPENAI}, ADA, WRONG),
    "json_schema beside": ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, ADA, WRONG),
    "json_object with a schema": ({"response_format": {"type": "json_object", "schema": SCHEMA}}, ADA, WRONG),
    "llama.cpp's": ({"json_schema": SCHEMA}, ADA, WRONG),
    "vLLM's": ({"structured_outputs": {"json": SCHEMA}}, ADA, WRONG),
    "vLLM's object": ({"structured_outputs": {"json_object": True}}, "{}", "[]"),
    "vLLM's regex": ({"structured_outputs": {"regex": "[ab]{2}"}}, "ba", "b"),
    "vLLM's choice": ({"structured_outputs": {"choice": ["yes", 'a "no"\n']}}, 'a "no"\n', "no"),
    "vLLM's grammar": ({"structured_outputs": {"grammar": 'root ::= "a" [0-9]'}}, "a7", "aa"),
    "guided_json": ({"guided_json": SCHEMA}, ADA, WRONG),
    "guided_json as text": ({"guided_json": '{"type": "integer"}'}, "-3", "3.5"),
    "guided_regex": ({"guided_regex": "é+"}, "éé", "e"),
    "guided_choice": ({"guided_choice": ["left", "right"]}, "left", "leftright"),
    "guided_grammar": ({"guided_grammar": 'root ::= "x"+'}, "xxx", "y"),
    "llama.cpp's grammar": ({"grammar": 'root ::= "x"'}, "x", "xx"),
}


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[RunningApi, ScriptedEngine]]:
    engine = ScriptedEngine()
    running = RunningApi(ApiConfig(model_dir=MODEL_DIR, engines=engine.address))
    yield running, engine
    running.close()
    engine.close()


def grammar_for(shared: tuple[RunningApi, ScriptedEngine], path: str, **fields: Any) -> pb.Grammar | None:
    """What the engine was asked for."""
    running, engine = shared
    body = {"prompt": "Hi"} if path.endswith("/completions") and "chat" not in path else {}
    if path == "/v1/responses":
        body = {"input": "Hi"}
    elif not body:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}  # type: ignore[dict-item]
    answer = running.client.post(path, json={"model": "demo", **body, **fields})
    assert answer.status_code == 200, answer.text
    start = engine.calls[-1].start
    return start.grammar if start.HasField("grammar") else None


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("wish", WISHES)
def test_every_word_for_it(shared: tuple[RunningApi, ScriptedEngine], wish: str, path: str) -> None:
    fields, right, wrong = WISHES[wish]
    grammar = grammar_for(shared, path, **fields)
    assert grammar is not None
    assert accepts(grammar, right)
    assert not accepts(grammar, wrong)


def test_a_free_answer_has_none(shared: tuple[RunningApi, ScriptedEngine]) -> None:
    names = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "json_schema")
    for fields in ({}, {"response_format": {"type": "text"}}, {"guided_choice": []}, dict.fromkeys(names)):
        assert grammar_for(shared, "/v1/chat/completions", **fields) is None


def test_the_other_flavours(shared: tuple[RunningApi, ScriptedEngine]) -> None:
    beside = {"type": "json_schema", "name": "person", "schema": SCHEMA}
    for path, fields in (
        ("/v1/responses", {"text": {"format": beside, "verbosity": "low"}}),
        ("/v1/messages", {"output_format": beside}),
        ("/v1/messages", {"output_config": {"format": beside, "effort": "high"}}),
    ):
        grammar = grammar_for(shared, path, **fields)
        assert grammar is not None
        assert accepts(grammar, ADA)
        assert not accepts(grammar, WRONG)
    assert grammar_for(shared, "/v1/responses", text={"format": {"type": "text"}}) is None


def test_a_response_repeats_what_was_asked(shared: tuple[RunningApi, ScriptedEngine]) -> None:
    asked = {"type": "json_schema", "name": "person", "schema": SCHEMA, "strict": True}
    body = {"model": "demo", "input": "Hi", "text": {"format": asked}}
    assert shared[0].client.post("/v1/responses", json=body).json()["text"]["format"] == asked


def test_white_space_is_bounded_and_order_is_kept(shared: tuple[RunningApi, ScriptedEngine]) -> None:
    grammar = grammar_for(shared, "/v1/chat/completions", response_format=OPENAI)
    assert grammar is not None
    assert accepts(grammar, '{\n  "name": "Ada",\n  "age": 36\n}')
    assert accepts(grammar, '{"name":"Ada","age":36}')
    assert not accepts(grammar, '{"age": 36, "name": "Ada"}')
    assert not accepts(grammar, '{\n\n"name": "Ada", "age": 36}')


def test_strict_knows_every_keyword_or_refuses(shared: tuple[RunningApi, ScriptedEngine]) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "integer", "not": {"const": 3}}}, "required": ["a"]}

    def asked(strict: bool) -> pb.Grammar:
        form = {"type": "json_schema", "json_schema": {"name": "x", "strict": strict, "schema": odd}}
        found = grammar_for(shared, "/v1/chat/completions", response_format=form)
        assert found is not None
        return found

    assert accepts(asked(False), '{"a": 3}')
    with pytest.raises(AssertionError, match="Unimplemented keys"):
        accepts(asked(True), '{"a": 3}')


def test_a_clients_own_options_are_not_taken(shared: tuple[RunningApi, ScriptedEngine]) -> None:
    schema = {"type": "integer", "x-guidance": {"lenient": True, "whitespace_pattern": "a"}, "not": {"const": 3}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    grammar = grammar_for(shared, "/v1/chat/completions", response_format=form)
    assert grammar is not None
    with pytest.raises(AssertionError, match="Unimplemented keys"):
        accepts(grammar, "3")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "format of another type": ({"response_format": {"type": "xml"}}, "response_format.type"),
    "format a string": ({"response_format": "json"}, "response_format"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    "schema a list": ({"response_format": {"type": "json_schema", "schema": []}}, "response_format.schema"),
    "guided_json no JSON": ({"guided_json": "{"}, "guided_json"),
    "guided_json too deep": ({"guided_json": '{"not":' * 900 + "{}" + "}" * 900}, "guided_json"),
    "guided_json with a constant": ({"guided_json": '{"const": NaN}'}, "guided_json"),
    "guided_json a number": ({"guided_json": "5"}, "guided_json"),
    "guided_choice of numbers": ({"guided_choice": [1]}, "guided_choice[0]"),
    "guided_choice of nothing": ({"guided_choice": [""]}, "guided_choice"),
    "too many choices": ({"guided_choice": ["a"] * 1001}, "guided_choice"),
    "regex a number": ({"guided_regex": 5}, "guided_regex"),
    "two forms": ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_fields_are_named(shared: tuple[RunningApi, ScriptedEngine], name: str) -> None:
    fields, param = BAD[name]
    running, engine = shared
    before = len(engine.calls)
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], **fields}
    answer = running.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert len(engine.calls) == before


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_is_a_400_with_the_field(
    shared: tuple[RunningApi, ScriptedEngine], stream: bool
) -> None:
    running, engine = shared
    chat = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "stream": stream, "max_tokens": 5}
    beside = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    for path, fields, param in (
        ("/v1/chat/completions", {**chat, "response_format": OPENAI}, "response_format"),
        ("/v1/completions", {"model": "demo", "prompt": "Hi", "guided_regex": "a"}, "guided_regex"),
        ("/v1/responses", {"model": "demo", "input": "Hi", "text": {"format": beside}}, "text.format"),
        ("/v1/messages", {**chat, "output_format": beside}, "output_format"),
    ):
        engine.failure = Failure(grpc.StatusCode.INVALID_ARGUMENT, "no text fits", "bad_grammar")
        answer = running.client.post(path, json=fields)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["message"] == f"{param}: no text fits"
        assert error.get("param", param) == param
        assert error.get("code", "invalid_schema") == "invalid_schema"


def test_any_text_can_be_a_choice(shared: tuple[RunningApi, ScriptedEngine]) -> None:
    letters = [*map(chr, range(0x180)), "\u2028", "\ufeff", "\uffff", "\U0010ffff"]
    texts = [*letters, *("a" + one + "b" for one in letters), "// # %json {} | <a> /b/ \\n $"]
    delete = grammar_for(shared, "/v1/chat/completions", guided_choice=["\x7f"])
    assert delete is not None
    assert accepts(delete, "\x7f")
    for at in range(0, len(texts), 200):
        some = texts[at : at + 200]
        grammar = grammar_for(shared, "/v1/chat/completions", guided_choice=some)
        assert grammar is not None
        assert [text for text in some[::5] if not accepts(grammar, text)] == []
        assert not accepts(grammar, "abab")
    schema = {"enum": ["\x7f", "b"]}
    grammar = grammar_for(shared, "/v1/chat/completions", response_format={"type": "json_object", "schema": schema})
    assert grammar is not None
    assert accepts(grammar, '"b"')
