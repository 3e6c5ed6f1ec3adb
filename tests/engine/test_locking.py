"""What page-locked RAM takes of a card: measured through a runtime that stands for CUDA's."""

import pytest

from services.engine.gpu import locking
from services.engine.gpu.ledger import LOCKED_SHARE, MIB


class Card:
    """Page tables of `share` of what is locked, in pieces of 2 MiB. Refuses to lock more than `most_bytes`."""

    def __init__(self, share: float, most_bytes: int = 1 << 60, spare_bytes: int = 0) -> None:
        """`spare_bytes` of a piece are there before."""
        self.share, self.most_bytes, self.spare_bytes = share, most_bytes, spare_bytes
        self.locked: dict[int, int] = {}
        self.peak_bytes = 0

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        assert address not in self.locked
        if sum(self.locked.values()) + size_bytes > self.most_bytes:
            return 2
        self.locked[address] = size_bytes
        self.peak_bytes = max(self.peak_bytes, sum(self.locked.values()))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0

    def free_bytes(self) -> int:
        tables = max(0, int(sum(self.locked.values()) * self.share) - self.spare_bytes)
        return 8000 * MIB - -(-tables // (2 * MIB)) * 2 * MIB


@pytest.mark.parametrize("spare_bytes", [0, MIB // 3, 2 * MIB - 1])
@pytest.mark.parametrize("share", [0.0, 1 / 4096, 1 / 512, 1 / 500, 1 / 256])
def test_the_share_is_measured(share: float, spare_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locking, "LONGEST_S", 60.0)  # whatever else this machine does meanwhile
    card = Card(share, spare_bytes=spare_bytes)
    found = locking.measured_share(card, card.free_bytes)
    assert share < found <= share + 2 * locking.GRAIN_BYTES / card.peak_bytes
    if share >= 1 / 512:
        assert found <= 1.03 * share, "no more than a step's worth is guessed"
    assert not card.locked, "and all is unlocked again"


@pytest.mark.parametrize("steps", [16, 33, 50, 127])
def test_in_less_time_less_exactly_and_never_too_little(steps: int) -> None:
    card = Card(1 / 512, most_bytes=steps * locking.STEP_BYTES)
    found = locking.measured_share(card, card.free_bytes)
    assert 1 / 512 < found <= (1.15 if steps >= 33 else 2.1) / 512


def test_where_little_can_be_locked_it_is_assumed() -> None:
    card = Card(1 / 100, most_bytes=512 * MIB)
    assert locking.measured_share(card, card.free_bytes) == LOCKED_SHARE
    assert not card.locked
    assert card.peak_bytes == 512 * MIB


def test_what_another_process_takes_meanwhile_is_not_believed() -> None:
    card = Card(1 / 20)
    assert locking.measured_share(card, card.free_bytes) == locking.MOST_SHARE


def test_it_takes_no_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locking, "LONGEST_S", 0.0)
    card = Card(1 / 512)
    assert locking.measured_share(card, card.free_bytes) == LOCKED_SHARE
    assert card.peak_bytes == 0
