"""Users take turns through the whole product: twelve requests of one do not hold up another's."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from running import Running, user


@pytest.mark.parametrize("name", ["other", "greedy"], ids=["another user", "the control"])
def test_a_crowd_of_one_user_does_not_hold_up_another(stack: Running, name: str) -> None:
    model = stack.client.models.list().data[0].id

    def ask(who: str) -> tuple[float, float]:
        """When the answer ended, and how long it waited."""
        reply: Any = stack.client.chat.completions.create(
            model=model,
            messages=[user("Tell me a long story.")],
            max_tokens=60,
            user=who,
            extra_body={"ignore_eos": True},
        )
        return time.monotonic(), reply.model_extra["timings"]["queue_ms"]

    with ThreadPoolExecutor(13) as pool:
        crowd = [pool.submit(ask, "greedy") for _ in range(12)]
        deadline = time.monotonic() + 30
        while stack.metrics()["thimble_num_requests_waiting"] < 7:
            assert time.monotonic() < deadline
        last = pool.submit(ask, name)
        ended, _ = last.result()
        behind = sum(call.result()[0] > ended for call in crowd)
    assert (behind >= 3) == (name == "other"), f"{behind} of the crowd ended later"
