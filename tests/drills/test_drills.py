"""Short runs of the drills: members killed, a store in trouble."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import xxhash
from fleet import Fleet
from kill_drill import Report, _judge, drill, fleets
from twenty_turns import settle

from services.engine.experts.store import Store

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def both(demo_store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, Fleet]]:
    with fleets(demo_store.folder, tmp_path_factory.mktemp("drills")) as running:
        yield running


def reply(text: str, prompt_tokens: int, cached_tokens: int) -> dict[str, Any]:
    usage = {"prompt_tokens": prompt_tokens, "prompt_tokens_details": {"cached_tokens": cached_tokens}}
    return {"choices": [{"message": {"content": text}}], "usage": usage}


def test_ten_turns_with_kills(both: tuple[Fleet, Fleet]) -> None:
    report = drill(*both, turns=10, seed=3, say=lambda text: None, bystanders=1)
    assert sum(report.kills.values()) >= 3
    assert (report.turns, report.failures) == (10, [])
    assert report.others > 0


def test_the_drill_can_fail() -> None:
    report = Report()
    _judge(report, reply("a", 50, 40), reply("a", 50, 0), [20, 30], True)
    assert report.failures == []
    _judge(report, reply("b", 50, 40), reply("a", 50, 0), [20, 30], True)
    assert (report.wrong, report.lost) == (1, 0)
    _judge(report, reply("a", 50, 5), reply("a", 50, 0), [20, 30], True)
    assert (report.wrong, report.lost) == (1, 1)


def test_a_killed_engine_s_dialog_goes_on_at_the_other(both: tuple[Fleet, Fleet]) -> None:
    fleet, reference = both
    for victim in fleet.engines:
        dialog: list[Any] = [{"role": "user", "content": f"What is 20 + 2{victim[-1]}?"}]
        first = fleet.chat(dialog)
        time.sleep(2.0)  # what is in flight is stored
        fleet.kill(victim)
        dialog += [first["choices"][0]["message"], {"role": "user", "content": "What is the capital of France?"}]
        second = fleet.chat(dialog)
        fleet.start(victim)
        assert second["choices"][0]["message"]["content"] == reference.chat(dialog)["choices"][0]["message"]["content"]
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= first["usage"]["prompt_tokens"] - 8
        fleet.wait_until_ready()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def fill_up(client: Any) -> None:
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", 1)


def spoil(client: Any) -> None:
    for name in client.keys("*"):
        client.delete(name)
        client.set(name, b"rubbish")


def age(client: Any) -> None:
    """Payloads of the format before this one, as sound as they were then."""
    for name in client.keys("*:state:*"):
        data = bytearray(b"".join(client.hget(name, str(n)) for n in range(client.hlen(name) - 1)))
        data[8:12] = (1).to_bytes(4, "little")
        data[-8:] = xxhash.xxh3_64_intdigest(bytes(data[:-8])).to_bytes(8, "little")
        for start in range(0, len(data), 1 << 20):
            client.hset(name, str(start >> 20), bytes(data[start : start + (1 << 20)]))


def sleep(client: Any) -> None:
    """Two seconds for a command: the server does nothing else meanwhile."""
    client.client_pause(4000)


@pytest.mark.parametrize("trouble", [fill_up, spoil, age, sleep])
def test_a_store_in_trouble_costs_no_answer(
    both: tuple[Fleet, Fleet], demo_store: Store, tmp_path: Path, trouble: Any
) -> None:
    _, reference = both
    dialog: list[Any] = [user("What is the capital of France?")]
    with Fleet(demo_store.folder, tmp_path, engines=1, ENGINE_WORKERS="1", ENGINE_HOT_STATES_GB="0") as fleet:
        for turn in range(3):
            answer, expected = fleet.chat(dialog), reference.chat(dialog)
            assert answer["choices"][0]["message"]["content"] == expected["choices"][0]["message"]["content"]
            dialog += [expected["choices"][0]["message"], user(f"What is {turn} + 4?")]
            settle(fleet)
            with redis.Redis.from_url(fleet.redis_url) as client:
                trouble(client)
