"""The exam: its questions, what counts as right, and both ways to ask."""

import csv
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from services.tools.cli import main
from services.tools.score import questions
from services.tools.score.asking import Reply, parsed


def test_there_are_as_many_questions_as_it_says() -> None:
    sizes = [len(part()) for part in (questions.questions, questions.tool_calls, questions.problems, questions.dialog)]
    assert sizes == [100, 50, 30, 20]
    assert len(questions.asked_in_exam()) > 150
    kinds = {one["kind"] for one in questions.questions()}
    assert kinds == {"small talk", "facts", "arithmetic", "reading", "memory", "lists", "stories"}


def test_every_call_that_is_wanted_is_one_that_its_tools_take() -> None:
    for one in questions.tool_calls():
        [tool] = [t["function"] for t in one["tools"] if t["function"]["name"] == one["call"]]
        assert one["arguments"].keys() == tool["parameters"]["properties"].keys()
        assert all(str(value).lower() in one["ask"].lower() for value in one["arguments"].values())
        assert questions.is_right_call(one, [(one["call"], one["arguments"])])
        assert not questions.is_right_call(one, [])


@pytest.mark.parametrize(
    ("rule", "answer", "right"),
    [
        ({"any": ["paris"]}, "The capital of France is Paris.", True),
        ({"any": ["paris"]}, "It is Parisian.", False),
        ({"any": ["garden"], "none": ["kitchen"]}, "Bruno is in the garden.", True),
        ({"any": ["garden"], "none": ["kitchen"]}, "In the garden or the kitchen.", False),
        ({"number": 64}, "23 + 41 = 64.", True),
        ({"number": 64}, "64 is what 23 + 41 is not: it is 65.", False),
        ({"number": 64}, "164", False),
        ({"number": 28}, "28.5", False),
        ({"number": 64}, "I do not know.", False),
        ({"items": ["dog", "cat", "fox"], "least": 2}, "Dogs and foxes, and more dogs.", True),
        ({"items": ["dog", "cat", "fox"], "least": 2}, "A dog, a dog and a dog.", False),
        ({"any": ["fox"], "least_words": 40}, "A fox went home.", False),
        ({"any": ["fox"], "least_words": 40}, "fox " * 50, False),
        ({"any": ["fox"], "least_words": 40}, "fox " + " ".join(f"word{i}" for i in range(50)), True),
    ],
)
def test_what_counts_as_right(rule: dict[str, Any], answer: str, right: bool) -> None:
    assert questions.is_right(rule, answer) is right


def test_calls_and_results() -> None:
    wanted = {"call": "add", "arguments": {"a": 3, "b": 4}, "answer": ["7"]}
    assert questions.is_right_call(wanted, [("add", {"a": "3", "b": 4})])
    for wrong in (
        [("plus", {"a": 3, "b": 4})],
        [("add", {"a": 3})],
        [("add", {"a": 3, "b": 5})],
        [("add", {"a": 3, "b": 4})] * 2,
    ):
        assert not questions.is_right_call(wanted, wrong)
    assert questions.uses_result(wanted, "It is 7.")
    assert not questions.uses_result(wanted, "It is done.")
    assert not questions.uses_result({"answer": []}, " ")


def test_a_chats_format() -> None:
    assert questions.in_format("Hello!", True, [])
    assert not questions.in_format("Hello!", False, [])
    assert not questions.in_format("", True, [])
    assert not questions.in_format("Hello!", True, ["Hello!"] * 3)
    assert not questions.in_format("Hi <|im_start|>user", True, [])
    assert not questions.in_format("Hi\nuser\nHow are you?", True, [])
    assert not questions.in_format("word " * 151, True, [])


def test_an_answer_is_read_as_a_server_reads_it() -> None:
    schemas = {"f": {"type": "object", "properties": {"x": {"type": "integer"}}}}
    text = "<tool_call>\n<function=f>\n<parameter=x>\n4\n</parameter>\n</function>\n</tool_call>\n"
    assert parsed(text, False, schemas, True).calls == [("f", {"x": 4})]
    assert parsed("so\n</think>\nYes.", True, {}, True) == Reply("Yes.", "so", [], True)


class Speaker:
    """A server that knows the answers to all but the sums, and calls functions where there are some."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        speaker = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                speaker.bodies.append(body)
                text = json.dumps({"choices": [speaker.choice(body)]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def choice(self, body: dict[str, Any]) -> dict[str, Any]:
        last, tools = body["messages"][-1], body.get("tools")
        asked = [one for one in questions.questions() if one["turns"][-1] == last["content"]]
        calls = [one for one in questions.tool_calls() if one["ask"] == last["content"]]
        if tools and calls:
            call = {"name": calls[0]["call"], "arguments": json.dumps(calls[0]["arguments"])}
            return {"message": {"content": None, "tool_calls": [{"function": call}]}, "finish_reason": "tool_calls"}
        if last["role"] == "tool":
            return {"message": {"content": last["content"]}, "finish_reason": "stop"}
        said = f"Well, {len(body['messages'])}: {asked[0]['any'][0]}." if asked and "any" in asked[0] else "No idea."
        return {"message": {"content": said}, "finish_reason": "stop"}


@pytest.fixture
def speaker() -> Iterator[Speaker]:
    speaker = Speaker()
    thread = threading.Thread(target=speaker.server.serve_forever, daemon=True)
    thread.start()
    yield speaker
    speaker.server.shutdown()
    speaker.server.server_close()
    thread.join()


def test_a_server_is_examined(speaker: Speaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "here.csv"
    assert main(["score", speaker.url, "m", "--record", str(record), "--note", "a speaker", "--show"]) == 0
    rows = {row["name"]: row for row in csv.DictReader(record.read_text().splitlines())}
    told = [one for one in questions.questions() if "any" in one and "least_words" not in one]
    # "What is my name?" ends two dialogs; the speaker knows the first one's name.
    assert float(rows["demo.questions"]["value"]) == pytest.approx((len(told) - 1) / 100)
    assert "arithmetic 2/20" in rows["demo.questions"]["note"]
    assert float(rows["demo.tool_calls"]["value"]) == 1
    assert 0 < float(rows["demo.tool_results"]["value"]) < 1  # it says only what came back, not what it was for
    assert float(rows["demo.problems"]["value"]) == 0
    assert float(rows["demo.chat_turns"]["value"]) < 20  # it says the same thing again and again
    assert "arithmetic: 'What is" in capsys.readouterr().out
    assert {body["chat_template_kwargs"]["enable_thinking"] for body in speaker.bodies} == {True, False}
    assert {body["temperature"] for body in speaker.bodies} == {0}


def test_a_checkpoint_is_examined(demo_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", str(demo_checkpoint), "--few", "1"]) == 0
    shown = capsys.readouterr().out
    assert "demo.questions          1.0000 share   small talk 1/1" in shown
    assert "demo.chat_turns         1.0000 turns   of 1" in shown


def test_what_cannot_be_examined_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", "http://127.0.0.1:1/v1"]) == 2
    assert "name its model" in capsys.readouterr().err
