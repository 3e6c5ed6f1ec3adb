"""Odd requests of real programs: they are answered, or told clearly what is wrong with them."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from client_shapes import ANSWERED, CALL, CHAT, HEADERS, MESSAGES, READ, RESPONSES, TEXT, assistant, system, text, user
from running_api import RunningApi
from scripted_engine import ScriptedEngine

from services.api.model_folder import ModelFolder

OPEN_WEBUI = Path(__file__).parents[1] / "vectors/openwebui.jsonl"  # captured: a chat, and its three tasks


def ask(api: RunningApi, path: str, body: dict[str, Any]) -> str:
    """The answer's text, whole or streamed; it must be one."""
    answer = api.client.post(path, json={"model": "demo", **body}, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    assert '"error"' not in answer.text.replace('"error":null', ""), answer.text
    return answer.text


@pytest.mark.parametrize("name", ANSWERED)
def test_it_is_answered(api: RunningApi, engine: ScriptedEngine, name: str) -> None:
    path, body = ANSWERED[name]
    for stream in (False, True):
        assert "Hello" in ask(api, path, {**body, "stream": stream})


def test_the_published_schema_allows_them_all(api: RunningApi) -> None:
    document = api.client.get("/openapi.json").json()
    for path, body in ANSWERED.values():
        content = document["paths"][path.partition("?")[0]]["post"]["requestBody"]["content"]
        schema = content["application/json"]["schema"] | {"components": document["components"]}
        checker = jsonschema.Draft202012Validator(schema)
        checker.validate({"model": "demo", **body})
        assert not checker.is_valid({"model": "demo", **body, "stream": "yes"}), "a control"


def test_open_webui(api: RunningApi, engine: ScriptedEngine) -> None:
    bodies = [json.loads(line) for line in OPEN_WEBUI.read_text().splitlines()]
    for body in bodies:
        ask(api, CHAT, body)
    chat, *tasks = [call.start.low_priority for call in engine.calls]
    assert not chat
    assert tasks == [True] * 3


@pytest.mark.parametrize("name", ["cline", "home assistant", "claude code", "codex"])
def test_the_tool_s_result_reaches_the_model(
    api: RunningApi, engine: ScriptedEngine, folder: ModelFolder, name: str
) -> None:
    path, body = ANSWERED[name]
    ask(api, path, body)
    prompt = b"".join(map(folder.tokenizer.token_bytes, engine.calls[-1].start.ids)).decode()
    result = {"cline": "print(1)", "home assistant": "true", "claude code": "print(1)", "codex": "a.py"}[name]
    assert prompt.index("<tool_call>\n<function=") < prompt.rindex(result)


HOSTED: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "codex": (
        RESPONSES,
        [
            {"type": "function", "name": "exec_command", "parameters": {"type": "object"}},
            {"type": "namespace", "name": "multi_agent_v1", "tools": [{"type": "function", "name": "spawn"}]},
            {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}},
            {"type": "web_search", "external_web_access": False},
        ],
    ),
    "claude": (
        MESSAGES,
        [
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
            {"name": "exec_command", "input_schema": {"type": "object"}},
        ],
    ),
}


@pytest.mark.parametrize("name", HOSTED)
def test_tools_that_others_would_run_are_left_out(
    api: RunningApi, engine: ScriptedEngine, folder: ModelFolder, name: str
) -> None:
    """Codex sends such ones with every request, and does without."""
    path, tools = HOSTED[name]
    ask(api, path, {"input": "Hi", "messages": [user("Hi")], "max_tokens": 9, "tools": tools})
    prompt = b"".join(map(folder.tokenizer.token_bytes, engine.calls[-1].start.ids)).decode()
    assert "exec_command" in prompt
    assert not any(word in prompt for word in ("multi_agent", "spawn", "apply_patch", "web_search"))


