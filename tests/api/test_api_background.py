"""Tasks of chat programs: recognised, of low priority, and without a trace in what is kept for dialogs."""

from typing import Any

import pytest
from running_api import RunningApi
from scripted_engine import ScriptedEngine

HISTORY = "\n### Chat History:\n<chat_history>\nUSER: Hi\nASSISTANT: Hello\n</chat_history>"
TASKS = {
    "title": "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history." + HISTORY,
    "tags": "### Task:\nGenerate 1-3 broad tags categorizing the main themes of the chat history." + HISTORY,
    "follow-ups": "### Task:\nSuggest 3-5 relevant follow-up questions or prompts." + HISTORY,
    "autocomplete": "### Task:\nYou are an autocompletion system. Continue the text in `<text>`.\n<text>Hel</text>",
}
DIALOGS = {
    "a question": "Hi, tell me a long story about foxes and rivers and hills, please.",
    "a task of the user's own": "### Task:\nWrite a poem about chat history and titles, of ten lines or a few more.",
    "history first": HISTORY + "\n### Task:\nSummarise it for me in a few friendly sentences, please.",
}


@pytest.mark.parametrize("name", TASKS)
def test_tasks_are_of_low_priority_and_not_kept(api: RunningApi, engine: ScriptedEngine, name: str) -> None:
    reply = api.chat(TASKS[name], max_tokens=5)
    assert reply["choices"][0]["message"]["content"]
    start = engine.calls[-1].start
    assert start.low_priority
    assert not start.snapshot_at
    assert not start.snapshot_answer
    api.saved()
    assert not engine.hot


@pytest.mark.parametrize("name", DIALOGS)
def test_dialogs_are_not(api: RunningApi, engine: ScriptedEngine, name: str) -> None:
    api.chat(DIALOGS[name], max_tokens=5)
    start = engine.calls[-1].start
    assert not start.low_priority
    assert start.snapshot_answer
    api.saved()
    assert engine.hot


def test_a_task_quoted_later_in_a_dialog_is_the_user_s(api: RunningApi, engine: ScriptedEngine) -> None:
    api.chat("Hi", {"role": "assistant", "content": "Hello"}, TASKS["title"])
    assert not engine.calls[-1].start.low_priority


def test_users_are_told_apart(api: RunningApi, engine: ScriptedEngine) -> None:
    """By key and by name, else by address; every flavour has its own field."""

    def user(path: str, headers: dict[str, str] | None = None, **fields: Any) -> str:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
        if path == "/v1/completions":
            body = {"prompt": "Hi"}
        elif path == "/v1/responses":
            body = {"input": "Hi"}
        answer = api.client.post(path, json={"model": "demo", **body, **fields}, headers=headers or {})
        assert answer.status_code == 200, answer.text
        return engine.calls[-1].start.user

    chat = "/v1/chat/completions"
    ann = user(chat, user="ann")
    assert ann == user("/v1/completions", user="ann") == user("/v1/responses", user="ann")
    assert ann == user("/v1/messages", metadata={"user_id": "ann"}) == user(chat, safety_identifier="ann")
    assert ann == user(chat, {"X-OpenWebUI-User-Id": "ann"})
    nobody = user(chat)
    assert nobody == user("/v1/messages")
    keyed = user(chat, {"Authorization": "Bearer one"})
    assert len({ann, nobody, keyed, user(chat, user="bob"), user(chat, {"Authorization": "Bearer two"})}) == 5
    assert "ann" not in ann
    answer = api.client.post(chat, json={"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "user": 5})
    assert answer.json()["error"]["param"] == "user"
