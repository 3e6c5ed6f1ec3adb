"""The chat endpoint over real HTTP: replies, streams, usage, stop strings, tools, thinking."""

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from running_api import RunningApi
from scripted_engine import ScriptedEngine
from timing import in_time

from services.api.model_folder import ModelFolder

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}


def stream(api: RunningApi, *messages: Any, **fields: Any) -> tuple[list[dict[str, Any]], str]:
    """Chunks, and the raw body."""
    dialog = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
    body = {"model": "demo", "messages": dialog, "stream": True, **fields}
    with api.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        raw = answer.read().decode()
    lines = [line.removeprefix("data: ") for line in raw.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]], raw


def test_whole_answer(api: RunningApi, engine: ScriptedEngine, folder: ModelFolder) -> None:
    reply = api.chat("Hi")
    assert reply["object"] == "chat.completion"
    assert reply["model"] == "demo"
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": "Hello there, friend.", "refusal": None}
    assert reply["choices"][0]["finish_reason"] == "stop"
    start = engine.calls[0].start
    assert list(start.ids) == folder.tokenizer.encode(
        "<|im_start|>system\n<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think></think>"
    )
    assert reply["usage"] == {
        "prompt_tokens": len(start.ids),
        "completion_tokens": len(engine.script) + 1,
        "total_tokens": len(start.ids) + len(engine.script) + 1,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert reply["timings"]["prompt_n"] == len(start.ids)
    assert reply["timings"]["prompt_ms"] == 250
    assert list(start.stop_ids) == [2, 11]
    assert start.sampling.temperature == pytest.approx(0.7)
    assert start.sampling.top_p == pytest.approx(0.95)


def test_stream_has_openai_s_order(api: RunningApi) -> None:
    chunks, _ = stream(api, "Hi")
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello there, friend."
    assert all(delta["content"] for delta in deltas[1:-1])
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all("usage" not in chunk for chunk in chunks)


def test_usage_chunk_only_when_asked(api: RunningApi) -> None:
    chunks, _ = stream(api, "Hi", stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])
    plain, _ = stream(api, "Hi", stream_options={"include_usage": False})
    assert all(chunk["choices"] for chunk in plain)


def test_the_openai_client_reads_both(api: RunningApi) -> None:
    with api.openai() as client:
        reply = client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "Hi"}])
        assert reply.choices[0].message.content == "Hello there, friend."
        text, last = "", None
        for chunk in client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "Hi"}],
            stream=True,
            stream_options={"include_usage": True},
        ):
            last = chunk
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        assert text == "Hello there, friend."
        assert last is not None
        assert last.usage is not None
        assert last.usage.prompt_tokens == reply.usage.prompt_tokens  # type: ignore[union-attr]


def test_the_token_limit(api: RunningApi, engine: ScriptedEngine) -> None:
    reply = api.chat("Hi", max_tokens=2)
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 2
    api.chat("Hi", max_completion_tokens=3, max_tokens=2)
    assert engine.calls[-1].start.max_tokens == 3
    api.chat("Hi", max_tokens=100_000)
    assert engine.calls[-1].start.max_tokens == engine.context_tokens - len(engine.calls[-1].start.ids)
    api.chat("Hi")
    assert engine.calls[-1].start.max_tokens == engine.context_tokens - len(engine.calls[-1].start.ids)


def test_sampling_reaches_the_engine(api: RunningApi, engine: ScriptedEngine) -> None:
    api.chat("Hi", temperature=0, top_p=0.5, seed=-1)
    sampling = engine.calls[-1].start.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0, 0.5, 2**64 - 1)
    api.chat("Hi")
    api.chat("Hi")
    assert engine.calls[-1].start.sampling.seed != engine.calls[-2].start.sampling.seed


def test_utf8_is_never_split(api: RunningApi, engine: ScriptedEngine, folder: ModelFolder) -> None:
    text = "żółć 日本語 👩‍👩‍👧 é"
    engine.script = folder.tokenizer.encode(text)
    assert any(len(folder.tokenizer.token_bytes(i)) == 1 for i in engine.script), "no token is part of a character"
    chunks, raw = stream(api, "Hi")
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text
    assert "\ufffd" not in raw
    first = folder.tokenizer.encode("日")
    assert len(first) > 1
    engine.script = first
    assert api.chat("Hi", max_tokens=1)["choices"][0]["message"]["content"] == ""


def test_control_tokens_are_not_shown(api: RunningApi, engine: ScriptedEngine, folder: ModelFolder) -> None:
    engine.script = [*folder.tokenizer.encode("a"), 10, 3, *folder.tokenizer.encode("b")]
    assert api.chat("Hi")["choices"][0]["message"]["content"] == "ab"


