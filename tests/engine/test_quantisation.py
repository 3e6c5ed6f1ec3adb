"""What a config says of formats, in every form that ModelOpt writes, and every contradiction named with its tensor."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.checkpoint import Checkpoint
from services.engine.errors import CheckpointError
from services.engine.quantisation import Description
from services.tools import small_checkpoint
from services.tools.small_checkpoint import Style, language_model

LINEARS, FORMATS = list(language_model(seed=0)[1]), language_model(seed=0)[1]
DENSE = [name for name in LINEARS if ".experts." not in name]
IN_PROJ = "backbone.layers.0.mixer.in_proj"


@pytest.mark.parametrize("form", ["NVFP4", "W4A16_NVFP4", "FP8", "BF16"])
def test_every_dense_linear_may_have_every_format(tmp_path: Path, form: str) -> None:
    folder = small_checkpoint.write(tmp_path / "c", formats=dict.fromkeys(DENSE, form))
    found = Checkpoint.open(folder).formats
    assert {found[name] for name in DENSE} == {form}


@pytest.mark.parametrize("form", ["F32", "F16"])
def test_other_floats_are_taken_too(tmp_path: Path, form: str) -> None:
    dtype = {"F32": torch.float32, "F16": torch.float16}[form]

    def edit(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.dtype == torch.bfloat16:
                tensors[name] = tensor.to(dtype)

    found = Checkpoint.open(small_checkpoint.write(tmp_path / "c", edit=edit)).formats
    assert found["layers.2.mixer.in_proj"] == form


def described(**said: Any) -> dict[str, str]:
    layers = said.get("layers", {})
    return Description("config", said.get("algorithm"), tuple(said.get("excluded", ())), layers).expected(LINEARS)


def test_one_algorithm_holds_for_all_but_the_excluded() -> None:
    found = described(algorithm="NVFP4", excluded=["lm_head", "*.mixer.in_proj", "backbone.layers.3*", "mtp*"])
    assert found["lm_head"] == found["layers.0.mixer.in_proj"] == found["layers.3.mixer.q_proj"] == "unquantised"
    assert found["layers.1.mixer.experts.5.up_proj"] == found["layers.0.mixer.out_proj"] == "NVFP4"


@pytest.mark.parametrize("prefix", ["", "backbone.", "model.", "language_model.backbone."])
def test_experts_are_meant_with_and_without_their_number(prefix: str) -> None:
    for module in ("experts", "experts.*", "experts.up_proj", "experts.7.up_proj", "experts.7"):
        found = described(algorithm="MIXED_PRECISION", layers={f"{prefix}layers.1.mixer.{module}": "NVFP4"})
        assert found["layers.1.mixer.experts.7.up_proj"] == "NVFP4", module
        assert (found["layers.1.mixer.experts.7.down_proj"] == "NVFP4") == ("up_proj" not in module), module
        assert (found["layers.1.mixer.experts.6.up_proj"] == "NVFP4") == ("7" not in module), module
        assert found["layers.4.mixer.experts.7.up_proj"] == "unquantised"


def test_what_is_said_of_one_wins_over_what_is_said_of_all() -> None:
    layers = {"layers.1.mixer.experts.3.up_proj": "FP8", "layers.1.mixer.experts": "NVFP4"}
    found = described(layers=layers)
    assert found["layers.1.mixer.experts.3.up_proj"] == "FP8"
    assert found["layers.1.mixer.experts.2.up_proj"] == "NVFP4"


def quantisation(said: dict[str, Any], file: bool, folder: Path) -> None:
    """Put a description into config.json's quantization_config or into hf_quant_config.json; the other goes away."""
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    if not file:
        config["quantization_config"] = {"quant_method": "modelopt", **said}
        (folder / "hf_quant_config.json").unlink()
    else:
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
    (folder / "config.json").write_text(json.dumps(config))


