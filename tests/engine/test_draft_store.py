"""The multi-token-prediction block on its way from a checkpoint to a store: kept, checked, and never needed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kernels.nvfp4.reference as nvfp4
from services.engine.errors import StoreError
from services.engine.experts.store import Store
from services.engine.experts.streamer import catalog
from services.tools import small_checkpoint
from services.tools.repack import repack

Tensors = dict[str, torch.Tensor]
EXPERT = "mtp.layers.1.mixer.experts.3.up_proj"


def made(
    folder: Path, edit: Callable[[dict[str, Any], Tensors], None] = lambda config, tensors: None, **how: Any
) -> tuple[Store, list[str]]:
    said: list[str] = []
    checkpoint = small_checkpoint.write(folder / "c", edit=edit, **how)
    return repack(checkpoint, folder / "store", say=said.append), said


def without(config: dict[str, Any], tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("mtp.")]:
        del tensors[name]


def test_it_is_in_the_store_and_the_model_is_the_same_without_it(tmp_path: Path) -> None:
    store, _ = made(tmp_path / "with")
    tensors: Tensors = {}
    small_checkpoint.write(tmp_path / "again", edit=lambda config, all_: tensors.update(all_))
    draft = store.draft()
    assert draft is not None
    for name in ("mtp.layers.0.enorm.weight", "mtp.layers.1.mixer.gate.e_score_correction_bias"):
        assert torch.equal(draft.plain(name), tensors[name].float())
    assert torch.equal(draft.linear("mtp.layers.0.eh_proj").weight, tensors["mtp.layers.0.eh_proj.weight"])
    codes, scales, scale_2 = nvfp4.quantise(tensors[f"{EXPERT}.weight"].float(), "max")
    up, up_scales, _, _ = store.layout.unpack(store.read_block(len(store.blocks), 3))
    assert (up == codes.numpy()).all()
    assert (up_scales == scales.view(torch.uint8).numpy()).all()
    assert store.layers[-1][3].up_scale == float(scale_2)

    bare, said = made(tmp_path / "without", without)
    assert bare.draft() is None
    assert not (bare.folder / "mtp.safetensors").exists()
    assert said[-1].startswith("note: the checkpoint has no tokenizer.json")
    assert (bare.fingerprint, bare.blocks, bare.layers) == (store.fingerprint, store.blocks, store.blocks)


def test_experts_that_are_nvfp4_already_keep_their_codes(tmp_path: Path) -> None:
    packed: Tensors = {}

    def edit(config: dict[str, Any], tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("mtp.layers.1.mixer.experts.")]:
            stem = name.removesuffix(".weight")
            weight, scale, scale_2 = nvfp4.quantise(tensors[name].float(), "mse")
            packed.update({name: weight, f"{stem}.weight_scale": scale, f"{stem}.weight_scale_2": scale_2})
        tensors.update(packed)

    store, said = made(tmp_path, edit)
    assert not any("rounded" in line for line in said)
    up, _, _, _ = store.layout.unpack(store.read_block(len(store.blocks), 3))
    assert (up == packed[f"{EXPERT}.weight"].numpy()).all()


def test_one_that_cannot_be_computed_is_left_out_and_that_is_said(tmp_path: Path) -> None:
    def edit(config: dict[str, Any], tensors: Tensors) -> None:
        del tensors["mtp.layers.0.hnorm.weight"]

    store, said = made(tmp_path, edit)
    assert store.draft() is None
    assert any(
        "31 multi-token-prediction tensors are left out of the store: tensor mtp.layers.0.hnorm" in s for s in said
    )


@pytest.mark.parametrize("damage", ["dense", "truncated", "block", "record"])
def test_damage_is_noticed(tmp_path: Path, damage: str) -> None:
    store, _ = made(tmp_path)
    file = store.folder / ("experts.bin" if damage == "block" else "mtp.safetensors")
    data = bytearray(file.read_bytes())
    data[-4000] ^= 1
    file.write_bytes(data[:-1] if damage == "truncated" else data)
    if damage == "record":
        manifest = json.loads((store.folder / "manifest.json").read_text())
        manifest["mtp"]["blocks"].pop()
        (store.folder / "manifest.json").write_text(json.dumps(manifest))

    def use() -> None:
        opened = Store.open(store.folder)
        opened.check_dense()
        opened.read_block(len(opened.blocks), 7)

    with pytest.raises(StoreError, match="repack again"):
        use()


def test_a_store_from_before_stays_as_it_is_until_it_is_replaced(tmp_path: Path) -> None:
    store, _ = made(tmp_path)
    whole = (store.folder / "experts.bin").read_bytes()
    manifest = json.loads((store.folder / "manifest.json").read_text())
    del manifest["mtp"]
    (store.folder / "manifest.json").write_text(json.dumps(manifest))
    (store.folder / "experts.bin").write_bytes(whole[: 16 * store.layout.block_bytes])
    said: list[str] = []
    assert repack(tmp_path / "c", store.folder, say=said.append).draft() is None
    assert "lacks the multi-token-prediction block" in said[-1]
    assert repack(tmp_path / "c", store.folder, replace=True, say=said.append).draft() is not None
    assert (store.folder / "experts.bin").read_bytes() == whole


def test_a_replaced_store_keeps_nothing_of_another_checkpoints_block(tmp_path: Path) -> None:
    store, _ = made(tmp_path)
    shutil.rmtree(tmp_path / "c")
    small_checkpoint.write(tmp_path / "c", edit=without)
    assert repack(tmp_path / "c", store.folder, replace=True, say=lambda _: None).draft() is None
    assert not (store.folder / "mtp.safetensors").exists()


def test_its_experts_are_one_more_layer_of_the_cache_if_asked_for(tmp_path: Path) -> None:
    store, _ = made(tmp_path)
    assert catalog(store).offsets.shape == (2, 8)
    assert catalog(store, drafts=True).offsets.shape == (3, 8)
