"""Copies of a store's blocks on further disks: written, read by the engine, refused when they are of something else."""

import json
from pathlib import Path

import pytest
import torch

from services.engine.errors import DiskError, StoreError
from services.engine.experts.copies import DRIVE, copies, folders_of
from services.engine.experts.store import EXPERTS, MANIFEST, Store
from services.engine.experts.streamer import open_experts
from services.tools.cli import main
from services.tools.spread import spread


def step(store: Store, *folders: Path) -> torch.Tensor:
    experts = open_experts(store, slots=64, readers=0, copies=copies(store, folders))
    config = store.config
    ids = torch.arange(config.experts, dtype=torch.int32)[None]
    x = torch.randn(1, config.latent_size, generator=torch.Generator().manual_seed(1))
    out = experts.step(3, ids, torch.ones(1, config.experts), x)
    experts.check()
    experts.close()
    return out


@pytest.mark.parametrize("part", ["1/1", "2/2", "3/5"])
def test_a_copy_is_read_and_changes_no_bit(demo_store: Store, tmp_path: Path, part: str) -> None:
    expected = step(demo_store)
    assert main(["spread", str(demo_store.folder), str(tmp_path / "second"), "--part", part]) == 0
    assert torch.equal(step(demo_store, tmp_path / "second"), expected)


def test_a_damaged_copy_costs_a_second_read_only(demo_store: Store, tmp_path: Path) -> None:
    """Every block of the copy is zeros, which would be another answer."""
    spread(demo_store, tmp_path, 0, 1)
    path = tmp_path / EXPERTS
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(step(demo_store, tmp_path), step(demo_store))


@pytest.mark.parametrize("change", ["no file", "cut", "of another store", "of another part", "not ours"])
def test_what_is_not_a_copy_is_refused(demo_store: Store, tmp_path: Path, change: str) -> None:
    spread(demo_store, tmp_path, 0, 2)
    said = json.loads((tmp_path / DRIVE).read_text())
    if change == "no file":
        (tmp_path / DRIVE).unlink()
    elif change == "cut":
        (tmp_path / EXPERTS).write_bytes(b"x")
    elif change == "of another store":
        (tmp_path / DRIVE).write_text(json.dumps(said | {"fingerprint": "0"}))
    elif change == "of another part":
        (tmp_path / DRIVE).write_text(json.dumps(said | {"of": 1}))
    else:
        (tmp_path / DRIVE).write_text("[1]")
    with pytest.raises(StoreError, match="thimble spread"):
        copies(demo_store, [tmp_path])


def test_a_copy_that_goes_away(demo_store: Store, tmp_path: Path) -> None:
    spread(demo_store, tmp_path, 0, 2)
    held = copies(demo_store, [tmp_path])
    (tmp_path / EXPERTS).unlink()
    with pytest.raises(DiskError, match="cannot be opened"):
        open_experts(demo_store, slots=8, copies=held)


def test_the_command_refuses(demo_store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = str(demo_store.folder)
    assert main(["spread", store, store]) == 1
    assert "is the store itself" in capsys.readouterr().err
    for part in ("0/2", "3/2", "x", "1/"):
        with pytest.raises(SystemExit):
            main(["spread", store, str(tmp_path), "--part", part])
    assert not (tmp_path / DRIVE).exists()


def test_what_is_there_is_not_overwritten(
    demo_store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another model's store, or its blocks behind a link; an older copy is."""
    for name in ("a store", "a link"):
        (tmp_path / name).mkdir()
    blocks = tmp_path / "a store" / EXPERTS
    blocks.write_bytes(b"of another model")
    (tmp_path / "a store" / MANIFEST).write_text("{}")
    (tmp_path / "a link" / EXPERTS).symlink_to(blocks)
    for name in ("a store", "a link"):
        assert main(["spread", str(demo_store.folder), str(tmp_path / name)]) == 1
        assert "give a folder of its own" in capsys.readouterr().err
    assert blocks.read_bytes() == b"of another model"
    for _ in range(2):
        assert main(["spread", str(demo_store.folder), str(tmp_path / "a copy")]) == 0
    assert "on the disk of the store itself" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written(demo_store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a file").write_text("x")
    assert main(["spread", str(demo_store.folder), str(tmp_path / "a file")]) == 1
    assert "a file: cannot be written" in capsys.readouterr().err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / EXPERTS).mkdir()
    assert main(["spread", str(demo_store.folder), str(tmp_path / "full")]) == 1
    assert "cannot be written: Is a directory" in capsys.readouterr().err
    with pytest.raises(StoreError, match="holds no copies"):
        copies(demo_store, [tmp_path / "full"])


def test_the_setting() -> None:
    assert folders_of("") == ()
    assert folders_of("/a:/b c:") == (Path("/a"), Path("/b c"))
