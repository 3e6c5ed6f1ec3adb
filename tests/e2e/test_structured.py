"""A JSON answer by a schema, and a tool call that must be made, from the demo model through every flavour of API. The
control is the same question without them: the model then says something else."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from anthropic import Anthropic
from running import Running, user

QUESTION = "Tell me about Rex, a fox of 7 years who lives in Oslo."
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["fox", "wolf", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
        "tame": {"type": "boolean"},
    },
    "required": ["kind", "age", "tame"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "animal", "strict": True, "schema": SCHEMA}}
BESIDE = {"type": "json_schema", "name": "animal", "strict": True, "schema": SCHEMA}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
}
TOOL = {"type": "function", "function": {"name": "forecast", "description": "Weather.", "parameters": PARAMETERS}}
OTHER = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
ASKED: dict[str, Any] = {"temperature": 0.7, "seed": 3}
LIMIT = 200


def fits(text: str) -> bool:
    found = json.loads(text)
    assert list(found) == ["kind", "age", "tame"]
    assert found["kind"] in ("fox", "wolf", "dog")
    assert type(found["age"]) is int
    assert 0 <= found["age"] <= 30
    assert type(found["tame"]) is bool
    return True


def is_call(name: str, arguments: Any) -> bool:
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert name == "forecast"
    assert list(found) == ["city", "days"]
    assert isinstance(found["city"], str)
    assert found["days"] in range(1, 10)
    return True


def model(stack: Running, think: bool = False) -> str:
    return next(m.id for m in stack.client.models.list() if m.id.endswith("-think") == think and "-doc" not in m.id)


def chat(stack: Running, **fields: Any) -> Any:
    fields = {"model": model(stack), "messages": [user(QUESTION)], "max_tokens": LIMIT, **ASKED, **fields}
    return stack.client.chat.completions.create(**fields)


def test_the_control_says_something_else(stack: Running) -> None:
    free = chat(stack).choices[0].message
    assert free.content
    assert not free.tool_calls
    with pytest.raises(ValueError, match="Expecting value"):
        fits(free.content)
    forecast = [user("Tell me the forecast for Oslo.")]  # the call leaves out the days, which are required
    [offered] = chat(stack, tools=[TOOL], messages=forecast).choices[0].message.tool_calls
    with pytest.raises(AssertionError):
        is_call(offered.function.name, offered.function.arguments)


def test_chat(stack: Running) -> None:
    reply = chat(stack, response_format=FORMAT).choices[0]
    assert fits(reply.message.content)
    assert reply.finish_reason == "stop"
    assert chat(stack, response_format={"type": "json_object"}, max_tokens=9).choices[0].message.content.startswith("{")
    called = chat(stack, tools=[OTHER, TOOL], tool_choice={"type": "function", "function": {"name": "forecast"}})
    [call] = called.choices[0].message.tool_calls
    assert is_call(call.function.name, call.function.arguments)
    assert called.choices[0].finish_reason == "tool_calls"


def test_chat_stream(stack: Running) -> None:
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chat(stack, response_format=FORMAT, stream=True))
    assert fits(text)
    name, arguments, ends = "", "", []
    for chunk in chat(stack, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, stream=True):
        ends.append(chunk.choices[0].finish_reason)
        for call in chunk.choices[0].delta.tool_calls or []:
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    assert is_call(name, arguments)
    assert ends[-1] == "tool_calls"


def test_completions(stack: Running) -> None:
    asked = {"messages": [user(QUESTION)], "tools": [TOOL]}
    prompt = httpx.post(f"{stack.url}/apply-template", json=asked).json()["prompt"]
    free, bound = (
        stack.client.completions.create(
            model=model(stack),
            prompt=prompt,
            max_tokens=LIMIT,
            extra_body=extra,
            **ASKED,
        )
        .choices[0]
        .text
        for extra in ({}, {"guided_json": SCHEMA})
    )
    assert fits(bound)
    assert free != bound


def test_responses(stack: Running) -> None:
    asked: dict[str, Any] = {"model": model(stack), "input": QUESTION, "max_output_tokens": LIMIT, "temperature": 0}
    client = stack.client.responses
    assert fits(client.create(**asked, text={"format": BESIDE}).output_text)
    tools = [{"type": "function", "name": "forecast", "parameters": PARAMETERS, "strict": False}]
    [call] = client.create(**asked, tools=tools, tool_choice="required", parallel_tool_calls=False).output
    assert is_call(call.name, call.arguments)
    with client.stream(**asked, text={"format": BESIDE}) as stream:
        assert fits(stream.get_final_response().output_text)
    choice = {"type": "function", "name": "forecast"}
    with client.stream(**asked, tools=tools, tool_choice=choice, parallel_tool_calls=False) as stream:
        [call] = stream.get_final_response().output
    assert is_call(call.name, call.arguments)


def test_anthropic(stack: Running) -> None:
    asked: dict[str, Any] = {"model": model(stack), "max_tokens": LIMIT, "messages": [user(QUESTION)]}
    tools = [{"name": "forecast", "input_schema": PARAMETERS}]
    with Anthropic(base_url=stack.url, api_key="none", max_retries=0) as client:
        schema = {"extra_body": {"output_config": {"format": BESIDE}, "temperature": 0}}
        assert fits(client.messages.create(**asked, **schema).content[0].text)
        with client.messages.stream(**asked, **schema) as stream:
            assert fits(stream.get_final_text())
        for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "forecast"}):
            forced: dict[str, Any] = {"tools": tools, "tool_choice": choice}
            reply = client.messages.create(**asked, **forced)
            assert is_call(reply.content[0].name, reply.content[0].input)
            assert reply.stop_reason == "tool_use"
            with client.messages.stream(**asked, **forced) as stream:
                block = stream.get_final_message().content[0]
            assert is_call(block.name, block.input)


def test_thinking_is_free(stack: Running) -> None:
    asked = [user("What is 20 + 22?")]  # it thinks about sums briefly
    thinking = model(stack, think=True)
    thought = chat(stack, model=thinking, messages=asked, response_format=FORMAT, max_tokens=600).choices[0]
    assert thought.message.reasoning_content
    assert fits(thought.message.content)
    budget = {"extra_body": {"thinking_budget": 5}}
    called = chat(stack, model=thinking, tools=[TOOL], tool_choice="required", **budget).choices[0]
    assert is_call(called.message.tool_calls[0].function.name, called.message.tool_calls[0].function.arguments)


def test_several_answers_and_several_at_once(stack: Running) -> None:
    reply = chat(stack, response_format=FORMAT, n=3)
    assert all(fits(choice.message.content) for choice in reply.choices)
    with ThreadPoolExecutor(4) as pool:
        wishes: list[dict[str, Any]] = [
            {"response_format": FORMAT},
            {"tools": [TOOL], "tool_choice": "required"},
            {"extra_body": {"guided_choice": ["left", "right"]}},
            {},
        ]
        json_reply, call_reply, choice_reply, free = pool.map(lambda wish: chat(stack, **wish), wishes)
    assert json_reply.choices[0].message.content == reply.choices[0].message.content, "the same seed, the same answer"
    assert call_reply.choices[0].message.tool_calls
    assert choice_reply.choices[0].message.content in ("left", "right")
    assert free.choices[0].message.content == chat(stack).choices[0].message.content


def test_what_cannot_be_is_a_400(stack: Running) -> None:
    impossible = {"type": "integer", "minimum": 5, "maximum": 3}
    for fields, param, words in (
        ({"response_format": {"type": "json_schema", "schema": impossible}}, "response_format", "minimum"),
        ({"extra_body": {"guided_regex": "(("}}, "guided_regex", "unclosed group"),
        ({"extra_body": {"guided_grammar": "root ::= nothing"}}, "guided_grammar", "nothing"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "names f"),
    ):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match=words) as caught:
                chat(stack, stream=stream, **fields)
            assert caught.value.param == param