def test_no_limit_is_the_server_s(api: RunningApi, engine: ScriptedEngine) -> None:
    for field in ("max_tokens", "max_completion_tokens"):
        ask(api, CHAT, {"messages": [user("Hi")], field: -1})
        limited = engine.calls[-1].start.max_tokens
        ask(api, CHAT, {"messages": [user("Hi")]})
        assert limited == engine.calls[-1].start.max_tokens


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a user without content": (CHAT, {"messages": [user(None)]}, "messages[0].content"),
    "a tool without content": (CHAT, {"messages": [user("Hi"), {"role": "tool"}]}, "messages[1].content"),
    "an unknown role": (CHAT, {"messages": [{"role": "function", "name": "f", "content": ""}]}, "messages[0].role"),
    "no messages": (CHAT, {"messages": []}, "messages"),
    "sound": (CHAT, {"messages": [user([{"type": "input_audio", "input_audio": {}}])]}, "messages[0].content"),
    "a file": (CHAT, {"messages": [user([{"type": "file", "file": {"file_id": "f"}}])]}, "messages[0].content"),
    "a part without text": (CHAT, {"messages": [user([{"type": "text"}])]}, "messages[0].content"),
    "a call without a name": (CHAT, {"messages": [assistant("", tool_calls=[{"function": {}}])]}, "tool_calls[0]"),
    "no tokens": (CHAT, {"messages": [user("Hi")], "max_tokens": 0}, "max_tokens"),
    "fewer than none": (CHAT, {"messages": [user("Hi")], "max_tokens": -2}, "max_tokens"),
    "a number as text": (CHAT, {"messages": [user("Hi")], "temperature": "0.7"}, "temperature"),
    "half a token": (CHAT, {"messages": [user("Hi")], "max_tokens": 10.5}, "max_tokens"),
    "old functions": (CHAT, {"messages": [user("Hi")], "functions": [READ["function"]]}, "functions"),
    "an unknown effort": (CHAT, {"messages": [user("Hi")], "reasoning_effort": "extreme"}, "reasoning_effort"),
    "a middle to fill": (TEXT, {"prompt": "def", "suffix": "return"}, "suffix"),
    "no limit for messages": (MESSAGES, {"messages": [user("Hi")]}, "max_tokens"),
    "a turn of nothing": (MESSAGES, {"messages": [user([])], "max_tokens": 9}, "messages[0].content"),
    "a user who calls": (
        MESSAGES,
        {"messages": [user([{"type": "tool_use", "id": "t", "name": "f", "input": {}}])], "max_tokens": 9},
        "messages[0].content",
    ),
    "a document": (MESSAGES, {"messages": [user([{"type": "document", "source": {}}])], "max_tokens": 9}, "content"),
    "a begun answer": (MESSAGES, {"messages": [user("Hi"), assistant("{")], "max_tokens": 9}, "messages"),
    "anthropic's own tools": (
        MESSAGES,
        {"messages": [user("Hi")], "max_tokens": 9, "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "tools[0]",
    ),
    "openai's own tools": (RESPONSES, {"input": "Hi", "tools": [{"type": "web_search"}]}, "tools[0]"),
    "an unknown item": (RESPONSES, {"input": [{"type": "computer_call"}]}, "input[0]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_named(api: RunningApi, engine: ScriptedEngine, name: str) -> None:
    path, body, field = REFUSED[name]
    for stream in (False, True):
        answer = api.client.post(path, json={"model": "demo", **body, "stream": stream}, headers=HEADERS)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert field in error["message"]
        assert path == MESSAGES or field in error["param"]
    assert not engine.calls


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/v1/audio/speech", "/v1/images/generations", "/api/tags", "/props"]
)
def test_what_is_not_here_says_so(api: RunningApi, path: str) -> None:
    answer = api.client.post(path, json={"model": "demo", "input": "Hi"})
    assert answer.status_code == 404
    assert path in answer.json()["error"]["message"]


def test_a_system_message_stays_where_it_is(api: RunningApi, engine: ScriptedEngine, folder: ModelFolder) -> None:
    ask(
        api,
        CHAT,
        {"messages": [user([text("one")]), assistant("two", tool_calls=[CALL]), system("three"), user("four")]},
    )
    prompt = b"".join(map(folder.tokenizer.token_bytes, engine.calls[-1].start.ids)).decode()
    places = [prompt.index(word) for word in ("one", "two", "three", "four")]
    assert places == sorted(places)
