"""Answers of the demo model that follow a grammar: what may come next, in every combination with the other wishes."""

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from demo_engine import STOP, Demo, demo, tokenizer
from toy_engine import soon, toy
from toy_server import Stream, channel_to, code_of, serving, start

from services.engine.errors import GrammarError, IdsError, UnsupportedError
from services.engine.experts.store import Store
from services.engine.grammar import Grammars
from services.engine.request import Failed, Finish, Form, Grammar, Reason, Request, Restore, Source, Thinking
from services.rpc import engine_pb2 as pb

END, CALL, END_CALL = 13, 14, 15  # </think>, <tool_call>, </tool_call>
QUESTION = "Tell me about a fox named Rex who is 7."
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": " "},
}
SCHEMA = Grammar(Form.JSON_SCHEMA, json.dumps(PERSON))
REGEX = Grammar(Form.REGEX, "(yes|no), [a-z]{5}")
OPEN = Grammar(Form.REGEX, "[a-z ]{3,}")  # may end at any place behind the third letter
TOOLS = Grammar(Form.LARK, 'start: <tool_call> "\\n<function=" ("foo" | "bar") ">\\n</function>\\n" </tool_call>')
DIGITS = Grammar(Form.GBNF, 'root ::= "a" [0-9] [0-9] "z"')
SAMPLED: dict[str, Any] = {"temperature": 1.2, "top_p": 0.9, "seed": 5}


@pytest.fixture(scope="module")
def engine(demo_store: Store) -> Iterator[Demo]:
    with demo(demo_store, prefill_chunk_tokens=16, grammar_max_bytes=20_000) as running:
        yield running


def thinking_prompt(engine: Demo, question: str = QUESTION) -> list[int]:
    """The same question, with the answer begun inside the thinking."""
    ids = engine.prompt(question)
    assert ids[-1] == END
    newline = tokenizer(engine._store.folder).encode("\n", add_special_tokens=False).ids
    return [*ids[:-1], *newline]


def is_person(text: str) -> bool:
    found = json.loads(text)
    return list(found) == ["name", "age"] and len(found["name"]) <= 12 and 0 <= found["age"] <= 99


FITS = {
    SCHEMA: is_person,
    REGEX: re.compile("(yes|no), [a-z]{5}").fullmatch,
    DIGITS: re.compile("a[0-9]{2}z").fullmatch,
    TOOLS: re.compile("<tool_call>\n<function=(foo|bar)>\n</function>\n</tool_call>").fullmatch,
}


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_answers_fit(engine: Demo, options: dict[str, Any]) -> None:
    ids = engine.prompt(QUESTION)
    free = engine.text(engine.answer(ids, max_tokens=64, **options))
    for grammar, fits in FITS.items():
        call = engine.ask(ids, max_tokens=64, grammar=grammar, **options)
        finish = call.finish()
        text = engine.text(call.tokens)
        assert fits(text), text
        assert finish.reason is Reason.STOP
        assert call.tokens[-1] in STOP
        assert text != free, "the control: unmasked, the model says something else"


def test_several_at_once_answer_as_they_do_alone(engine: Demo) -> None:
    ids = engine.prompt(QUESTION)
    wishes: list[dict[str, Any]] = [
        {"grammar": SCHEMA},
        {"grammar": SCHEMA, "temperature": 3.0, "seed": 7},
        {"grammar": REGEX, "frequency_penalty": 2.0, "logit_bias": {300: 5.0}, **SAMPLED},
        {},
    ]
    alone = [engine.answer(ids, max_tokens=48, **wish) for wish in wishes]
    calls = [engine.ask(ids, max_tokens=48, **wish) for wish in wishes]
    for call in calls:
        call.finish()
        call.handle.cancel()
    assert [call.tokens for call in calls] == alone
    assert len(set(map(tuple, alone))) == 4


