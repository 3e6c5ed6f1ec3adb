"""Who thinks and how long: model ids, switches, budgets, and an end that is asked for while it thinks."""

import json
from typing import Any

import pytest
from running_api import RunningApi
from scripted_engine import ScriptedEngine

from services.api.model_folder import ModelFolder
from services.rpc import engine_pb2 as pb

USER = {"role": "user", "content": "2+2?"}


def thinking_of(api: RunningApi, engine: ScriptedEngine, **fields: Any) -> pb.Thinking | None:
    api.chat("2+2?", **fields)
    start = engine.calls[-1].start
    return start.thinking if start.HasField("thinking") else None


def test_ids_for_documents_only_where_pictures_are_seen(api: RunningApi, engine: ScriptedEngine) -> None:
    def ids() -> list[str]:
        return [model["id"] for model in api.client.get("/v1/models").json()["data"]]

    assert ids() == ["demo", "demo-think"]
    refused = api.client.post("/v1/chat/completions", json={"model": "demo-doc", "messages": [USER]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


def test_ids_of_a_model_that_sees(engine: ScriptedEngine, start_api: Any) -> None:
    engine.vision = True
    api = start_api()
    listed = api.client.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["demo", "demo-think", "demo-doc", "demo-think-doc"]
    assert all(model["architecture"]["input_modalities"] == ["text", "image"] for model in listed)
    assert thinking_of(api, engine, model="demo-doc") is None
    assert thinking_of(api, engine, model="demo-think-doc") is not None


def test_the_budget_reaches_the_engine(api: RunningApi, engine: ScriptedEngine, folder: ModelFolder) -> None:
    close, call = (folder.tokenizer.added[tag].id for tag in ("</think>", "<tool_call>"))
    found = thinking_of(api, engine, model="demo-think")
    assert found is not None
    assert list(found.end_ids) == [close]
    assert not found.HasField("budget_tokens")
    for name in ("thinking_budget", "thinking_token_budget", "thinking_budget_tokens", "reasoning_budget"):
        found = thinking_of(api, engine, reasoning_effort="high", **{name: 7})
        assert found is not None
        assert found.budget_tokens == 7
    found = thinking_of(api, engine, model="demo-think", thinking_budget=0)
    assert found is not None
    assert found.HasField("budget_tokens")
    tool = {"type": "function", "function": {"name": "f"}}
    found = thinking_of(api, engine, model="demo-think", tools=[tool])
    assert found is not None
    assert list(found.end_ids) == [close, call], "a call ends thinking too"
    assert thinking_of(api, engine, thinking_budget=7) is None, "it does not think"


@pytest.mark.parametrize(
    ("effort", "thinks", "low"),
    [
        ("none", False, False),
        ("low", True, True),
        ("minimal", True, True),
        ("medium", True, False),
        ("max", True, False),
    ],
)
def test_effort(
    api: RunningApi, engine: ScriptedEngine, folder: ModelFolder, effort: str, thinks: bool, low: bool
) -> None:
    assert (thinking_of(api, engine, reasoning_effort=effort) is not None) == thinks
    text = b"".join(map(folder.tokenizer.token_bytes, engine.calls[-1].start.ids)).decode()
    assert ("{reasoning effort: low}" in text) == low


@pytest.mark.parametrize("name", ["answer", "request"])
def test_stop_thinking_now(api: RunningApi, engine: ScriptedEngine, folder: ModelFolder, name: str) -> None:
    engine.script, engine.token_s = folder.tokenizer.encode("I wonder and wonder and wonder") * 50, 0.1
    body = {"model": "demo-think", "messages": [USER], "stream": True}
    with api.client.stream("POST", "/v1/chat/completions", json=body, headers={"X-Request-Id": "mine"}) as answer:
        lines = answer.iter_lines()
        first = json.loads(next(lines).removeprefix("data: "))
        control = {"id": first["id"] if name == "answer" else "mine", "action": "reasoning_end"}
        done = api.client.post("/v1/chat/completions/control", json=control)
        assert done.status_code == 200, done.text
        assert engine.calls[-1].stop_thinking.wait(20)
        engine.hurry.set()
        for _ in lines:
            pass
    late = api.client.post("/v1/chat/completions/control", json=control)
    assert late.status_code == 404, "it is over"


def test_control_of_nothing(api: RunningApi) -> None:
    unknown = api.client.post("/v1/chat/completions/control", json={"id": "chatcmpl-0", "action": "reasoning_end"})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "id")
    wrong = api.client.post("/v1/chat/completions/control", json={"id": "chatcmpl-0", "action": "explode"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "action")


def test_anthropic_s_effort(api: RunningApi, engine: ScriptedEngine, folder: ModelFolder) -> None:
    def text(**fields: Any) -> str:
        asked = {"model": "demo", "max_tokens": 9, "messages": [USER], **fields}
        assert api.client.post("/v1/messages", json=asked).status_code == 200
        return b"".join(map(folder.tokenizer.token_bytes, engine.calls[-1].start.ids)).decode()

    thinking, low = {"thinking": {"type": "enabled"}}, {"output_config": {"effort": "low"}}
    assert "effort: low" in text(**thinking, **low)
    assert "effort: low" not in text(**thinking)
    assert "effort: low" not in text(**low), "it does not think"
