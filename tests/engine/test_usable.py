"""The card's context: made before anybody plans with what is free, and with less set aside; no card is needed."""

import pytest
import torch

from services.engine.errors import DeviceError, MemoryPlanError
from services.engine.gpu import limits, usable


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done with a card that is usable, in order."""
    made: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", made.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: made.append("context"))
    monkeypatch.setattr(usable, "check_build_tools", lambda: None)
    monkeypatch.setattr(limits, "lower", lambda: made.append("limits"))
    return made


def test_limits_are_lowered_in_a_context_that_is_there(done: list[str]) -> None:
    assert usable.usable_device() == torch.device("cuda", 0)
    assert done == ["expandable_segments:True", "context", "limits"]


@pytest.mark.parametrize(
    ("said", "kind", "message"),
    [
        ("CUDA error: out of memory", MemoryPlanError, "no room for a program: .*; close what else"),
        ("CUDA error: uncorrectable ECC error encountered", DeviceError, "does not work: CUDA error: uncorrectable"),
    ],
)
def test_a_card_that_makes_no_context_is_refused(
    done: list[str], monkeypatch: pytest.MonkeyPatch, said: str, kind: type[Exception], message: str
) -> None:
    def refuse() -> None:
        raise torch.AcceleratorError(said)

    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    with pytest.raises(kind, match=message):
        usable.usable_device()
    assert "limits" not in done