def test_the_end_comes_when_the_text_is_complete(engine: Demo) -> None:
    ids = engine.prompt(QUESTION)
    short = engine.answer(ids, grammar=OPEN, logit_bias=dict.fromkeys(STOP, 50.0))
    text = engine.text(short)
    assert len(text) >= 3, "the bias wants the end at once; it waits for three letters"
    longer = engine.answer(ids, grammar=OPEN, logit_bias=dict.fromkeys(STOP, 50.0), min_tokens=12)
    assert len(longer) == 13 > len(short), "min_tokens holds while more may come"
    whole = engine.answer(ids, grammar=REGEX, min_tokens=24)
    assert whole == engine.answer(ids, grammar=REGEX), "and yields where nothing can"
    assert len(whole) < 24


def test_a_bias_cannot_force_what_does_not_fit(engine: Demo) -> None:
    ids = engine.prompt(QUESTION)
    [letter] = tokenizer(engine._store.folder).encode("z", add_special_tokens=False).ids
    assert set(engine.answer(ids, logit_bias={letter: 1000.0})) == {letter}, "the control"
    text = engine.text(engine.answer(ids, grammar=DIGITS, logit_bias={letter: 1000.0}))
    assert re.fullmatch("a[0-9]{2}z", text)


def test_logprobs_are_the_models_own(engine: Demo) -> None:
    ids = engine.prompt(QUESTION)
    free, bound = (engine.ask(ids, 4, logprobs=3, **more) for more in ({}, {"grammar": REGEX}))
    free.finish(), bound.finish()
    one, other = (next(e for e in call.events if hasattr(e, "logprob")) for call in (free, bound))
    assert one.id != other.id  # type: ignore[union-attr]
    assert one.top == other.top  # type: ignore[union-attr]


@pytest.mark.parametrize("budget", [None, 0, 5])
def test_thinking_is_free_and_the_grammar_begins_behind_it(engine: Demo, budget: int | None) -> None:
    ids = thinking_prompt(engine, "What is 20 + 22?")  # thoughts that end by themselves
    thinking = Thinking((END,), budget)
    free = engine.answer(ids, max_tokens=120, thinking=thinking)
    bound = engine.answer(ids, max_tokens=200, thinking=thinking, grammar=REGEX)
    at, bound_at = free.index(END), bound.index(END)
    assert free[: at + 1] == bound[: bound_at + 1], "the same thoughts"
    assert budget is None or at == budget
    assert FITS[REGEX](engine.text(bound[bound_at + 1 :]))
    assert not FITS[REGEX](engine.text(free[at + 1 :]))


def test_nothing_ends_the_answer_inside_the_thinking(engine: Demo) -> None:
    ids, wanted = thinking_prompt(engine), dict.fromkeys(STOP, 1000.0)
    thinking = Thinking((END,), 6)
    assert len(engine.answer(ids, thinking=thinking, logit_bias=wanted)) == 1, "the control"
    bound = engine.answer(ids, thinking=thinking, logit_bias=wanted, grammar=REGEX)
    assert bound.index(END) == 6
    assert FITS[REGEX](engine.text(bound[7:]))


def test_a_call_that_ends_the_thinking_is_the_grammars_first_id(engine: Demo) -> None:
    ids = thinking_prompt(engine)
    asked: dict[str, Any] = {"thinking": Thinking((END, CALL), 6), "logit_bias": {CALL: 1000.0}}
    called = engine.answer(ids, grammar=TOOLS, **asked)
    assert called[0] == CALL
    assert FITS[TOOLS](engine.text(called))
    other = engine.answer(ids, grammar=REGEX, **asked)
    assert other.index(END) == 6, "where the grammar begins with no call, none ends the thinking"
    assert FITS[REGEX](engine.text(other[7:]))


def test_a_restored_prompt_and_a_retry_give_the_same_answer(engine: Demo) -> None:
    ids = engine.prompt(QUESTION, "Rex is a fox.", "And now?")
    first = engine.ask(ids, max_tokens=40, grammar=SCHEMA, snapshot_at=(20,), **SAMPLED)
    [snapshot] = first.finish().snapshots
    again = engine.ask(ids, max_tokens=40, grammar=SCHEMA, offers=(snapshot.state,), **SAMPLED)
    assert again.finish().cached_tokens == 20
    assert any(isinstance(event, Restore) and event.source is Source.HOT for event in again.events)
    assert again.tokens == first.tokens
    first.handle.cancel()