@pytest.mark.parametrize("stop", ["there", ["zzz", "lo th", "there"]])
def test_stop_strings_cut_and_do_not_leak(api: RunningApi, engine: ScriptedEngine, stop: Any) -> None:
    engine.token_s, engine.script = 0.01, engine.script * 500  # it says more unless it hears that it shall not
    kept = "Hello there, friend.".partition(stop if isinstance(stop, str) else "lo th")[0]
    reply = api.chat("Hi", stop=stop)
    assert reply["choices"][0]["message"]["content"] == kept
    assert reply["choices"][0]["finish_reason"] == "stop"
    chunks, _ = stream(api, "Hi", stop=stop)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == kept
    assert engine.calls[-1].stopped, "the engine was not told to stop"
    assert engine.calls[-1].sent_tokens < len(engine.script)


def test_an_engine_that_does_not_hear_stop_is_cancelled(
    api: RunningApi, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.api.answer.STOP_GRACE_S", 0.2)
    engine.hears_stop, engine.script, engine.token_s = False, engine.script * 50, 0.02
    assert api.chat("Hi", stop="there")["choices"][0]["message"]["content"] == "Hello "
    assert engine.calls[-1].cancelled.wait(5)


def test_thinking(api: RunningApi, engine: ScriptedEngine, folder: ModelFolder) -> None:
    engine.script = folder.tokenizer.encode("I add.\n</think>\nFour.")
    message = api.chat("2+2?", model="demo-think")["choices"][0]["message"]
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("I add.", "I add.", "Four.")
    assert engine.calls[-1].start.ids[-2] == folder.tokenizer.added["<think>"].id
    chunks, _ = stream(api, "2+2?", model="demo-think", stream_options={"include_usage": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "I add."
    assert "".join(delta.get("content", "") for delta in deltas) == "Four."
    details = chunks[-1]["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == len(folder.tokenizer.encode("I add.\n</think>"))


def test_thinking_that_never_ends(api: RunningApi, engine: ScriptedEngine, folder: ModelFolder) -> None:
    engine.script = folder.tokenizer.encode("I wonder and wonder")
    choice = api.chat("2+2?", model="demo-think", max_tokens=len(engine.script))["choices"][0]
    assert choice["message"]["content"] == ""
    assert choice["message"]["reasoning_content"] == "I wonder and wonder"
    assert choice["finish_reason"] == "length"


def test_thinking_by_other_switches(api: RunningApi, engine: ScriptedEngine) -> None:
    def thinking(**fields: Any) -> bool:
        api.chat("Hi", **fields)
        return 13 not in engine.calls[-1].start.ids

    assert not thinking()
    assert thinking(reasoning_effort="high")
    assert not thinking(model="demo-think", reasoning_effort="none")
    assert thinking(chat_template_kwargs={"enable_thinking": True})
    assert not thinking(model="demo-think", chat_template_kwargs={"enable_thinking": False})


def test_tool_call(api: RunningApi, engine: ScriptedEngine, folder: ModelFolder) -> None:
    engine.script = folder.tokenizer.encode(
        "\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n"
    )
    choice = api.chat("Weather?", tools=[TOOL])["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    call = choice["message"]["tool_calls"][0]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo", "days": 3}
    chunks, _ = stream(api, "Weather?", tools=[TOOL])
    pieces = [d for chunk in chunks for d in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert pieces[0]["id"].startswith("call_")
    assert [("id" in piece, "name" in piece["function"]) for piece in pieces[1:]] == [(False, False)] * (
        len(pieces) - 1
    )
    assert json.loads("".join(piece["function"]["arguments"] for piece in pieces)) == {"city": "Oslo", "days": 3}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    without = api.chat("Weather?", tools=[TOOL], tool_choice="none")["choices"][0]
    assert "<tool_call>" in without["message"]["content"], "a call without tools is text"
    assert len(engine.calls[-1].start.ids) < len(engine.calls[-2].start.ids), "the tools were shown all the same"


def test_the_whole_tool_dialog(api: RunningApi, engine: ScriptedEngine, folder: ModelFolder) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    api.chat(
        {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
        "Weather?",
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        tools=[TOOL],
        user="me",
        store=False,
        metadata={"a": 1},
        parallel_tool_calls=True,
    )
    text = b"".join(map(folder.tokenizer.token_bytes, engine.calls[-1].start.ids)).decode()
    assert "<|im_start|>system\nBe\nbrief." in text
    assert "<parameter=city>\nOslo\n</parameter>" in text
    assert "<tool_response>\nrain\n</tool_response>" in text


def test_models(api: RunningApi, engine: ScriptedEngine) -> None:
    with api.openai() as client:
        assert [model.id for model in client.models.list()] == ["demo", "demo-think"]
        assert client.models.retrieve("demo-think").id == "demo-think"
    listed = api.client.get("/v1/models").json()["data"]
    assert all(model["max_model_len"] == engine.context_tokens for model in listed)


def test_three_chats_at_once(start_api: Callable[..., RunningApi], engine: ScriptedEngine) -> None:
    api = start_api()
    engine.prompt_s = 120
    answers: list[str] = []
    threads = [
        threading.Thread(target=lambda: answers.append(api.chat("Hi")["choices"][0]["message"]["content"]))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    assert in_time(lambda: len(engine.calls) == 3), "they run one after another"
    assert answers == []
    engine.hurry.set()
    for thread in threads:
        thread.join(20)
    assert answers == ["Hello there, friend."] * 3
