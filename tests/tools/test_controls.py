"""The nine mistakes are caught by their figures, and a control that catches nothing would be seen."""

import dataclasses
from pathlib import Path

import pytest

from services.tools import controls
from services.tools.controls import CAUGHT_KL, CONTROLS, Control
from services.tools.parity import MEAN_KL_BAR


def test_there_are_the_nine() -> None:
    assert len({control.name for control in CONTROLS}) == len({control.fault for control in CONTROLS}) == 9
    assert CAUGHT_KL >= 10 * MEAN_KL_BAR


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name.replace(" ", "-"))
def test_a_mistake_is_caught(control: Control, tmp_path: Path) -> None:
    [result] = controls.run(tmp_path, (control,))
    assert result.sound.passed, result.sound
    assert result.sound.mean_kl < MEAN_KL_BAR / 100
    assert result.faulty.mean_kl >= CAUGHT_KL, result.faulty
    assert result.caught


@pytest.mark.parametrize("in_store", [True, False])
def test_no_mistake_is_not_caught(in_store: bool, tmp_path: Path) -> None:
    none = (lambda store, folder: store) if in_store else (lambda model, undo: None)
    [result] = controls.run(tmp_path, (dataclasses.replace(CONTROLS[0], fault=none, in_store=in_store),))
    assert not result.caught
    assert result.faulty.mean_kl == result.sound.mean_kl


def test_a_mistake_is_undone_with_its_model(tmp_path: Path) -> None:
    [rope] = [control for control in CONTROLS if control.name == "RoPE on"]
    first, second = controls.run(tmp_path, (rope, dataclasses.replace(rope, fault=lambda model, undo: None)))
    assert first.caught
    assert not second.caught


def test_the_command_fails_when_one_is_not_caught(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from services.tools.cli import main

    broken = dataclasses.replace(CONTROLS[0], fault=lambda store, folder: store)
    for chosen, status, verdict in (((CONTROLS[3],), 0, "  caught"), ((CONTROLS[3], broken), 1, "NOT CAUGHT")):
        monkeypatch.setattr(controls.run, "__defaults__", (chosen,))
        assert main(["verify", "--controls"]) == status
        assert verdict in capsys.readouterr().out
