"""Requests of low priority: last for a place, last to read, and never in the way of the others."""

from dataclasses import replace

from toy_engine import INFO, Gate, answer, toy

from services.engine.request import Request

A, B = (1, 2, 3, 4, 5) * 5, (9, 8, 7)
LONG = Request("dialog", A, 6)
TASK = Request("task", A, 4, low_priority=True)


def test_alone_it_is_answered_as_any_other() -> None:
    with toy() as t:
        task = t.ask(TASK)
        task.finish()
        assert task.tokens == answer(list(A), 4)


def test_it_begins_after_those_that_came_later() -> None:
    with toy() as t:
        gate = Gate()
        t.model.before = gate
        first = t.ask(LONG)
        gate.hold(1)
        task, later = t.ask(TASK), t.ask(replace(LONG, ids=B))
        plain = [first, later]
        gate.open()
        ends = [call.finish() for call in (*plain, task)]
        assert task.tokens == answer(list(A), 4)
        assert later.tokens == answer(list(B), 6)
        assert ends[2].queue_s > ends[1].queue_s
        assert t.model.calls[-7:] == [[8], [8], [8], [1], [1], [1], [1]], "alone, after all others"


def test_it_stops_reading_while_a_dialog_runs() -> None:
    with toy() as t:
        gate = Gate()
        t.model.before = gate
        task = t.ask(replace(TASK, max_tokens=1))
        gate.hold(2)  # one chunk is read, the second at the gate
        dialog = t.ask(replace(LONG, ids=B))
        gate.open()
        dialog.finish(), task.finish()
        # Two chunks, then the dialog from its prompt to its end, then the rest of the task.
        assert t.model.calls == [[8], [8], [3], *[[1]] * 5, [8], [1]]
        assert (dialog.tokens, task.tokens) == (answer(list(B), 6), answer(list(A), 1))


def test_as_ordinary_requests_they_would_take_turns() -> None:
    """The control of the test above."""
    with toy() as t:
        gate = Gate()
        t.model.before = gate
        task = t.ask(replace(TASK, max_tokens=1, low_priority=False))
        gate.hold(2)
        dialog = t.ask(replace(LONG, ids=B))
        gate.open()
        dialog.finish(), task.finish()
        assert t.model.calls != [[8], [8], [3], *[[1]] * 5, [8], [1]]


def test_a_cancelled_dialog_lets_it_go_on() -> None:
    with toy(replace(INFO, max_sequences=2)) as t:
        gate = Gate()
        t.model.before = gate
        dialog = t.ask(replace(LONG, max_tokens=900))
        gate.hold(6)  # it answers
        task = t.ask(TASK)
        gate.hold(8)
        assert len(t.scheduler.waiting) == 1
        dialog.handle.cancel()
        gate.open()
        task.finish()
        assert task.tokens == answer(list(A), 4)
