"""Quantizing: the layout, the values, the activation scales, and that it is of use."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.engine.checkpoint import Checkpoint
from services.engine.errors import CheckpointError
from services.engine.weights import read_linear
from services.tools import calibrate, oracle
from services.tools import small_checkpoint as tiny_checkpoint
from services.tools.cli import main
from services.tools.quantize import algorithm, quantize
from services.tools.repack import repack
from services.tools.texts import Window


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny_checkpoint.write_unquantised(tmp_path / "bf16")


def all_inputs(checkpoint: Checkpoint, value: float = 2.0) -> dict[str, float]:
    return dict.fromkeys(checkpoint.formats, value)


def quiet(line: str) -> None:
    pass


@pytest.mark.parametrize(
    ("linear", "expected"),
    [
        ("lm_head", "NVFP4"),
        ("layers.1.mixer.experts.511.up_proj", "NVFP4"),
        ("layers.1.mixer.shared_experts.down_proj", "NVFP4"),
        ("layers.0.mixer.in_proj", "FP8"),
        ("layers.0.mixer.out_proj", "FP8"),
        ("layers.1.mixer.fc1_latent_proj", None),
        ("layers.7.mixer.o_proj", None),
    ],
)
def test_the_recipe(linear: str, expected: str | None) -> None:
    assert algorithm(linear) == expected


def test_the_layout_on_disk(source: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(source)
    quantize(checkpoint, tmp_path / "q", all_inputs(checkpoint), "mse", say=quiet)
    found = load_file(tmp_path / "q" / "model.safetensors")
    up = "backbone.layers.1.mixer.experts.0.up_proj"
    described = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items() if name.startswith(up)}
    assert described == {
        f"{up}.weight": (torch.uint8, (48, 16)),
        f"{up}.weight_scale": (torch.float8_e4m3fn, (48, 2)),
        f"{up}.weight_scale_2": (torch.float32, ()),
        f"{up}.input_scale": (torch.float32, ()),
    }
    assert found["backbone.layers.0.mixer.in_proj.weight"].dtype == torch.float8_e4m3fn
    assert found["backbone.layers.0.mixer.in_proj.weight_scale"].shape == ()
    assert found["backbone.layers.3.mixer.q_proj.weight"].dtype == torch.bfloat16
    before = load_file(source / "model.safetensors")
    for name in ("backbone.embeddings.weight", "backbone.layers.1.mixer.gate.e_score_correction_bias"):
        assert found[name].dtype == before[name].dtype
        assert torch.equal(found[name], before[name])


def test_both_descriptions_name_every_quantized_module_and_no_other(source: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(source)
    quantize(checkpoint, tmp_path / "q", all_inputs(checkpoint), "mse", say=quiet)
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    separate = json.loads((tmp_path / "q" / "hf_quant_config.json").read_text())
    described = config.pop("quantization_config")
    assert config == json.loads((source / "config.json").read_text())
    assert described["quant_method"] == "modelopt"
    assert described["quant_algo"] == separate["quantization"]["quant_algo"] == "MIXED_PRECISION"
    assert described["quantized_layers"] == separate["quantization"]["quantized_layers"]
    formats = Checkpoint.open(tmp_path / "q").formats
    expected = {
        name if name == "lm_head" else f"backbone.{name}": form for name, form in formats.items() if form != "BF16"
    }
    assert {name: entry["quant_algo"] for name, entry in described["quantized_layers"].items()} == expected
    assert len(expected) == 2 * 2 * 8 + 4 + 1 + 4


@pytest.mark.parametrize("choose", ["mse", "max"])
def test_values_are_near_and_least_squares_is_nearer(source: Path, tmp_path: Path, choose: str) -> None:
    checkpoint = Checkpoint.open(source)

    def errors(how: Any) -> dict[str, float]:
        quantize(checkpoint, tmp_path / how, all_inputs(checkpoint), how, say=quiet)
        target = Checkpoint.open(tmp_path / how)
        result = {}
        for name, form in target.formats.items():
            before = checkpoint.tensors[f"{name}.weight"].read().float()
            after = read_linear(target.tensors, name, form).dequantise()
            result[name] = float((after - before).norm() / before.norm())
        return result

    least, plain = errors("mse"), errors("max")
    for name, error in least.items():
        bound = {"NVFP4": 0.12, "FP8": 0.03, None: 0.0}[algorithm(name)]
        assert error <= bound, name
        assert error <= plain[name] * 1.00001, name
    assert sum(least.values()) < sum(plain.values())


def test_activation_scales_are_of_the_largest_input(source: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(source)
    inputs = all_inputs(checkpoint) | {"layers.0.mixer.in_proj": 448.0, "layers.1.mixer.experts.2.down_proj": 0.0}
    quantize(checkpoint, tmp_path / "q", inputs, "max", say=quiet)
    found = load_file(tmp_path / "q" / "model.safetensors")
    assert found["backbone.layers.0.mixer.in_proj.input_scale"] == 1.0
    assert found["lm_head.input_scale"] == torch.tensor(2 / (6 * 448))
    assert found["backbone.layers.1.mixer.experts.2.down_proj.input_scale"] == 1.0


def test_an_expert_without_calibration_takes_its_layers_largest(source: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(source)
    inputs = all_inputs(checkpoint) | {"layers.1.mixer.experts.5.up_proj": 6 * 448.0}
    inputs |= {"layers.1.mixer.experts.5.down_proj": 9e9, "layers.4.mixer.experts.5.up_proj": 9e9}
    del inputs["layers.1.mixer.experts.3.up_proj"]
    said: list[str] = []
    quantize(checkpoint, tmp_path / "q", inputs, "max", say=said.append)
    found = load_file(tmp_path / "q" / "model.safetensors")
    assert found["backbone.layers.1.mixer.experts.3.up_proj.input_scale"] == 1.0
    assert said == ["1 expert linears saw no calibration token and take their layer's largest input"]


def test_a_linear_without_calibration_is_refused(source: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(source)
    inputs = all_inputs(checkpoint)
    del inputs["lm_head"]
    with pytest.raises(CheckpointError, match="linear lm_head: no calibration token reached it"):
        quantize(checkpoint, tmp_path / "q", inputs, "max", say=quiet)
    assert not (tmp_path / "q").exists()


def test_a_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint.write(tmp_path / "c"))
    with pytest.raises(CheckpointError, match="already; give an unquantized checkpoint"):
        quantize(checkpoint, tmp_path / "q", all_inputs(checkpoint), "max", say=quiet)


def test_calibration_sees_what_the_linears_see(source: Path) -> None:
    """Against loops over tokens and experts, from what the router said."""
    checkpoint = Checkpoint.open(source)
    model = oracle.load(source)
    windows = [Window(list(range(1, 13)), [True] * 12, 0), Window([5, 3], [True] * 2, 0)]
    norms: list[float] = []
    routed: list[tuple[torch.Tensor, torch.Tensor]] = []
    first, second = model.model.layers[0], model.model.layers[1].mixer.experts
    first.norm.register_forward_hook(lambda module, inputs, out: norms.append(float(out.abs().amax())))
    second.register_forward_pre_hook(lambda module, inputs: routed.extend(zip(inputs[0], inputs[1], strict=True)))
    seen = calibrate.largest_inputs(model, windows)

    assert seen["layers.0.mixer.in_proj"] == max(norms)
    largest: dict[str, float] = {}
    for x, experts in routed:
        for expert in experts.tolist():
            name = f"layers.1.mixer.experts.{expert}"
            hidden = torch.relu(second.up_proj[expert] @ x).square()
            for part, value in (("up_proj", x), ("down_proj", hidden)):
                key = f"{name}.{part}"
                largest[key] = max(largest.get(key, 0.0), float(value.abs().amax()))
    found = {name: value for name, value in seen.items() if name.startswith("layers.1.mixer.experts.")}
    assert found == pytest.approx(largest, rel=1e-5)
    assert len(routed) == 14
    dense = {name for name in checkpoint.formats if ".experts." not in name}
    assert {name for name in seen if ".experts." not in name} == dense


def test_the_command_makes_a_checkpoint_that_repacks(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "one and two is three more one two three four five " * 4}) + "\n")
    words = ["quantize", str(source), str(tmp_path / "q"), "--calibrate", str(text)]
    assert main(words) == 0
    assert "4 FP8, 37 NVFP4" in capsys.readouterr().out
    store = repack(tmp_path / "q", tmp_path / "store", say=quiet)
    assert (tmp_path / "store" / "tokenizer.json").exists()
    assert set(store.dense().formats.values()) == {"NVFP4", "FP8", "BF16"}
    assert main(words) == 1
    assert "holds a checkpoint already" in capsys.readouterr().err
