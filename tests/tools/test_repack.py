"""Repacking: both styles give one store, a kill loses nothing, and every refusal says what to do."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.errors import CheckpointError, DiskError
from services.engine.experts.store import Store
from services.tools import repack as module
from services.tools import small_checkpoint as tiny_checkpoint
from services.tools.cli import main
from services.tools.repack import repack


def quiet(line: str) -> None:
    pass


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tiny_checkpoint.write(tmp_path / "checkpoint")


def content(store: Path) -> dict[str, Any]:
    """Everything in a store but where it came from."""
    files: dict[str, Any] = {path.name: path.read_bytes() for path in store.iterdir() if path.suffix != ".json"}
    manifest = json.loads((store / "manifest.json").read_text())
    del manifest["source"]
    return files | {"manifest": manifest}


def test_all_published_styles_give_the_same_store(tmp_path: Path) -> None:
    styles = ("3-super", "3.5-super-vl", "3.5-super-vl-export")
    stores = [tmp_path / style / "store" for style in styles]
    said: list[str] = []
    for store, style in zip(stores, styles, strict=True):
        repack(tiny_checkpoint.write(tmp_path / style / "c", style), store, say=said.append)  # type: ignore[arg-type]
    plain, original, export = map(content, stores)
    assert original == export
    assert original.pop("vision.safetensors")
    assert original["manifest"].pop("vision")["config"]["least_patches"] == 16
    assert original["manifest"].pop("fingerprint") != plain["manifest"].pop("fingerprint")
    assert original == plain, "all but the pictures' side is the same"
    rounded = "experts of the multi-token-prediction block are rounded to NVFP4: it drafts, answers do not change"
    assert said.count(rounded) == 3
    other = tmp_path / "other"
    repack(tiny_checkpoint.write(other / "c", seed=1), other / "store", say=quiet)
    assert content(other / "store") != content(stores[0])


def test_text_files_are_copied(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "tokenizer.json").write_text("tokens")
    said: list[str] = []
    repack(checkpoint, tmp_path / "store", say=said.append)
    assert (tmp_path / "store" / "tokenizer.json").read_text() == "tokens"
    assert said[-1].startswith(
        "note: the checkpoint has no tokenizer_config.json, chat_template.jinja, generation_config.json"
    )


def test_repacking_again_changes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    repack(checkpoint, store, say=quiet)
    before = {path: path.stat().st_mtime_ns for path in store.iterdir()}
    repack(checkpoint, store, say=quiet)
    assert {path: path.stat().st_mtime_ns for path in store.iterdir()} == before


def test_another_models_store_is_kept_unless_told(checkpoint: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    first = repack(tiny_checkpoint.write(tmp_path / "other", seed=1), store, say=quiet)
    with pytest.raises(DiskError, match="--replace"):
        repack(checkpoint, store, say=quiet)
    assert Store.open(store).fingerprint == first.fingerprint
    assert repack(checkpoint, store, replace=True, say=quiet).fingerprint != first.fingerprint
    assert not (store / "repack.journal").exists()


KILLED = """
import os, random, signal, sys
from pathlib import Path
from services.tools import repack as module

checkpoint, folder = Path(sys.argv[1]), Path(sys.argv[2])
module._BATCH_BYTES = 3 * 4096

