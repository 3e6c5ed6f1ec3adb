"""Made-up chats: in the form that a served model sees, right in what they say, and nothing of the exam among them."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.api.model_folder import load_model_folder
from services.tools.score.questions import held_out_words, questions, sums_in, tool_calls
from services.tools.train_demo import documents, lesson_sums, lesson_tools
from services.tools.train_demo.chats import Renderer
from services.tools.train_demo.documents import Source
from services.tools.train_demo.lesson_copying import Copying
from services.tools.train_demo.lesson_slots import Found, Slots
from services.tools.train_demo.lessons import Lessons
from services.tools.train_demo.prepare import asked_in, asks_exam
from services.tools.train_demo.shapes import DEMO

COUNTRIES = {"France": "Paris", "Peru": "Lima", "Spain": "Madrid", "Latvia": "Riga"}
TEXT = (
    "In the wood Kettleby met Ursula and took the kettle, the saddle and the spoon to old Barnaby, who was glad. " * 3
)


def drawn(count: int, seed: int = 7) -> Iterator[dict[str, Any]]:
    lessons = Lessons(seed, COUNTRIES, Found.of([TEXT]), [[{"role": "user", "content": "Hm?"}]])
    return (lessons.chat() for _ in range(count))


def held_out_in(chat: dict[str, Any]) -> set[str]:
    """Functions, parameters and values of calls, and names in what is asked, that are the exam's."""
    held = held_out_words()
    named = {call["function"]["name"] for m in chat["messages"] for call in m.get("tool_calls", ())}
    tools = [tool["function"] for tool in chat.get("tools", ())]
    named |= {tool["name"] for tool in tools} | {key for tool in tools for key in tool["parameters"]["properties"]}
    asked = [m["content"] for m in chat["messages"] if m["role"] == "user" and "capital" not in m["content"]]
    named |= {word.lower() for text in asked for word in re.findall(r"(?<!^)(?<![.!?:] )\b[A-Z]\w+", text)}
    return (named & held) - {"first"}


def test_nothing_of_the_exam_is_drawn() -> None:
    chats = list(drawn(3000))
    assert Counter(word for chat in chats for word in held_out_in(chat)) == {}
    dropped = [chat for chat in chats if asks_exam(chat)]  # prepare leaves them out
    assert len(dropped) < 60, "a sum or one of four capitals may be asked as the exam does, no more"
    call = tool_calls()[0]
    asked = {"messages": [{"role": "user", "content": call["ask"]}], "tools": call["tools"]}
    assert held_out_in(asked) == {"forecast_lookup", "town", "bergen"}
    assert asks_exam(asked)
    other_words = {"messages": [{"role": "user", "content": "Tell me, 57 plus 38 makes what?"}]}
    assert asks_exam(other_words)
    assert not asks_exam({"messages": [{"role": "user", "content": "57 + 39 is what?"}]})


def test_words_of_a_corpus_are_used_but_not_the_exams() -> None:
    found = Found.of([TEXT])
    assert "Kettleby" in found.names
    assert "Ursula" not in found.names
    assert not any("kettle" in phrase.split() for phrase in found.phrases)


def test_what_was_written_is_searched_for_the_exam(tmp_path: Path) -> None:
    renderer, asked = Renderer.of(DEMO), questions()[0]["turns"][0]

    def wrote(question: str) -> list[str]:
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": "Yes."}]
        documents.save(tmp_path / "documents", Source.of("chat", True, [renderer.chat(chat, None)]))
        return asked_in(tmp_path, renderer)

    assert wrote(f"{asked} Really?") == []
    assert wrote(asked) == [asked]


