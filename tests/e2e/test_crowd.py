"""Users take turns through the whole product: twelve requests of one do not hold up another's."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from running import Running, until, user

PLACES = 4  # of an engine whose settings do not say another number


@pytest.mark.parametrize("name", ["other", "greedy"], ids=["another user", "the control"])
def test_a_crowd_of_one_user_does_not_hold_up_another(stack: Running, name: str) -> None:
    model = stack.client.models.list().data[0].id

    story: Any = {"model": model, "messages": [user("Tell me a long story.")], "extra_body": {"ignore_eos": True}}

    def ask(who: str) -> float:
        """When the answer ended."""
        stack.client.chat.completions.create(user=who, max_tokens=60, **story)
        return time.monotonic()

    def waiting() -> float:
        return stack.metrics()["thimble_num_requests_waiting"]

    with ThreadPoolExecutor(13) as pool, ExitStack() as held:
        for _ in range(PLACES):  # by others, until all of the crowd are there
            before: Any = stack.client.chat.completions.create(user="before", stream=True, max_tokens=3000, **story)
            held.enter_context(before)
        crowd = [pool.submit(ask, "greedy") for _ in range(12)]
        assert until(lambda: waiting() == 12, 60)
        last = pool.submit(ask, name)
        assert until(lambda: waiting() == 13, 60)
        held.close()
        ended = last.result()
        behind = sum(call.result() > ended for call in crowd)
    assert (behind >= 3) == (name == "other"), f"{behind} of the crowd ended later"
