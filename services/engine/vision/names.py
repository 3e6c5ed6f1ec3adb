"""Vision and projector tensors under one set of names, from both layouts that checkpoints have. Computes nothing.

    one name                    original (radio_model)                     ModelOpt export
    embedder                    …patch_generator.embedder.weight           …embeddings.patch_projection.weight
    video_embedder              …patch_generator.video_embedder.weight     …embeddings.video_patch_projection.weight
    position                    …patch_generator.pos_embed                 …embeddings.position_embedding
    class_tokens                …patch_generator.cls_token.token           …embeddings.cls_register_token
    blocks.i.norm1, .norm2      …blocks.i.norm1, .norm2                    …encoder.layer.i.norm1, .norm2
    blocks.i.qkv                …blocks.i.attn.qkv                         …attention.attention.query, key, value
    blocks.i.proj               …blocks.i.attn.proj                        …attention.output.dense
    blocks.i.fc1, .fc2          …blocks.i.mlp.fc1, .fc2                    …mlp.fc1, .fc2
    blocks.i.layer_scale1       (none)                                     …layer_scale1.lambda1
    final_norm                  vision_projector.vision_final_layernorm    the same
    projector.norm, .up, .down  mlp1.0, mlp1.1, mlp1.3                     vision_projector.mlp1.norm, linear1, linear2

What only describes preprocessing (norm_mean, norm_std, summary_idxs) is known and left out.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.engine.errors import CheckpointError
from services.engine.tensorfile import Entry

FLOATS = ("BF16", "F16", "F32")
_BLOCK = r"vision_model\.(?:radio_model\.model\.blocks|encoder\.layer)\.(\d+)\."
_ORIGINAL = "vision_model.radio_model.model.patch_generator."
_EXPORT = "vision_model.embeddings."
_WHOLE = {
    _ORIGINAL + "embedder.weight": "embedder",
    _ORIGINAL + "video_embedder.weight": "video_embedder",
    _ORIGINAL + "pos_embed": "position",
    _ORIGINAL + "cls_token.token": "class_tokens",
    _EXPORT + "patch_projection.weight": "embedder",
    _EXPORT + "video_patch_projection.weight": "video_embedder",
    _EXPORT + "position_embedding": "position",
    _EXPORT + "cls_register_token": "class_tokens",
    "vision_projector.vision_final_layernorm.weight": "final_norm.weight",
    "vision_projector.vision_final_layernorm.bias": "final_norm.bias",
    "mlp1.0.weight": "projector.norm",
    "mlp1.1.weight": "projector.up",
    "mlp1.3.weight": "projector.down",
    "vision_projector.mlp1.norm.weight": "projector.norm",
    "vision_projector.mlp1.linear1.weight": "projector.up",
    "vision_projector.mlp1.linear2.weight": "projector.down",
}
_IN_BLOCK = {
    "attn.qkv": ("qkv", None),
    "attention.attention.query": ("qkv", 0),
    "attention.attention.key": ("qkv", 1),
    "attention.attention.value": ("qkv", 2),
    "attn.proj": ("proj", None),
    "attention.output.dense": ("proj", None),
} | {name: (name.removeprefix("mlp."), None) for name in ("norm1", "norm2", "mlp.fc1", "mlp.fc2")}
_LEFT_OUT = re.compile(
    r"vision_model\.(radio_model\.)?(input_conditioner\.)?(norm_mean|norm_std|summary_idxs)|"
    r"vision_model\.radio_model\.model\.(norm_mean|norm_std|summary_idxs)"
)


@dataclass(frozen=True)
class VisionTensor:
    """One tensor under its one name: a single entry, or query, key and value, whose rows follow each other."""

    parts: tuple[Entry, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0].shape
        return (sum(part.shape[0] for part in self.parts), *first[1:]) if len(self.parts) > 1 else first

    def read(self) -> Tensor:
        """In the checkpoint's own type. Raises CheckpointError if a file ends too early."""
        tensors = [part.read() for part in self.parts]
        return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


