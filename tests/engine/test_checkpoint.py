"""Checkpoints as they come: both published styles, every format, and what is wrong named with its tensor."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.engine.checkpoint import Checkpoint
from services.engine.errors import CheckpointError
from services.engine.tensorfile import read_header
from services.engine.weights import DenseWeights, dense_tensors, read_linear
from services.tools import small_checkpoint as tiny_checkpoint

UP = "backbone.layers.1.mixer.experts.3.up_proj"
Tensors = dict[str, Tensor]


def replace(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Any], Tensors], None]:
    def edit(config: dict[str, Any], tensors: Tensors) -> None:
        tensors[name] = change(tensors[name])

    return edit


@pytest.mark.parametrize("style", ["3-super", "3.5-super-vl", "3.5-super-vl-export"])
def test_every_tensor_is_found_with_its_format(tmp_path: Path, style: tiny_checkpoint.Style) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint.write(tmp_path / "c", style))
    tensors, formats = tiny_checkpoint.language_model(seed=0)
    assert checkpoint.formats == formats
    assert set(checkpoint.tensors) == set(tensors)
    assert len(checkpoint.mtp) == 32
    assert bool(checkpoint.vision) == (style != "3-super")
    for name, tensor in tensors.items():
        read = checkpoint.tensors[name].read()
        assert read.dtype == tensor.dtype, name
        assert torch.equal(read.float(), tensor.float()), name


def test_model_prefix_is_taken_as_backbone_is(tmp_path: Path) -> None:
    def rename(config: dict[str, Any], tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.replace("backbone.", "model.")] = tensors.pop(name)

    checkpoint = Checkpoint.open(tiny_checkpoint.write(tmp_path / "c", edit=rename))
    assert "layers.0.norm.weight" in checkpoint.tensors


def test_our_reader_gives_what_the_safetensors_package_gives(tmp_path: Path) -> None:
    folder = tiny_checkpoint.write(tmp_path / "c")
    checkpoint = Checkpoint.open(folder)
    with safe_open(folder / "model.safetensors", "pt") as theirs:
        assert len(theirs.keys()) == len(checkpoint.tensors) + len(checkpoint.mtp)
        for entry in checkpoint.tensors.values():
            other = theirs.get_tensor(entry.name)
            assert other.dtype == entry.read().dtype
            assert torch.equal(other.float(), entry.read().float())
            assert b"".join(entry.chunks()) == other.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_dequantised_values_follow_the_published_formulas(tmp_path: Path) -> None:
    """Recomputed here one weight at a time, from nibbles and bytes."""
    checkpoint = Checkpoint.open(tiny_checkpoint.write(tmp_path / "c"))
    tensors, _ = tiny_checkpoint.language_model(seed=0)
    e2m1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    name = "layers.1.mixer.experts.3.down_proj"
    values = read_linear(checkpoint.tensors, name, "NVFP4").dequantise()
    for n, k in [(0, 0), (0, 1), (31, 47), (5, 16), (5, 15), (17, 32)]:
        code = int(tensors[f"{name}.weight"][n, k // 2]) >> 4 * (k % 2) & 15
        scale = tensors[f"{name}.weight_scale"][n, k // 16].float() * tensors[f"{name}.weight_scale_2"]
        assert values[n, k].item() == pytest.approx((-1 if code & 8 else 1) * e2m1[code & 7] * scale.item(), rel=1e-6)
    name = "layers.0.mixer.in_proj"
    values = read_linear(checkpoint.tensors, name, "FP8").dequantise()
    assert torch.equal(values, tensors[f"{name}.weight"].float() * tensors[f"{name}.weight_scale"])


def test_dense_weights_are_float32_and_complete(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint.write(tmp_path / "c"))
    dense = {name: entry for name, entry in checkpoint.tensors.items() if ".experts." not in name}
    weights = DenseWeights(dense, checkpoint.config)
    expected = dense_tensors(checkpoint.config)
    values = {name: (weights.plain(name), shape) for name, shape in expected.plain.items()}
    values |= {name: (weights.linear(name).dequantise(), shape) for name, shape in expected.linears.items()}
    for name, (value, shape) in values.items():
        assert (value.dtype, tuple(value.shape)) == (torch.float32, shape), name
        assert torch.isfinite(value).all(), name
    packed = weights.linear("lm_head")
    assert (packed.format, packed.weight.dtype, packed.input_scale) == ("W4A16_NVFP4", torch.uint8, None)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c, t: t.pop(f"{UP}.weight"), r"experts\.3\.up_proj\.weight: missing"),
        (lambda c, t: t.pop(f"{UP}.weight_scale"), r"experts\.3\.up_proj\.weight_scale: missing, expected F8_E4M3"),
        (lambda c, t: t.pop(f"{UP}.weight_scale_2"), r"experts\.3\.up_proj\.weight_scale_2: missing"),
        (lambda c, t: t.pop("backbone.layers.0.mixer.in_proj.weight_scale"), r"in_proj\.weight_scale: missing"),
        (lambda c, t: t.pop("backbone.norm_f.weight"), r"norm_f\.weight: missing"),
        (lambda c, t: t.update({"backbone.layers.9.norm.weight": torch.ones(64)}), r"layers\.9\.norm\.weight: unknown"),
        (
            lambda c, t: t.update({"model.norm_f.weight": torch.ones(64)}),
            r"norm_f\.weight: present twice, as .*norm_f\.weight in .* and as .*norm_f\.weight in",
        ),
        (replace("lm_head.weight", lambda x: x[:-1]), r"lm_head\.weight: expected U8 \[96, 32\], found U8 \[95, 32\]"),
        (replace(f"{UP}.weight", lambda x: x.to(torch.int32)), "found I32"),
        (
            replace(f"{UP}.weight_scale", lambda x: x[:, :1].contiguous()),
            r"weight_scale: expected F8_E4M3 \[48, 2\], found F8_E4M3 \[48, 1\]",
        ),
        (replace("backbone.layers.0.mixer.A_log", lambda x: x.to(torch.float64)), "A_log: expected BF16 or F16 or F32"),
        (
            lambda c, t: t.update({"backbone.layers.3.mixer.q_proj.weight_scale": torch.tensor(1.0)}),
            r"q_proj\.weight_scale: unknown",
        ),
        (lambda c, t: c.update(n_routed_experts=7, num_experts_per_tok=3), r"gate\.weight: expected .*\[7, 64\]"),
        (lambda c, t: c.update(architectures=["LlamaForCausalLM"], model_type="llama"), "not a model of ours"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_named(tmp_path: Path, edit: Any, message: str) -> None:
    folder = tiny_checkpoint.write(tmp_path / "c", edit=edit)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (f"{UP}.weight_scale_2", lambda x: -x, r"experts\.3\.up_proj\.weight_scale_2: found a scale of -"),
        (f"{UP}.weight_scale_2", lambda x: x * float("nan"), "found a scale of nan"),
        (f"{UP}.weight_scale_2", lambda x: x * 0, "found a scale of 0"),
        (f"{UP}.weight_scale_2", lambda x: x * 0 + 1e-40, "expected a positive finite normal number"),
        (f"{UP}.weight_scale", lambda x: (-x.float().clamp(min=1)).to(x.dtype), "no negative one"),
        (f"{UP}.weight_scale", lambda x: (x.float() * float("nan")).to(x.dtype), "found a scale of nan"),
        (f"{UP}.input_scale", lambda x: x * float("inf"), r"input_scale: found a scale of inf"),
    ],
    ids=["negative_2", "nan_2", "zero_2", "subnormal_2", "negative", "nan", "inf_input"],
)
def test_scales_that_the_formulas_do_not_take_are_refused(
    tmp_path: Path, name: str, change: Callable[[Tensor], Tensor], message: str
) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint.write(tmp_path / "c", edit=replace(name, change)))
    with pytest.raises(CheckpointError, match=message):
        read_linear(checkpoint.tensors, "layers.1.mixer.experts.3.up_proj", "NVFP4")


@pytest.mark.parametrize("keep", [0, 7, 100, -1, -5000])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = tiny_checkpoint.write(tmp_path / "c") / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    with pytest.raises(CheckpointError, match="truncated"):
        Checkpoint.open(tmp_path / "c")
    path.write_bytes(data)
    Checkpoint.open(tmp_path / "c")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', "tensor x is damaged"),
        (b'{"x":{"dtype":"F32","shape":[-1],"data_offsets":[0,-4]}}', "tensor x is damaged"),
        (b'{"x":[]}', "tensor x is damaged"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path: Path, header: bytes, message: str) -> None:
    path = tiny_checkpoint.write(tmp_path / "c") / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 64)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path / "c")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = tiny_checkpoint.write(tmp_path / "c", "3.5-super-vl")
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors: not found"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    "content",
    ["{", "{}", '{"weight_map": []}', '{"weight_map": {"x": "../elsewhere"}}', '{"weight_map": {"x": ["a"]}}'],
)
def test_a_damaged_index_is_refused(tmp_path: Path, content: str) -> None:
    folder = tiny_checkpoint.write(tmp_path / "c", "3.5-super-vl")
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        Checkpoint.open(folder)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint.write(tmp_path / "c")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="neither"):
        Checkpoint.open(folder)


def test_a_scalar_may_have_one_dimension(tmp_path: Path) -> None:
    edit = replace(f"{UP}.weight_scale_2", lambda x: x.reshape(1))
    checkpoint = Checkpoint.open(tiny_checkpoint.write(tmp_path / "c", edit=edit))
    plain = Checkpoint.open(tiny_checkpoint.write(tmp_path / "d"))
    name = "layers.1.mixer.experts.3.up_proj"
    assert torch.equal(
        read_linear(checkpoint.tensors, name, "NVFP4").dequantise(),
        read_linear(plain.tensors, name, "NVFP4").dequantise(),
    )


def test_an_unquantised_checkpoint_is_one_too(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint.write_unquantised(tmp_path / "c"))
    assert set(checkpoint.formats.values()) == {"BF16"}
    assert set(checkpoint.formats) == set(tiny_checkpoint.language_model(seed=0)[1])


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint.write(tmp_path / "c", "3.5-super-vl")
    first, second = (folder / f"model-0000{i}-of-00003.safetensors" for i in (1, 2))
    name = next(iter(read_header(first)))
    save_file(load_file(second) | {name: load_file(first)[name]}, second)
    with pytest.raises(CheckpointError, match=rf"tensor {name}: model-00002.* is there, but .*index.json does not"):
        Checkpoint.open(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(f'"{name}": "model-00001', f'"{name}": "model-00002'))
    with pytest.raises(CheckpointError, match=rf"tensor {name}: model-00001.* is there, but .*index.json does not"):
        Checkpoint.open(folder)


def test_a_tensor_that_the_index_lists_must_be_there(tmp_path: Path) -> None:
    folder = tiny_checkpoint.write(tmp_path / "c", "3.5-super-vl")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["extra"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"tensor extra: model-00001.* missing there, but .* lists it"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (
            b'{"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"x":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}',
            "tensor x: present twice",
        ),
        (
            b'{"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"y":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}',
            "tensor y overlaps",
        ),
    ],
)
def test_two_tensors_in_one_place_are_refused(tmp_path: Path, header: bytes, message: str) -> None:
    path = tiny_checkpoint.write(tmp_path / "c") / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 64)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path / "c")