WRONG = [
    (Form.JSON_SCHEMA, "{", "not usable: Expecting property name"),
    (Form.JSON_SCHEMA, "[5]", "not usable"),
    (Form.JSON_SCHEMA, '{"type": "strnig"}', "Invalid type: strnig"),
    (Form.JSON_SCHEMA, '{"type": "integer", "minimum": 5, "maximum": 3}', "Unsatisfiable schema: minimum"),
    (Form.JSON_SCHEMA, '{"$ref": "#"}', "no text fits"),
    (Form.JSON_SCHEMA, '{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}', "needs itself"),
    (Form.JSON_SCHEMA, '{"$ref": "http://example.com/schema"}', "not present in a registry"),
    (Form.JSON_SCHEMA, '{"type": "array", "items": {"not": {}}}', "Unimplemented keys"),
    (Form.JSON_SCHEMA, '{"type": "array", "items": ' * 300 + "{}" + "}" * 300, "recursion limit"),
    (Form.REGEX, "((((", "unclosed group"),
    (Form.REGEX, "(?=a)b", "look-around"),
    (Form.REGEX, r"[^\s\S]", "no text fits"),
    (Form.LARK, "start: foo", "unknown name"),
    (Form.LARK, "start: <nothing>", "unknown special token"),
    (Form.GBNF, 'root ::= "a', "Failed to convert"),
    (Form.REGEX, "a" * 20_001, "20001 bytes, more than the 20000"),
]


@pytest.mark.parametrize(("form", "text", "message"), WRONG, ids=lambda value: str(value)[:24])
def test_what_is_wrong_with_a_grammar_is_named(engine: Demo, form: Form, text: str, message: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(message)) as caught:
        engine.ask(engine.prompt(QUESTION), grammar=Grammar(form, text))
    assert len(str(caught.value)) < 700
    assert "<backtrace>" not in str(caught.value)