def one_name(name: str) -> tuple[str, int | None] | None:
    """Our name and, for a third of qkv, which one; None for what carries no weights. Raises CheckpointError."""
    if _LEFT_OUT.fullmatch(name):
        return None
    if name in _WHOLE:
        return _WHOLE[name], None
    block = re.match(_BLOCK, name)
    if block:
        prefix, rest = f"blocks.{int(block[1])}.", name[block.end() :]
        if scale := re.fullmatch(r"(layer_scale[12])\.lambda1", rest):
            return prefix + scale[1], None
        module, _, suffix = rest.rpartition(".")
        if module in _IN_BLOCK and suffix in ("weight", "bias"):
            inner, third = _IN_BLOCK[module]
            return f"{prefix}{inner}.{suffix}", third
    raise CheckpointError(f"tensor {name}: unknown, expected a vision or projector tensor of a known layout")


def vision_tensors(entries: Mapping[str, Entry], config: Mapping[str, Any] | None = None) -> dict[str, VisionTensor]:
    """All of the vision side; empty if there is none. `config` is the whole config.json, for the projector's width.

    Raises CheckpointError that names an unknown, missing, duplicate or misshapen tensor.
    """
    gathered: dict[str, dict[int | None, Entry]] = {}
    for name, entry in entries.items():
        found = one_name(name)
        if found is None:
            continue
        ours, third = found
        parts = gathered.setdefault(ours, {})
        if third in parts or (parts and (third is None) != (None in parts)):
            other = next(iter(parts.values())).name
            raise CheckpointError(f"tensor {name}: present twice, also as {other} (both are our {ours})")
        if entry.dtype not in FLOATS:
            raise CheckpointError(f"tensor {name}: expected {' or '.join(FLOATS)}, found {entry.dtype}")
        parts[third] = entry
    if not gathered:
        return {}
    tensors = {}
    for ours, parts in gathered.items():
        if None not in parts and set(parts) != {0, 1, 2}:
            present = ", ".join(entry.name for entry in parts.values())
            raise CheckpointError(f"tensor {ours}: query, key or value is missing, found only {present}")
        tensors[ours] = VisionTensor(tuple(parts[key] for key in sorted(parts, key=lambda key: key or 0)))
    _check_shapes(tensors, config or {})
    return tensors


def _check_shapes(tensors: Mapping[str, VisionTensor], config: Mapping[str, Any]) -> None:
    """Sizes follow from the embedder, the projector and the number of blocks: all else must fit them."""
    for name in ("embedder", "position", "projector.down", "projector.up", "blocks.0.fc1.weight"):
        if name not in tensors or len(tensors[name].shape) < 2:
            found = list(tensors[name].shape) if name in tensors else "none"
            raise CheckpointError(f"vision tensor {name}: expected a matrix, found {found}")
    width, patch = tensors["embedder"].shape[-2:]
    inner = tensors["blocks.0.fc1.weight"].shape[0]
    hidden, wide = tensors["projector.down"].shape
    said = config.get("projector_hidden_size")
    if said is not None and type(said) is not int:
        raise CheckpointError(f"config: projector_hidden_size is {said!r}, expected a number")
    wide = said or wide
    wanted: dict[str, tuple[int, ...]] = {
        "embedder": (width, patch),
        "position": (1, tensors["position"].shape[-2], width),
        "class_tokens": (tensors["class_tokens"].shape[0] if "class_tokens" in tensors else 0, width),
        "final_norm.weight": (width,),
        "final_norm.bias": (width,),
        "projector.norm": (4 * width,),
        "projector.up": (wide, 4 * width),
        "projector.down": (hidden, wide),
    }
    optional: dict[str, tuple[int, ...]] = {"video_embedder": (width, 2 * patch)}
    count = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blocks."))
    for block in range(count):
        prefix = f"blocks.{block}."
        for name, rows, columns in (
            ("qkv", 3 * width, width),
            ("proj", width, width),
            ("fc1", inner, width),
            ("fc2", width, inner),
        ):
            wanted |= {f"{prefix}{name}.weight": (rows, columns), f"{prefix}{name}.bias": (rows,)}
        wanted |= {f"{prefix}{norm}.{part}": (width,) for norm in ("norm1", "norm2") for part in ("weight", "bias")}
        optional |= {f"{prefix}layer_scale{i}": (width,) for i in (1, 2)}
    for name, shape in wanted.items():
        if name not in tensors:
            raise CheckpointError(f"vision tensor {name}: missing, expected {list(shape)}")
    known = wanted | optional
    for name, tensor in tensors.items():
        shape = known[name]
        if tensor.shape != shape:
            raise CheckpointError(
                f"tensor {tensor.parts[0].name}: expected {list(shape)} (our {name}), found {list(tensor.shape)}"
            )
