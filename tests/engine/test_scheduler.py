"""Who runs when: batches, chunks, turns, places and pages. The toy's answers are worked out without any engine."""

from dataclasses import replace

import pytest
from toy_engine import INFO, Gate, answer, toy

from services.engine import sequence
from services.engine.request import Finish, Progress, Reason, Request, Restore, Token

A, B, C = [1, 2, 3, 4, 5] * 5, [9, 8, 7], [20, 21] * 9


def ask(prompt: list[int], max_tokens: int = 6, **more: object) -> Request:
    return Request("r", tuple(prompt), max_tokens, **more)  # type: ignore[arg-type]


def test_an_answer_is_the_models_and_events_come_in_order() -> None:
    with toy() as t:
        call = t.ask(ask(A))
        finish = call.finish()
        assert call.tokens == answer(A, 6)
        assert t.model.calls == [[8], [8], [8], [1], [1], [1], [1], [1], [1]]
        kinds = [type(event) for event in call.events]
        assert kinds == [Restore, *[Progress] * 4, *[Token] * 6, Finish]
        assert [e.done_tokens for e in call.events if isinstance(e, Progress)] == [8, 16, 24, 25]
        counts = (finish.prompt_tokens, finish.cached_tokens, finish.executed_tokens, finish.generated_tokens)
        assert counts == (25, 0, 25, 6)
        assert finish.reason is Reason.LENGTH
        assert min(finish.queue_s, finish.prefill_s, finish.decode_s) > 0


@pytest.mark.parametrize("chunk_tokens", [1, 3, 25, 64])
def test_the_cut_of_a_prompt_does_not_show(chunk_tokens: int) -> None:
    with toy(chunk_tokens=chunk_tokens) as t:
        call = t.ask(ask(A))
        call.finish()
        assert call.tokens == answer(A, 6)
        assert len(t.model.calls) == -(-25 // chunk_tokens) + 5


def test_the_last_sampled_token_is_not_fed() -> None:
    with toy() as t:
        t.ask(ask(B, max_tokens=1)).finish()
        assert t.model.calls == [[3]]


def test_a_stop_id_ends_the_answer_and_is_reported() -> None:
    expected = answer(A, 6)
    stop = expected[3]
    assert stop not in expected[:3]
    with toy() as t:
        call = t.ask(ask(A, stop_ids=frozenset({stop})))
        finish = call.finish()
        assert call.tokens == expected[:4]
        assert (finish.reason, finish.generated_tokens) == (Reason.STOP, 4)


def test_a_step_is_one_token_for_each_answer_and_one_chunk() -> None:
    with toy() as t:
        gate = Gate()
        t.model.before = gate
        first = t.ask(ask(B, max_tokens=8))
        gate.hold(1)  # its prompt is at the gate; the other comes in now
        second = t.ask(ask(A, max_tokens=4))
        gate.open()
        first.finish(), second.finish()
        assert (first.tokens, second.tokens) == (answer(B, 8), answer(A, 4))
        # Token and chunk alternate until the second prompt is read, then both answers are one call.
        assert t.model.calls == [[3], [1], [8], [1], [8], [1], [8], [1], [1], [1, 1], [1, 1], [1, 1]]


def test_prompts_share_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "DECODED_TOKENS", 8)  # both are long prompts, then
    with toy() as t:
        gate = Gate()
        t.model.before = gate
        long = t.ask(ask(A * 4, max_tokens=1))
        gate.hold(1)
        short = t.ask(ask(C, max_tokens=1))
        gate.open()
        short.finish(), long.finish()
        assert t.model.calls[:7] == [[8], *[[4, 4]] * 4, [6, 2], [8]], "long, both, then long has it for itself again"
        assert (long.tokens, short.tokens) == (answer(A * 4, 1), answer(C, 1))


def test_places_are_given_in_order() -> None:
    with toy(replace(INFO, max_sequences=1)) as t:
        gate = Gate()
        t.model.before = gate
        calls = [t.ask(ask(prompt, max_tokens=2)) for prompt in (A, B, C)]
        gate.hold(1)
        gate.open()
        for call in calls:
            call.finish()
        assert t.model.calls == [[8], [8], [8], [1], [1], [3], [1], [8], [8], [2], [1]]


def test_a_request_waits_for_its_pages_and_nobody_overtakes() -> None:
    """Pages for the whole answer come with the place: a request that has one never runs out."""
    with toy(pages=3) as t:
        gate = Gate()
        t.model.before = gate
        big = t.ask(ask(B, max_tokens=120))  # two of the three pages
        gate.hold(1)
        second = t.ask(ask(B, max_tokens=100))  # two more: waits
        third = t.ask(ask(C, max_tokens=1))  # one would fit, but it is not its turn
        gate.hold(2)
        assert (t.value("num_requests_running"), t.value("num_requests_waiting")) == (1, 2)
        assert t.value("kv_pages", state="used") == 2
        gate.open()
        assert [call.finish().generated_tokens for call in (big, second, third)] == [120, 100, 1]
        assert big.tokens == answer(B, 120)


def test_sampling_depends_on_seed_and_position_only() -> None:
    def sampled(seed: int, mates: bool) -> list[int]:
        with toy() as t:
            mate = t.ask(ask(C, max_tokens=12)) if mates else None
            call = t.ask(ask(A, max_tokens=12, temperature=0.8, top_p=0.9, seed=seed))
            call.finish()
            if mate is not None:
                mate.finish()
            return call.tokens

    assert sampled(1, mates=False) == sampled(1, mates=True) != sampled(2, mates=False)


def test_stop_ends_an_answer_as_a_stop_id_does() -> None:
    with toy() as t:
        gate = Gate()
        t.model.before = gate
        call = t.ask(ask(A, max_tokens=50, snapshot_answer=True))
        gate.hold(6)  # its prompt is four calls, the sixth feeds its second token
        call.handle.stop()
        gate.open()
        finish = call.finish()
        assert finish.reason is Reason.STOP
        assert call.tokens == answer(A, 3), "the token under way still came"
        assert [s.state.tokens for s in finish.snapshots] == [27], "all but the last token were fed"
        call.handle.cancel()


def test_stop_before_the_first_token_ends_after_it() -> None:
    with toy() as t:
        gate = Gate()
        t.model.before = gate
        call = t.ask(ask(A, max_tokens=50))
        gate.hold(1)
        call.handle.stop()
        gate.open()
        assert (call.finish().reason, call.tokens) == (Reason.STOP, answer(A, 1))
