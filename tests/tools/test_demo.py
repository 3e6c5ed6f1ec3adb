"""Stores that a full disk or a power cut has damaged: the demo's is made again, another's command says how to."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from services.engine.experts.store import Store
from services.tools import demo
from services.tools.cli import main


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def of_another_version(path: Path) -> None:
    manifest = json.loads((path.parent / "manifest.json").read_text())
    (path.parent / "manifest.json").write_text(json.dumps(manifest | {"version": 99}))


DAMAGES: list[Callable[[Path], None]] = [cut, Path.unlink, lambda path: path.write_bytes(b"")]
FILES = ["manifest.json", "experts.bin", "dense.safetensors", "vision.safetensors", "mtp.safetensors", "tokenizer.json"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("demo") / "store"
    demo.make(store)
    return store


@pytest.mark.parametrize("name", [*FILES, demo.STAMP])
@pytest.mark.parametrize("damage", DAMAGES, ids=["cut", "gone", "empty"])
def test_a_damaged_store_of_the_demo_is_not_taken_for_whole(
    made: Path, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    store = shutil.copytree(made, tmp_path / "store")
    assert demo.is_fresh(store)
    damage(store / name)
    assert not demo.is_fresh(store)


def test_it_is_made_again_whole(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = shutil.copytree(made, tmp_path / "store")
    cut(store / "experts.bin")
    assert main(["demo", str(store)]) == 0
    assert "is made" in capsys.readouterr().out
    assert (store / "experts.bin").read_bytes() == (made / "experts.bin").read_bytes()
    assert demo.is_fresh(store)


def test_what_an_engine_keeps_beside_it_is_no_damage(made: Path, tmp_path: Path) -> None:
    store = shutil.copytree(made, tmp_path / "store")
    (store / "warm.experts").write_bytes(b"of a run")
    (store / "chat_template.jinja").write_text("changed by its owner")
    assert demo.is_fresh(store)
    demo.make(store)
    (store / "warm.experts").write_bytes(b"of a later run")
    assert demo.is_fresh(store)


@pytest.mark.parametrize("name", ["manifest.json", "experts.bin", "dense.safetensors"])
@pytest.mark.parametrize("damage", [*DAMAGES, of_another_version], ids=["cut", "gone", "empty", "version"])
def test_a_damaged_store_says_how_it_is_made_again_and_then_is(
    made: Path, tmp_path: Path, name: str, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    store = shutil.copytree(made, tmp_path / "store")
    damage(store / name)
    words = ["repack", str(demo.CHECKPOINT), str(store)]
    status = main(words)
    if (name, damage) == ("manifest.json", Path.unlink):
        assert status == 0, "no store yet: it is made"
    else:
        assert status == 1
        assert "--replace" in capsys.readouterr().err
        assert main([*words, "--replace"]) == 0
    assert Store.open(store).fingerprint == Store.open(made).fingerprint
