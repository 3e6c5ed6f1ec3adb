"""Short runs of the drills: members killed, a store in trouble."""

from collections.abc import Iterator
from typing import Any

import pytest
from fleet import Fleet
from kill_drill import Report, _judge, drill, fleets
from store_troubles import FOUND, TROUBLES, open_fleet, run
from timing import in_time
from twenty_turns import SAVES, _sums_of

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
    report, read, never = Report(), [(100.0, 20), (101.0, 30)], float("-inf")
    _judge(report, reply("a", 50, 40), reply("a", 50, 0), read, never)
    assert report.failures == []
    _judge(report, reply("b", 50, 40), reply("a", 50, 0), read, never)
    assert (report.wrong, report.lost) == (1, 0)
    _judge(report, reply("a", 50, 5), reply("a", 50, 0), read, 100.0)
    assert (report.lost, report.kept) == (0, 2), "the store has lost it too"
    _judge(report, reply("a", 50, 5), reply("a", 50, 0), read, 96.0)
    assert (report.wrong, report.lost, report.kept) == (1, 1, 3)


def saves(fleet: Fleet) -> float:
    [count] = _sums_of(f"{fleet.url}/metrics", SAVES)
    return count


def test_a_killed_engine_s_dialog_goes_on_at_the_other(both: tuple[Fleet, Fleet]) -> None:
    fleet, reference = both
    for victim in fleet.engines:
        dialog: list[Any] = [{"role": "user", "content": f"What is 20 + 2{victim[-1]}?"}]
        wanted = saves(fleet) + 2  # the answer's, and what is read ahead
        first = fleet.chat(dialog)
        assert in_time(lambda wanted=wanted: saves(fleet) >= wanted, 60)
        fleet.kill(victim)
        dialog += [first["choices"][0]["message"], {"role": "user", "content": "What is the capital of France?"}]
        second = fleet.chat(dialog)
        fleet.start(victim)
        assert second["choices"][0]["message"]["content"] == reference.chat(dialog)["choices"][0]["message"]["content"]
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= first["usage"]["prompt_tokens"] - 8
        fleet.wait_until_ready()


@pytest.fixture(scope="module")
def bare(demo_store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with open_fleet(demo_store.folder, tmp_path_factory.mktemp("troubles")) as running:
        yield running


@pytest.mark.parametrize("trouble", list(TROUBLES))
def test_a_store_in_trouble_costs_no_answer(both: tuple[Fleet, Fleet], bare: Fleet, trouble: str) -> None:
    report = run(bare, both[1], trouble, turns=3)
    assert (report.turns, report.wrong) == (3, 0)
    assert report.found == (trouble in FOUND), "else there was no trouble, or more than this one"
