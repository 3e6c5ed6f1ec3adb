"""`thimble score`: the exam, put to a running server or to a checkpoint in this process; figures as rows on request."""

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.tools import figures
from services.tools.amounts import whole
from services.tools.complaints import UsageError
from services.tools.score import questions
from services.tools.score.asking import Asked, InProcess, Server

Say = Callable[[str], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("where", help="a checkpoint's folder, or the address of an api with /v1 at its end")
    parser.add_argument("model", nargs="?", help="for a server: which model")
    parser.add_argument(
        "--texts", type=Path, help="a checkpoint's perplexity on this text too, as `thimble perplexity`"
    )
    parser.add_argument("--few", type=whole, metavar="N", help="only the first N of every part, for a try")
    parser.add_argument("--show", action="store_true", help="print what was answered wrong")
    parser.add_argument("--record", type=Path, metavar="CSV", help="append the figures as rows")
    parser.add_argument("--note", default="", help="put into each row's note")


def run(args: argparse.Namespace) -> int:
    say: Say = print if args.show else lambda text: None

    def told(name: str, value: float, unit: str, note: str) -> None:
        print(f"{name:<22}{value:8.4f} {unit:<8}{note}", flush=True)
        if args.record:
            figures.append(args.record, name, value, unit, "; ".join(filter(None, (args.note, note))))

    if args.where.startswith(("http://", "https://")):
        if not args.model or args.texts:
            raise UsageError("a server: name its model, and leave out --texts")
        examine(Server(args.where, args.model), args.few, say, told)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            model = InProcess(Path(args.where), Path(scratch))
            try:
                examine(model, args.few, say, told)
            finally:
                model.close()
    if args.texts:
        told("demo.ppl_byte", *_perplexity(Path(args.where), args.texts))
    return 0


Figure = tuple[float, str, str]  # value, unit, note


def examine(model: Asked, few: int | None, say: Say, told: Callable[[str, float, str, str], None]) -> None:
    """Every figure is told as soon as it is there."""
    told("demo.questions", *ask_questions(model, few, say))
    for part in (ask_problems, ask_calls):
        for name, figure in part(model, few, say).items():
            told(name, *figure)
    told("demo.chat_turns", *talk(model, few, say))


def ask_questions(model: Asked, few: int | None, say: Say) -> Figure:
    right, asked = Counter[str](), Counter[str]()
    for one in questions.questions()[:few]:
        messages: list[dict[str, Any]] = []
        for turn in one["turns"]:
            messages.append({"role": "user", "content": turn})
            messages.append({"role": "assistant", "content": model.ask(messages).content})
        good = questions.is_right(one, messages[-1]["content"])
        asked[one["kind"]] += 1
        right[one["kind"]] += good
        if not good:
            say(f"{one['kind']}: {one['turns'][-1]!r} -> {messages[-1]['content']!r}")
    parts = ", ".join(f"{kind} {right[kind]}/{asked[kind]}" for kind in asked)
    return right.total() / asked.total(), "share", parts


def ask_problems(model: Asked, few: int | None, say: Say) -> dict[str, Figure]:
    """Word problems without and with thinking."""
    found: dict[str, Figure] = {}
    problems = questions.problems()[:few]
    for name, think in (("demo.problems", False), ("demo.problems_thinking", True)):
        right = 0
        for one in problems:
            reply = model.ask([{"role": "user", "content": one["ask"]}], think=think)
            good = questions.is_right(one, reply.content)
            right += good
            if not good:
                say(f"{name}: {one['ask']!r} is {one['number']} -> {reply.reasoning!r} {reply.content!r}")
        found[name] = (right / len(problems), "share", f"{right}/{len(problems)} word problems")
    return found


def ask_calls(model: Asked, few: int | None, say: Say) -> dict[str, Figure]:
    """Right calls; and answers that use the result, which every model is given behind the right call."""
    called = used = 0
    calls = questions.tool_calls()[:few]
    for one in calls:
        messages: list[dict[str, Any]] = [{"role": "user", "content": one["ask"]}]
        reply = model.ask(messages, one["tools"])
        good = questions.is_right_call(one, reply.calls)
        call = {"name": one["call"], "arguments": json.dumps(one["arguments"])}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": "c1", "content": json.dumps(one["result"])},
        ]
        answer = model.ask(_for_template(messages, model), one["tools"]).content
        uses = questions.uses_result(one, answer)
        called, used = called + good, used + uses
        if not good:
            say(f"call: {one['ask']!r} -> {reply.calls} {reply.content!r}, not {one['call']} {one['arguments']}")
        if not uses:
            say(f"result: {one['ask']!r} {one['result']} -> {answer!r}")
    return {
        "demo.tool_calls": (called / len(calls), "share", f"{called}/{len(calls)} calls right"),
        "demo.tool_results": (used / len(calls), "share", f"{used}/{len(calls)} answers use the result"),
    }


def _for_template(messages: list[dict[str, Any]], model: Asked) -> list[dict[str, Any]]:
    """A template takes arguments as an object where a client sends them as JSON text."""
    if isinstance(model, Server):
        return messages
    whole: list[dict[str, Any]] = json.loads(json.dumps(messages))
    for message in whole:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return whole


def talk(model: Asked, few: int | None, say: Say) -> Figure:
    """How many turns of one chat stay in its format, until the first that does not."""
    messages: list[dict[str, Any]] = []
    said: list[str] = []
    turns = questions.dialog()[:few]
    for number, turn in enumerate(turns):
        messages.append({"role": "user", "content": turn})
        reply = model.ask(messages)
        if reply.calls or not questions.in_format(reply.content, reply.finished, said):
            say(f"chat, turn {number + 1}: {turn!r} -> {reply.content!r}")
            return number, "turns", f"of {len(turns)}, then out of format"
        said.append(reply.content)
        messages.append({"role": "assistant", "content": reply.content})
    return len(turns), "turns", f"of {len(turns)}"


def _perplexity(checkpoint: Path, text: Path) -> Figure:
    from services.tools import oracle
    from services.tools.perplexity import WINDOW_TOKENS, measure
    from services.tools.texts import Texts

    score = measure(oracle.load(checkpoint), Texts(checkpoint, WINDOW_TOKENS).windows(text))
    return score.per_byte, "", f"{text.name}, {score.tokens} tokens"
