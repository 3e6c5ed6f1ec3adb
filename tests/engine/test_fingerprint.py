"""The arithmetic fingerprint changes with whatever may change a bit, and with nothing else."""

import re
import shutil
from pathlib import Path

import pytest
import torch

import kernels
from services.engine import fingerprint
from services.engine.fingerprint import arithmetic_fingerprint


@pytest.fixture
def copied_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of kernels/ that the fingerprint reads; its cache is cleared."""
    folder = tmp_path / "kernels"
    shutil.copytree(Path(kernels.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    engine = Path(fingerprint.services.engine.model.__file__).parent
    model = tmp_path / "services/engine/model.py"
    model.parent.mkdir(parents=True)
    for name in ("model.py", "sequence.py"):
        shutil.copy(engine / name, model.parent / name)
    shutil.copytree(engine / "gpu", model.parent / "gpu", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(kernels, "__file__", str(folder / "__init__.py"))
    monkeypatch.setattr(fingerprint.services.engine.model, "__file__", str(model))
    return tmp_path


def fresh(model: str = "m", path: str = "cpu") -> str:
    fingerprint._sources.cache_clear()
    return arithmetic_fingerprint(model, path)


def test_is_stable_hex() -> None:
    assert re.fullmatch("[0-9a-f]{64}", fresh())
    assert fresh() == fresh()


def test_model_path_and_torch_are_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fresh()
    assert fresh(model="n") != before
    assert fresh(path="sm_120") != before
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert fresh() != before


@pytest.mark.parametrize(
    "name", ["kernels/norm/reference.py", "kernels/mamba/mamba.cpp", "kernels/elementary/elementary.h"]
)
def test_an_edit_of_a_kernel_changes_it(copied_kernels: Path, name: str) -> None:
    before = fresh()
    path = copied_kernels / name
    path.write_text(path.read_text() + " ")
    assert fresh() != before


@pytest.mark.parametrize("name", ["sequence.py", "gpu/sweep.py", "gpu/token.py"])
def test_an_edit_of_what_puts_kernels_together_changes_it(copied_kernels: Path, name: str) -> None:
    before = fresh()
    path = copied_kernels / "services/engine" / name
    path.write_text(path.read_text() + " ")
    assert fresh() != before


def test_an_edit_of_the_model_changes_it(copied_kernels: Path) -> None:
    before = fresh()
    path = copied_kernels / "services/engine/model.py"
    path.write_text(path.read_text().replace("routed + linear", "linear + routed"))
    assert fresh() != before


def test_a_new_or_renamed_kernel_changes_it(copied_kernels: Path) -> None:
    before = fresh()
    (copied_kernels / "kernels/norm/norm.cpp").rename(copied_kernels / "kernels/norm/norms.cpp")
    renamed = fresh()
    (copied_kernels / "kernels/norm/more.py").write_text("")
    assert len({before, renamed, fresh()}) == 3


def test_the_place_of_the_code_is_not_in_it(copied_kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = fresh()
    monkeypatch.undo()
    assert fresh() == copied


def test_other_files_are_not_in_it(copied_kernels: Path) -> None:
    before = fresh()
    (copied_kernels / "kernels/notes.md").write_text("nothing that computes")
    assert fresh() == before