@pytest.mark.parametrize("think", [False, True])
def test_training_shows_what_a_served_model_sees(think: bool) -> None:
    """Token by token: behind the question, and behind the result of the call."""
    words, renderer = load_model_folder(DEMO), Renderer.of(DEMO)
    for one in tool_calls():
        call = {"type": "function", "id": "c1", "function": {"name": one["call"], "arguments": one["arguments"]}}
        asked = [{"role": "user", "content": one["ask"]}]
        calling: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
        if think:
            calling["reasoning_content"] = "I call it."
        result = {"role": "tool", "tool_call_id": "c1", "content": json.dumps(one["result"])}
        answer = {"role": "assistant", "content": "So it is."} | ({"reasoning_content": "Good."} if think else {})
        ids, scored = renderer.chat([*asked, calling, result, answer], one["tools"])
        for shown in (asked, [*asked, calling, result]):
            prompt = words.template.prompt(shown, one["tools"], {"enable_thinking": think})
            served = words.tokenizer.encode(prompt.text)
            assert ids[: len(served)] == served
            assert scored[len(served)]
            assert not scored[len(served) - 1]
        other = words.template.prompt(asked, one["tools"], {"enable_thinking": not think})
        assert ids[: len(words.tokenizer.encode(other.text))] != words.tokenizer.encode(other.text)


def test_a_copy_has_nothing_that_was_not_there_before() -> None:
    """Words of what is to be learnt, in documents of every kind; spelling is of letters."""
    corpus = Found.of([TEXT])
    made = Copying(5, corpus)
    held = {word for word in held_out_words() if len(word) > 2}  # a note may well say "at"
    assert held & set(corpus.usual), "or nothing shows that a call has none of them"
    format_words, found = {"tool", "call", "function", "parameter", "and"}, Counter[bool]()
    for kind in (made.again, made.table, made.call, made.pattern):
        for _ in range(100):
            before = ""
            for text, learnt in kind():
                words = set(re.findall(r"[^\W_]+", text))
                known = words - format_words <= set(re.findall(r"[^\W_]+", before))
                found[known] += learnt
                assert known or not learnt
                asked = held & {word.lower() for word in re.findall(r"\w+", text)}
                assert asked <= (set() if kind == made.call else {word.lower() for word in corpus.usual})
                before += text
    assert found[True] > 500
    for pair in (made.spelling() for _ in range(50)):
        for (shown, _), (wanted, learnt) in zip(pair[::2], pair[1::2], strict=True):
            letters = "".join(filter(str.isalpha, shown.replace(" is spelled ", "")))
            assert learnt
            assert letters == "".join(filter(str.isalpha, wanted))


def test_pieces_are_learnt_by_where_their_tokens_begin() -> None:
    renderer = Renderer.of(DEMO)
    ids, scored = renderer.pieces([("one two", False), (" three four", True), (" five", False)])
    whole = renderer.ids("one two three four five")
    assert ids == whole.tolist()
    learnt = [one for one, wanted in zip(ids, scored, strict=True) if wanted]
    assert learnt == renderer.ids(" three four").tolist()


def test_sums_are_right() -> None:
    slots = Slots(3, COUNTRIES, Found())
    worked = 0
    for _ in range(300):
        said = [lesson_sums.word_problem(slots)["messages"][-1], *lesson_sums.sums(slots)["messages"][1::2]]
        for text in (m.get(key, "") for m in said for key in ("content", "reasoning_content")):
            for a, sign, b, value in re.findall(r"\b(\d+) ([-+*]) (\d+) = (\d+)\b", text):
                assert {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign] == int(value)
                worked += 1
        steps, answer = said[0].get("reasoning_content", ""), said[0]["content"]
        if steps:
            assert re.findall(r"\d+", steps)[-1] == re.findall(r"\d+", answer)[-1]
    assert worked > 500
    assert sums_in("What is 12 plus 30?") == {(12, "+", 30)}


def test_calls_have_the_arguments_that_their_tool_asks_for() -> None:
    slots = Slots(4, COUNTRIES, Found.of([TEXT]))
    for _ in range(200):
        chat = lesson_tools.tool_call(slots)
        tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in chat["tools"]}
        calls = [call["function"] for m in chat["messages"] for call in m.get("tool_calls", ())]
        asked = [m["content"] for m in chat["messages"] if m["role"] == "user"]
        assert len(calls) == len(asked)
        for call, ask in zip(calls, asked, strict=True):
            assert list(call["arguments"]) == tools[call["name"]]["required"]
            assert all(str(value) in ask for value in call["arguments"].values())
