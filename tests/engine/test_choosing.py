"""What a request may ask of the draw, through the whole engine, with a toy whose logits a test can redo by hand."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from toy_engine import Gate, answer, feed, next_logits, toy

from services.engine.errors import IdsError, SamplingError
from services.engine.request import Request, Thinking, Token

PROMPT = [1, 2, 3, 4, 5] * 5
PLAIN = Request("r", tuple(PROMPT), 24)
WARM = replace(PLAIN, temperature=3.0, seed=9)
END = 49  # never drawn by the plain request


def tokens(request: Request) -> list[int]:
    with toy() as t:
        call = t.ask(request)
        call.finish()
        return call.tokens


def logits_after(ids: list[int]) -> torch.Tensor:
    order = 0
    for id_ in ids:
        order = feed(order, id_)
    return next_logits(order, sum(ids))


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"top_k": -1}, SamplingError, "top_k is -1"),
        ({"min_p": 1.1}, SamplingError, "min_p is 1.1"),
        ({"presence_penalty": float("nan")}, SamplingError, "presence_penalty is nan"),
        ({"frequency_penalty": float("inf")}, SamplingError, "frequency_penalty is inf"),
        ({"repetition_penalty": -1.0}, SamplingError, "repetition_penalty is -1"),
        ({"logit_bias": {1: float("nan")}}, SamplingError, "logit_bias holds a value"),
        ({"logit_bias": {50: 1.0}}, IdsError, "logit_bias has 50"),
        ({"min_tokens": 25}, SamplingError, "min_tokens is 25: give 0 to max_tokens, which is 24"),
        ({"logprobs": 21}, SamplingError, "logprobs of 21 ids"),
        ({"thinking": Thinking((), 3)}, IdsError, "thinking.end_ids is empty"),
        ({"thinking": Thinking((50,), 3)}, IdsError, "thinking.end_ids has 50"),
    ],
)
def test_wrong_values_are_named(change: dict[str, object], kind: type[Exception], message: str) -> None:
    with toy() as t:
        with pytest.raises(kind, match=message):
            t.ask(replace(PLAIN, **change))  # type: ignore[arg-type]
        assert t.ask(PLAIN).finish(), "the control: unchanged, it is answered"


def test_neutral_values_change_nothing() -> None:
    neutral = replace(WARM, top_k=50, min_p=0.0, repetition_penalty=1.0, logit_bias={3: 0.0}, logprobs=2, min_tokens=24)
    assert tokens(neutral) == tokens(WARM)
    assert tokens(PLAIN) == answer(PROMPT, 24)


def test_top_k_and_min_p_of_one_are_greedy() -> None:
    assert tokens(replace(WARM, top_k=1)) == tokens(replace(WARM, min_p=1.0)) == answer(PROMPT, 24)
    assert tokens(WARM) != answer(PROMPT, 24)


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_penalties_count_the_answer(penalty: str) -> None:
    """Strong enough, no id comes twice."""
    assert len(set(answer(PROMPT, 24))) < 24
    found = tokens(replace(PLAIN, **{penalty: 1e6}))  # type: ignore[arg-type]
    assert len(set(found)) == 24
    assert {*found} & {*PROMPT}, "ids of the prompt cost nothing"


def test_repetition_counts_prompt_and_answer() -> None:
    ids = list(PROMPT)
    for _ in range(12):
        logits = logits_after(ids)
        for id_ in set(ids):
            logits[id_] = logits[id_] / 8 if logits[id_] > 0 else logits[id_] * 8
        ids.append(int(logits.argmax()))
    found = tokens(replace(PLAIN, max_tokens=12, repetition_penalty=8.0))
    assert found == ids[len(PROMPT) :] != answer(PROMPT, 12)


def test_bias_bans_and_forces() -> None:
    first = answer(PROMPT, 1)[0]
    assert first not in tokens(replace(PLAIN, logit_bias={first: -100.0}))
    assert tokens(replace(PLAIN, logit_bias={17: 100.0})) == [17] * 24


def test_min_tokens_forbid_the_end() -> None:
    expected = answer(PROMPT, 24)
    stop = expected[3]
    plain = replace(PLAIN, stop_ids=frozenset({stop}))
    assert tokens(plain) == expected[:4]
    later = tokens(replace(plain, min_tokens=8))
    assert stop not in later[:8]
    assert len(later) >= 8
    whole = tokens(replace(plain, min_tokens=24))
    assert stop not in whole
    assert len(whole) == 24


def test_logprobs_are_the_models_own() -> None:
    with toy() as t:
        call = t.ask(replace(WARM, logprobs=3, logit_bias={17: 100.0}, max_tokens=4))
        call.finish()
        told = [event for event in call.events if isinstance(event, Token)]
        ids = list(PROMPT)
        for token in told:
            exact = torch.log_softmax(logits_after(ids).double(), 0)
            assert token.logprob == pytest.approx(float(exact[token.id]), abs=1e-6)
            assert [id_ for id_, _ in token.top] == exact.topk(3).indices.tolist()
            assert all(a >= b for (_, a), (_, b) in pairwise(token.top))
            ids.append(token.id)
        plain = t.ask(replace(WARM, max_tokens=1))
        plain.finish()
        assert [e for e in plain.events if isinstance(e, Token)] == [Token(plain.tokens[0])]


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_thinking_budget_puts_the_end_in(budget: int) -> None:
    found = tokens(replace(PLAIN, thinking=Thinking((END,), budget)))
    assert found[: budget + 1] == [*answer(PROMPT, budget), END]
    assert found[budget + 1 :] == answer([*PROMPT, *found[: budget + 1]], 24 - budget - 1), "it goes on from there"


def test_thinking_that_ended_by_itself_is_left_alone() -> None:
    expected = answer(PROMPT, 24)
    assert END not in expected
    assert tokens(replace(PLAIN, thinking=Thinking((END, expected[2]), 5))) == expected
    assert tokens(replace(PLAIN, thinking=Thinking((END,), 24))) == expected
    assert tokens(replace(PLAIN, thinking=Thinking((END,)))) == expected


def test_stop_thinking_now() -> None:
    with toy() as t:
        gate = Gate()
        t.model.before = gate
        call = t.ask(replace(PLAIN, thinking=Thinking((END,))))
        gate.hold(6)  # four chunks of the prompt, one token; the next is under way
        call.handle.stop_thinking()
        gate.open()
        call.finish()
        assert call.tokens[:4] == [*answer(PROMPT, 3), END]
        assert call.tokens[4:] == answer([*PROMPT, *call.tokens[:4]], 20)
        other = t.ask(PLAIN)
        other.handle.stop_thinking()
        other.finish()
        assert other.tokens == answer(PROMPT, 24), "an answer that does not think is left alone"