def listed(**changes: str | None) -> dict[str, Any]:
    named = {name if name == "lm_head" else f"backbone.{name}": form for name, form in FORMATS.items()} | changes
    layers = {name: {"quant_algo": form} for name, form in named.items() if form not in (None, "BF16")}
    return {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


@pytest.mark.parametrize("file", [False, True])
@pytest.mark.parametrize("style", ["3-super", "3.5-super-vl"])
def test_either_description_is_enough(tmp_path: Path, file: bool, style: Style) -> None:
    folder = small_checkpoint.write(tmp_path / "c", style)
    quantisation(listed(), file, folder)
    assert Checkpoint.open(folder).formats == FORMATS


def test_config_groups_are_a_description_too(tmp_path: Path) -> None:
    def names(form: str) -> list[str]:
        return [name for name in FORMATS if FORMATS[name] == form]

    four = {"num_bits": 4, "type": "float", "group_size": 16}
    groups = {
        "group_0": {"weights": four, "input_activations": four, "targets": names("NVFP4")},
        "group_1": {"weights": four, "targets": names("W4A16_NVFP4")},
        "group_2": {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 8}, "targets": names("FP8")},
    }
    folder = small_checkpoint.write(tmp_path / "c")
    quantisation({"quant_algo": "MIXED_PRECISION", "config_groups": groups}, False, folder)
    assert Checkpoint.open(folder).formats == FORMATS
    groups["group_2"]["targets"] = names("FP8")[1:]
    quantisation_file = json.loads((folder / "config.json").read_text())
    quantisation_file["quantization_config"]["config_groups"] = groups
    (folder / "config.json").write_text(json.dumps(quantisation_file))
    with pytest.raises(CheckpointError, match=r"says unquantised, .* found FP8"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("file", [False, True])
@pytest.mark.parametrize(
    ("said", "message"),
    [
        (listed(**{IN_PROJ: None}), r"layers\.0\.mixer\.in_proj\.weight: .* says unquantised, .* found FP8"),
        (listed(**{IN_PROJ: "NVFP4"}), r"in_proj\.weight: .* says NVFP4, .* found FP8"),
        (listed(**{"backbone.layers.3.mixer.q_proj": "FP8"}), r"q_proj\.weight: .* says FP8, .* found BF16"),
        (
            listed(lm_head="NVFP4"),
            r"lm_head\.weight: .* says NVFP4, .* found W4A16_NVFP4 \(U8 weight without input_scale",
        ),
        (listed(**{IN_PROJ: "W4A8_MXFP4_FP8"}), "in_proj is 'W4A8_MXFP4_FP8'; this engine reads"),
        (listed(**{"backbone.layers.7.mixer.in_proj": "FP8"}), r"layers\.7\.mixer\.in_proj as FP8, expected a linear"),
        ({"quant_algo": "NVFP4"}, r"says NVFP4, .* found "),
        ({"quant_algo": "INT4_AWQ"}, "quant_algo is 'INT4_AWQ'"),
        ({"quant_algo": "MIXED_PRECISION"}, "lists no layers"),
        (listed() | {"exclude_modules": ["*in_proj"]}, "both listed as FP8 and excluded"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"lm_head": "FP8"}}, "damaged or of an unknown form"),
    ],
)
def test_a_description_that_contradicts_the_tensors_is_refused(
    tmp_path: Path, file: bool, said: dict[str, Any], message: str
) -> None:
    folder = small_checkpoint.write(tmp_path / "c")
    quantisation(said, file, folder)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(folder)


def test_another_quantiser_is_refused(tmp_path: Path) -> None:
    def edit(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config["quantization_config"]["quant_method"] = "compressed-tensors"

    with pytest.raises(CheckpointError, match="'compressed-tensors'; this engine reads ModelOpt's"):
        Checkpoint.open(small_checkpoint.write(tmp_path / "c", edit=edit))


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    folder = small_checkpoint.write(tmp_path / "c")
    (folder / "hf_quant_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json: cannot be read"):
        Checkpoint.open(folder)
