"""The door of a full queue: who was turned away first is let in first and told when, and nobody is waited for long."""

import heapq
import random
from collections import Counter
from dataclasses import replace

import pytest
from toy_engine import INFO, soon, toy

from services.engine.errors import QueueFullError
from services.engine.request import Event, Finish, Reason, Request
from services.engine.sequence import Sequence
from services.engine.turns import LATE_S, LONGEST_WAIT_S, MOST_IDLE, MOST_USERS, Admission, Line

ANSWER_S = 0.8


class Door:
    """An engine's door, without an engine behind it, at a time of its own."""

    def __init__(self, places: int, queue_limit: int, answer_s: float | None = ANSWER_S) -> None:
        self.now = 1000.0
        self.admission = Admission(places, queue_limit, lambda: self.now)
        self.admission._answer_s = answer_s

    def enter(self, user: str, idle: bool = False) -> Sequence:
        request = Request("r", (1, 2), 3, user=user, idle=idle)
        self.admission.check(request)
        sequence = Sequence(request, lambda event: None)
        sequence.submitted_at = self.now
        self.admission.add(sequence)
        return sequence

    def wait_s(self, user: str) -> int:
        """What they are told who are not let in."""
        with pytest.raises(QueueFullError) as caught:
            self.enter(user)
        assert caught.value.retry_after_s is not None
        assert f"ask again in {caught.value.retry_after_s} s" in str(caught.value)
        return caught.value.retry_after_s

    def leave(self, sequence: Sequence, took_s: float = ANSWER_S) -> None:
        self.admission.over(sequence, Finish(Reason.STOP, 2, 0, 2, 3, 0.0, 0.0, took_s))


def full(places: int = 1, queue_limit: int = 2, answer_s: float | None = ANSWER_S) -> tuple[Door, list[Sequence]]:
    """Of users who have one request each: as many as are let in."""
    door = Door(places, queue_limit, answer_s)
    return door, [door.enter(f"early {number}") for number in range(places + 2 * queue_limit)]


def test_a_place_is_kept_for_who_was_turned_away_first() -> None:
    door, inside = full()
    assert door.wait_s("first") == 1
    assert door.wait_s("second") == 2
    door.leave(inside[0])
    assert door.wait_s("newcomer") == 2
    assert door.wait_s("second") == 1, "their place in the line, not who asks"
    door.enter("first")
    door.leave(inside[1])
    door.enter("second")
    assert door.wait_s("third") == 2, "behind the newcomer"


def test_who_does_not_come_back_is_not_waited_for() -> None:
    door, inside = full()
    told_s = door.wait_s("first")
    door.leave(inside[0])
    door.now += told_s + LATE_S
    door.wait_s("newcomer")
    door.now += 0.01
    door.enter("newcomer")
    assert door.wait_s("first") == 1


def test_who_comes_too_early_stays_in_line() -> None:
    door, inside = full()
    door.wait_s("first")
    door.wait_s("second")
    for _ in range(50):
        door.now += 0.1
        assert door.wait_s("first") == 1
    door.leave(inside[0])
    door.enter("first")


def test_nobody_waits_for_an_empty_seat() -> None:
    door, inside = full()
    door.wait_s("first")
    for sequence in inside:
        door.leave(sequence)
    door.enter("newcomer")


def test_who_has_a_request_under_way_is_behind_the_line() -> None:
    door, inside = full(places=1, queue_limit=4)
    busy = inside[-1].request.user
    for sequence in inside[:5]:
        door.leave(sequence)
    door.enter(busy)
    assert door.wait_s(busy) == 1, "five are inside, the most for one who has some"
    for number in range(4):
        door.enter(f"late {number}")
    door.wait_s("first")
    door.leave(inside[5])
    for _ in range(3):
        assert door.wait_s(busy) > 3
    door.enter("first")
    assert busy not in door.admission._line._until


def test_when_to_ask_again() -> None:
    """As long as answers take, shared by the places; before the first one, as long again as the oldest has taken."""
    door, _ = full(places=1, queue_limit=0, answer_s=None)
    door.now += 41.5
    assert door.wait_s("x") == 42
    for answer_s, places, expected_s in ((8.2, 1, 9), (8.2, 4, 3), (0.01, 1, 1), (1e9, 1, LONGEST_WAIT_S)):
        door, _ = full(places, 0, answer_s)
        assert door.wait_s("x") == expected_s
    door, inside = full(places=4, queue_limit=0, answer_s=None)
    door.leave(inside[0], 8.0)
    door.enter("another")
    assert [door.wait_s(user) for user in ("a", "b", "c", "b")] == [2, 4, 6, 4]


def test_an_engine_learns_how_long_its_answers_take() -> None:
    with toy(replace(INFO, max_sequences=1, queue_limit=0)) as t:
        told: list[Event] = []
        t.engine.submit(Request("r", (1, 2, 3), 3), told.append)
        assert soon(lambda: any(isinstance(event, Finish) for event in told))
        [finish] = [event for event in told if isinstance(event, Finish)]
        assert t.engine._open._answer_s == pytest.approx(finish.prefill_s + finish.decode_s)


def test_idle_work_has_a_door_of_its_own() -> None:
    door, _ = full()
    for _ in range(MOST_IDLE):
        door.enter("x", idle=True)
    with pytest.raises(QueueFullError, match=f"{MOST_IDLE} requests"):
        door.enter("x", idle=True)
    assert not door.admission._line._until


def test_the_line_is_bounded() -> None:
    line = Line()
    for number in range(MOST_USERS + 9):
        line.wait(str(number), 10.0)
    line.wait("0", 20.0)
    assert line.ahead(None, 10.0) == MOST_USERS
    assert line.ahead(None, 10.1) == 1
    assert line.ahead("0", 10.1) == 0


def shares(clients: int, seconds: float, seed: int) -> tuple[Counter[str], float]:
    """Answers by client, of clients who ask again at once after each and a little late after each refusal; and the
    share of time in which seats were taken. Seats are given in the order in which requests came in."""
    door, draw = Door(4, 8), random.Random(seed)
    due: list[tuple[float, int, str, Sequence | None]] = []
    waiting: list[Sequence] = []
    answers: Counter[str] = Counter()
    seated, count, busy_s = 0, 0, 0.0

    def at(time_s: float, user: str, ended: Sequence | None = None) -> None:
        nonlocal count
        count += 1
        heapq.heappush(due, (time_s, count, user, ended))

    for number in range(clients):
        at(door.now + draw.random(), str(number))
    until = door.now + seconds
    while due[0][0] < until:
        now, _, user, ended = heapq.heappop(due)
        busy_s += (now - door.now) * seated
        door.now = now
        if ended is not None:
            answers[user] += 1
            door.leave(ended)
            seated -= 1
            at(now + 0.01, user)
        else:
            try:
                waiting.append(door.enter(user))
            except QueueFullError as error:
                at(now + (error.retry_after_s or 0) + draw.random() * 0.3, user)
        while waiting and seated < 4:
            sequence = waiting.pop(0)
            seated += 1
            at(now + ANSWER_S * (0.5 + draw.random()), sequence.request.user, sequence)
    return answers, busy_s / seconds / 4


@pytest.mark.parametrize("seed", range(3))
def test_equal_clients_get_equally_much(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, busy = shares(64, 600, seed)
    assert max(answers.values()) / min(answers.values()) < 1.15
    assert busy > 0.995, "fairness costs no work"
    monkeypatch.setattr(Line, "ahead", lambda *args: 0)
    by_chance, _ = shares(64, 600, seed)
    assert max(by_chance.values()) / min(by_chance.values()) > 1.4, "the control: who comes at the right moment"
