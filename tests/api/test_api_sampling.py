"""What clients send to steer the draw, on its way to the engine and back: fields, choices, log probabilities."""

from typing import Any

import pytest
from running_api import RunningApi
from scripted_engine import ScriptedEngine
from test_api_chat import stream

from services.api.model_folder import ModelFolder

NEUTRAL = {
    "top_k": 0, "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1,
}  # fmt: skip


def test_every_field_reaches_the_engine(api: RunningApi, engine: ScriptedEngine) -> None:
    api.chat(
        "Hi",
        top_k=40,
        min_p=0.25,
        presence_penalty=0.5,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        logit_bias={"5": 100, "7": -2.5},
        min_tokens=3,
        max_tokens=9,
        seed=4,
    )
    start = engine.calls[-1].start
    found = {name: getattr(start.sampling, name) for name in NEUTRAL}
    assert found == dict(zip(NEUTRAL, (40, 0.25, 0.5, -1, 1.5), strict=True))
    assert dict(start.sampling.logit_bias) == {5: 100, 7: -2.5}
    assert (start.min_tokens, start.max_tokens, start.sampling.seed) == (3, 9, 4)
    assert not start.HasField("logprobs")


def test_defaults_are_neutral(api: RunningApi, engine: ScriptedEngine) -> None:
    for fields in ({}, dict.fromkeys(NEUTRAL), {"top_k": -1, "logit_bias": {}, "min_tokens": 0, "n": 1}):
        api.chat("Hi", **fields)
        start = engine.calls[-1].start
        assert {name: getattr(start.sampling, name) for name in NEUTRAL} == NEUTRAL
        assert not start.sampling.logit_bias
        assert start.min_tokens == 0


def test_ignore_eos_forbids_the_end(api: RunningApi, engine: ScriptedEngine) -> None:
    api.chat("Hi", ignore_eos=True, max_tokens=9)
    assert engine.calls[-1].start.min_tokens == 9
    api.chat("Hi", ignore_eos=False, max_tokens=9)
    assert engine.calls[-1].start.min_tokens == 0


def test_several_choices_come_one_after_another(api: RunningApi, engine: ScriptedEngine) -> None:
    reply = api.chat("Hi", n=3, seed=2**64 - 1)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in reply["choices"]} == {"Hello there, friend."}
    assert [call.start.sampling.seed for call in engine.calls] == [2**64 - 1, 0, 1], "each has its own seed"
    prompt = len(engine.calls[0].start.ids)
    assert reply["usage"]["prompt_tokens"] == prompt
    assert reply["usage"]["completion_tokens"] == 3 * (len(engine.script) + 1)
    assert reply["timings"]["predicted_n"] == reply["usage"]["completion_tokens"]


def test_several_choices_in_a_stream(api: RunningApi, engine: ScriptedEngine) -> None:
    chunks, _ = stream(api, "Hi", n=2, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 2 * (len(engine.script) + 1)
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert len({chunk["id"] for chunk in chunks}) == 1
    for index in range(2):
        mine = [choice for choice in choices if choice["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "Hello there, friend."
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["stop"]


def test_a_client_that_leaves_ends_all_choices(api: RunningApi, engine: ScriptedEngine) -> None:
    engine.token_s, engine.script = 0.1, engine.script * 50
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "stream": True, "n": 5}
    with api.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        next(answer.iter_raw())
    assert engine.calls[0].cancelled.wait(20)
    assert len(engine.calls) == 1


@pytest.fixture
def expected(engine: ScriptedEngine, folder: ModelFolder) -> list[dict[str, Any]]:
    def one(token_id: int, logprob: float) -> dict[str, Any]:
        data = folder.tokenizer.token_bytes(token_id)
        return {"token": data.decode(errors="replace"), "logprob": pytest.approx(logprob), "bytes": list(data)}

    return [
        {**one(i, -i / 1000), "top_logprobs": [one(i - j, (j - i) / 1000) for j in range(2)]} for i in engine.script
    ]


def test_logprobs_whole(api: RunningApi, engine: ScriptedEngine, expected: list[dict[str, Any]]) -> None:
    found = api.chat("Hi", logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]
    assert found["content"] == expected
    assert engine.calls[-1].start.logprobs.top == 2
    assert api.chat("Hi", logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert api.chat("Hi")["choices"][0]["logprobs"] is None


def test_logprobs_in_a_stream(api: RunningApi, expected: list[dict[str, Any]]) -> None:
    """Text that is held back for a stop string brings its tokens along when it comes."""
    chunks, _ = stream(api, "Hi", logprobs=True, top_logprobs=2, stop="Hello there, friend!")
    pieces = [chunk["choices"][0]["logprobs"]["content"] for chunk in chunks]
    assert [entry for piece in pieces for entry in piece] == expected
    assert any(len(piece) > 1 for piece in pieces), "nothing was held back"
    plain, _ = stream(api, "Hi")
    assert all(chunk["choices"][0]["logprobs"] is None for chunk in plain)


def test_logprobs_leave_thinking_out(api: RunningApi, engine: ScriptedEngine, folder: ModelFolder) -> None:
    engine.script = folder.tokenizer.encode("I add.\n</think>\nFour.")
    choice = api.chat("2+2?", model="demo-think", logprobs=True)["choices"][0]
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]).strip() == "Four."


def test_the_openai_client_reads_logprobs_and_choices(api: RunningApi) -> None:
    with api.openai() as client:
        reply = client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "Hi"}], n=2, logprobs=True, top_logprobs=1
        )
        assert len(reply.choices) == 2
        assert reply.choices[1].logprobs is not None
        content = reply.choices[1].logprobs.content
        assert content is not None
        assert "".join(token.token for token in content) == "Hello there, friend."
        assert content[0].top_logprobs[0].logprob == content[0].logprob
