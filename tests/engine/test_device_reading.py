"""The GPU model's `reading`, without a GPU: which ids decoders get, what may come in between, what a failure leaves.

A step has one or two rows, or four.
"""

import pytest
import torch
from torch import Tensor

from kernels.experts.device.turns import HandoffError
from services.engine.errors import StepError
from services.engine.gpu.decoder import Row
from services.engine.gpu.memory import DeviceState
from services.engine.gpu.model import DeviceModel
from services.engine.model import GaveWay, Segment

VOCAB = 50


class Pool:
    kept = None  # no drafts

    def require(self, pages: int) -> None:
        pass


class Place(DeviceState):
    """A state that lies nowhere."""

    def __init__(self) -> None:
        self.ids, self.spoiled = [], False

    def pages_missing(self, tokens: int) -> int:
        return 0

    def reserve(self, tokens: int) -> None:
        pass


class OneHot:
    """Says the last id and how many there were; as a real decoder, always in the same memory."""

    def __init__(self, rows: int, fed: list[list[int]]) -> None:
        self.rows, self.fed = rows, fed
        self.logits = torch.zeros(rows, VOCAB)

    def run(self, rows: list[Row]) -> Tensor:
        assert len(rows) == self.rows
        self.fed.append([row.id for row in rows])
        if any(row.id == 49 for row in rows):
            raise HandoffError("disk gone")
        self.logits.zero_()
        for number, (row, values) in enumerate(zip(rows, self.logits, strict=True)):
            values[row.id] = len(row.state.ids) + 1 + sum(other.state is row.state for other in rows[:number])
        return self.logits


@pytest.fixture
def fed() -> list[list[int]]:
    return []


@pytest.fixture
def model(fed: list[list[int]]) -> DeviceModel:
    model = DeviceModel.__new__(DeviceModel)
    model.sweep = None
    model.pool, model.told = Pool(), str.upper  # type: ignore[assignment]
    model.decoders = [OneHot(rows, fed) for rows in (1, 2, 4)]  # type: ignore[misc]
    return model


def test_others_may_run_between_two_steps(model: DeviceModel, fed: list[list[int]]) -> None:
    """A sequence's ids are neighbours in a step, and every step has as many rows as there are."""
    places = [Place() for _ in range(4)]
    wanted = [1, 2, 3], [4], [5, 6, 9]
    running = model.reading([Segment(place, ids) for place, ids in zip(places, wanted, strict=False)])
    told, logits = [], torch.empty(0)
    while True:
        try:
            told.append(next(running))
        except StopIteration as end:
            logits = end.value
            break
        model.forward([Segment(places[3], [7])])
        model.forward([Segment(Place(), [8]), Segment(Place(), [8])])
    assert [ids for ids in fed if ids not in ([7], [8, 8])] == [[1, 2, 3, 4], [5, 6], [9]]
    assert told == pytest.approx([4 / 7, 6 / 7])
    assert logits.argmax(1).tolist() == [3, 4, 9]
    assert logits.max(1).values.tolist() == [3, 1, 3]
    assert [place.ids for place in places] == [[1, 2, 3], [4], [5, 6, 9], [7, 7]]
    assert not any(place.spoiled for place in places)


def test_closed_early_or_failed_it_spoils_all_its_states(model: DeviceModel) -> None:
    places = [Place() for _ in range(4)]
    running = model.reading([Segment(places[0], [1, 2, 4, 5]), Segment(places[1], [3])])
    next(running)
    running.close()
    with pytest.raises(StepError, match="DISK GONE"):
        model.forward([Segment(places[2], [49])])
    assert [place.spoiled for place in places] == [True, True, True, False]
    model.forward([Segment(places[3], [1, 2])])
    assert not places[3].spoiled


def test_forward_gives_way_between_two_steps_and_not_behind_the_last(model: DeviceModel) -> None:
    place = Place()
    with pytest.raises(GaveWay):
        model.forward([Segment(place, [1, 2, 3])], lambda: True)
    assert (place.ids, place.spoiled) == ([1, 2], True)
    assert model.forward([Segment(Place(), [1])], lambda: True).argmax().item() == 1
