"""OpenAI's responses, with OpenAI's own client: create, stream, get, cancel, tools, thinking, going on from one."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import openai
import pytest
from openai import OpenAI
from running_api import RunningApi
from scripted_engine import Failure, ScriptedEngine

from services.api.model_folder import ModelFolder

TOOL: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "strict": False,
}
CALL = (
    "Let me see.\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>\n"
)


@pytest.fixture
def client(api: RunningApi) -> Iterator[OpenAI]:
    with api.openai() as found:
        yield found


def prompt_of(engine: ScriptedEngine, folder: ModelFolder) -> str:
    return b"".join(map(folder.tokenizer.token_bytes, engine.calls[-1].start.ids)).decode()


def soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_an_answer(client: OpenAI, engine: ScriptedEngine, folder: ModelFolder) -> None:
    reply = client.responses.create(
        model="demo", input="Hi", instructions="Be brief.", max_output_tokens=50, temperature=0, metadata={"a": "b"}
    )
    assert (reply.status, reply.output_text, reply.metadata) == ("completed", "Hello there, friend.", {"a": "b"})
    assert [item.type for item in reply.output] == ["message"]
    assert reply.usage is not None
    start = engine.calls[-1].start
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (len(start.ids), len(engine.script) + 1)
    assert (start.max_tokens, start.sampling.temperature) == (50, 0)
    assert prompt_of(engine, folder).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi")
    assert client.responses.retrieve(reply.id) == reply


def test_a_stream(client: OpenAI) -> None:
    with client.responses.stream(model="demo", input="Hi") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert final.output_text == "Hello there, friend."
    assert client.responses.retrieve(final.id).output_text == "Hello there, friend."


@pytest.mark.parametrize("streamed", [False, True])
def test_thinking(client: OpenAI, engine: ScriptedEngine, folder: ModelFolder, streamed: bool) -> None:
    engine.script = folder.tokenizer.encode("I add.\n</think>\nFour.")
    asked: Any = {"model": "demo", "input": "2+2?", "reasoning": {"effort": "high"}}
    if streamed:
        with client.responses.stream(**asked) as stream:
            reply: Any = stream.get_final_response()
    else:
        reply = client.responses.create(**asked)
    thought, message = reply.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "I add.")
    assert message.content[0].text == "Four."
    assert reply.usage.output_tokens_details.reasoning_tokens > 0


@pytest.mark.parametrize("streamed", [False, True])
def test_a_whole_tool_dialog(client: OpenAI, engine: ScriptedEngine, folder: ModelFolder, streamed: bool) -> None:
    engine.script = folder.tokenizer.encode(CALL)
    asked: Any = {"model": "demo", "tools": [TOOL]}
    first: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}]
    if streamed:
        with client.responses.stream(**asked, input=first) as stream:
            reply: Any = stream.get_final_response()
    else:
        reply = client.responses.create(**asked, input=first)
    message, call = reply.output
    assert message.content[0].text == "Let me see."
    assert (call.name, call.arguments, call.status) == ("weather", '{"city":"Oslo","days":3}', "completed")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    client.responses.create(**asked, input=[*first, *[item.to_dict() for item in reply.output], result])
    written_out = prompt_of(engine, folder)
    assert "Let me see." in written_out
    assert "<parameter=city>\nOslo\n</parameter>" in written_out
    assert "<tool_response>\nrain\n</tool_response>" in written_out
    client.responses.create(**asked, previous_response_id=reply.id, input=[result])
    assert prompt_of(engine, folder) == written_out, "the same dialog, whoever keeps it"


def test_going_on_from_a_response(client: OpenAI, engine: ScriptedEngine, folder: ModelFolder) -> None:
    first = client.responses.create(model="demo", input="Hi", instructions="Be brief.")
    second = client.responses.create(model="demo", input="More", previous_response_id=first.id)
    prompt = prompt_of(engine, folder)
    assert "Hi<|im_end|>" in prompt
    assert "Hello there, friend.<|im_end|>" in prompt
    assert "Be brief." not in prompt, "instructions are of one response"
    client.responses.create(model="demo", input="Again", previous_response_id=second.id)
    assert prompt_of(engine, folder).count("Hello there, friend.") == 2
    unkept = client.responses.create(model="demo", input="Hi", store=False)
    for call in (
        lambda: client.responses.retrieve(unkept.id),
        lambda: client.responses.create(model="demo", input="More", previous_response_id=unkept.id),
    ):
        with pytest.raises(openai.NotFoundError):
            call()


def test_the_token_limit(client: OpenAI) -> None:
    reply = client.responses.create(model="demo", input="Hi", max_output_tokens=2)
    assert reply.status == "incomplete"
    assert reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"


def test_in_the_background(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.prompt_s = 120
    begun = client.responses.create(model="demo", input="Hi", background=True)
    assert begun.status == "in_progress"
    engine.hurry.set()
    assert soon(lambda: client.responses.retrieve(begun.id).status == "completed")
    assert client.responses.retrieve(begun.id).output_text == "Hello there, friend."
    engine.failure = Failure(grpc.StatusCode.INTERNAL, code="step_failed", after_tokens=2)
    failing = client.responses.create(model="demo", input="Hi", background=True)
    assert soon(lambda: client.responses.retrieve(failing.id).status == "failed")
    error = client.responses.retrieve(failing.id).error
    assert error is not None
    assert error.code == "engine_failed"


def test_cancel_in_the_background(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script, engine.token_s = engine.script * 50, 0.05
    begun = client.responses.create(model="demo", input="Hi", background=True)
    assert soon(lambda: client.responses.retrieve(begun.id).output_text != "")
    cancelled = client.responses.cancel(begun.id)
    assert cancelled.status == "cancelled"
    assert cancelled.output_text.startswith("Hello")
    assert engine.calls[-1].cancelled.wait(5)
    assert client.responses.retrieve(begun.id).status == "cancelled"
    assert client.responses.cancel(begun.id).status == "cancelled", "twice is no error"


def test_cancel_while_the_prompt_is_read(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.prompt_s = 30
    begun = client.responses.create(model="demo", input="Hi", background=True)
    assert client.responses.cancel(begun.id).status == "cancelled"
    assert engine.calls[-1].cancelled.wait(5)


def test_cancel_a_stream(api: RunningApi, client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script, engine.token_s = engine.script * 50, 0.05
    kinds, name = [], ""
    for event in client.responses.create(model="demo", input="Hi", stream=True):
        kinds.append(event.type)
        if event.type == "response.created":
            name = event.response.id
        if event.type == "response.output_text.delta" and kinds.count(event.type) == 2:
            cancelled = api.client.post(f"/v1/responses/{name}/cancel")
            assert cancelled.json()["status"] == "cancelled"
    assert kinds[-1] == "response.incomplete"
    assert engine.calls[-1].cancelled.wait(5)


def test_a_client_that_leaves_frees_the_sequence(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.token_s, engine.script = 0.1, engine.script * 50
    stream = client.responses.create(model="demo", input="Hi", stream=True)
    next(iter(stream))
    stream.close()
    assert engine.calls[-1].cancelled.wait(5)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no input": ({"input": []}, "input"),
    "input a number": ({"input": 5}, "input"),
    "a picture": ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
    "an unknown item": ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    "a call without name": ({"input": [{"type": "function_call", "call_id": "x"}]}, "input[0].name"),
    "a server's tool": ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    "a choice of tools": ({"tools": [TOOL], "tool_choice": "perhaps"}, "tool_choice"),
    "a form": ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    "background and stream": ({"background": True, "stream": True}, "background"),
    "effort": ({"reasoning": {"effort": "heroic"}}, "reasoning.effort"),
    "limit": ({"max_output_tokens": 0}, "max_output_tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_named(api: RunningApi, engine: ScriptedEngine, name: str) -> None:
    fields, param = REFUSED[name]
    answer = api.client.post("/v1/responses", json={"model": "demo", "input": "Hi", **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert not engine.calls


def test_a_failure_inside_the_stream(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.failure = Failure(grpc.StatusCode.INTERNAL, code="step_failed", after_tokens=2)
    *_, last = client.responses.create(model="demo", input="Hi", stream=True)
    assert last.type == "error"
    assert "as the test wants it" in last.message


def test_unknown_responses(api: RunningApi) -> None:
    assert api.client.get("/v1/responses/resp_0").status_code == 404
    assert api.client.post("/v1/responses/resp_0/cancel").status_code == 404
