"""Twenty turns cost their new text only, counted by what the engine executed."""

from pathlib import Path

import pytest
from twenty_turns import TURNS, WITH_PICTURE, open_fleet, run, seeing_store

from services.engine.experts.store import Store

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing_store(tmp_path_factory.mktemp("seeing"))


@pytest.mark.parametrize("thinking", [False, True], ids=["plain", "thinking"])
def test_twenty_turns_cost_their_new_text_only(demo_store: Store, tmp_path: Path, thinking: bool) -> None:
    with open_fleet(demo_store.folder, tmp_path) as fleet:
        costs = run(fleet, demo_store.folder, thinking, picture=False)
    assert [ran for ran, _ in costs[1:]] == [ideal for _, ideal in costs[1:]]
    assert len(costs) == TURNS


@pytest.mark.parametrize("thinking", [False, True], ids=["plain", "thinking"])
def test_so_they_do_with_a_picture_among_them(seeing: Path, tmp_path: Path, thinking: bool) -> None:
    with open_fleet(seeing, tmp_path) as fleet:
        costs = run(fleet, seeing, thinking, picture=True)
    assert [ran for ran, _ in costs[1:]] == [ideal for _, ideal in costs[1:]]
    assert costs[WITH_PICTURE][1] > costs[WITH_PICTURE - 1][1], "the picture has tokens of its own"
