"""Short runs of the drills: members killed, a store in trouble, twenty turns counted by what the engine executed."""

import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import xxhash
from fleet import Fleet
from kill_drill import Report, _judge, drill, fleets

from services.api.model_folder import ModelFolder, load_model_folder
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
    report = drill(*both, turns=10, seed=3, say=lambda text: None)
    assert sum(report.kills.values()) >= 3
    assert (report.turns, report.failures) == (10, [])


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


def executed(fleet: Fleet) -> float:
    """Prompt tokens that the fleet's engines ran for requests, by their own count."""
    total = 0.0
    for name in fleet.engines:
        line = next(line for line in fleet.log(name).splitlines()[::-1] if line.startswith("ready:"))
        with urllib.request.urlopen(line.split("metrics on ")[1], timeout=10) as answer:
            for sample in answer.read().decode().splitlines():
                if sample.startswith("thimble_prompt_tokens_total"):
                    total += float(sample.rsplit(" ", 1)[1])
    return total


TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@pytest.mark.parametrize("thinking", [False, True], ids=["plain", "thinking"])
def test_twenty_turns_cost_their_new_text_only(demo_store: Store, tmp_path: Path, thinking: bool) -> None:
    folder: ModelFolder = load_model_folder(demo_store.folder)
    opening = "<think>\n" if thinking else "<think></think>"
    dialog: list[Any] = [{"role": "system", "content": "You are a patient assistant."}]
    with Fleet(demo_store.folder, tmp_path, engines=1, ENGINE_WORKERS="1", ENGINE_HOT_STATES_GB="0.02") as fleet:
        costs: list[tuple[float, int]] = []
        calls: Any = None
        for turn in range(20):
            text = f"What is {turn} + {turn}?"
            dialog.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": text} if calls else user(text))
            before = executed(fleet)
            answer = fleet.chat(
                dialog,
                model="demo-think" if thinking else "demo",
                tools=[TOOL],
                tool_choice="required" if turn in (4, 11) else "auto",
                max_tokens=200,
            )
            ran = executed(fleet) - before
            assert ran == answer["usage"]["prompt_tokens"] - answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            shown = f"<tool_response>\n{text}\n</tool_response>\n" if calls else text
            new = f"<|im_start|>user\n{shown}<|im_end|>\n<|im_start|>assistant\n{opening}"
            costs.append((ran, len(folder.tokenizer.encode(new))))
            message = answer["choices"][0]["message"]
            calls = message.get("tool_calls")
            assert calls or turn not in (4, 11)
            dialog.append({key: message[key] for key in ("role", "content", "tool_calls") if key in message})
            settle(fleet)
    assert [ran for ran, _ in costs[1:]] == [ideal for _, ideal in costs[1:]]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def settle(fleet: Fleet) -> None:
    """Until the newest history is read ahead and stored: nothing grows any more."""
    seen, since = -1.0, time.monotonic()
    while time.monotonic() - since < 0.8:
        with urllib.request.urlopen(f"{fleet.url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        now = sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith(("thimble_api_reads_ahead_total", "thimble_api_snapshot_writes_total"))
        )
        if now != seen:
            seen, since = now, time.monotonic()
        time.sleep(0.05)


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