BOMBS = [
    (Form.REGEX, "((((a{1,100}){1,100}){1,100}){1,100})"),
    (Form.REGEX, "(.*a.{400}b.{400})"),
    (Form.JSON_SCHEMA, json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 10**9})),
    (Form.JSON_SCHEMA, json.dumps({"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(700)}})),
    (Form.JSON_SCHEMA, json.dumps({"enum": [f"number {i}" for i in range(1200)]})),
    (Form.JSON_SCHEMA, json.dumps({"allOf": [{"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}] * 14})),
    (Form.LARK, "start: A\nA: " + " & ".join(f"~/(?s:.*)a.{{{i}}}b(?s:.*)/" for i in range(10, 40))),
    (Form.LARK, 'start: a{1000000}\na: b{1000000}\nb: "x" | "y"'),
    (Form.LARK, 'start: start start | "a"'),
]


@pytest.mark.parametrize(("form", "text"), BOMBS, ids=lambda value: str(value)[:24])
def test_a_bomb_ends_soon_and_harms_nobody(engine: Demo, form: Form, text: str) -> None:
    """Refused, given up on the way, or followed: whatever it is, it takes little time and ends nothing else."""
    ids = engine.prompt(QUESTION)
    other = engine.ask(ids, max_tokens=20)
    began = time.perf_counter()
    try:
        call = engine.ask(ids, max_tokens=20, grammar=Grammar(form, text), **SAMPLED)
        call.until(Finish, Failed)
    except GrammarError:
        pass
    assert time.perf_counter() - began < 20
    other.finish()
    assert other.tokens == engine.answer(ids, max_tokens=20)


def test_time_is_bounded_and_wrong_ones_are_remembered(demo_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Grammar(Form.JSON_SCHEMA, json.dumps({"enum": [f"value number {i}" for i in range(100_000)]}))
    file = demo_store.folder / "tokenizer.json"
    hasty, patient = (Grammars(file, 4096, 4_000_000, timeout_s) for timeout_s in (0.001, 60.0))
    try:
        with pytest.raises(GrammarError, match=r"not worked out within 0\.001 s"):
            hasty.matcher(slow, STOP)
        with pytest.raises(GrammarError, match="too big"):
            patient.matcher(slow, STOP)
        monkeypatch.setattr(patient, "_work_out", lambda grammar: pytest.fail("it is worked out twice"))
        with pytest.raises(GrammarError, match="too big"):
            patient.matcher(slow, STOP)
    finally:
        hasty.close()
        patient.close()


def test_masks_hold_no_control_tokens(demo_store: Store) -> None:
    grammars = Grammars(demo_store.folder / "tokenizer.json", 4096 + 64, 1000, 20.0)
    try:
        matcher = grammars.matcher(Grammar(Form.REGEX, "(?s:.*)"), STOP)
        allowed = matcher.allowed(may_stop=False)
        assert allowed.shape == (4096 + 64,)
        assert not allowed[:32].any(), "added tokens"
        assert not allowed[4096:].any(), "ids beyond the vocabulary"
        assert int(allowed.sum()) > 3000
        assert [id_ for id_ in range(32) if matcher.allowed(may_stop=True)[id_]] == sorted(STOP)
    finally:
        grammars.close()


def test_an_engine_without_a_tokenizer_says_so() -> None:
    with toy() as t, pytest.raises(UnsupportedError, match="follows no grammars"):
        t.ask(Request("r", (1, 2), 4, stop_ids=frozenset({1}), grammar=REGEX))


def test_an_answer_must_be_able_to_end(engine: Demo) -> None:
    with pytest.raises(IdsError, match="stop_ids is empty"):
        engine.engine.submit(Request("r", (1, 2), 4, grammar=REGEX), print)


def test_over_grpc(engine: Demo) -> None:
    ids = engine.prompt(QUESTION)
    with serving(engine.engine) as running, channel_to(running) as channel:
        for grammar in (pb.Grammar(regex="(("), pb.Grammar()):
            stream = Stream(channel)
            stream.send(start=start(*ids, stop_ids=STOP, grammar=grammar))
            error: Any = stream.error()
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert code_of(error) == "bad_grammar"
        stream = Stream(channel)
        stream.send(start=start(*ids, max_tokens=24, stop_ids=STOP, grammar=pb.Grammar(regex=REGEX.text)))
        stream.half_close()
        found = [message.token.id for message in stream.rest() if message.WhichOneof("message") == "token"]
    assert FITS[REGEX](engine.text(found))


def test_the_tokenizer_of_the_store_is_used(demo_store: Store, tmp_path: Path) -> None:
    grammars = Grammars(tmp_path / "tokenizer.json", 4096, 1000, 20.0)
    (tmp_path / "tokenizer.json").write_text("{}")
    try:
        with pytest.raises(UnsupportedError, match=r"tokenizer\.json"):
            grammars.matcher(REGEX, STOP)
    finally:
        grammars.close()


def test_a_queue_of_slow_grammars_keeps_nobody_waiting_for_long(
    demo_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two are worked on, the others give up in time; one that two wait for is given up by both."""
    slow = [Grammar(Form.REGEX, letter) for letter in "abc"]
    grammars = Grammars(demo_store.folder / "tokenizer.json", 4096, 4_000_000, 0.05)
    over, work_out = threading.Event(), grammars._work_out

    def slowly(grammar: Grammar) -> object:
        assert over.wait(20)
        return work_out(grammar)

    monkeypatch.setattr(grammars, "_work_out", slowly)

    async def ask_all() -> list[object]:
        asked = [grammars.prepare(grammar) for grammar in (*slow, slow[2], REGEX)]
        return await asyncio.gather(*asked, return_exceptions=True)

    try:
        grammars._vocabulary().result()
        began = time.perf_counter()
        found = asyncio.run(ask_all())
        assert time.perf_counter() - began < 5
        assert all("not worked out within" in str(error) for error in found), found
        over.set()
        assert soon(lambda: not isinstance(asyncio.run(settled(grammars)), GrammarError)), "later it is"
    finally:
        grammars.close()


async def settled(grammars: Grammars) -> object:
    [found] = await asyncio.gather(grammars.prepare(REGEX), return_exceptions=True)
    return found
