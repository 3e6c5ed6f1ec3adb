"""The turns of `bench stall`, on a network without arithmetic: who is fed what, and when."""

import time
from argparse import Namespace
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.engine.model import Segment
from services.tools import bench_stall

ARGS = Namespace(tokens=20)
PLACES = 6  # of a chunk, where others may run


class Network:
    def __init__(self) -> None:
        self.read: list[int] = []
        self.answered, self.held = 0, 0
        self.sweep = SimpleNamespace(tokens=8)

    def new_state(self, tokens: int) -> Any:
        self.held += 1
        return SimpleNamespace(release=lambda: setattr(self, "held", self.held - 1))

    def forward(self, segments: list[Segment]) -> None:
        assert [len(segment.ids) for segment in segments] == [1]
        self.answered += 1

    def reading(self, segments: list[Segment]) -> Iterator[float]:
        self.read.append(len(segments[0].ids))
        for place in range(PLACES):
            time.sleep(0.001)
            yield place / PLACES


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    monkeypatch.setattr(bench_stall, "SLICE_S", 0.0015)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return Network()


@pytest.mark.parametrize("answers", [True, False])
def test_the_whole_prompt_is_read_and_an_answer_runs_between_slices(network: Network, answers: bool) -> None:
    took, gaps = bench_stall.beside(network, ARGS, 100, answers)  # type: ignore[arg-type]
    assert network.read == [8, 8, 4]
    assert network.answered == 1 + len(gaps), "the first token is of before"
    assert len(gaps) > 0 if answers else not gaps
    assert all(gap >= 0.0015 for gap in gaps), "not before the slice is over"
    assert sum(gaps) <= took
    assert took >= 3 * PLACES * 0.001
    assert network.held == 0


def test_an_answer_alone_leaves_its_first_token_out(network: Network) -> None:
    assert len(bench_stall.answer(network, 5, 100)) == 5  # type: ignore[arg-type]
    assert network.answered == 6
    assert network.held == 0
