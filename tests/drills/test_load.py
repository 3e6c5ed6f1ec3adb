"""Short runs of the load drill, and that it would see what it looks for."""

import asyncio
import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import crowd
import httpx
import pytest
from crowd import QUESTIONS, Client, Question, Seen
from load import complains, drill, fairness
from timing import in_time
from vitals import Sample, Vitals, growth

from services.api.logs import JsonLines
from services.engine.experts.store import Store

pytestmark = pytest.mark.timeout(300)


def test_a_crowd_gets_right_answers_and_leaves_nothing(demo_store: Store, tmp_path: Path) -> None:
    for seconds in (5, 40):  # a busy machine may not come to many answers in the first
        folder = tmp_path / str(seconds)
        folder.mkdir()
        [(_, one)] = drill(demo_store.folder, folder, levels=(), full=20, seconds=seconds)
        assert one.sound, str(one)
        if one.seen.answers > 5:
            break
    assert one.seen.answers > 5
    assert one.seen.refused > 0, "20 clients, four places and a queue of eight"
    assert max(one.engine.threads, one.api.threads) <= 2, "pools may grow, a thread for each client may not be"


def test_a_fault_of_our_own_is_seen_in_a_log() -> None:
    try:
        raise RuntimeError("ours")
    except RuntimeError:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "a request failed", None, sys.exc_info())
    assert complains(JsonLines().format(record))
    record.levelno, record.levelname = logging.INFO, "INFO"
    assert not complains(JsonLines().format(record))


async def judged(answer: httpx.Response, expected: Mapping[Question, Any]) -> Seen:
    transport = httpx.MockTransport(lambda request: answer)
    async with httpx.AsyncClient(base_url="http://test", transport=transport) as http:
        client = Client(http, 0, "steady", expected, float("-inf"))
        await client._stream(QUESTIONS[0])
    return client.seen


@pytest.mark.parametrize("case", ["right", "wrong", "a bit", "failure", "busy", "busy late", "busy without a time"])
def test_the_drill_can_fail(case: str) -> None:
    entry = {"token": "b" if case == "wrong" else "a", "logprob": -0.25 if case == "a bit" else -0.5}
    event = json.dumps({"choices": [{"logprobs": {"content": [entry]}}]})
    replies = {
        "failure": httpx.Response(200, text='data: {"error": {"code": "engine_failed"}}\n\n'),
        "busy late": httpx.Response(200, text='data: {"error": {"code": "queue_full"}}\n\n'),
        "busy": httpx.Response(429, headers={"Retry-After": "3"}),
        "busy without a time": httpx.Response(429),
    }
    seen = asyncio.run(
        judged(
            replies.get(case, httpx.Response(200, text=f"data: {event}\n\ndata: [DONE]\n\n")),
            {QUESTIONS[0]: [("a", -0.5)]},
        )
    )
    assert seen.wrong == (case in ("wrong", "a bit"))
    assert seen.answers == (case in ("right", "wrong", "a bit"))
    assert sum(seen.failures.values()) == (case in ("failure", "busy without a time"))
    assert seen.refused == (case in ("busy", "busy late"))


def test_fairness_is_of_the_steady_ones() -> None:
    clients = [Client(None, n, "steady" if n else "slow", {}, 0.0) for n in range(3)]  # type: ignore[arg-type]
    for client, tokens in zip(clients, (1, 10, 20), strict=True):
        client.seen.tokens = tokens
    assert fairness(clients) == 2.0
    assert {crowd.manner_of(n, 16) for n in range(16)} == {"steady", "leaves", "slow", "retries"}


def test_a_leak_is_a_slope_and_a_handle_too_many_is_counted() -> None:
    flat = [Sample(float(n), 10**9, 20, 8) for n in range(120)]
    assert (growth(flat).rss_percent_a_minute, growth(flat).handles, growth(flat).threads) == (0.0, 0, 0)
    leaking = [Sample(float(n), 10**9 + n * 10**6, 20 + n // 60, 8 + n // 100) for n in range(120)]
    assert 5 < growth(leaking).rss_percent_a_minute < 6, "a MB a second of a GB"
    assert (growth(leaking).handles, growth(leaking).threads) == (1, 1)
    assert growth(leaking).handles_kept == 1
    passing = [Sample(float(n), 10**9, 21 if n == 100 else 20, 8) for n in range(120)]
    assert (growth(passing).handles, growth(passing).handles_kept) == (1, 0)
    filled = [Sample(float(n), min(10**9, 10**7 * n), 20, 8) for n in range(240)]
    assert growth(filled).rss_percent_a_minute == 0.0, "a cache that was filled in the first half"


def test_it_watches_this_process() -> None:
    with Vitals({"me": os.getpid()}, every_s=0.02) as vitals:
        seen = vitals.samples["me"]
        assert in_time(lambda: len(seen) > 1)
        kept = [open("/proc/self/status") for _ in range(20)]  # noqa: SIM115
        before = len(seen)
        assert in_time(lambda: len(seen) > before + 2)
        for file in kept:
            file.close()
    assert seen[before + 2].handles > seen[0].handles + 10, "some of earlier tests may be closed meanwhile"
