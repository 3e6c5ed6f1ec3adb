"""A real Prometheus scrapes the running stack under a short load, and every panel and rule has data to show."""

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from panels import DASHBOARDS, Query, panel_queries
from running import Reply, Running, until, user
from scraped import Prometheus

pytestmark = pytest.mark.skipif(not shutil.which("prometheus"), reason="no Prometheus here: apt install prometheus")
LOAD_S = 8


@pytest.fixture
def prometheus(tmp_path: Path, stack: Running) -> Iterator[Prometheus]:
    server = Prometheus(tmp_path, stack)
    try:
        assert until(server.is_up, 30), (tmp_path / "log").read_text()
        yield server
    finally:
        server.close()


def load(stack: Running, until_time: float) -> None:
    """Two dialogs at a time, some with a second turn, one refused: a bit of everything that panels show."""
    plain = stack.client.models.list().data[0].id

    def talk(number: int) -> None:
        turn = 0
        while time.time() < until_time:
            turn += 1
            dialog = [user(f"What is {number} + {turn}?")]
            reply = Reply(stack.client, plain, dialog, max_tokens=12)
            Reply(
                stack.client,
                plain,
                [*dialog, {"role": "assistant", "content": reply.content}, user("Thanks!")],
                max_tokens=4,
            )
            with pytest.raises(openai.BadRequestError):
                Reply(stack.client, plain, [], max_tokens=1)

    threads = [threading.Thread(target=talk, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_every_panel_has_data(prometheus: Prometheus, stack: Running) -> None:
    begin = time.time()
    load(stack, begin + LOAD_S)
    queries = [query for dashboard in DASHBOARDS for query in panel_queries(dashboard)]
    assert until(lambda: all(prometheus.has_data(query, begin) for query in queries), 10), [
        str(query) for query in queries if not prometheus.has_data(query, begin)
    ]
    assert not prometheus.has_data(Query("control", "rate(thimble_no_such_thing_total[30s])"), begin)

    assert prometheus.has_data(Query("rule", "thimble:expert_hit_ratio:rate10m"), begin)
    rules = [rule for group in prometheus.get("/api/v1/rules")["groups"] for rule in group["rules"]]
    assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []
    # One is pending for a moment when a busy machine answers a scrape late.
    assert until(lambda: prometheus.get("/api/v1/alerts")["alerts"] == [], 30)
