"""The store on disk: what is in it, and that a damaged one is refused with what to do."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from services.engine.errors import StoreError
from services.engine.experts.store import DenseFile, Store, parse_block
from services.engine.experts.store import fingerprint as fingerprint_of
from services.engine.model_config import ModelConfig
from services.tools import small_checkpoint as tiny_checkpoint
from services.tools.repack import repack


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    repack(tiny_checkpoint.write(folder / "checkpoint"), folder / "store", say=lambda _: None)
    return folder / "store"


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    shutil.copytree(made, tmp_path / "store")
    return tmp_path / "store"


def edit_manifest(store: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    manifest = json.loads((store / "manifest.json").read_text())
    change(manifest)
    (store / "manifest.json").write_text(json.dumps(manifest))


def test_blocks_hold_the_checkpoints_own_codes_and_scales(made: Path) -> None:
    store = Store.open(made)
    tensors, _ = tiny_checkpoint.language_model(seed=0)
    for layer, index in enumerate(store.config.moe_layers):
        for expert in range(store.config.experts):
            name = f"layers.{index}.mixer.experts.{expert}"
            parts = store.layout.unpack(store.read_block(layer, expert))
            for part, found in zip(("up_proj.weight", "up_proj.weight_scale"), parts[:2], strict=True):
                assert np.array_equal(found, tensors[f"{name}.{part}"].view(torch.uint8).numpy())
            for part, found in zip(("down_proj.weight", "down_proj.weight_scale"), parts[2:], strict=True):
                assert np.array_equal(found, tensors[f"{name}.{part}"].view(torch.uint8).numpy())
            block = store.blocks[layer][expert]
            assert block.up_scale == tensors[f"{name}.up_proj.weight_scale_2"].item()
            assert block.down_scale == tensors[f"{name}.down_proj.weight_scale_2"].item()


def test_blocks_are_page_aligned_and_follow_each_other(made: Path) -> None:
    store = Store.open(made)
    offsets = [block.offset for layer in store.layers for block in layer]
    assert offsets == list(range(0, 24 * store.layout.block_bytes, store.layout.block_bytes))
    assert store.layout.block_bytes % 4096 == 0
    assert store.experts_path.stat().st_size == 24 * store.layout.block_bytes


def test_dense_tensors_keep_their_formats_and_bytes(made: Path) -> None:
    dense = Store.open(made).dense()
    tensors, formats = tiny_checkpoint.language_model(seed=0)
    for name, form in formats.items():
        if ".experts." in name:
            continue
        linear = dense.linear(name)
        assert linear.format == form
        assert torch.equal(linear.weight.view(torch.uint8), tensors[f"{name}.weight"].view(torch.uint8))
    assert torch.equal(dense.plain("norm_f.weight"), tensors["norm_f.weight"].float())


def test_the_fingerprint_names_weights_and_config(made: Path, tmp_path: Path) -> None:
    def fingerprint(name: str, **how: Any) -> str:
        checkpoint = tiny_checkpoint.write(tmp_path / name, **how)
        return repack(checkpoint, tmp_path / f"{name}-store", say=lambda _: None).fingerprint

    def one_norm_weight(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors["backbone.norm_f.weight"][0] += 1

    def one_scale(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors["backbone.layers.4.mixer.experts.7.down_proj.weight_scale_2"] *= 2

    plain = Store.open(made).fingerprint
    assert fingerprint("same") == plain
    changed = {
        fingerprint("seed", seed=1),
        fingerprint("norm", edit=one_norm_weight),
        fingerprint("scale", edit=one_scale),
        fingerprint("config", edit=lambda config, _: config.update(routed_scaling_factor=2.5)),
    }
    assert len(changed | {plain}) == 5


def test_changed_bytes_are_noticed(store: Path) -> None:
    path = store / "experts.bin"
    data = bytearray(path.read_bytes())
    block_bytes = Store.open(store).layout.block_bytes
    data[block_bytes * 9 + 5] ^= 1
    path.write_bytes(data)
    opened = Store.open(store)
    opened.read_block(1, 0)
    with pytest.raises(StoreError, match="MoE layer 1, expert 1: the checksum does not match"):
        opened.read_block(1, 1)


def test_changed_dense_bytes_are_noticed(store: Path) -> None:
    Store.open(store).check_dense()
    path = store / "dense.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match="checksum"):
        Store.open(store).check_dense()


@pytest.mark.parametrize(("place", "code"), [("up_scales", 0x80), ("down_scales", 0x7F), ("down_scales", 0xFF)])
def test_scales_that_are_negative_or_nan_are_refused(store: Path, place: str, code: int) -> None:
    """Even with a checksum that fits: the arithmetic would take the code for a large positive number."""
    layout = Store.open(store).layout
    data = bytearray((store / "experts.bin").read_bytes())
    data[getattr(layout, place)] = code
    (store / "experts.bin").write_bytes(data)
    digest = xxhash.xxh64_hexdigest(bytes(data[: layout.block_bytes]))
    edit_manifest(store, lambda m: m["layers"][0]["blocks"][0].update(xxh64=digest))
    with pytest.raises(StoreError, match="fingerprint"):
        Store.open(store)
    opened = Store.open(refingerprint(store))
    with pytest.raises(StoreError, match=f"scale 0 has the E4M3 code 0x{code:02x}"):
        opened.read_block(0, 0)


def refingerprint(store: Path) -> Path:
    """Make the fingerprint fit what was edited, as one who forges a store would."""

    def change(manifest: dict[str, Any]) -> None:
        blocks = [[parse_block(b) for b in layer["blocks"]] for layer in manifest["layers"]]
        dense = DenseFile(manifest["dense"]["size_bytes"], int(manifest["dense"]["xxh64"], 16))
        config = ModelConfig.from_json(manifest["config"])
        manifest["fingerprint"] = fingerprint_of(config, blocks, dense)

    edit_manifest(store, change)
    return store


@pytest.mark.parametrize("name", ["experts.bin", "dense.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "longer"])
def test_a_file_of_the_wrong_size_is_refused(store: Path, name: str, damage: str) -> None:
    path = store / name
    if damage == "missing":
        path.unlink()
    else:
        data = path.read_bytes()
        path.write_bytes(data[:-1] if damage == "truncated" else data + b"x")
    expected = "missing" if damage == "missing" else "truncated or replaced"
    with pytest.raises(StoreError, match=f"{name}: {expected}.*run thimble repack again"):
        Store.open(store)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(version=2), "store version 2, this build reads 1"),
        (lambda m: m.update(format="other"), "not the manifest of a Thimble store"),
        (lambda m: m.pop("config"), "damaged"),
        (lambda m: m["config"].update(vocab_size=-1), "damaged"),
        (lambda m: m["layers"].pop(), "do not match its config"),
        (lambda m: m["layers"][0].update(layer=0), "do not match its config"),
        (lambda m: m["layers"][1]["blocks"].pop(), "do not match its config"),
        (lambda m: m["layers"][1]["blocks"][2].update(offset=4096), "has offset 4096"),
        (lambda m: m["layers"][1]["blocks"][2].update(up_scale=-1.0), "damaged"),
        (lambda m: m["layers"][1]["blocks"][2].update(up_scale=0.1), "damaged"),  # not a float32
        (lambda m: m["layers"][1]["blocks"][2].update(up_scale=0.5), "fingerprint"),
        (lambda m: m["layers"][1]["blocks"][2].update(xxh64="zz"), "damaged"),
        (lambda m: m.update(fingerprint="0" * 32), "fingerprint"),
    ],
)
def test_a_damaged_manifest_is_refused(store: Path, change: Callable[[dict[str, Any]], Any], message: str) -> None:
    edit_manifest(store, change)
    with pytest.raises(StoreError, match=message):
        Store.open(store)


@pytest.mark.parametrize("content", ["", "{", "[]", "null"])
def test_a_manifest_that_is_not_one_is_refused(store: Path, content: str) -> None:
    (store / "manifest.json").write_text(content)
    with pytest.raises(StoreError, match=r"manifest\.json"):
        Store.open(store)


def test_an_empty_or_unfinished_folder_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store; run thimble repack"):
        Store.open(tmp_path)
    (tmp_path / "repack.journal").touch()
    with pytest.raises(StoreError, match="its repack was not finished; run thimble repack"):
        Store.open(tmp_path)


def test_the_demo_opens(demo_store: Store) -> None:
    assert demo_store.config.experts == 48
    assert demo_store.layout.block_bytes == 20480
    assert len(demo_store.blocks) == 7
    demo_store.check_dense()
    assert torch.isfinite(demo_store.dense().linear("lm_head").dequantise()).all()
