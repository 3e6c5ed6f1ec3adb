"""Anthropic's API, with its own client: answers, events, thinking, tools, counts, failures."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic
from running_api import RunningApi
from scripted_engine import Failure, ScriptedEngine

from services.api.model_folder import ModelFolder

TOOL: Any = {
    "name": "weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}
CALL = (
    "Let me see.\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>\n"
)
HI: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def client(api: RunningApi) -> Iterator[Anthropic]:
    with Anthropic(base_url=api.url, api_key="none", max_retries=0) as found:
        yield found


def prompt_of(engine: ScriptedEngine, folder: ModelFolder) -> str:
    return b"".join(map(folder.tokenizer.token_bytes, engine.calls[-1].start.ids)).decode()


def test_an_answer(client: Anthropic, engine: ScriptedEngine, folder: ModelFolder) -> None:
    reply = client.messages.create(
        model="demo", max_tokens=50, messages=HI, system="Be brief.", extra_body={"top_k": 5, "top_p": 0.5}
    )
    assert [(block.type, getattr(block, "text", "")) for block in reply.content] == [("text", "Hello there, friend.")]
    assert (reply.role, reply.model, reply.stop_reason, reply.stop_sequence) == ("assistant", "demo", "end_turn", None)
    start = engine.calls[-1].start
    assert reply.usage.input_tokens == len(start.ids)
    assert reply.usage.output_tokens == len(engine.script) + 1
    assert (start.max_tokens, start.sampling.top_k, start.sampling.top_p) == (50, 5, 0.5)
    assert prompt_of(engine, folder).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi")


def test_a_stream(client: Anthropic, engine: ScriptedEngine) -> None:
    with client.messages.stream(model="demo", max_tokens=50, messages=HI) as stream:
        kinds = [event.type for event in stream if event.type not in ("text", "content_block_delta")]
        final = stream.get_final_message()
    assert kinds == ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
    assert final.content[0].type == "text"
    assert final.content[0].text == "Hello there, friend."
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == len(engine.script) + 1
    assert final.usage.input_tokens == len(engine.calls[-1].start.ids)


def test_events_have_names_and_no_done(api: RunningApi) -> None:
    body = {"model": "demo", "max_tokens": 5, "messages": HI, "stream": True}
    raw = api.client.post("/v1/messages", json=body).text
    for event in raw.strip().split("\n\n"):
        name, data = event.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert "[DONE]" not in raw


def test_what_was_restored_is_counted_apart(client: Anthropic, engine: ScriptedEngine) -> None:
    dialog: Any = [{"role": "user", "content": "Tell me something long about foxes and rivers and hills, please."}]
    first = client.messages.create(model="demo", max_tokens=50, messages=dialog)
    dialog += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "More"}]
    second = client.messages.create(model="demo", max_tokens=50, messages=dialog)
    assert second.usage.cache_read_input_tokens == engine.calls[-1].restored_tokens > 0
    assert second.usage.input_tokens == len(engine.calls[-1].executed)


@pytest.mark.parametrize("streamed", [False, True])
def test_thinking(client: Anthropic, engine: ScriptedEngine, folder: ModelFolder, streamed: bool) -> None:
    engine.script = folder.tokenizer.encode("I add.\n</think>\nFour.")
    asked: Any = {
        "model": "demo",
        "max_tokens": 50,
        "messages": HI,
        "thinking": {"type": "enabled", "budget_tokens": 9},
    }
    if streamed:
        with client.messages.stream(**asked) as stream:
            reply: Any = stream.get_final_message()
    else:
        reply = client.messages.create(**asked)
    thought, text = reply.content
    assert (thought.type, thought.thinking, bool(thought.signature)) == ("thinking", "I add.", True)
    assert (text.type, text.text) == ("text", "Four.")
    assert engine.calls[-1].start.thinking.budget_tokens == 9
    again = client.messages.create(
        model="demo-think",
        max_tokens=50,
        messages=[*HI, {"role": "assistant", "content": reply.content}, *HI],
        thinking={"type": "disabled"},
    )
    assert not engine.calls[-1].start.HasField("thinking")
    assert again.stop_reason == "end_turn"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_whole_tool_dialog(client: Anthropic, engine: ScriptedEngine, folder: ModelFolder, streamed: bool) -> None:
    engine.script = folder.tokenizer.encode(CALL)
    asked: Any = {"model": "demo", "max_tokens": 99, "messages": HI, "tools": [TOOL]}
    if streamed:
        with client.messages.stream(**asked) as stream:
            reply: Any = stream.get_final_message()
    else:
        reply = client.messages.create(**asked)
    text, call = reply.content
    assert (text.text, call.type, call.name, call.input) == (
        "Let me see.", "tool_use", "weather", {"city": "Oslo", "days": 3},
    )  # fmt: skip
    assert reply.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
    answered: Any = {"role": "user", "content": [result, {"type": "text", "text": "So?"}]}
    client.messages.create(**{**asked, "messages": [*HI, {"role": "assistant", "content": reply.content}, answered]})
    prompt = prompt_of(engine, folder)
    assert "<parameter=city>\nOslo\n</parameter>" in prompt
    assert prompt.index("<tool_response>\nrain\n</tool_response>") < prompt.index("So?")
    client.messages.create(**asked, tool_choice={"type": "none"})
    assert "weather" not in prompt_of(engine, folder)


def test_half_a_call_is_not_told_whole(client: Anthropic, engine: ScriptedEngine, folder: ModelFolder) -> None:
    engine.script = folder.tokenizer.encode(CALL)
    reply = client.messages.create(model="demo", max_tokens=len(engine.script) - 20, messages=HI, tools=[TOOL])
    assert [block.type for block in reply.content] == ["text"]
    assert reply.stop_reason == "max_tokens"


def test_stop_sequences(client: Anthropic) -> None:
    reply = client.messages.create(model="demo", max_tokens=50, messages=HI, stop_sequences=["zzz", " there"])
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", " there")
    assert getattr(reply.content[0], "text", "") == "Hello"
    with client.messages.stream(model="demo", max_tokens=50, messages=HI, stop_sequences=[" there"]) as stream:
        assert stream.get_final_message().stop_sequence == " there"


def test_counting(client: Anthropic, engine: ScriptedEngine) -> None:
    counted = client.messages.count_tokens(model="demo", messages=HI, system="Be brief.", tools=[TOOL]).input_tokens
    client.messages.create(model="demo", max_tokens=5, messages=HI, system="Be brief.", tools=[TOOL])
    assert counted == len(engine.calls[-1].start.ids)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no limit": ({"max_tokens": None}, "max_tokens"),
    "no message": ({"messages": []}, "messages"),
    "a picture": ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content"),
    "an answer begun": ({"messages": [*HI, {"role": "assistant", "content": "A"}]}, "messages"),
    "a forced tool without a name": ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    "a server's tool": ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]."),
    "temperature": ({"temperature": "hot"}, "temperature"),
    "stops": ({"stop_sequences": [""]}, "stop_sequences"),
    "budget": ({"thinking": {"type": "enabled", "budget_tokens": "x"}}, "thinking.budget_tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_named_in_anthropic_s_shape(api: RunningApi, engine: ScriptedEngine, name: str) -> None:
    fields, words = REFUSED[name]
    answer = api.client.post("/v1/messages", json={"model": "demo", "max_tokens": 5, "messages": HI, **fields})
    assert answer.status_code == 400
    found = answer.json()
    assert (found["type"], found["error"]["type"]) == ("error", "invalid_request_error")
    assert words in found["error"]["message"]
    assert not engine.calls


def test_failures(client: Anthropic, engine: ScriptedEngine) -> None:
    import grpc

    with pytest.raises(anthropic.NotFoundError, match="no-model"):
        client.messages.create(model="no-model", max_tokens=5, messages=HI)
    engine.failure = Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, code="queue_full")
    with pytest.raises(anthropic.RateLimitError):
        client.messages.create(model="demo", max_tokens=5, messages=HI)
    engine.failure = Failure(grpc.StatusCode.INTERNAL, code="step_failed", after_tokens=2)
    with (
        pytest.raises(anthropic.APIStatusError, match="as the test wants it"),
        client.messages.stream(model="demo", max_tokens=50, messages=HI) as stream,
    ):
        stream.until_done()


def test_a_client_that_leaves_frees_the_sequence(client: Anthropic, engine: ScriptedEngine) -> None:
    engine.token_s, engine.script = 0.1, engine.script * 50
    with client.messages.stream(model="demo", max_tokens=1000, messages=HI) as stream:
        next(iter(stream))
    assert engine.calls[-1].cancelled.wait(5)


def test_the_key_in_anthropic_s_header(start_api: Callable[..., RunningApi]) -> None:
    api = start_api(api_key="secret")
    with Anthropic(base_url=api.url, api_key="secret", max_retries=0) as client:
        client.messages.create(model="demo", max_tokens=5, messages=HI)
    wrong = Anthropic(base_url=api.url, api_key="guess", max_retries=0)
    with wrong as client, pytest.raises(anthropic.AuthenticationError):
        client.messages.create(model="demo", max_tokens=5, messages=HI)
    plain = {"model": "demo", "max_tokens": 5, "messages": HI}
    assert api.client.post("/v1/messages", json=plain, headers={"X-Api-Key": "secret"}).status_code == 200
    assert api.client.post("/v1/messages", json=plain, headers={"X-Api-Key": ""}).status_code == 401
