"""--dense fp8: which linears change, by how much, and that it says so; nothing else changes."""

import json
from pathlib import Path

import pytest
import torch

from kernels.fp8.reference import quantise
from services.engine.checkpoint import Checkpoint
from services.engine.errors import DiskError
from services.engine.experts.store import Store
from services.engine.tensorfile import read_header
from services.tools import repack_dense, small_checkpoint
from services.tools.repack import repack


def quiet(line: str) -> None:
    pass


def test_large_float_linears_become_fp8_and_nothing_else(tmp_path: Path) -> None:
    checkpoint = small_checkpoint.write(tmp_path / "c", formats={"layers.0.mixer.in_proj": "FP8"})
    source, said = Checkpoint.open(checkpoint), []
    plain = repack(checkpoint, tmp_path / "plain", say=quiet)
    rounded = repack(checkpoint, tmp_path / "rounded", dense="fp8", say=said.append)
    changed = repack_dense.rounded(source)
    assert set(changed) == {
        *("layers.0.mixer.out_proj", "layers.2.mixer.in_proj", "layers.2.mixer.out_proj", "lm_head"),
        *(f"layers.{i}.mixer.fc{j}_latent_proj" for i in (1, 4) for j in (1, 2)),
        *(f"layers.{i}.mixer.shared_experts.{part}_proj" for i in (1, 4) for part in ("up", "down")),
    }
    assert f"--dense fp8 changes the weights: {len(changed)} linears are rounded to FP8" in said
    before, after = plain.dense(), rounded.dense()
    for name, form in before.formats.items():
        old, new = before.linear(name), after.linear(name)
        if name not in changed:
            assert (after.formats[name], new.weight.dtype) == (form, old.weight.dtype)
            assert torch.equal(new.dequantise(), old.dequantise())
            continue
        assert after.formats[name] == "FP8"
        weight, scale = quantise(old.weight, "max")
        assert torch.equal(new.weight.view(torch.uint8), weight.view(torch.uint8))
        assert new.weight_scale is not None
        assert torch.equal(new.weight_scale, scale)
    headers = [read_header(store.folder / "dense.safetensors") for store in (plain, rounded)]
    assert set(headers[1]) - set(headers[0]) == {f"{name}.weight_scale" for name in changed}
    assert (plain.folder / "experts.bin").read_bytes() == (rounded.folder / "experts.bin").read_bytes()
    assert plain.fingerprint != rounded.fingerprint


def test_pieces_are_rounded_as_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = small_checkpoint.write(tmp_path / "c")
    whole = repack(checkpoint, tmp_path / "whole", dense="fp8", say=quiet)
    monkeypatch.setattr(repack_dense, "_PIECE_ROWS", 7)
    assert repack(checkpoint, tmp_path / "pieces", dense="fp8", say=quiet).fingerprint == whole.fingerprint


def test_the_store_says_what_was_done_and_is_not_taken_for_the_other(tmp_path: Path) -> None:
    checkpoint = small_checkpoint.write(tmp_path / "c")
    repack(checkpoint, tmp_path / "store", dense="fp8", say=quiet)
    assert json.loads((tmp_path / "store" / "manifest.json").read_text())["source"]["dense"] == "fp8"
    with pytest.raises(DiskError, match="made with another --dense"):
        repack(checkpoint, tmp_path / "store", say=quiet)
    repack(checkpoint, tmp_path / "store", replace=True, say=quiet)
    assert Store.open(tmp_path / "store").source["dense"] == "as-is"
