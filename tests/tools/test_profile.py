"""thimble profile without a GPU: what it says, and that it makes nothing."""

from pathlib import Path

import pytest
import torch

from services.tools import synth
from services.tools.bench_decode import METHODS
from services.tools.cli import main


def test_a_machine_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    synth.synthesise(tmp_path / "store", "small")
    assert main(["profile", str(tmp_path / "store"), "--out", str(tmp_path / "out")]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_store_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(tmp_path)]) == 1
    assert "there is no store" in capsys.readouterr().err


def test_every_method_can_be_asked_for() -> None:
    assert METHODS["split"].share is None, "found by itself"
    assert METHODS["cpu"].share == 0
    assert METHODS["published"].whole_groups