def child(store, kill_at):
    \"\"\"Repack in a child that kills itself at the kill_at-th step; a half-written journal line is a step too.\"\"\"
    if pid := os.fork():
        return os.waitpid(pid, 0)[1]
    steps = 0
    def step():
        nonlocal steps
        steps += 1
        if steps == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
    def stepped(function):
        def run(*args, **kwargs):
            step()
            result = function(*args, **kwargs)
            step()
            return result
        return run
    class Journal:
        def __init__(self, file):
            self.file = file
        def __getattr__(self, name):
            return getattr(self.file, name)
        def write(self, line):
            self.file.write(line[: len(line) // 2])
            self.file.flush()
            step()
            self.file.write(line[len(line) // 2 :])
            self.file.flush()
            step()
    make = module._make
    module._make = lambda source, folder, journal, *rest: make(source, folder, Journal(journal), *rest)
    for name in ("fdatasync", "fsync", "replace", "truncate"):
        setattr(os, name, stepped(getattr(os, name)))
    said = []
    module.repack(checkpoint, store, say=said.append)
    os._exit(10 + any("going on" in line for line in said))

kills = resumed = 0
random.seed(7)
for number in range(20):
    store = folder / str(number)
    status = child(store, random.randrange(1, 40))
    if os.WIFSIGNALED(status):
        kills += 1
        if number % 2:
            child(store, random.randrange(1, 8))
        status = child(store, 0)
    assert os.WEXITSTATUS(status) in (10, 11), status
    resumed += os.WEXITSTATUS(status) == 11
print(kills, resumed)
"""


def test_killed_anywhere_and_resumed_it_is_the_same_store(checkpoint: Path, tmp_path: Path) -> None:
    """SIGKILL at 20 random steps, every other time twice; forked from one process so that torch is imported once."""
    repack(checkpoint, tmp_path / "whole", say=quiet)
    (tmp_path / "killed").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(checkpoint), str(tmp_path / "killed")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    kills, resumed = map(int, done.stdout.split())
    assert kills >= 15
    assert resumed >= 8
    for number in range(20):
        assert content(tmp_path / "killed" / str(number)) == content(tmp_path / "whole")


def stopped_half_way(checkpoint: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "_BATCH_BYTES", 3 * 4096)
        patch.setattr(module.repack_dense, "write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            repack(checkpoint, store, say=quiet)
    assert not (store / "manifest.json").exists()


@pytest.mark.parametrize(
    ("damage", "goes_on"), [("none", True), ("block", False), ("short", False), ("journal", False), ("source", False)]
)
def test_only_what_an_earlier_run_really_wrote_is_kept(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str, goes_on: bool
) -> None:
    store = tmp_path / "store"
    stopped_half_way(checkpoint, store, monkeypatch)
    experts, journal = store / "experts.bin", store / "repack.journal"
    if damage == "block":
        data = bytearray(experts.read_bytes())
        data[-4096] ^= 1
        experts.write_bytes(data)
    elif damage == "short":
        os.truncate(experts, experts.stat().st_size - 1)
    elif damage == "journal":
        journal.write_bytes(journal.read_bytes().replace(b"offset", b"offsat", 1))
    elif damage == "source":
        os.utime(checkpoint / "model.safetensors", (1, 1))
    said: list[str] = []
    repack(checkpoint, store, say=said.append)
    assert any("going on after 24 blocks" in line for line in said) == goes_on
    repack(checkpoint, tmp_path / "whole", say=quiet)
    assert content(store) == content(tmp_path / "whole")


def test_two_at_once_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    with (store / "repack.journal").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(DiskError, match="another thimble repack"):
            repack(checkpoint, store, say=quiet)
    repack(checkpoint, store, say=quiet)


def test_too_little_space_is_said_before_anything_is_written(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(DiskError, match=r"0\.1 GB needed, 0\.0 GB free"):
        repack(checkpoint, tmp_path / "store", say=quiet)
    assert not (tmp_path / "store" / "experts.bin").exists()


def test_a_place_that_cannot_be_written_is_named(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match="file"):
        repack(checkpoint, tmp_path / "file" / "store", say=quiet)


def test_experts_that_are_not_nvfp4_are_refused(tmp_path: Path) -> None:
    def edit(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        name = "backbone.layers.4.mixer.experts.2.down_proj"
        for part in ("weight_scale", "weight_scale_2", "input_scale"):
            del tensors[f"{name}.{part}"]
        tensors[f"{name}.weight"] = torch.ones(32, 48, dtype=torch.bfloat16)
        del config["quantization_config"]

    folder = tiny_checkpoint.write(tmp_path / "c", edit=edit)
    (folder / "hf_quant_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"experts\.2\.down_proj\.weight: expected NVFP4 .* found BF16"):
        repack(folder, tmp_path / "store", say=quiet)


def test_a_dense_scale_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    def edit(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors["backbone.layers.0.mixer.in_proj.weight_scale"] *= float("inf")

    with pytest.raises(CheckpointError, match=r"in_proj\.weight_scale: found a scale of inf"):
        repack(tiny_checkpoint.write(tmp_path / "c", edit=edit), tmp_path / "store", say=quiet)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["backbone.layers.2.mixer.in_proj.weight", "backbone.layers.0.mixer.dt_bias"])
def test_a_dense_weight_that_is_not_finite_is_refused(tmp_path: Path, name: str, value: float) -> None:
    def edit(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[-1] = value

    with pytest.raises(CheckpointError, match=rf"{name.removeprefix('backbone.')}: found {value}, expected finite"):
        repack(tiny_checkpoint.write(tmp_path / "c", edit=edit), tmp_path / "store", say=quiet)


def test_an_fp8_weight_that_is_no_number_is_refused(tmp_path: Path) -> None:
    def edit(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors["backbone.layers.0.mixer.in_proj.weight"].view(torch.uint8)[3, 5] = 0x7F

    with pytest.raises(CheckpointError, match=r"in_proj\.weight: found nan, expected finite"):
        repack(tiny_checkpoint.write(tmp_path / "c", edit=edit), tmp_path / "store", say=quiet)


def test_a_kv_scale_that_is_negative_is_refused(tmp_path: Path) -> None:
    def edit(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors["backbone.layers.3.mixer.k_proj.k_scale"] *= -1

    with pytest.raises(CheckpointError, match=r"k_proj\.k_scale: found a scale of -"):
        repack(tiny_checkpoint.write(tmp_path / "c", edit=edit), tmp_path / "store", say=quiet)


def test_the_command_reports_and_fails_in_words(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["repack", str(checkpoint), str(tmp_path / "store")]) == 0
    assert Store.open(tmp_path / "store").fingerprint in capsys.readouterr().out
    assert main(["repack", str(tmp_path / "absent"), str(tmp_path / "store2")]) == 1
    assert "config.json: not found" in capsys.readouterr().err
