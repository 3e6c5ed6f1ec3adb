"""The vision side on its way from a checkpoint to rows for the language model: both layouts, limits, and refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.engine.checkpoint import Checkpoint
from services.engine.errors import CheckpointError, StoreError
from services.engine.experts.store import Store
from services.engine.vision.config import CLIP_MEAN, VisionConfig, read_vision_config
from services.engine.vision.embedding import embed, run
from services.tools import small_checkpoint
from services.tools.repack import repack
from services.tools.small_checkpoint import Style


def _store(folder: Path, style: Style, edit: Callable[[Any, Any], None] = lambda config, tensors: None) -> Store:
    return repack(small_checkpoint.write(folder / "c", style, edit=edit), folder / "store", say=lambda text: None)


def _rows(store: Store, grid: tuple[int, int] = (6, 4)) -> Tensor:
    weights = store.vision()
    assert weights is not None
    random = torch.Generator().manual_seed(1)
    return run(embed(weights, torch.randn(grid[0] * grid[1], 12, generator=random), grid))


def test_both_layouts_give_identical_rows(tmp_path: Path) -> None:
    original = _rows(_store(tmp_path / "a", "3.5-super-vl"))
    export = _rows(_store(tmp_path / "b", "3.5-super-vl-export"))
    assert original.shape == (6, 64)
    assert torch.isfinite(original).all()
    assert torch.equal(original, export)


def test_layer_scales_that_are_not_1_count(tmp_path: Path) -> None:
    def halve(config: Any, tensors: Any) -> None:
        tensors["vision_model.encoder.layer.0.layer_scale1.lambda1"] *= 0.5

    plain = _rows(_store(tmp_path / "a", "3.5-super-vl-export"))
    halved = _rows(_store(tmp_path / "b", "3.5-super-vl-export", halve))
    assert not torch.allclose(plain, halved)


def test_a_model_without_vision_has_none(tmp_path: Path) -> None:
    store = _store(tmp_path, "3-super")
    assert store.vision() is None
    assert not (store.folder / "vision.safetensors").exists()


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    store = _store(tmp_path, "3.5-super-vl")
    path = store.folder / "vision.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match=r"vision\.safetensors: the checksum does not match"):
        store.check_dense()
    path.write_bytes(data[:-1])
    with pytest.raises(StoreError, match="truncated"):
        Store.open(store.folder)
    path.unlink()
    with pytest.raises(StoreError, match=r"vision\.safetensors: missing"):
        Store.open(store.folder)


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_a_checkpoint_without_the_final_norm_is_refused(part: str, tmp_path: Path) -> None:
    """Without it features are wrong and answers merely poor: nobody would notice."""

    def drop(config: Any, tensors: Any) -> None:
        del tensors[f"vision_projector.vision_final_layernorm.{part}"]

    with pytest.raises(CheckpointError, match=rf"final_norm\.{part}: missing"):
        _store(tmp_path, "3.5-super-vl", drop)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    def spoil(config: Any, tensors: Any) -> None:
        tensors["mlp1.1.weight"][0, 0] = float("nan")

    with pytest.raises(CheckpointError, match=r"mlp1\.1\.weight: found nan"):
        _store(tmp_path, "3.5-super-vl", spoil)


def _config(folder: Path, **changes: Any) -> VisionConfig:
    checkpoint = Checkpoint.open(small_checkpoint.write(folder, "3.5-super-vl"))
    raw = json.loads((folder / "config.json").read_text()) | changes
    return read_vision_config(folder, raw, {name: t.shape for name, t in checkpoint.vision.items()})


def test_limits_are_read_in_their_order(tmp_path: Path) -> None:
    vision = {"patch_size": 2, "num_attention_heads": 2}
    found = _config(tmp_path / "a", vision_config=vision)
    assert (found.least_patches, found.most_patches) == (1024, 13312)
    assert found.mean == CLIP_MEAN
    told = {"min_num_patches": 20, "max_num_patches": 90, "norm_mean": [0.5, 0.5, 0.5]}
    (tmp_path / "a" / "preprocessor_config.json").write_text(json.dumps(told))
    checkpoint = Checkpoint.open(tmp_path / "a")
    shapes = {name: t.shape for name, t in checkpoint.vision.items()}
    raw = json.loads((tmp_path / "a" / "config.json").read_text())
    assert read_vision_config(tmp_path / "a", raw | {"vision_config": vision}, shapes).least_patches == 20
    assert read_vision_config(tmp_path / "a", raw | {"vision_config": vision}, shapes).mean == (0.5, 0.5, 0.5)
    nearer = vision | {"min_num_patches": 30, "args": {"max_num_patches": 80}}
    found = read_vision_config(tmp_path / "a", raw | {"vision_config": nearer}, shapes)
    assert (found.least_patches, found.most_patches) == (30, 80)
    assert VisionConfig.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ps_version": "v1"}, r"ps_version is 'v1'; this engine computes only 'v2'"),
        ({"downsample_ratio": 0.25}, r"downsample_ratio is 0.25"),
        ({"vision_config": {"patch_size": 16}}, r"patch_size is 16, but the embedder takes 12 values"),
        ({"vision_config": {"patch_size": 2, "num_attention_heads": 3}}, r"16 channels do not divide into 3 heads"),
        ({"vision_config": {"patch_size": 2, "min_num_patches": 9, "max_num_patches": 8}}, r"at least 9 .* at most 8"),
        ({"norm_mean": [1, 2]}, r"expected three numbers"),
        ({"norm_std": [1, 1, 0]}, r"expected positive numbers"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        _config(tmp_path / "c", **changes)
