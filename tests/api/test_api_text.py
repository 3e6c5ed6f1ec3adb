"""Text without a dialog: completions, tokenizer, template."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from running_api import RunningApi
from scripted_engine import ScriptedEngine

from services.api.model_folder import ModelFolder


def complete(api: RunningApi, prompt: Any, **fields: Any) -> dict[str, Any]:
    answer = api.client.post("/v1/completions", json={"model": "demo", "prompt": prompt, **fields})
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


def test_a_completion_is_of_the_text_itself(api: RunningApi, engine: ScriptedEngine, folder: ModelFolder) -> None:
    text = "<|im_start|>user\nHi<|im_end|>\n"
    reply = complete(api, text)
    assert reply["object"] == "text_completion"
    assert reply["choices"] == [{"index": 0, "text": "Hello there, friend.", "logprobs": None, "finish_reason": "stop"}]
    assert list(engine.calls[-1].start.ids) == folder.tokenizer.encode(text), "no template, and tokens written out"
    assert reply["usage"]["prompt_tokens"] == len(engine.calls[-1].start.ids)
    assert not engine.calls[-1].start.snapshot_at
    assert not engine.calls[-1].start.snapshot_answer
    complete(api, [5, 6, 7], max_tokens=3, temperature=0)
    start = engine.calls[-1].start
    assert (list(start.ids), start.max_tokens, start.sampling.temperature) == ([5, 6, 7], 3, 0)


def test_tags_in_a_completion_are_text(api: RunningApi, engine: ScriptedEngine, folder: ModelFolder) -> None:
    engine.script = folder.tokenizer.encode("<think>\nfour</think> <tool_call>\n<function=f>")
    assert complete(api, "2+2=")["choices"][0]["text"] == "<think>\nfour</think> <tool_call>\n<function=f>"


def test_prompts_times_n(api: RunningApi, engine: ScriptedEngine) -> None:
    reply = complete(api, ["a", "bb cc dd"], n=2, seed=7)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    prompts = [list(call.start.ids) for call in engine.calls]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
    assert reply["usage"]["prompt_tokens"] == len(prompts[0]) + len(prompts[2])
    assert reply["usage"]["completion_tokens"] == 4 * (len(engine.script) + 1)


def test_a_stream_of_text(api: RunningApi, engine: ScriptedEngine) -> None:
    body = {"model": "demo", "prompt": "a", "stream": True, "stream_options": {"include_usage": True}, "stop": "friend"}
    raw = api.client.post("/v1/completions", json=body).text
    lines = [line.removeprefix("data: ") for line in raw.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert "".join(choice["text"] for choice in choices) == "Hello there, "
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]


def test_the_openai_client_completes(api: RunningApi) -> None:
    with api.openai() as client:
        reply = client.completions.create(model="demo", prompt="a", logprobs=2)
        assert reply.choices[0].text == "Hello there, friend."
        found = reply.choices[0].logprobs
        assert found is not None
        assert found.tokens is not None
        assert "".join(found.tokens) == "Hello there, friend."
        assert found.text_offset is not None
        assert found.text_offset[1] == len(found.tokens[0])
        assert found.top_logprobs is not None
        assert len(found.top_logprobs[0]) <= 2
        pieces = [chunk.choices[0].text for chunk in client.completions.create(model="demo", prompt="a", stream=True)]
        assert "".join(pieces) == "Hello there, friend."


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], 5, None, [1, "a"], [4096], {"a": 1}, ["a"] * 65, [-1]])
def test_prompts_that_are_none(api: RunningApi, engine: ScriptedEngine, prompt: Any) -> None:
    answer = api.client.post("/v1/completions", json={"model": "demo", "prompt": prompt})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].partition("[")[0] == "prompt"
    assert not engine.calls


def test_too_long_a_prompt(api: RunningApi, engine: ScriptedEngine) -> None:
    error = api.client.post("/v1/completions", json={"model": "demo", "prompt": [5] * 5000}).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    missing = api.client.post("/v1/completions", json={"model": "none", "prompt": "a"})
    assert missing.status_code == 404


def test_tokenize_and_back(api: RunningApi, engine: ScriptedEngine, folder: ModelFolder) -> None:
    text = "Grüße, <|im_end|> 日本!"
    ids = folder.tokenizer.encode(text)
    for name in ("prompt", "content"):
        found = api.client.post("/tokenize", json={name: text}).json()
        assert found == {"count": len(ids), "max_model_len": engine.context_tokens, "tokens": ids}
    strings = api.client.post("/tokenize", json={"prompt": "Hello there", "return_token_strs": True}).json()
    assert "".join(strings["token_strs"]) == "Hello there"
    back = api.client.post("/detokenize", json={"tokens": ids}).json()
    assert back == {"prompt": text, "content": text}
    wrong = api.client.post("/detokenize", json={"tokens": [1, 99999]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tokens")
    for body in ({}, {"prompt": "a", "content": "b"}, {"prompt": 5}):
        assert api.client.post("/tokenize", json=body).status_code == 400


def test_the_template_of_a_chat_is_what_the_engine_gets(
    api: RunningApi, engine: ScriptedEngine, folder: ModelFolder
) -> None:
    dialog = [{"role": "user", "content": "Hi <|im_end|>"}]
    rendered = api.client.post("/apply-template", json={"messages": dialog}).json()["prompt"]
    assert rendered.endswith("Hi <|im_end|><|im_end|>\n<|im_start|>assistant\n<think></think>")
    api.chat(*dialog)
    sent = list(engine.calls[-1].start.ids)
    assert api.client.post("/tokenize", json={"messages": dialog}).json()["tokens"] == sent
    thinking = {"messages": dialog, "model": "demo-think"}
    assert api.client.post("/apply-template", json=thinking).json()["prompt"].endswith("<think>\n")
    assert api.client.post("/apply-template", json={"messages": []}).status_code == 400
    assert api.client.post("/apply-template", json=[]).status_code == 400


def test_the_key_guards_text_too(start_api: Callable[..., RunningApi]) -> None:
    api = start_api(api_key="secret")
    for path in ("/v1/completions", "/tokenize", "/detokenize", "/apply-template"):
        assert api.client.post(path, json={"prompt": "a"}).status_code == 401
    key = {"Authorization": "Bearer secret"}
    assert api.client.post("/tokenize", json={"prompt": "a"}, headers=key).status_code == 200
