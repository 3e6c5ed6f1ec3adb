"""Users take turns: at the places, at the reading, and at the door when the queue is full."""

from dataclasses import replace

import pytest
from toy_engine import INFO, Gate, Toy, soon, toy

from services.engine.errors import QueueFullError
from services.engine.request import Event, Finish, Progress, Request

ONE = replace(INFO, max_sequences=1, queue_limit=12)
GREEDY = Request("greedy", (1, 2, 3, 4, 5), 3, user="greedy")
MODEST = Request("modest", (9, 8, 7), 3, user="modest")


class Crowd:
    """Requests of an engine whose model stands at a gate, and what they are told, in its order."""

    def __init__(self, t: Toy) -> None:
        self.t = t
        self.gate = Gate()
        t.model.before = self.gate
        self.asked = 0
        self.told: list[tuple[int, Event]] = []

    def ask(self, *requests: Request) -> None:
        """The first one goes to the gate; the others come in behind it, together."""
        for request in requests:
            number = self.asked
            self.asked += 1
            self.t.engine.submit(request, lambda event, number=number: self.told.append((number, event)))
            if number == 0:
                self.gate.hold(1)

    def order(self) -> list[int]:
        """Open the gate; the requests by their number, in the order they end."""
        self.gate.open()
        assert soon(lambda: len(self.ended()) == self.asked)
        return self.ended()

    def ended(self) -> list[int]:
        return [number for number, event in list(self.told) if isinstance(event, Finish)]

    def read_tokens(self, number: int) -> int:
        done = [e.done_tokens for n, e in list(self.told) if n == number and isinstance(e, Progress)]
        return max(done, default=0)


@pytest.mark.parametrize(("user", "place"), [("modest", 1), ("greedy", 10)], ids=["another user", "the control"])
def test_ten_requests_of_one_user_do_not_hold_up_another(user: str, place: int) -> None:
    with toy(ONE) as t:
        crowd = Crowd(t)
        crowd.ask(*[GREEDY] * 10, replace(MODEST, user=user))
        assert crowd.order().index(10) == place


def test_three_users_get_a_place_by_turns() -> None:
    with toy(ONE) as t:
        crowd = Crowd(t)
        users = "aaabbc"
        crowd.ask(*[replace(GREEDY, user=user) for user in users])
        assert "".join(users[number] for number in crowd.order()) == "abcaba"


@pytest.mark.parametrize(("user", "first"), [("modest", [4, 1]), ("greedy", [1, 2])], ids=["another user", "control"])
def test_who_has_a_place_is_behind_who_has_none(user: str, first: list[int]) -> None:
    with toy(replace(ONE, max_sequences=2)) as t:
        crowd = Crowd(t)
        crowd.ask(replace(GREEDY, max_tokens=40), GREEDY, GREEDY, GREEDY, replace(MODEST, user=user))
        assert crowd.order()[:2] == first, "the second place goes from hand to hand"


@pytest.mark.parametrize(("user", "share"), [("modest", 2), ("greedy", 4)], ids=["another user", "the control"])
def test_prompts_are_read_by_turns_of_users(user: str, share: int) -> None:
    """Three long prompts of one user and one of another's: how much of the last one is read by the 25th chunk."""
    with toy(replace(ONE, max_sequences=4), chunk_tokens=4, pages=128) as t:
        crowd = Crowd(t)
        long = tuple(range(1, 41)) * 4
        crowd.ask(*[replace(GREEDY, ids=long)] * 3, replace(MODEST, ids=long, user=user))
        crowd.gate.hold(25)
        assert crowd.read_tokens(3) == pytest.approx(4 * 24 / share, abs=4)
        crowd.order()


def test_who_has_nothing_under_way_is_let_in_when_the_queue_is_full() -> None:
    with toy(replace(INFO, max_sequences=1, queue_limit=2)) as t:
        crowd = Crowd(t)
        crowd.ask(GREEDY, GREEDY, GREEDY)
        with pytest.raises(QueueFullError, match="3 requests are under way or waiting"):
            crowd.ask(GREEDY)
        crowd.asked -= 1
        crowd.ask(MODEST, replace(MODEST, user="third"))
        with pytest.raises(QueueFullError, match="5 requests"):
            crowd.ask(replace(MODEST, user="fourth"))
        crowd.asked -= 1
        assert crowd.order()[0] == 0
        t.ask(GREEDY).finish()


def test_low_priority_is_behind_every_user() -> None:
    with toy(ONE) as t:
        crowd = Crowd(t)
        crowd.ask(GREEDY, replace(MODEST, low_priority=True), GREEDY, GREEDY)
        assert crowd.order() == [0, 2, 3, 1]
