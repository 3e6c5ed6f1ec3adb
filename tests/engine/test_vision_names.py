"""Both layouts of the vision tensors come out under the same names with the same values; what does not fit is named."""

from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.checkpoint import Checkpoint
from services.engine.errors import CheckpointError
from services.tools import small_checkpoint
from services.tools.small_checkpoint import Style

EXPORT = "vision_model.encoder.layer.1."
ORIGINAL = "vision_model.radio_model.model.blocks.1."


def test_both_layouts_are_the_same_tower(tmp_path: Path) -> None:
    original, export = (
        Checkpoint.open(small_checkpoint.write(tmp_path / style, style)).vision  # type: ignore[arg-type]
        for style in ("3.5-super-vl", "3.5-super-vl-export")
    )
    scales = {f"blocks.{block}.layer_scale{i}" for block in (0, 1) for i in (1, 2)}
    assert set(export) - set(original) == scales
    assert set(original) < set(export)
    for name, tensor in original.items():
        assert tensor.shape == export[name].shape == tuple(tensor.read().shape)
        assert torch.equal(tensor.read(), export[name].read()), name
    assert len(original) == 4 + 2 * 12 + 2 + 3
    assert len(export["blocks.0.qkv.weight"].parts) == 3


@pytest.mark.parametrize(
    ("style", "edit", "message"),
    [
        (
            "export",
            lambda t: t.pop(EXPORT + "attention.attention.key.bias"),
            r"blocks\.1\.qkv\.bias: query, key or value",
        ),
        ("export", lambda t: t.pop(EXPORT + "norm2.bias"), r"blocks\.1\.norm2\.bias: missing, expected \[16\]"),
        ("", lambda t: t.pop(ORIGINAL + "attn.qkv.weight"), r"blocks\.1\.qkv\.weight: missing, expected \[48, 16\]"),
        ("", lambda t: t.pop("mlp1.3.weight"), r"projector\.down: expected a matrix, found none"),
        ("", lambda t: t.update({"mlp1.2.weight": torch.ones(4)}), r"mlp1\.2\.weight: unknown"),
        ("", lambda t: t.update({ORIGINAL + "attn.scale": torch.ones(4)}), r"attn\.scale: unknown"),
        (
            "",
            lambda t: t.update({EXPORT + "norm1.bias": torch.ones(16)}),
            r"norm1\.bias: present twice, also as .* \(both are our blocks\.1\.norm1\.bias\)",
        ),
        (
            "",
            lambda t: t.update({EXPORT + "attention.attention.query.bias": torch.ones(16)}),
            r"present twice, .* \(both are our blocks\.1\.qkv\.bias\)",
        ),
        (
            "",
            lambda t: t.update({ORIGINAL + "mlp.fc2.bias": torch.ones(32)}),
            r"mlp\.fc2\.bias: expected \[16\] \(our blocks\.1\.fc2\.bias\), found \[32\]",
        ),
        ("", lambda t: t.update({"mlp1.1.weight": torch.ones(47, 64)}), r"mlp1\.1\.weight: expected \[48, 64\]"),
        (
            "",
            lambda t: t.update({"mlp1.0.weight": torch.ones(64).to(torch.uint8)}),
            "expected BF16 or F16 or F32, found U8",
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, style: str, edit: Any, message: str) -> None:
    whole: Style = "3.5-super-vl-export" if style else "3.5-super-vl"
    folder = small_checkpoint.write(tmp_path / "c", whole, edit=lambda config, tensors: edit(tensors))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(folder)


def test_a_projector_of_another_width_than_the_config_says_is_refused(tmp_path: Path) -> None:
    def edit(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config["projector_hidden_size"] = 4096

    with pytest.raises(CheckpointError, match=r"expected \[64, 4096\] \(our projector\.down\)"):
        Checkpoint.open(small_checkpoint.write(tmp_path / "c", "3.5-super-vl", edit=edit))
